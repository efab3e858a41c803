"""Recognises what layers write in single steps and ONNX has one operator for: RMS norms and rotations of halves."""

from __future__ import annotations

import numpy as np

from keras_transformer.export.builder import GraphBuilder, Tensor
from keras_transformer.export.dims import Dim


def rms_norm(g: GraphBuilder, x1: Tensor, x2: Tensor) -> Tensor | None:
    """`x1 * x2` as RMSNormalization, if it is `x / sqrt(mean(x²) + ε)`, or that times one number for each feature."""
    for x, factor in ((x1, x2), (x2, x1)):
        if x.dtype not in ("float32", "float64"):
            return None
        known = g.producer(x, "RMSNormalization")
        # Over the last axis alone, as its scale shows.
        if known is not None and known[1].rank == 1 and _is_one(known[1]) and factor.shape == x.shape[-1:]:
            return _rms_norm(g, known[0], factor, x.value.producer().attributes["epsilon"].as_float())
        epsilon = _reciprocal_root_mean_square(g, factor, x)
        if epsilon is not None:
            return _rms_norm(g, x, g.expand(g.scalar(1.0, x.dtype), x.shape[-1:]), epsilon)
    return None


def _rms_norm(g, x, scale, epsilon) -> Tensor:
    return g.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, shape=x.shape)


def _is_one(x: Tensor) -> bool:
    return x.array is not None and bool(np.all(x.array == 1))


def _reciprocal_root_mean_square(g, factor: Tensor, x: Tensor) -> float | None:
    """The ε of `factor` if it is `1 / sqrt(mean(x²) + ε)` over the last axis."""
    if x.rank and isinstance(x.shape[-1], int) and factor.shape == (*x.shape[:-1], 1):
        root = g.producer(factor, "Reciprocal")
        total = root and g.producer(root[0], "Sqrt")
        parts = total and g.producer(total[0], "Add")
        for mean, epsilon in (parts, parts[::-1]) if parts else ():
            square = g.producer(mean, "ReduceMean")
            square = square and g.producer(square[0], "Mul")
            if (
                square
                and square[0].value is square[1].value is x.value
                and epsilon.array is not None
                and epsilon.array.size == 1
            ):
                return float(epsilon.array.item())
    return None


def rotation(g: GraphBuilder, x1: Tensor, x2: Tensor) -> Tensor | None:
    """`x1 + x2` as RotaryEmbedding, if it is `x * cos + (-b, a) * sin` with x = (a, b) and equal halves of both."""
    for first, second in ((x1, x2), (x2, x1)):
        products = g.producer(first, "Mul"), g.producer(second, "Mul")
        if None in products:
            return None
        for turned, sine in (products[1], products[1][::-1]):
            x = _turned(g, turned)
            for own, cosine in (products[0], products[0][::-1]) if x is not None else ():
                if own.value is x.value and (tables := _tables(g, x, cosine, sine)) is not None:
                    return _rotate(g, x, *tables)
    return None


def _turned(g, x: Tensor) -> Tensor | None:
    """The tensor (a, b) of which `x` is (-b, a)."""
    parts = _joined(g, x)
    negative = parts and g.producer(parts[0], "Neg")
    if negative is None:
        return None
    lower, upper = parts[1], negative[0]
    sources = g.producer(lower, "Split"), g.producer(upper, "Split")
    if (
        None not in sources
        and sources[0][0].value is sources[1][0].value
        and lower.shape == upper.shape == parts[1].shape
    ):
        node = lower.value.producer()
        source = sources[0][0]
        halves = node is upper.value.producer() and list(node.outputs) == [lower.value, upper.value]
        return source if halves and source.shape == x.shape else None
    return None


