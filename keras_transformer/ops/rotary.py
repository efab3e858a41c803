"""Rotary position embedding: queries and keys turned by angles that grow with their positions."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer.ops._operation import run
from keras_transformer.ops.attention import agree
from keras_transformer.ops.positions import waves


def rotary_frequencies(width: int, base: float = 10000, scaling: dict[str, Any] | None = None) -> tuple[float, ...]:
    """The frequencies `base ** (-2i / width)`, i = 0 … width/2 - 1, in radians a position.

    Args:
        width: how many entries of each head are rotated, an even number.
        base: the base of the geometric progression.
        scaling: how a model that was trained on short texts was made to read longer ones, in the words of published
            configurations: `{"rope_type": "linear", "factor": f}` divides all frequencies by f
            (https://arxiv.org/abs/2306.15595); `{"rope_type": "llama3", "factor": f, "low_freq_factor": l,
            "high_freq_factor": h, "original_max_position_embeddings": n}` divides those of waves longer than n / l
            positions, leaves those of waves shorter than n / h, and passes from one to the other in between.

    Raises:
        ValueError: if `width` is odd or below 2, or `scaling` is of another type or lacks a number.
    """
    if width < 2 or width % 2:
        raise ValueError(f"`width` must be an even number, 2 or more. Received: width={width}")
    frequencies = float(base) ** (-np.arange(0, width, 2) / width)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if kind not in _SCALINGS:
        raise ValueError(f"`scaling` must be of a rope_type of {sorted(_SCALINGS)}. Received: scaling={scaling}")
    missing = [name for name in _SCALINGS[kind] if name not in scaling]
    if missing:
        raise ValueError(f"`scaling` of type {kind!r} must give {missing}. Received: scaling={scaling}")
    if kind == "linear":
        frequencies = frequencies / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
    return tuple(frequencies.tolist())


_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def rotary_encoding(positions: Any, frequencies: tuple[float, ...]) -> Any:
    """The cosines and sines of `rotate`, computed in float32 and within 1e-6 at every position up to 2**24.

    Args:
        positions: integers (B|1, T), not negative.
        frequencies: R radians a position, from `rotary_frequencies`, or scaled as a published model has them.

    Returns:
        float32 (B|1, T, 2R): R cosines, then R sines.
    """
    # Python's own numbers: NumPy's would be constants of a trace.
    return run(RotaryEncoding, positions, frequencies=tuple(map(float, frequencies)))


def rotate(x: Any, encoding: Any) -> Any:
    """Rotary position embedding (RoFormer, https://arxiv.org/abs/2104.09864, eq. 34).

    Entries i and R + i of each head, i < R, are a pair that is turned by the encoding's angle i; the layout of GPT-NeoX
    and Llama. Entries from 2R on are left as they are. Computed in float32.

    Args:
        x: queries or keys, (B, T, N, H).
        encoding: (B|1, T, 2R) from `rotary_encoding`, R at most H / 2.

    Returns:
        (B, T, N, H), of the dtype of `x`.

    Raises:
        ValueError: on shapes that do not fit.
    """
    return run(Rotate, x, encoding)


def rotary_waves(frequencies: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The frequencies and quarter turns of `waves` that make the rotary encoding."""
    return 2 * tuple(frequencies), (1,) * len(frequencies) + (0,) * len(frequencies)


class RotaryEncoding(keras.Operation):
    """The operation behind `rotary_encoding`; it is called with (positions)."""

    def __init__(self, frequencies: tuple[float, ...], *, name: str | None = None):
        super().__init__(name=name)
        self.frequencies = tuple(frequencies)

    def call(self, positions):
        return self.compute(positions, self.frequencies)

    @staticmethod
    def compute(positions, frequencies):
        """See `rotary_encoding`."""
        return waves(positions, *rotary_waves(frequencies))

    def compute_output_spec(self, positions):
        return keras.KerasTensor((*positions.shape, 2 * len(self.frequencies)), "float32")


class Rotate(keras.Operation):
    """The operation behind `rotate`; it is called with (x, encoding)."""

    def call(self, x, encoding):
        return self.compute(x, encoding)

    @staticmethod
    def compute(x, encoding):
        """See `rotate`."""
        _check(x, encoding)
        half = encoding.shape[-1] // 2
        exact = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        # A layer of half precision casts whatever it is given.
        encoding = ops.expand_dims(ops.cast(encoding, exact.dtype), 2)
        cosine, sine = encoding[..., :half], encoding[..., half:]
        first, second = exact[..., :half], exact[..., half : 2 * half]
        turned = [first * cosine - second * sine, second * cosine + first * sine]
        return ops.cast(ops.concatenate([*turned, exact[..., 2 * half :]], axis=-1), x.dtype)

    def compute_output_spec(self, x, encoding):
        _check(x, encoding)
        return keras.KerasTensor(x.shape, x.dtype)


def _check(x, encoding):
    shape, other = tuple(x.shape), tuple(encoding.shape)
    if (
        len(shape) != 4
        or len(other) != 3
        or not (other[0] == 1 or agree(other[0], shape[0]))
        or not agree(other[1], shape[1])
        or other[2] % 2
        or other[2] > shape[3]
    ):
        raise ValueError(
            "`x` (B, T, N, H) and `encoding` (B|1, T, 2R) do not fit together, where R is at most H / 2. "
            f"Received: x.shape={shape}, encoding.shape={other}"
        )
