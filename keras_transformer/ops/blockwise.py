"""Attention one block of queries after another, so that memory grows with the length and not with its square."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

# Scores in a block, for one row of the batch: 8 MiB of them. Larger blocks were no faster.
BLOCK_SCORES = 2**21
# Causal attention in so many bands of queries computes 5/8 of the square; each band is a loop to be compiled.
BANDS = 4
# Finite, so that no difference of two of them is NaN; and exp(_MASKED_SCORE - x) is 0 for each x from _LEAST_SCORE up.
_MASKED_SCORE, _LEAST_SCORE = -1e30, -1e29


def blockwise_attention(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """See `ops.attention`; T and S are known, and the mask is (B|1, N|1, T|1, S) or None.

    A block has some queries and all of their keys. Its scores are computed twice: once for the output, and once in the
    backward pass, from the output and the logarithm of each query's sum of exponentials, as in "FlashAttention"
    (https://arxiv.org/abs/2205.14135, algorithm 4). There the keys are cut too, to fit a GPU's memory on chip. Whole
    rows of scores meet the bound with one loop and a plain softmax.
    """
    if not causal:
        return _attend(query, key, value, mask, None, scale)
    length = query.shape[1]
    step = -(-length // BANDS)
    bands = []
    for start in range(0, length, step):
        end = min(start + step, length)
        seen = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start:end]
        seen = None if seen is None else seen[..., :end]
        bands.append(_attend(query[:, start:end], key[:, :end], value[:, :end], seen, start, scale))
    return ops.concatenate(bands, axis=1)


def _attend(query, key, value, mask, first, scale):
    """Attention block by block; causal if `first`, the position of the first query, is not None."""
    (length, num_heads, head_dim), (slots, num_kv_heads) = query.shape[1:], key.shape[1:3]
    groups = num_heads // num_kv_heads
    rows = -(-length // -(-num_heads * length * slots // BLOCK_SCORES))
    blocks = -(-length // rows)
    exact = keras.backend.result_type(query.dtype, "float32")

    def to_blocks(x):
        """(B, T, N, H) → (blocks, B, K, N/K · rows, H); the query heads of a key head are rows of one product."""
        x = ops.reshape(ops.cast(x, exact), (-1, length, num_kv_heads, groups, x.shape[-1]))
        x = ops.transpose(_cut(x, 1, blocks, rows), (0, 1, 3, 4, 2, 5))
        return ops.reshape(x, (blocks, -1, num_kv_heads, groups * rows, x.shape[-1]))

    def from_blocks(x):
        """(blocks, B, K, N/K · rows, H) → (B, T, N, H)."""
        x = ops.reshape(x, (blocks, -1, num_kv_heads, groups, rows, x.shape[-1]))
        x = ops.transpose(x, (1, 0, 4, 2, 3, 5))
        return ops.reshape(x, (-1, blocks * rows, num_heads, x.shape[-1]))[:, :length]

    def masks_of(mask):
        """(B|1, N|1, T|1, S) → (blocks, B|1, K|1, N/K|1, rows, S); one row for all: (1, B|1, K|1, N/K|1, 1, S)."""
        heads = (1, 1) if mask.shape[1] == 1 else (num_kv_heads, groups)
        mask = ops.reshape(mask, (-1, *heads, *mask.shape[2:]))
        return mask[None] if mask.shape[3] == 1 else _cut(mask, 3, blocks, rows)

    def masked(scores, block, masks=None):
        """Scores (B, K, N/K · rows, S) with those that do not count replaced."""
        allowed = None if masks is None else masks[0 if masks.shape[0] == 1 else block]
        if first is not None:
            before = ops.arange(slots) <= (first + block * rows + ops.arange(rows))[:, None]
            allowed = before if allowed is None else ops.logical_and(allowed, before)
        if allowed is None:
            return scores
        by_head = ops.reshape(scores, (-1, num_kv_heads, groups, rows, slots))
        return ops.reshape(ops.where(allowed, by_head, ops.cast(_MASKED_SCORE, exact)), ops.shape(scores))

    @ops.custom_gradient
    def attend(queries, keys, values, *masks):
        def scores_of(block):
            return masked(ops.einsum("bkqh,bksh->bkqs", queries[block], keys), block, *masks)

        def forward(block, results):
            outputs, logsumexps = results
            scores = scores_of(block)
            largest = ops.maximum(ops.max(scores, axis=-1, keepdims=True), _LEAST_SCORE)
            weights = ops.exp(scores - largest)
            # Where a query sees nothing the sum is 0; else it is at least the 1 of the largest score.
            total = ops.maximum(ops.sum(weights, axis=-1, keepdims=True), 1.0)
            outputs = _put(outputs, block, ops.einsum("bkqs,bksh->bkqh", weights, values) / total)
            return outputs, _put(logsumexps, block, largest + ops.log(total))

        one = ops.zeros_like(queries[..., :1])
        outputs, logsumexps = ops.fori_loop(0, blocks, forward, (ops.repeat(one, values.shape[-1], axis=-1), one))

        def gradient(*args, upstream=None):
            upstream = args[0] if upstream is None else upstream
            deltas = ops.sum(upstream * outputs, axis=-1, keepdims=True)

            def backward(block, results):
                of_queries, of_keys, of_values = results
                weights = ops.exp(scores_of(block) - logsumexps[block])
                of_scores = weights * (ops.einsum("bkqh,bksh->bkqs", upstream[block], values) - deltas[block])
                return (
                    _put(of_queries, block, ops.einsum("bkqs,bksh->bkqh", of_scores, keys)),
                    of_keys + ops.einsum("bkqs,bkqh->bksh", of_scores, queries[block]),
                    of_values + ops.einsum("bkqs,bkqh->bksh", weights, upstream[block]),
                )

            zeros = tuple(ops.zeros_like(x) for x in (queries, keys, values))
            return *ops.fori_loop(0, blocks, backward, zeros), *(None for _ in masks)

        return outputs, gradient

    queries = to_blocks(query) * (head_dim**-0.5 if scale is None else scale)
    keys, values = (ops.transpose(ops.cast(x, exact), (0, 2, 1, 3)) for x in (key, value))
    # Masks are arguments: JAX takes nothing traced from around such a function.
    outputs = attend(queries, keys, values, *([] if mask is None else [masks_of(mask)]))
    return ops.cast(from_blocks(outputs), query.dtype)


def _cut(x, axis, blocks, rows):
    """`x` with an axis cut into blocks, the last one filled up with zeros; the blocks come first."""
    padding = [(0, blocks * rows - x.shape[axis]) if each == axis else (0, 0) for each in range(len(x.shape))]
    x = ops.reshape(ops.pad(x, padding), (-1, *x.shape[1:axis], blocks, rows, *x.shape[axis + 1 :]))
    return ops.moveaxis(x, axis, 0)


def _put(x, block, values):
    return ops.slice_update(x, (block, *[0] * (len(x.shape) - 1)), values[None])
