"""Rules for functions that make tensors from numbers alone, and for the `*_like` operations."""

from __future__ import annotations

import numpy as np
from keras.src.ops import numpy as knp

from keras_transformer.export.builder import GraphBuilder, Tensor, numpy_dtype
from keras_transformer.export.dims import Dim, Expr
from keras_transformer.export.lowering.elementwise import compute_dtype
from keras_transformer.export.lowering.registry import register_lowering

_FLOAT_RANGES = ("float32", "float64")


@register_lowering("arange", knp.Arange)
def _arange(g, node, start, stop=None, step=None, **kwargs):
    dtype = node.outputs[0].dtype
    if stop is None:
        start, stop = 0, start
    step = 1 if step is None else step
    if not any(isinstance(bound, (Expr, Tensor)) for bound in (start, stop, step)):
        return g.constant(np.arange(start, stop, step).astype(numpy_dtype(dtype)), dtype)
    wide = dtype if dtype in ("int32", "int64", *_FLOAT_RANGES) else "int32"
    bounds = [g.scalar(bound, wide) for bound in (start, stop, step)]
    return g.op("Range", *bounds, shape=node.outputs[0].shape, dtype=wide)


@register_lowering("zeros", "ones", "full", "empty")
def _filled(g, node, shape, fill_value=None, *args, **kwargs):
    number = {"zeros": 0, "ones": 1, "empty": 0}.get(node.kind, fill_value)
    return filled(g, node.outputs[0].shape, number, node.outputs[0].dtype)


def filled(g: GraphBuilder, shape, number, dtype: str) -> Tensor:
    """A tensor of one number."""
    return g.expand(g.scalar(number, dtype), shape)


@register_lowering(knp.Full)
def _full(g, node, fill_value):
    return g.expand(g.cast(fill_value, node.outputs[0].dtype), node.outputs[0].shape)


@register_lowering(knp.ZerosLike, knp.OnesLike, knp.EmptyLike)
def _like(g, node, x):
    return filled(g, x.shape, int(node.kind is knp.OnesLike), node.outputs[0].dtype)


@register_lowering(knp.FullLike)
def _full_like(g, node, x, fill_value):
    return g.expand(g.cast(fill_value, node.outputs[0].dtype), x.shape)


@register_lowering("eye", "identity", "tri")
def _diagonals(g, node, k=0, **kwargs):
    output = node.outputs[0]
    rows, columns = output.shape
    dtype = compute_dtype(output.dtype)
    make = np.tri if node.kind == "tri" else np.eye
    if not any(isinstance(number, Expr) for number in (rows, columns, k)):
        return g.constant(make(rows, columns, k).astype(numpy_dtype(output.dtype)), output.dtype)
    row = g.unsqueeze(steps(g, rows), [1])
    row = row if k == 0 else g.op("Add", row, g.scalar(k, "int64"))
    op_type = "GreaterOrEqual" if node.kind == "tri" else "Equal"
    return g.cast(g.op(op_type, row, g.unsqueeze(steps(g, columns), [0]), dtype="bool"), dtype)


def steps(g: GraphBuilder, size: Dim, dtype: str = "int64") -> Tensor:
    """0, 1, … size-1."""
    if not isinstance(size, Expr):
        return g.constant(np.arange(size), dtype)
    zero, one = g.scalar(0, dtype), g.scalar(1, dtype)
    return g.op("Range", zero, g.scalar(size, dtype), one, shape=(size,))


@register_lowering("linspace", knp.Linspace)
def _linspace(g, node, start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0):
    if node.kind is knp.Linspace:
        names = ("num", "endpoint", "retstep", "axis")
        num, endpoint, retstep, axis = (node.attributes[name] for name in names)
    output = node.outputs[0].dtype
    if retstep or any(isinstance(bound, Tensor) for bound in (start, stop)):
        raise NotImplementedError("its ends must be numbers, and retstep False")
    if not any(isinstance(bound, Expr) for bound in (start, stop, num)):
        return g.constant(np.linspace(start, stop, num, endpoint).astype(numpy_dtype(output)), output)
    index = g.cast(steps(g, num), "float32")
    count = g.scalar(num, "float32")
    if endpoint:
        count = g.op("Max", g.op("Sub", count, g.scalar(1.0, "float32")), g.scalar(1.0, "float32"))
    first, last = g.scalar(start, "float32"), g.scalar(stop, "float32")
    fraction = g.op("Div", index, count)
    return g.op("Add", first, g.op("Mul", fraction, g.op("Sub", last, first)))
