"""Rules for attention, its masks and its cache: one ONNX `Attention` node, with past and present for a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
from keras.src.ops import nn
from keras.src.ops import numpy as knp

from keras_transformer import ops
from keras_transformer.export.builder import CONTRIB, GraphBuilder, Tensor
from keras_transformer.export.cached import SlotMask
from keras_transformer.export.dims import Dim, Expr, axes_of, multiply
from keras_transformer.export.lowering.elementwise import add, compare, compute_dtype, promoted, to_bool
from keras_transformer.export.lowering.registry import register_lowering
from keras_transformer.export.lowering.shaping import Repeated, scatter, slice_update
from keras_transformer.export.lowering.sources import steps
from keras_transformer.ops.positions import BLOCK, sinusoidal_waves, turns, wave_table
from keras_transformer.ops.rotary import rotary_waves

_HEADS_FIRST = (0, 2, 1, 3)

# What Keras puts in place of a hidden score: where all are hidden, their softmax is the mean.
_KERAS_HIDDEN = {"float16": -0.7 * 65500.0}
_KERAS_HIDDEN_DEFAULT = -0.7 * 3.38953e38


@dataclasses.dataclass(frozen=True)
class _Causal:
    """The tensor is the causal mask (T, S) of a sequence that starts at position 0."""


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The tensor counts 1, 2, … along one axis, as Keras' attention does to make a causal mask."""

    axis: int


@dataclasses.dataclass(frozen=True)
class _Appended:
    """The tensor is `past` (B, K, P, H) followed by `new` (B, T, K, H); `joined` is both, heads first."""

    past: Tensor
    new: Tensor
    joined: Tensor


@dataclasses.dataclass(frozen=True)
class _Written:
    """The tensor is `past` (B, K, S, H) with `new` (B, T, K, H) from a slot by row on; `whole` is it, heads first."""

    past: Tensor
    new: Tensor
    whole: Tensor


@dataclasses.dataclass(frozen=True)
class _Slots:
    """The tensor is the mask of a buffer, of which each row uses as many slots as its `attention_mask` has ones."""

    attention_mask: Tensor
    window: int | None


@dataclasses.dataclass(frozen=True)
class _Weights:
    """The tensor is softmax(scale · left @ right) of heads-first operands, hidden where `mask` says so.

    With a `cap` the scores are cap · tanh(scale · left @ right / cap).
    `left` is (B, N, T, H), or (B, K, G, T, H) of G query heads for each of K key heads.
    """

    left: Tensor
    right: Tensor
    scale: float
    cap: float | None
    mask: Tensor | None
    causal: bool


@register_lowering(ops.Attention)
def _attention(g, node, query, key, value, mask=None):
    causal = node.attributes["causal"]
    if mask is not None and isinstance(slots := g.facts.get(mask.value), _Slots):
        written = tuple(g.facts.get(x.value) for x in (key, value))
        if all(isinstance(side, _Written) for side in written) and not node.attributes["return_weights"]:
            return _attend_to_buffer(g, query, written, slots, node.attributes["scale"])
    if mask is not None:
        mask, found = _split_causal(g, mask)
        causal = causal or found
    if mask is not None and mask.rank == 3:
        mask = g.unsqueeze(mask, [1])
    write = attend_with_weights if node.attributes["return_weights"] else attend
    return write(g, query, key, value, mask, causal, node.attributes["scale"])


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
    cap: float | None = None,
) -> Tensor:
    """One `Attention` node.

    Args:
        g: the graph.
        query: (B, T, N, H).
        key: (B, S, K, H).
        value: (B, S, K, W).
        mask: (B|1, N|1, T|1, S), boolean (True = may attend) or added to the scores.
        causal: position t attends to 0 … t.
        scale: factor of the scores; `H ** -0.5` if None.
        cap: bound of the scores, which become `cap · tanh(scores / cap)` before the mask; none if None.

    Returns:
        The output (B, T, N, W). Rows in which a boolean mask hides everything are 0.
    """
    dtype = promoted(query, key, value)
    query, key, value = (g.cast(x, dtype) for x in (query, key, value))
    if (sizes := _none_at(query.shape[1], key.shape[1])) is not None:
        raise NotImplementedError(
            f"at {sizes} there are no queries or no keys, which ONNX Runtime's attention does not take; pass a larger "
            "`min_length`"
        )
    query, factor = _unscaled(g, query)
    if factor != 1.0:
        scale = factor * (query.shape[-1] ** -0.5 if scale is None else scale)
    if scale is not None and not scale > 0:
        # ONNX Runtime takes positive scales only.
        query, scale = g.op("Mul", query, g.scalar(float(scale), dtype)), 1.0
    key, value = _unrepeated(g, key, value)
    (batch, length, num_heads, _), (_, slots, num_kv_heads, _) = query.shape, key.shape
    if mask is not None:
        # ONNX Runtime rejects a mask that broadcasts over the queries.
        mask = g.expand(mask, (*mask.shape[:2], length, slots))
    # With past keys `is_causal` counts from the last key, without them (and in Keras) from the first.
    past = None if causal else _past_of(g, key, value)
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
    output, *presents = g.op(
        "Attention",
        *tensors,
        mask,
        *([] if past is None else [side.past for side in past]),
        is_causal=int(causal) or None,
        scale=None if scale is None else float(scale),
        softcap=None if cap is None else float(cap),
        # The softmax in float32 under half precision, as Keras has it.
        softmax_precision=1 if dtype in ("float16", "bfloat16") else None,
        **heads,
        outputs=[(shape, dtype), *present],
    )
    for old, new in zip(joined, presents, strict=False):
        g.replace(old, new)
    if flat:
        return g.reshape(output, (batch, length, num_heads, value.shape[3]))
    return g.transpose(output, _HEADS_FIRST)


