"""Causal masks as functions of positions; True means "may attend"."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer.ops._operation import run

_MARK = "_keras_transformer_causal"


def causal_mask(positions: Any, key_positions: Any) -> Any:
    """Each query attends to the keys at its own position and before.

    Args:
        positions: integer positions of the queries, (B|1, T).
        key_positions: integer positions of the keys, (B|1, S).

    Returns:
        Boolean (B|1, T, S): `key_positions <= positions`.

    Raises:
        ValueError: if either is not of rank 2.
    """
    return run(CausalMask, positions, key_positions)


def window_mask(positions: Any, key_positions: Any, window: int) -> Any:
    """Each query attends to the keys less than `window` positions away, before it and after.

    Args:
        positions: integer positions of the queries, (B|1, T).
        key_positions: integer positions of the keys, (B|1, S).
        window: how far, 1 for the query's own position alone.

    Returns:
        Boolean (B|1, T, S).

    Raises:
        ValueError: if either is not of rank 2.
    """
    _check(positions, key_positions)
    distance = ops.subtract(ops.expand_dims(positions, 2), ops.expand_dims(key_positions, 1))
    return ops.less(ops.absolute(distance), window)


def square_causal_mask(x: Any) -> Any:
    """The causal mask (1, T, T) of a sequence `x` (B, T, …) that starts at position 0.

    Attention that is given this very tensor runs and exports as `causal=True`: see `as_causal`.
    """
    return run(SquareCausalMask, x)


def as_causal(mask: Any) -> tuple[Any, bool]:
    """Splits an attention mask into (mask, causal): (None, True) for an unchanged `square_causal_mask`.

    The mask is known by a mark on the tensor, which nothing computed from it carries. Where a tensor takes no mark (in
    a function that JAX compiles), the mask is simply applied: the result is the same.
    """
    causal = getattr(mask, _MARK, None) == (_version(mask),)
    return (None, True) if causal else (mask, False)


class CausalMask(keras.Operation):
    """The operation behind `causal_mask`; it is called with (positions, key_positions)."""

    def call(self, positions, key_positions):
        return self.compute(positions, key_positions)

    @staticmethod
    def compute(positions, key_positions):
        """See `causal_mask`."""
        _check(positions, key_positions)
        return ops.less_equal(ops.expand_dims(key_positions, 1), ops.expand_dims(positions, 2))

    def compute_output_spec(self, positions, key_positions):
        _check(positions, key_positions)
        (rows, length), (key_rows, slots) = positions.shape, key_positions.shape
        return keras.KerasTensor((key_rows if rows == 1 else rows, length, slots), "bool")


class SquareCausalMask(keras.Operation):
    """The operation behind `square_causal_mask`; it is called with (x)."""

    def call(self, x):
        return self.compute(x)

    @staticmethod
    def compute(x):
        """See `square_causal_mask`."""
        steps = ops.arange(ops.shape(x)[1])
        return _marked(ops.less_equal(steps[None, None, :], steps[None, :, None]))

    def compute_output_spec(self, x):
        return _marked(keras.KerasTensor((1, x.shape[1], x.shape[1]), "bool"))


def _check(positions, key_positions):
    if len(positions.shape) != 2 or len(key_positions.shape) != 2:
        raise ValueError(
            "`positions` and `key_positions` must have the shapes (B|1, T) and (B|1, S). "
            f"Received: positions.shape={tuple(positions.shape)}, "
            f"key_positions.shape={tuple(key_positions.shape)}"
        )


def _marked(mask):
    try:
        setattr(mask, _MARK, (_version(mask),))
    except AttributeError:
        pass
    return mask


def _version(tensor):
    """How often a torch tensor was changed in place; None for tensors that cannot be."""
    try:
        return getattr(tensor, "_version", None)
    except RuntimeError:  # torch's inference mode keeps no count: equal to nothing, so that the mask is applied
        return object()