def _joined(g, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two equally wide tensors that are `x` side by side along its last axis."""
    parts = g.producer(x, "Concat")
    if parts is not None:
        axis = x.value.producer().attributes["axis"].as_int() % x.rank
        if len(parts) == 2 and axis == x.rank - 1 and parts[0].shape == parts[1].shape:
            return parts
        return None
    stacked = g.producer(x, "Reshape")
    parts = stacked and g.producer(stacked[0], "Concat")
    if not parts or len(parts) != 2 or stacked[0].shape != (*x.shape[:-1], 2, parts[0].shape[-1]):
        return None
    inner = [g.producer(part, "Unsqueeze") for part in parts]
    if None in inner or any(list(axes.array) != [x.rank - 1] for _, axes in inner):
        return None
    return inner[0][0], inner[1][0]


def _tables(g, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, bool] | None:
    """Half of each table as (B|1, T, H/2), and whether the heads of `x` stand before its positions."""
    halves = [_half(g, table) for table in (cosine, sine)]
    if None in halves:
        return None
    tables = [g.unsqueeze(half, list(range(x.rank - half.rank))) for half in halves]
    width = x.shape[-1] // 2
    for heads in (None,) if x.rank == 3 else (2, 1) if x.rank == 4 else ():
        lead = [dim for axis, dim in enumerate(x.shape[:-1]) if axis != heads]
        fitting = [[table.shape[i] for i in range(x.rank) if i != heads] for table in tables]
        if all(
            (heads is None or table.shape[heads] == 1) and shape[0] in (1, lead[0]) and shape[1:] == [lead[1], width]
            for table, shape in zip(tables, fitting, strict=True)
        ):
            tables = [table if heads is None else g.squeeze(table, [heads]) for table in tables]
            return (*tables, heads == 1)
    return None


def _half(g, x: Tensor) -> Tensor | None:
    """The first half of `x` along its last axis, if the second is the same."""
    if x.array is not None and x.rank:
        first, *rest = np.split(x.array, 2, axis=-1) if x.array.shape[-1] % 2 == 0 else (None,)
        return g.constant(first, x.dtype) if rest and np.array_equal(first, rest[0]) else None
    parts = _joined(g, x)
    if parts is not None:
        return parts[0] if parts[0].value is parts[1].value else None
    node = x.value.producer()
    if node is None:
        return None
    shape: tuple[Dim, ...] = (*x.shape[:-1], x.shape[-1] // 2) if x.rank and isinstance(x.shape[-1], int) else ()
    if node.op_type in ("Cos", "Sin", "Cast"):
        half = _half(g, g.producer(x, node.op_type)[0])
        if half is not None:
            return g.cast(half, x.dtype) if node.op_type == "Cast" else g.op(node.op_type, half)
    elif node.op_type == "Unsqueeze":
        inner, axes = g.producer(x, "Unsqueeze")
        half = _half(g, inner) if x.rank - 1 not in axes.array else None
        return half if half is None else g.unsqueeze(half, axes.array.tolist())
    elif node.op_type == "Reshape":
        (inner, _) = g.producer(x, "Reshape")
        half = _half(g, inner) if inner.shape[-1:] == x.shape[-1:] else None
        return half if half is None else g.reshape(half, shape)
    elif node.op_type in ("Mul", "Div"):
        inner, factor = g.producer(x, node.op_type)
        half = _half(g, inner) if factor.rank == 0 else None
        return half if half is None else g.op(node.op_type, half, factor)
    return None


def _rotate(g, x: Tensor, cosine: Tensor, sine: Tensor, heads_first: bool) -> Tensor:
    batch, length = x.shape[0], x.shape[2 if heads_first else 1]
    tables = [g.expand(table, (batch, length, table.shape[2])) for table in (cosine, sine)]
    if heads_first:
        return g.op("RotaryEmbedding", x, *tables, shape=x.shape)
    heads = x.shape[2] if x.rank == 4 else 1
    flat = g.reshape(x, (batch, length, heads * x.shape[-1]))
    return g.reshape(g.op("RotaryEmbedding", flat, *tables, num_heads=heads, shape=flat.shape), x.shape)
