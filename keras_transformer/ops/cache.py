"""The key/value cache: a pair of plain tensors that a layer is given and hands back."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer.ops._operation import run
from keras_transformer.ops.attention import agree
from keras_transformer.ops.torch_kernels import write_slots


def write_cache(cache: tuple[Any, Any], key: Any, value: Any, start: Any = None) -> tuple[Any, Any]:
    """Writes new keys and values into a cache, or appends them to it.

    Args:
        cache: the pair (keys, values), each (B, S, K, H): S is the buffer's length, or what was appended so far.
        key: the new keys (B, T, K, H).
        value: the new values (B, T, K, H).
        start: the slot of the first new entry: one integer for all rows, or one a row (B,). The entries fill the
            slots `start … start+T-1`, which must exist: only a Python integer can be checked. None: append.

    Returns:
        The pair (keys, values), each (B, S, K, H), or (B, S+T, K, H) when appended.

    Raises:
        ValueError: on shapes that do not fit, or an integer `start` that runs over the buffer's end.
    """
    return run(WriteCache, tuple(cache), key, value, start)


class WriteCache(keras.Operation):
    """The operation behind `write_cache`; it is called with (cache, key, value, start=None)."""

    def call(self, cache, key, value, start=None):
        return self.compute(cache, key, value, start)

    @staticmethod
    def compute(cache, key, value, start):
        """See `write_cache`."""
        _check(cache, key, value, start)
        return tuple(_write(old, new, start) for old, new in zip(cache, (key, value), strict=True))

    def compute_output_spec(self, cache, key, value, start=None):
        _check(cache, key, value, start)
        return tuple(
            keras.KerasTensor(_written_shape(old.shape, new.shape, start), old.dtype)
            for old, new in zip(cache, (key, value), strict=True)
        )


def _check(cache, key, value, start):
    for name, old, new in (("key", cache[0], key), ("value", cache[1], value)):
        if (
            len(old.shape) != 4
            or len(new.shape) != 4
            or tuple(old.shape[2:]) != tuple(new.shape[2:])
            or not agree(old.shape[0], new.shape[0])
        ):
            raise ValueError(
                f"The cache's {name}s (B, S, K, H) and the new `{name}` (B, T, K, H) must agree in B, K and H. "
                f"Received: shapes {tuple(old.shape)} and {tuple(new.shape)}"
            )
    if start is None:
        return
    shape = tuple(getattr(start, "shape", ()))
    dtype = keras.backend.standardize_dtype(start.dtype) if hasattr(start, "dtype") else type(start).__name__
    if len(shape) > 1 or not all(agree(size, key.shape[0]) for size in shape):
        raise ValueError(f"`start` must be an integer or have the shape (B,). Received: start.shape={shape}")
    if "int" not in dtype.lower():
        raise ValueError(f"`start` must hold integers. Received: start={start!r} of type {dtype}")
    slots, length = cache[0].shape[1], key.shape[1]
    if isinstance(start, int) and None not in (slots, length) and not 0 <= start <= slots - length:
        raise ValueError(
            f"{length} entries from slot `start` do not fit into the {slots} slots of the cache. "
            f"Received: start={start}"
        )


def _written_shape(old, new, start):
    if start is not None:
        return tuple(old)
    appended = None if None in (old[1], new[1]) else old[1] + new[1]
    return (new[0] if old[0] is None else old[0], appended, *old[2:])


def _write(old, new, start):
    new = ops.cast(new, old.dtype)
    if start is None:
        return ops.concatenate([old, new], axis=1)
    if keras.config.backend() == "torch":
        start = start if isinstance(start, int) else ops.convert_to_tensor(start)
        return write_slots(ops.convert_to_tensor(old), new, start)
    if len(getattr(start, "shape", ())) == 0:
        return ops.slice_update(old, (0, start, 0, 0), new)
    batch, length = ops.shape(new)[:2]
    slots = ops.expand_dims(ops.cast(start, "int32"), 1) + ops.arange(length, dtype="int32")
    rows = ops.broadcast_to(ops.expand_dims(ops.arange(batch, dtype="int32"), 1), (batch, length))
    indices = ops.reshape(ops.stack([rows, slots], axis=-1), (-1, 2))
    return ops.scatter_update(old, indices, ops.reshape(new, (-1, *old.shape[2:])))
