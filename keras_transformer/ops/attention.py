"""Scaled dot-product attention as one operation, whatever kernel runs inside."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.src import backend as keras_backend

from keras_transformer.ops._operation import run
from keras_transformer.ops.blockwise import blockwise_attention
from keras_transformer.ops.torch_kernels import fused_attention

# Finite, so that a row with every key masked gives a finite softmax (and gradient) before it is set to 0. Scores are
# at least float32 where it is used, and exp(-1e30 - score) is 0 for every score that attention can produce.
_MASKED_SCORE = -1e30

# As many scores for one row of the batch as this are computed in blocks: 64 MiB of them, 4 heads of length 2048.
BLOCKWISE_FROM = 2**24


def attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | keras.random.SeedGenerator | None = None,
    return_weights: bool = False,
) -> Any:
    """Scaled dot-product attention: `softmax(scale · query keyᵀ) value` ("Attention Is All You Need", eq. 1).

    A query that may attend to no key gives 0, with finite gradients. The softmax is computed in float32 at least.
    Without dropout and weights to return, long sequences take memory that grows linearly with their length: by a kernel
    of the backend's, or by blocks.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H); K divides N, and each key head serves N / K successive query heads.
        value: (B, S, K, W); W is H in most models.
        mask: boolean, True = may attend, of shape (B|1, T|1, S) or (B|1, N|1, T|1, S).
        causal: position t attends to positions 0 … t only. For T == S; with a cache pass a mask.
        scale: factor of the scores; `H ** -0.5` if None.
        dropout: rate at which attention weights are dropped. Give 0 at inference.
        seed: seed or seed generator of the dropout.
        return_weights: also return the attention weights (before dropout).

    Returns:
        The output (B, T, N, W), or the pair (output, weights (B, N, T, S)).

    Raises:
        ValueError: on shapes that do not fit, a mask that is not boolean, or `causal` with T != S.
    """
    return run(
        Attention,
        query,
        key,
        value,
        mask,
        causal=causal,
        scale=scale,
        dropout=dropout,
        seed=seed,
        return_weights=return_weights,
    )


class Attention(keras.Operation):
    """The operation behind `attention`; it is called with (query, key, value, mask=None)."""

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        seed: int | keras.random.SeedGenerator | None = None,
        return_weights: bool = False,
        *,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self.causal = causal
        self.scale = scale
        self.dropout = dropout
        self.return_weights = return_weights
        self._seed = seed

    def call(self, query, key, value, mask=None):
        return self.compute(
            query, key, value, mask, self.causal, self.scale, self.dropout, self._seed, self.return_weights
        )

    @staticmethod
    def compute(query, key, value, mask, causal, scale, dropout, seed, return_weights):
        """See `attention`."""
        _check(query, key, value, mask, causal)
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        query, key, value = (ops.cast(x, dtype) for x in (query, key, value))
        if mask is not None:
            mask = ops.convert_to_tensor(mask)
            if len(mask.shape) == 3:
                mask = ops.expand_dims(mask, 1)
        fused = query.shape[-1] == value.shape[-1] and _backend_has_fused_kernel(dtype)
        output_alone = not dropout and not return_weights
        if output_alone and not fused and _in_blocks(query, key):
            return blockwise_attention(query, key, value, mask, causal, scale)
        if causal and mask is not None:
            mask = ops.logical_and(mask, _causal(query))
        if output_alone and fused:
            output, weights = _fused(query, key, value, mask, causal, scale), None
        else:
            output, weights = _plain(query, key, value, mask, causal, scale, dropout, seed)
        if mask is not None:
            attends = ops.transpose(ops.any(mask, axis=-1, keepdims=True), (0, 2, 1, 3))
            output = ops.where(attends, output, ops.zeros((), dtype))
        if not return_weights:
            return output
        if mask is not None:
            weights = ops.where(mask, weights, ops.zeros((), dtype))
        return output, weights

    def compute_output_spec(self, query, key, value, mask=None):
        batch, length, slots = _check(query, key, value, mask, self.causal)
        num_heads = query.shape[2]
        dtype = keras.backend.result_type(query.dtype, key.dtype, value.dtype)
        output = keras.KerasTensor((batch, length, num_heads, value.shape[3]), dtype)
        if not self.return_weights:
            return output
        return output, keras.KerasTensor((batch, num_heads, length, slots), dtype)


def _fused(query, key, value, mask, causal, scale):
    """The backend's own kernel: the output alone."""
    causal = causal and mask is None
    if keras.config.backend() == "torch":
        return fused_attention(query, key, value, mask, causal, scale)
    if key.shape[2] == 1:
        # Kernels differ on whether they broadcast a single head.
        key, value = (ops.repeat(x, query.shape[2], axis=2) for x in (key, value))
    return ops.dot_product_attention(query, key, value, mask=mask, scale=scale, is_causal=causal)


