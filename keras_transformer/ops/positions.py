"""Positions of tokens, and sines and cosines of them, accurate at any position."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer.ops._operation import run

BLOCK = 4096


def positions(length: Any, start: Any = None) -> Any:
    """The positions `start … start+length-1`.

    Args:
        length: how many, an integer.
        start: the first position: an integer, or one a row (B,). 0 if None.

    Returns:
        Integers (1, length), or (B, length) if `start` has one entry a row.
    """
    steps = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
    if start is None:
        return steps
    return ops.add(steps, ops.expand_dims(start, 1) if len(getattr(start, "shape", ())) else start)


def sinusoidal_encoding(positions: Any, d_model: int, max_wavelength: float = 10000, interleaved: bool = True) -> Any:
    """The sinusoidal encoding of positions ("Attention Is All You Need", section 3.5).

    Column 2i is `sin(p / max_wavelength ** (2i / d_model))` and column 2i+1 the cosine of the same angle; an odd
    `d_model` ends with a sine. Computed in float32 and within 1e-6 of the exact value at every position up to 2**24.

    Args:
        positions: integers (B|1, T), not negative.
        d_model: number of columns.
        max_wavelength: the base of the geometric progression of wavelengths.
        interleaved: whether sines and cosines alternate; otherwise all sines come first, then the cosines.

    Returns:
        float32 (B|1, T, d_model).
    """
    return run(SinusoidalEncoding, positions, d_model=d_model, max_wavelength=max_wavelength, interleaved=interleaved)


def sinusoidal_table(length: int, d_model: int, max_wavelength: float = 10000) -> np.ndarray:
    """The encoding of positions 0 … length-1, computed in float64 and rounded once to float32 (length, d_model)."""
    return wave_table(np.arange(length), *sinusoidal_waves(d_model, max_wavelength))


class SinusoidalEncoding(keras.Operation):
    """The operation behind `sinusoidal_encoding`; it is called with (positions)."""

    def __init__(
        self, d_model: int, max_wavelength: float = 10000, interleaved: bool = True, *, name: str | None = None
    ):
        super().__init__(name=name)
        self.interleaved = interleaved
        self.d_model = d_model
        self.max_wavelength = max_wavelength

    def call(self, positions):
        return self.compute(positions, self.d_model, self.max_wavelength, self.interleaved)

    @staticmethod
    def compute(positions, d_model, max_wavelength, interleaved):
        """See `sinusoidal_encoding`."""
        return waves(positions, *sinusoidal_waves(d_model, max_wavelength, interleaved))

    def compute_output_spec(self, positions):
        return keras.KerasTensor((*positions.shape, self.d_model), "float32")


@functools.lru_cache(maxsize=32)
def sinusoidal_waves(
    d_model: int, max_wavelength: float, interleaved: bool = True
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The frequencies and quarter turns of `waves` that make the sinusoidal encoding."""
    columns = np.arange(d_model)
    if not interleaved:
        columns = np.concatenate([columns[::2], columns[1::2]])
    return tuple(float(max_wavelength) ** (-(columns // 2 * 2) / d_model)), tuple(columns % 2)


def waves(positions: Any, frequencies: tuple[float, ...], quarters: tuple[int, ...]) -> Any:
    """`sin(position · frequency + quarter · π/2)`, float32 (B|1, T, number of frequencies), within 1e-6 up to 2**24.

    Args:
        positions: integers (B|1, T), not negative.
        frequencies: radians a position.
        quarters: for each frequency 0 for the sine or 1 for the cosine.
    """
    # p = block · 4096 + offset, and angles are counted in turns, of which only the fraction matters. Each factor is
    # split into 12 bits, whose product with a 12-bit number is exact in float32, and a small remainder.
    positions = ops.expand_dims(ops.cast(positions, "int32"), -1)
    block = ops.cast(ops.floor_divide(positions, BLOCK), "float32")
    offset = ops.cast(ops.mod(positions, BLOCK), "float32")
    block_turns, block_rest, offset_turns, offset_rest, phase = (
        ops.convert_to_tensor(part) for part in turns(frequencies, quarters)
    )
    exact = _fraction(_fraction(block * block_turns) + _fraction(offset * offset_turns) + phase)
    angle = _fraction(exact + (block * block_rest + offset * offset_rest))
    return ops.sin(angle * (2 * np.pi))


def _fraction(angle):
    """The same angle, in turns, within half a turn."""
    return angle - ops.round(angle)


@functools.lru_cache(maxsize=32)
def turns(frequencies: tuple[float, ...], quarters: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Turns a block and turns a position, each as (12 bits, remainder), and the quarter turn that makes a cosine."""
    per_position = np.array(frequencies) / (2 * np.pi)
    parts = []
    for factor in (BLOCK * per_position, per_position):
        factor = factor - np.round(factor)
        coarse = np.round(factor * BLOCK) / BLOCK
        parts += [coarse, factor - coarse]
    return tuple(part.astype("float32") for part in (*parts, np.array(quarters) / 4))


def wave_table(positions: np.ndarray, frequencies: tuple[float, ...], quarters: tuple[int, ...]) -> np.ndarray:
    """`waves` of known positions, computed in float64 and rounded once to float32."""
    angles = np.asarray(positions)[..., None] * np.array(frequencies)
    return np.where(np.array(quarters), np.cos(angles), np.sin(angles)).astype("float32")
