"""Rules for attention, its masks and its cache: one ONNX `Attention` node, with past and present for a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
from keras.src.ops import nn

from keras_transformer import ops
from keras_transformer.export.builder import GraphBuilder, Tensor
from keras_transformer.export.lowering.elementwise import add, compute_dtype, promoted, to_bool
from keras_transformer.export.lowering.registry import register_lowering
from keras_transformer.export.lowering.shaping import slice_update
from keras_transformer.export.lowering.sources import steps
from keras_transformer.ops.positions import _BLOCK, _turns

_HEADS_FIRST = (0, 2, 1, 3)

# What Keras puts in place of a hidden score: where all are hidden, their softmax is the mean.
_KERAS_HIDDEN = {"float16": -0.7 * 65500.0}
_KERAS_HIDDEN_DEFAULT = -0.7 * 3.38953e38


@dataclasses.dataclass(frozen=True)
class _Causal:
    """The tensor is the causal mask of a sequence that starts at position 0."""


@dataclasses.dataclass(frozen=True)
class _Appended:
    """The tensor is `past` (B, K, P, H) followed by `new` (B, T, K, H); `joined` is both, heads first."""

    past: Tensor
    new: Tensor
    joined: Tensor


@register_lowering(ops.Attention)
def _attention(g, node, query, key, value, mask=None):
    causal = node.attributes["causal"]
    if mask is not None:
        mask, found = _split_causal(g, mask)
        causal = causal or found
    if mask is not None and mask.rank == 3:
        mask = g.unsqueeze(mask, [1])
    weights = node.attributes["return_weights"]
    return attend(g, query, key, value, mask, causal, node.attributes["scale"], weights)


@register_lowering(nn.DotProductAttention)
def _dot_product_attention(g, node, query, key, value, bias=None, mask=None, scale=None):
    if node.attributes["attn_logits_soft_cap"] is not None:
        raise NotImplementedError("attn_logits_soft_cap is not covered")
    causal = node.attributes["is_causal"]
    dtype = promoted(query, key, value)
    if mask is not None:
        # Keras gives the mean of the values where everything is hidden: its own finite constant does so here too.
        mask, found = _split_causal(g, mask)
        causal = causal or found
    if mask is not None:
        mask = to_bool(g, mask)
        if causal:
            mask = g.op("And", mask, _square_mask(g, query.shape[1], key.shape[1]), dtype="bool")
            causal = False
        hidden = g.scalar(_KERAS_HIDDEN.get(dtype, _KERAS_HIDDEN_DEFAULT), dtype)
        mask = g.op("Where", mask, g.scalar(0.0, dtype), hidden, dtype=dtype)
    if bias is not None:
        bias = g.cast(bias, dtype)
        mask = bias if mask is None else g.op("Add", bias, mask)
    if mask is not None:
        mask = g.unsqueeze(mask, list(range(4 - mask.rank)))
    return attend(g, query, key, value, mask, causal, scale)


def attend(
    g: GraphBuilder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """One `Attention` node.

    Args:
        g: the graph.
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, W).
        mask: (B|1, N|1, T|1, S), boolean (True = may attend) or added to the scores.
        causal: position t attends to 0 … t.
        scale: factor of the scores; `H ** -0.5` if None.
        return_weights: whether to return the attention weights too.

    Returns:
        The output (B, T, N, W), or the pair (output, weights (B, N, T, S)). Rows in which a boolean mask hides
        everything are 0.
    """
    dtype = promoted(query, key, value)
    query, key, value = (g.cast(x, dtype) for x in (query, key, value))
    (batch, length, num_heads, _), (_, slots, num_kv_heads, _) = query.shape, key.shape
    if mask is not None:
        # ONNX Runtime rejects a mask that broadcasts over the queries.
        mask = g.expand(mask, (*mask.shape[:2], length, slots))
    past = _past_of(g, key, value)
    if past is not None:
        key, value = past[0].new, past[1].new
    # With the heads last a reshape undone is enough; whatever stands with its heads first is best taken so.
    flat = past is not None or not any(g.producer(x, "Transpose") for x in (key, value))
    if flat:
        tensors = [g.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3])) for x in (query, key, value)]
        heads = {"q_num_heads": num_heads, "kv_num_heads": num_kv_heads}
        shape = (batch, length, num_heads * value.shape[3])
    else:
        tensors = [g.transpose(x, _HEADS_FIRST) for x in (query, key, value)]
        heads = {}
        shape = (batch, num_heads, length, value.shape[3])
    joined = [] if past is None else [side.joined for side in past]
    present = [((batch, num_kv_heads, slots, x.shape[3]), dtype) for x in (key, value)]
    output, *presents, weights = g.op(
        "Attention",
        *tensors,
        mask,
        *([] if past is None else [side.past for side in past]),
        is_causal=int(causal) or None,
        scale=None if scale is None else float(scale),
        # The softmax in float32 under half precision, as Keras has it.
        softmax_precision=1 if dtype in ("float16", "bfloat16") else None,
        qk_matmul_output_mode=3 if return_weights else None,
        **heads,
        outputs=[(shape, dtype), *present, ((batch, num_heads, length, slots), dtype)],
    )
    for old, new in zip(joined, presents, strict=False):
        g.replace(old, new)
    if flat:
        output = g.reshape(output, (batch, length, num_heads, value.shape[3]))
    else:
        output = g.transpose(output, _HEADS_FIRST)
    return (output, weights) if return_weights else output


def _past_of(g, key, value) -> tuple[_Appended, _Appended] | None:
    """Both caches, if `key` and `value` have just been appended to them and nobody has read the result yet."""
    sides = tuple(g.facts.get(x.value) for x in (key, value))
    if not all(isinstance(side, _Appended) for side in sides):
        return None
    if any(g.readers(x) or g.readers(side.joined) > 1 for x, side in zip((key, value), sides, strict=True)):
        return None
    return sides


def _split_causal(g, mask) -> tuple[Tensor | None, bool]:
    """(mask, False), or what is left of `mask` and True if it holds the causal mask."""
    if isinstance(g.facts.get(mask.value), _Causal):
        return None, True
    both = g.producer(mask, "And")
    if both is not None and both[0].rank == both[1].rank:
        for one, other in (both, both[::-1]):
            if isinstance(g.facts.get(one.value), _Causal):
                return other, True
    return mask, False


@register_lowering(ops.WriteCache)
def _write_cache(g, node, cache, key, value, start=None):
    results = []
    for old, new in zip(cache, (key, value), strict=True):
        new = g.cast(new, old.dtype)
        if start is not None:
            if isinstance(start, Tensor) and start.rank == 1:
                raise NotImplementedError("a start for each row is not covered")
            results.append(slice_update(g, old, {1: start}, new))
            continue
        past = g.transpose(old, _HEADS_FIRST)
        joined = g.concat([past, g.transpose(new, _HEADS_FIRST)], 2)
        result = g.transpose(joined, _HEADS_FIRST)
        g.facts[result.value] = _Appended(past, new, joined)
        results.append(result)
    return results


@register_lowering(ops.CausalMask)
def _causal_mask(g, node, positions, key_positions):
    dtype = compute_dtype(promoted(positions, key_positions))
    keys = g.unsqueeze(g.cast(key_positions, dtype), [1])
    return g.op("LessOrEqual", keys, g.unsqueeze(g.cast(positions, dtype), [2]), dtype="bool")


@register_lowering(ops.SquareCausalMask)
def _square_causal_mask(g, node, x):
    mask = g.unsqueeze(_square_mask(g, x.shape[1], x.shape[1]), [0])
    g.facts[mask.value] = _Causal()
    return mask


def _square_mask(g, length, slots) -> Tensor:
    return g.op("LessOrEqual", g.unsqueeze(steps(g, slots), [0]), g.unsqueeze(steps(g, length), [1]), dtype="bool")


@register_lowering(ops.SinusoidalEncoding)
def _sinusoidal_encoding(g, node, positions):
    width, max_wavelength = node.attributes["d_model"], node.attributes["max_wavelength"]
    if positions.array is not None and positions.array.size:
        table = ops.sinusoidal_table(int(positions.array.max()) + 1, width, max_wavelength)
        return g.constant(table[positions.array])
    # The operation's own arithmetic: see `SinusoidalEncoding.call`.
    positions = g.unsqueeze(g.cast(positions, "int32"), [positions.rank])
    blocks = g.scalar(_BLOCK, "int32")
    block = g.cast(g.op("Div", positions, blocks), "float32")
    offset = g.cast(g.op("Mod", positions, blocks), "float32")
    block_turns, block_rest, offset_turns, offset_rest, phase = (
        g.constant(turns) for turns in _turns(width, max_wavelength)
    )
    exact = add(g, _fraction(g, g.op("Mul", block, block_turns)), _fraction(g, g.op("Mul", offset, offset_turns)))
    exact = _fraction(g, add(g, exact, phase))
    rest = add(g, g.op("Mul", block, block_rest), g.op("Mul", offset, offset_rest))
    turns = _fraction(g, add(g, exact, rest))
    return g.op("Sin", g.op("Mul", turns, g.scalar(2 * np.pi, "float32")))


def _fraction(g, turns):
    return g.op("Sub", turns, g.op("Round", turns))