def _none_at(*lengths: Dim) -> dict[str, int] | None:
    """Sizes of the free axes at which one of `lengths` is 0 or less; None where the smallest sizes leave some."""
    for length in lengths:
        sizes = {axis.name: axis.minimum for axis in axes_of(length)}
        if (length.evaluate(sizes) if isinstance(length, Expr) else length) <= 0:
            return sizes
    return None


def attend_with_weights(
    g: GraphBuilder, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention that also gives its weights (B, N, T, S), with a boolean mask, in single steps.

    `Attention` could return them, but ONNX infers a length of 0 for that output where the length is free.
    """
    dtype = promoted(query, key, value)
    query, key, value = (g.cast(x, dtype) for x in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (
            g.reshape(
                g.expand(g.unsqueeze(x, [3]), (*x.shape[:3], groups, x.shape[3])),
                (*x.shape[:2], query.shape[2], x.shape[3]),
            )
            for x in (key, value)
        )
    if causal:
        square = g.unsqueeze(_square_mask(g, query.shape[1], key.shape[1]), [0, 1])
        mask = square if mask is None else g.op("And", mask, square, dtype="bool")
    query = g.op("Mul", query, g.scalar(query.shape[-1] ** -0.5 if scale is None else scale, dtype))
    scores = g.matmul(g.transpose(query, _HEADS_FIRST), g.transpose(key, (0, 2, 3, 1)))
    scores = g.cast(scores, "float64" if dtype == "float64" else "float32")
    if mask is not None:
        scores = g.op("Where", mask, scores, g.scalar(-1e30, scores.dtype), dtype=scores.dtype)
    weights = g.cast(g.op("Softmax", scores, axis=-1), dtype)
    if mask is not None:
        weights = g.op("Where", mask, weights, g.scalar(0.0, dtype), dtype=dtype)
    return g.transpose(g.matmul(weights, g.transpose(value, _HEADS_FIRST)), _HEADS_FIRST), weights


def _unrepeated(g, key, value) -> tuple[Tensor, Tensor]:
    """`key` and `value` before each head of theirs was repeated for the query heads that share it."""
    known = [g.facts.get(x.value) for x in (key, value)]
    if all(isinstance(fact, Repeated) and fact.axis == 2 for fact in known) and known[0].repeats == known[1].repeats:
        return known[0].source, known[1].source
    return key, value


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
    inner = g.producer(mask, "Unsqueeze")
    if inner is not None and max(inner[1].array) < mask.rank - 2:
        rest, causal = _split_causal(g, inner[0])
        return (rest if rest is None else g.unsqueeze(rest, inner[1].array.tolist())), causal
    both = g.producer(mask, "And")
    if both is not None and both[0].rank == both[1].rank:
        for one, other in (both, both[::-1]):
            rest, causal = _split_causal(g, one)
            if causal:
                return (other if rest is None else g.op("And", rest, other, dtype="bool")), True
    return mask, False


# Attention that is written as two products around a softmax.


def note_softmax(g: GraphBuilder, node, weights: Tensor, scores: Tensor, mask: Tensor | None = None) -> None:
    """Remembers `weights`, the softmax of `scores` over the last axis and 0 where the boolean `mask` is False."""
    if g.is_output(node.outputs[0]):
        return
    bias, causal = None, False
    product = _product_of(g, scores)
    if product is None:
        total, factor = _unscaled(g, scores)
        for one, other in _sums(g, total):
            product = _product_of(g, one) if one.shape == scores.shape else None
            if product is not None and (factor == 1 or product[3] is None):
                product = (*product[:2], product[2] * factor, product[3])
                bias = other if factor == 1 else g.op("Mul", other, g.scalar(factor, other.dtype))
                break
        else:
            return
    if mask is not None and bias is None:
        mask, causal = _split_causal(g, mask)
    rank = scores.rank
    mask, bias = (x if x is None else g.unsqueeze(x, list(range(rank - x.rank))) for x in (mask, bias))
    if rank == 5:
        # Of grouped heads only what is the same for all of them.
        if any(x is not None and x.shape[1:3] != (1, 1) for x in (mask, bias)):
            return
        mask, bias = (x if x is None else g.squeeze(x, [2]) for x in (mask, bias))
    if bias is not None:
        # Rows in which everything is hidden are 0 with an infinite bias, as with a boolean mask.
        hidden = g.scalar(-np.inf, bias.dtype)
        mask = bias if mask is None else g.op("Where", mask, bias, hidden, dtype=bias.dtype)
    g.facts[weights.value] = _Weights(*product, mask, causal)


def _sums(g, scores) -> list[tuple[Tensor, Tensor]]:
    """The ways to read `scores` as one of the terms that it is a sum of, and the others."""
    terms = g.producer(scores, "Add")
    if terms is None:
        return []
    found = [terms, terms[::-1]]
    for one, other in tuple(found):
        inner = g.producer(one, "Add")
        for first, second in (inner, inner[::-1]) if inner is not None and g.readers(one) == 1 else ():
            if _product_of(g, first) is not None:
                found.append((first, g.op("Add", second, other)))
    return found


def _product_of(g, scores) -> tuple[Tensor, Tensor, float, float | None] | None:
    """The operands of the product of heads behind `scores`, their factor, and the cap that they were bounded by."""
    product, scale = _unscaled(g, scores)
    cap = None
    bounded = g.producer(product, "Tanh")
    if bounded is not None and scale > 0:
        cap = scale
        product, scale = _unscaled(g, bounded[0])
        scale *= cap
    if scores.rank == 5:
        # Groups of query heads that share a key head are rows of one product.
        whole = g.producer(product, "Reshape")
        operands = whole and g.producer(whole[0], "MatMul")
        rows = operands and g.producer(operands[0], "Reshape")
        if not rows or rows[0].shape[:4] != scores.shape[:4] or operands[1].rank != 4:
            return None
        grouped = rows[0].rank == 5 and whole[0].shape[:2] == operands[1].shape[:2] == scores.shape[:2]
        return (rows[0], operands[1], scale, cap) if grouped else None
    operands = g.producer(product, "MatMul")
    if operands is None or any(x.rank != 4 for x in operands):
        return None
    left, right = operands
    return (left, right, scale, cap) if left.shape[:2] == right.shape[:2] else None


def _unscaled(g, x) -> tuple[Tensor, float]:
    """`x` as a tensor times a number."""
    scale = 1.0
    while (operands := g.producer(x, "Mul", "Div")) is not None:
        inner, factor = operands
        divides = x.value.producer().op_type == "Div"
        if inner.array is not None and not divides:
            inner, factor = factor, inner
        if factor.array is None or factor.array.size != 1 or inner.shape != x.shape:
            break
        scale *= 1 / float(factor.array.item()) if divides else float(factor.array.item())
        x = inner
    return x, scale


def weighted_sum(g: GraphBuilder, weights: Tensor, values: Tensor) -> Tensor | None:
    """`weights @ values` as one Attention node if `weights` are attention weights (B, N, T, S); otherwise None."""
    rows = g.producer(weights, "Reshape")
    source = weights if rows is None else rows[0]
    # The rows of a group are its heads' positions, or its positions' heads.
    order = [0, 1, 2, 3, 4]
    moved = g.producer(source, "Transpose")
    if moved is not None and list(source.value.producer().attributes["perm"].as_ints()) == [0, 1, 3, 2, 4]:
        source, order = moved[0], [0, 1, 3, 2, 4]
    known = g.facts.get(source.value)
    if not isinstance(known, _Weights) or values.rank != 4 or values.shape[:2] != known.left.shape[:2]:
        return None
    if _none_at(known.left.shape[-2], known.right.shape[-1]) is not None:
        return None
    key = g.transpose(known.right, (0, 3, 1, 2))
    value = g.transpose(values, _HEADS_FIRST)
    if known.left.rank == 4:
        if rows is not None:
            return None
        query = g.transpose(known.left, _HEADS_FIRST)
        output = attend(g, query, key, value, known.mask, known.causal, known.scale, known.cap)
        return g.transpose(output, _HEADS_FIRST)
    batch, heads, groups, length, width = known.left.shape
    if weights.shape[:3] != (batch, heads, multiply(length, groups)):
        return None
    query = g.reshape(g.transpose(known.left, (0, 3, 1, 2, 4)), (batch, length, heads * groups, width))
    output = attend(g, query, key, value, known.mask, known.causal, known.scale, known.cap)
    output = g.reshape(output, (batch, length, heads, groups, output.shape[3]))
    order = [(0, 2, 3, 1, 4)[axis] for axis in order]
    return g.reshape(g.transpose(output, order), (*weights.shape[:3], output.shape[4]))


@register_lowering(ops.WriteCache)
def _write_cache(g, node, cache, key, value, start=None):
    results = []
    for old, new in zip(cache, (key, value), strict=True):
        new = g.cast(new, old.dtype)
        past = g.transpose(old, _HEADS_FIRST)
        if isinstance(start, Tensor) and start.rank == 1:
            result = _write_rows(g, old, start, new)
            g.facts[result.value] = _Written(past, new, g.transpose(result, _HEADS_FIRST))
            results.append(result)
            continue
        if start is not None:
            results.append(slice_update(g, old, {1: start}, new))
            continue
        joined = g.concat([past, g.transpose(new, _HEADS_FIRST)], 2)
        result = g.transpose(joined, _HEADS_FIRST)
        g.facts[result.value] = _Appended(past, new, joined)
        results.append(result)
    return results


@register_lowering(SlotMask)
def _slot_mask(g, node, position_ids, attention_mask):
    slots, window = node.attributes["slots"], node.attributes["window"]
    keys, queries = g.unsqueeze(steps(g, slots), [0, 1]), g.unsqueeze(position_ids, [2])
    mask = g.op("LessOrEqual", keys, queries, dtype="bool")
    if window is not None:
        near = g.op("Less", g.op("Sub", queries, keys), g.scalar(window, "int64"), dtype="bool")
        mask = g.op("And", mask, near, dtype="bool")
    g.facts[mask.value] = _Slots(attention_mask, window)
    return mask


def _attend_to_buffer(g, query, written, slots, scale) -> Tensor:
    """One `GroupQueryAttention` node, which writes the new keys and values where the cache lies and reads it."""
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = written[0].new.shape[2]
    counts = g.reduce("ReduceSum", slots.attention_mask, [1])
    last = g.cast(g.op("Sub", counts, g.scalar(1, "int64")), "int32")
    total = g.scalar(slots.attention_mask.shape[1], "int32")
    flat = [g.reshape(x, (*x.shape[:2], x.shape[2] * x.shape[3])) for x in (query, *(side.new for side in written))]
    output, *present = g.op(
        "GroupQueryAttention",
        *flat,
        *(side.past for side in written),
        last,
        total,
        domain=CONTRIB,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=None if scale is None else float(scale),
        local_window_size=slots.window,
        outputs=[(flat[0].shape, query.dtype), *((side.past.shape, side.past.dtype) for side in written)],
    )
    for side, new in zip(written, present, strict=True):
        g.replace(side.whole, new)
    return g.reshape(output, (batch, length, num_heads, head_dim))


def _write_rows(g, old, start, new) -> Tensor:
    """`old` with the rows of `new` written from a slot of their own each."""
    batch, length = new.shape[:2]
    slots = g.op("Add", g.unsqueeze(g.cast(start, "int64"), [1]), g.unsqueeze(steps(g, length), [0]))
    rows = g.expand(g.unsqueeze(steps(g, batch), [1]), (batch, length))
    indices = g.concat([g.unsqueeze(x, [2]) for x in (rows, slots)], 2)
    return scatter(g, old, indices, new)


@register_lowering(ops.CausalMask)
def _causal_mask(g, node, positions, key_positions):
    dtype = compute_dtype(promoted(positions, key_positions))
    keys = g.unsqueeze(g.cast(key_positions, dtype), [1])
    return g.op("LessOrEqual", keys, g.unsqueeze(g.cast(positions, dtype), [2]), dtype="bool")


@register_lowering(ops.SquareCausalMask)
def _square_causal_mask(g, node, x):
    return g.unsqueeze(_square_mask(g, x.shape[1], x.shape[1]), [0])


def note_steps(g: GraphBuilder, x: Tensor, source: Tensor, axis: int) -> None:
    """Remembers that `x`, the cumulative sum of `source` along `axis`, counts 1, 2, … if it does."""
    filled = g.producer(source, "Expand")
    if filled is not None and filled[0].array is not None and filled[0].array.size == 1 and filled[0].array == 1:
        g.facts[x.value] = _Steps(axis)


@register_lowering(knp.GreaterEqual)
def _greater_equal(g, node, x1, x2):
    """The comparison by which Keras' attention makes its causal mask from counted rows and columns."""
    if isinstance(x1, Tensor) and isinstance(x2, Tensor):
        rows, columns = (g.facts.get(x.value) for x in (x1, x2))
        lead, shape = x1.rank - 2, x1.shape
        counted = rows == _Steps(lead) and columns == _Steps(lead + 1) and shape == x2.shape
        if counted and shape[lead] == shape[lead + 1] and all(dim == 1 for dim in shape[:lead]):
            return g.unsqueeze(_square_mask(g, shape[lead], shape[lead]), list(range(lead)))
    return compare(g, node, x1, x2)


def _square_mask(g, length, slots) -> Tensor:
    rows, columns = g.unsqueeze(steps(g, length), [1]), g.unsqueeze(steps(g, slots), [0])
    mask = g.op("LessOrEqual", columns, rows, dtype="bool")
    g.facts[mask.value] = _Causal()
    return mask


@register_lowering(ops.SinusoidalEncoding)
def _sinusoidal_encoding(g, node, positions):
    arguments = (node.attributes[name] for name in ("d_model", "max_wavelength", "interleaved"))
    return _waves(g, positions, *sinusoidal_waves(*arguments))


@register_lowering(ops.RotaryEncoding)
def _rotary_encoding(g, node, positions):
    return _waves(g, positions, *rotary_waves(node.attributes["frequencies"]))


@register_lowering(ops.Rotate)
def _rotate(g, node, x, encoding):
    batch, length, num_heads, width = x.shape
    half = encoding.shape[2] // 2
    tables = [
        g.expand(g.slice(g.cast(encoding, x.dtype), 2, start, start + half, half), (batch, length, half))
        for start in (0, half)
    ]
    flat = g.reshape(x, (batch, length, num_heads * width))
    rotated = g.op(
        "RotaryEmbedding",
        flat,
        *tables,
        num_heads=num_heads,
        rotary_embedding_dim=2 * half if 2 * half < width else None,
        shape=flat.shape,
    )
    return g.reshape(rotated, x.shape)


def _waves(g, positions, frequencies, quarters):
    if positions.array is not None and positions.array.size:
        return g.constant(wave_table(positions.array, frequencies, quarters))
    # The arithmetic of `ops.positions.waves`.
    positions = g.unsqueeze(g.cast(positions, "int32"), [positions.rank])
    blocks = g.scalar(BLOCK, "int32")
    block = g.cast(g.op("Div", positions, blocks), "float32")
    offset = g.cast(g.op("Mod", positions, blocks), "float32")
    block_turns, block_rest, offset_turns, offset_rest, phase = (
        g.constant(part) for part in turns(frequencies, quarters)
    )
    exact = add(g, _fraction(g, g.op("Mul", block, block_turns)), _fraction(g, g.op("Mul", offset, offset_turns)))
    exact = _fraction(g, add(g, exact, phase))
    rest = add(g, g.op("Mul", block, block_rest), g.op("Mul", offset, offset_rest))
    angle = _fraction(g, add(g, exact, rest))
    return g.op("Sin", g.op("Mul", angle, g.scalar(2 * np.pi, "float32")))


def _fraction(g, angle):
    return g.op("Sub", angle, g.op("Round", angle))