def _plain(query, key, value, mask, causal, scale, dropout, seed):
    """Matrix products and a softmax: the output and the weights."""
    if causal and mask is None:
        mask = _causal(query)
    dtype = query.dtype
    batch, length, num_heads, head_dim = ops.shape(query)
    slots, num_kv_heads, value_dim = ops.shape(value)[1:]
    # Scores in float32, as fused kernels have them: a score of 40 has steps of 1/4 in bfloat16.
    exact = keras.backend.result_type(dtype, "float32")
    query = ops.cast(query, exact) * (head_dim**-0.5 if scale is None else scale)
    grouped = num_heads != num_kv_heads
    if grouped:
        query = ops.reshape(query, (batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim))
    scores = ops.einsum("btkgh,bskh->bkgts" if grouped else "btnh,bsnh->bnts", query, ops.cast(key, exact))
    if grouped:
        scores = ops.reshape(scores, (batch, num_heads, length, slots))
    if mask is not None:
        # Not `ops.full`, for which torch reads the number back from the device, and waits for it.
        scores = ops.where(mask, scores, ops.zeros((), exact) + _MASKED_SCORE)
    # Not `ops.softmax`, which warns of a single key: the first step of a growing cache has one.
    weights = ops.cast(keras_backend.nn.softmax(scores, axis=-1), dtype)
    dropped = keras.random.dropout(weights, dropout, seed=seed) if dropout else weights
    if not grouped:
        return ops.einsum("bnts,bsnh->btnh", dropped, value), weights
    dropped = ops.reshape(dropped, (batch, num_kv_heads, num_heads // num_kv_heads, length, slots))
    output = ops.einsum("bkgts,bskh->btkgh", dropped, value)
    return ops.reshape(output, (batch, length, num_heads, value_dim)), weights


def _check(query, key, value, mask, causal):
    """Raises ValueError on arguments that do not fit; returns the static (B, T, S)."""
    if any(len(x.shape) != 4 for x in (query, key, value)):
        raise ValueError(
            "`query`, `key` and `value` must have the shapes (batch, length, heads, width). "
            f"Received: {_shapes(query, key, value)}"
        )
    batch = _one_of(query.shape[0], key.shape[0], value.shape[0])
    length, slots = query.shape[1], _one_of(key.shape[1], value.shape[1])
    if not (
        all(agree(x.shape[0], batch) for x in (query, key, value))
        and agree(key.shape[1], value.shape[1])
        and key.shape[2] == value.shape[2]
        and query.shape[3] == key.shape[3]
        and query.shape[2] % key.shape[2] == 0
    ):
        raise ValueError(
            "`query` (B, T, N, H), `key` (B, S, K, H) and `value` (B, S, K, W) do not fit together, where K must "
            f"divide N. Received: {_shapes(query, key, value)}"
        )
    if causal and not agree(length, slots):
        raise ValueError(
            "`causal=True` needs as many queries as keys; with a cache pass a `mask` made from positions. "
            f"Received: {_shapes(query, key, value)}"
        )
    if mask is not None:
        _check_mask(mask, (batch, query.shape[2], length, slots))
    return batch, length, slots


def _check_mask(mask, sizes):
    dtype = keras.backend.standardize_dtype(mask.dtype)
    shape = tuple(mask.shape)
    if dtype != "bool":
        raise ValueError(f"`mask` must be boolean, True = may attend. Received: mask.dtype={dtype}")
    expected = sizes if len(shape) == 4 else (sizes[0], *sizes[2:])
    if (
        len(shape) not in (3, 4)
        or not all(s == 1 or agree(s, e) for s, e in zip(shape[:-1], expected[:-1], strict=True))
        or not agree(shape[-1], expected[-1])
    ):
        raise ValueError(
            "`mask` must have the shape (B|1, T|1, S) or (B|1, N|1, T|1, S) with (B, N, T, S) = "
            f"{sizes}. Received: mask.shape={shape}"
        )


def _backend_has_fused_kernel(dtype):
    backend = keras.config.backend()
    if backend == "jax":
        # cuDNN's, for half precision. Elsewhere JAX has no kernel that gains anything, and on a CPU its own fallback
        # has no gradient in float16.
        half = keras.backend.standardize_dtype(dtype) in ("float16", "bfloat16")
        return half and any(device.startswith("gpu") for device in keras.distribution.list_devices())
    # TensorFlow's version is an einsum, and takes no single key head.
    return backend == "torch"


def _in_blocks(query, key):
    """Whether to compute in blocks; the batch plays no part, so that a row gives the same in any company.

    Not on torch, where values of another width than the queries' are all that has no kernel, and where a gradient of
    Keras' kind breaks the graph of `torch.compile`.
    """
    length, slots = query.shape[1], key.shape[1]
    # JAX's symbolic sizes are no integers.
    known = isinstance(length, int) and isinstance(slots, int)
    return known and query.shape[2] * length * slots >= BLOCKWISE_FROM and keras.config.backend() != "torch"


def _causal(query):
    steps = ops.arange(ops.shape(query)[1])
    return ops.less_equal(steps[None, None, None, :], steps[None, None, :, None])


def _shapes(query, key, value):
    return f"query.shape={tuple(query.shape)}, key.shape={tuple(key.shape)}, value.shape={tuple(value.shape)}"


def _one_of(*sizes):
    return next((size for size in sizes if size is not None), None)


def agree(a: Any, b: Any) -> bool:
    """Whether two sizes may be equal; None is an unknown one."""
    if a is None or b is None:
        return True
    # As plain integers: export takes comparisons of its own sizes for conditions, and a check is none.
    return (int(a) if isinstance(a, int) else a) == (int(b) if isinstance(b, int) else b)
