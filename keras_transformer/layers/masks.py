"""The causal mask as a layer, and what the layers do with masks that they are given."""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import ops

from keras_transformer.ops import masks as ops_masks
from keras_transformer.ops.attention import agree


@keras.saving.register_keras_serializable(package="keras_transformer")
class CausalMask(keras.layers.Layer):
    """The mask that lets a position attend to itself and to what came before; True = may attend.

    `CausalMask()(x)` with `x` (B, T, …) is the boolean (1, T, T) mask, for the `attention_mask` argument of the
    attention layers, which then run and export as with `causal=True`. With a cache, give the positions:
    `CausalMask()(x, positions=positions, key_positions=key_positions)` is (B|1, T, S). `CausalMask.additive(mask)`
    shows a mask as the matrix of 0 and −inf that papers print.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x: Any, positions: Any = None, key_positions: Any = None) -> Any:
        """Returns the mask.

        Args:
            x: a tensor (B, T, …), of which only the length counts.
            positions: integer positions of the queries (B|1, T); 0 … T-1 if both are left out.
            key_positions: integer positions of the keys (B|1, S).

        Raises:
            ValueError: if only one of the two is given.
        """
        if (positions is None) != (key_positions is None):
            raise ValueError(
                "`positions` and `key_positions` must be given together. "
                f"Received: positions={positions}, key_positions={key_positions}"
            )
        if positions is None:
            return ops_masks.square_causal_mask(x)
        return ops_masks.causal_mask(positions, key_positions)

    def compute_output_spec(self, x, positions=None, key_positions=None):
        if positions is None:
            return ops_masks.SquareCausalMask().compute_output_spec(x)
        return ops_masks.CausalMask().compute_output_spec(positions, key_positions)

    def compute_output_shape(self, input_shape):
        return (1, input_shape[1], input_shape[1])

    def compute_mask(self, inputs, previous_mask):
        """The result is no sequence, so it carries no padding mask."""
        return None

    @staticmethod
    def additive(mask: Any, dtype: str = "float32") -> Any:
        """The mask as numbers to add to attention scores: 0 where it is True, −inf elsewhere."""
        return ops.where(mask, ops.zeros((), dtype), ops.full((), -float("inf"), dtype))


def padding_mask_of(padding_mask: Any, *implicit: Any, name: str = "padding_mask") -> Any:
    """The boolean (B, S) padding mask that holds: the explicit one if given, else the first implicit one.

    Raises:
        ValueError: if the explicit mask is not a boolean or integer (B, S).
    """
    if padding_mask is None:
        return next((mask for mask in implicit if mask is not None), None)
    check_padding_mask(padding_mask, name=name)
    return _as_boolean(padding_mask)


def combine_masks(padding_mask: Any, attention_mask: Any, window: Any = None) -> Any:
    """One boolean mask, (B|1, T|1, S) or (B|1, N|1, T|1, S), or None, from masks that were checked.

    Args:
        padding_mask: boolean (B, S).
        attention_mask: boolean or integer, (B|1, T|1, S) or (B|1, N|1, T|1, S).
        window: boolean (B|1, T, S).
    """
    masks = [] if window is None else [window]
    if padding_mask is not None:
        masks.append(ops.expand_dims(padding_mask, 1))
    if attention_mask is not None:
        if len(attention_mask.shape) == 4:
            masks = [ops.expand_dims(mask, 1) for mask in masks]
        masks.append(_as_boolean(attention_mask))
    return functools.reduce(ops.logical_and, masks) if masks else None


def check_padding_mask(mask: Any, batch: Any = None, slots: Any = None, name: str = "padding_mask") -> None:
    """Raises ValueError unless `mask` is None, or boolean or integer of shape (batch, slots), where these are known."""
    if mask is not None and not (_is_boolean(mask) and _fits(mask, (batch, slots))):
        raise ValueError(
            f"`{name}` must be boolean or integer of shape (batch, length), True or 1 for real tokens; here "
            f"{(batch, slots)}. {_received(name, mask)}"
        )


def check_attention_mask(mask: Any, sizes: tuple[Any, ...]) -> None:
    """Raises ValueError unless `mask` is None, or boolean or integer and fits the `sizes` (B, N, T, S)."""
    if mask is not None and not (_is_boolean(mask) and (_fits(mask, sizes) or _fits(mask, (sizes[0], *sizes[2:])))):
        raise ValueError(
            "`attention_mask` must be boolean or integer of shape (B|1, T|1, S) or (B|1, N|1, T|1, S), here with "
            f"(B, N, T, S) = {tuple(sizes)}; a (T, S) mask for all rows is given as (1, T, S), and a mask of padding "
            f"as `padding_mask`. {_received('attention_mask', mask)}"
        )


def _is_boolean(mask):
    if not hasattr(mask, "dtype"):
        return False
    dtype = keras.backend.standardize_dtype(mask.dtype)
    return dtype == "bool" or "int" in dtype


def _fits(mask, sizes):
    """Whether a mask has `sizes`, where these are known; 1 serves for all but the last."""
    *some, last = mask.shape
    return (
        len(mask.shape) == len(sizes)
        and all(agree(size, wanted) or size == 1 for size, wanted in zip(some, sizes, strict=False))
        and agree(last, sizes[-1])
    )


def _as_boolean(mask):
    return mask if keras.backend.standardize_dtype(mask.dtype) == "bool" else ops.cast(mask, "bool")


def _received(name, mask):
    if not hasattr(mask, "dtype"):
        return f"Received: {name} of type {type(mask).__name__}"
    dtype = keras.backend.standardize_dtype(mask.dtype)
    return f"Received: {name}.shape={tuple(mask.shape)}, {name}.dtype={dtype}"
