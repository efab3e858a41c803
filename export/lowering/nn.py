"""Rules for reductions, sorting, softmax, normalisation and one-hot codes, and for the layers that are kept whole."""

from __future__ import annotations

import keras
import ml_dtypes
import numpy as np
from keras.src.ops import linalg, nn
from keras.src.ops import math as kmath
from keras.src.ops import numpy as knp

from keras_transformer.export.builder import GraphBuilder, Tensor, product
from keras_transformer.export.lowering.attention import note_softmax, note_steps
from keras_transformer.export.lowering.elementwise import compute_dtype, is_float, to_bool
from keras_transformer.export.lowering.registry import register_lowering
from keras_transformer.export.lowering.shaping import axes_tuple

_REDUCTIONS = {
    knp.Sum: "ReduceSum",
    knp.Mean: "ReduceMean",
    knp.Max: "ReduceMax",
    knp.Amax: "ReduceMax",
    knp.Min: "ReduceMin",
    knp.Amin: "ReduceMin",
    knp.Prod: "ReduceProd",
    kmath.Logsumexp: "ReduceLogSumExp",
}


@register_lowering(*_REDUCTIONS)
def _reduce(g, node, x):
    dtype = compute_dtype(node.outputs[0].dtype)
    # Means in half precision are computed in float32, as Keras does.
    wide = "float32" if node.kind is knp.Mean and dtype in ("float16", "bfloat16") else dtype
    axes = axes_tuple(node.attributes["axis"], x.rank)
    result = g.reduce(_REDUCTIONS[node.kind], g.cast(x, wide), axes, node.attributes["keepdims"])
    initial = node.attributes.get("initial")
    if initial is not None:
        result = g.op("Max" if node.kind is knp.Max else "Min", result, g.scalar(initial, wide))
    return result


@register_lowering(knp.Ptp)
def _peak_to_peak(g, node, x):
    axes, keepdims = axes_tuple(node.attributes["axis"], x.rank), node.attributes["keepdims"]
    return g.op("Sub", *(g.reduce(op_type, x, axes, keepdims) for op_type in ("ReduceMax", "ReduceMin")))


@register_lowering(knp.All, knp.Any)
def _all_any(g, node, x):
    op_type = "ReduceMin" if node.kind is knp.All else "ReduceMax"
    axes = axes_tuple(node.attributes["axis"], x.rank)
    return to_bool(g, g.reduce(op_type, g.cast(to_bool(g, x), "int32"), axes, node.attributes["keepdims"]))


@register_lowering(knp.CountNonzero)
def _count_nonzero(g, node, x):
    return g.reduce("ReduceSum", g.cast(to_bool(g, x), "int32"), axes_tuple(node.attributes["axis"], x.rank))


@register_lowering(knp.Var, knp.Std)
def _variance(g, node, x):
    dtype = node.outputs[0].dtype
    x = g.cast(x, "float32" if dtype in ("float16", "bfloat16") else dtype)
    variance = _moments(g, x, axes_tuple(node.attributes["axis"], x.rank), node.attributes["keepdims"])[1]
    return g.op("Sqrt", variance) if node.kind is knp.Std else variance


@register_lowering(nn.Moments)
def _moments_rule(g, node, x):
    dtype = node.outputs[0].dtype
    x = g.cast(x, "float32" if dtype in ("float16", "bfloat16") else dtype)
    return _moments(g, x, axes_tuple(node.attributes["axes"], x.rank), node.attributes["keepdims"])


def _moments(g: GraphBuilder, x: Tensor, axes, keepdims: bool) -> tuple[Tensor, Tensor]:
    mean = g.reduce("ReduceMean", x, axes, True)
    centred = g.op("Sub", x, mean)
    variance = g.reduce("ReduceMean", g.op("Mul", centred, centred), axes, keepdims)
    return (mean if keepdims else g.squeeze(mean, axes)), variance


@register_lowering(knp.Cumsum)
def _cumsum(g, node, x):
    dtype = compute_dtype(node.outputs[0].dtype)
    axis = node.attributes["axis"]
    if axis is None:
        x, axis = g.reshape(x, (product(x.shape),)), 0
    result = g.op("CumSum", g.cast(x, dtype), g.scalar(axis % x.rank, "int64"), shape=x.shape)
    note_steps(g, result, x, axis % x.rank)
    return result


@register_lowering(knp.Argmax, knp.Argmin)
def _argmax(g, node, x):
    axis, keepdims = node.attributes["axis"], node.attributes["keepdims"]
    x = g.cast(x, compute_dtype(x.dtype))
    shape = node.outputs[0].shape
    if axis is None:
        x, axis, keepdims = g.reshape(x, (product(x.shape),)), 0, False
    op_type = "ArgMax" if node.kind is knp.Argmax else "ArgMin"
    left = (*x.shape[: axis % x.rank], *((1,) if keepdims else ()), *x.shape[axis % x.rank + 1 :])
    result = g.op(op_type, x, axis=axis % x.rank, keepdims=int(keepdims), shape=left, dtype="int64")
    return g.reshape(result, shape)


@register_lowering(kmath.TopK)
def _top_k(g, node, x):
    return top_k(g, x, node.attributes["k"], -1, node.outputs[0].shape)


@register_lowering(knp.Sort, knp.Argsort)
def _sort(g, node, x):
    axis = node.attributes["axis"]
    if axis is None:
        x, axis = g.reshape(x, (product(x.shape),)), 0
    axis %= x.rank
    values, indices = top_k(g, x, x.shape[axis], axis, x.shape, largest=0)
    return values if node.kind is knp.Sort else indices


def top_k(g: GraphBuilder, x: Tensor, k, axis: int, shape, largest: int = 1) -> tuple[Tensor, Tensor]:
    """The `k` first entries along `axis` in descending (`largest=0`: ascending) order, and where they stood."""
    dtype = x.dtype
    x = g.cast(x, compute_dtype(dtype))
    specs = [(shape, x.dtype), (shape, "int64")]
    values, indices = g.op("TopK", x, g.shape_tensor([k]), axis=axis % x.rank, largest=largest, sorted=1, outputs=specs)
    return g.cast(values, dtype), indices


@register_lowering(nn.OneHot)
def _one_hot(g, node, x):
    output = node.outputs[0]
    axis = node.attributes["axis"] % (x.rank + 1)
    classes = np.arange(node.attributes["num_classes"]).reshape(-1, *(1,) * (x.rank - axis))
    classes = g.constant(classes, "int32")
    x = g.unsqueeze(g.cast(x, "int32"), [axis])
    return g.cast(g.op("Equal", x, classes, dtype="bool"), output.dtype)


@register_lowering(nn.Softmax, nn.LogSoftmax)
def _softmax(g, node, x):
    op_type = "Softmax" if node.kind is nn.Softmax else "LogSoftmax"
    result = softmax(g, x, node.attributes["axis"], op_type)
    if node.kind is nn.Softmax and axes_tuple(node.attributes["axis"], x.rank) == (x.rank - 1,):
        note_softmax(g, node, result, x)
    return result


def softmax(g: GraphBuilder, x: Tensor, axis, op_type: str = "Softmax") -> Tensor:
    """Softmax over one axis, several, or all (None)."""
    axes = axes_tuple(axis, x.rank)
    if len(axes) == 1:
        return g.op(op_type, x, axis=axes[0])
    kept = [index for index in range(x.rank) if index not in axes]
    order = [*kept, *axes]
    moved = g.transpose(x, order)
    shape = moved.shape
    flat = g.reshape(moved, (*shape[: len(kept)], product(shape[len(kept) :])))
    result = g.reshape(g.op(op_type, flat, axis=len(kept)), shape)
    return g.transpose(result, [order.index(index) for index in range(x.rank)])


@register_lowering(nn.LayerNorm)
def _layer_norm(g, node, x, gamma=None, beta=None):
    axes = axes_tuple(node.attributes["axis"], x.rank)
    epsilon = _epsilon(node)
    dtype, wide = x.dtype, _at_least_float32(x.dtype)
    x = g.cast(x, wide)
    widths = [x.shape[axis] for axis in axes]
    if node.attributes["rms_scaling"] or axes != tuple(range(axes[0], x.rank)):
        mean, variance = _moments(g, x, axes, True)
        centred = x if node.attributes["rms_scaling"] else g.op("Sub", x, mean)
        beta = None if node.attributes["rms_scaling"] else beta
        result = g.op("Div", centred, g.op("Sqrt", g.op("Add", variance, g.scalar(epsilon, wide))))
        shape = [dim if axis in axes else 1 for axis, dim in enumerate(x.shape)]
        for op_type, factor in (("Mul", gamma), ("Add", beta)):
            if factor is not None:
                result = g.op(op_type, result, g.reshape(g.cast(factor, wide), shape))
        return g.cast(result, dtype)
    gamma = g.expand(g.scalar(1.0, wide), widths) if gamma is None else g.cast(gamma, wide)
    inputs = [x, g.reshape(gamma, widths)]
    inputs += [] if beta is None else [g.reshape(g.cast(beta, wide), widths)]
    result = g.op("LayerNormalization", *inputs, axis=axes[0], epsilon=epsilon, shape=x.shape)
    return g.cast(result, dtype)


@register_lowering(nn.RMSNorm)
def _rms_norm(g, node, x, scale=None):
    axes = axes_tuple(node.attributes["axis"], x.rank)
    dtype, wide = x.dtype, _at_least_float32(x.dtype)
    x = g.cast(x, wide)
    if axes == tuple(range(axes[0], x.rank)):
        widths = [x.shape[axis] for axis in axes]
        scale = g.expand(g.scalar(1.0, wide), widths) if scale is None else g.cast(scale, wide)
        result = g.op("RMSNormalization", x, scale, axis=axes[0], epsilon=_epsilon(node), shape=x.shape)
        return g.cast(result, dtype)
    mean = g.reduce("ReduceMean", g.op("Mul", x, x), axes, True)
    result = g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.scalar(_epsilon(node), wide))))
    return g.cast(result if scale is None else g.op("Mul", result, g.cast(scale, wide)), dtype)


def _epsilon(node) -> float:
    epsilon = node.attributes["epsilon"]
    return keras.config.epsilon() if epsilon is None else float(epsilon)


def _at_least_float32(dtype: str) -> str:
    return dtype if dtype == "float64" else "float32"


@register_lowering(nn.BatchNorm)
def _batch_norm(g, node, x, mean, variance, offset=None, scale=None):
    dtype = x.dtype
    wide = _at_least_float32(dtype)
    axis = node.attributes["axis"] % x.rank
    shape = [dim if index == axis else 1 for index, dim in enumerate(x.shape)]
    x, mean, variance = (g.cast(tensor, wide) for tensor in (x, mean, variance))
    if axis == 1 or g.producer(x, "Transpose"):
        # After a convolution, with the channels first; ONNX Runtime makes one operation of both.
        scale = g.expand(g.scalar(1.0, wide), variance.shape) if scale is None else g.cast(scale, wide)
        offset = g.expand(g.scalar(0.0, wide), variance.shape) if offset is None else g.cast(offset, wide)
        order = [0, axis, *(i for i in range(1, x.rank) if i != axis)]
        moved = g.transpose(x, order)
        inputs = (moved, scale, offset, mean, variance)
        result = g.op("BatchNormalization", *inputs, epsilon=float(node.attributes["epsilon"]), shape=moved.shape)
        return g.cast(g.transpose(result, [order.index(i) for i in range(x.rank)]), dtype)
    if all(tensor is None or tensor.array is not None for tensor in (mean, variance, offset, scale)):
        # Numbers that are known already are computed once, here.
        scale, offset = (1.0 if scale is None else scale.array), (0.0 if offset is None else offset.array)
        factor = scale / np.sqrt(variance.array.astype("float64") + float(node.attributes["epsilon"]))
        shift = offset - mean.array * factor
        product = g.op("Mul", x, g.constant(factor.reshape(shape), wide))
        return g.cast(g.op("Add", product, g.constant(shift.reshape(shape), wide)), dtype)
    factor = g.op("Sqrt", g.op("Add", variance, g.scalar(float(node.attributes["epsilon"]), wide)))
    factor = g.op("Reciprocal", factor) if scale is None else g.op("Div", g.cast(scale, wide), factor)
    shift = g.op("Neg", g.op("Mul", mean, factor))
    shift = shift if offset is None else g.op("Add", g.cast(offset, wide), shift)
    result = g.op("Add", g.op("Mul", x, g.reshape(factor, shape)), g.reshape(shift, shape))
    return g.cast(result, dtype)


@register_lowering(nn.Normalize)
def _normalize(g, node, x):
    order = node.attributes["order"]
    axes = axes_tuple(node.attributes["axis"], x.rank)
    x = x if is_float(x.dtype) else g.cast(x, keras.config.floatx())
    if order == 1:
        norm = g.reduce("ReduceSum", g.op("Abs", x), axes, True)
    elif order == 2:
        norm = g.op("Sqrt", g.reduce("ReduceSum", g.op("Mul", x, x), axes, True))
    elif order == np.inf:
        norm = g.reduce("ReduceMax", g.op("Abs", x), axes, True)
    else:
        raise NotImplementedError(f"norms of order {order} are not covered")
    return g.op("Div", x, g.op("Max", norm, g.scalar(_epsilon(node), x.dtype)))


@register_lowering(linalg.Norm)
def _norm(g, node, x):
    order, dtype = node.attributes["ord"], node.outputs[0].dtype
    axes, keepdims = axes_tuple(node.attributes["axis"], x.rank), node.attributes["keepdims"]
    x = g.cast(x, dtype)
    if order in (None, "fro") or order == 2 and len(axes) == 1:
        return g.op("Sqrt", g.reduce("ReduceSum", g.op("Mul", x, x), axes, keepdims))
    if len(axes) == 1 and order in (1, np.inf):
        return g.reduce("ReduceSum" if order == 1 else "ReduceMax", g.op("Abs", x), axes, keepdims)
    raise NotImplementedError(f"norms of order {order} over {len(axes)} axes are not covered")


@register_lowering(knp.NanToNum)
def _nan_to_num(g, node, x):
    if not is_float(x.dtype):
        return x
    limits = ml_dtypes.finfo(x.dtype)
    x = g.op("Where", g.op("IsNaN", x, dtype="bool"), g.scalar(node.attributes["nan"], x.dtype), x, dtype=x.dtype)
    for name, sign, limit in (("posinf", "negative", limits.max), ("neginf", "positive", limits.min)):
        infinite = g.op("IsInf", x, dtype="bool", **{f"detect_{sign}": 0})
        number = node.attributes[name]
        number = float(limit) if number is None else number
        x = g.op("Where", infinite, g.scalar(number, x.dtype), x, dtype=x.dtype)
    return x


# Layers that are kept whole, because they call the backend directly.


@register_lowering(
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.ActivityRegularization,
)
def _identity(g, node, inputs, **kwargs):
    return inputs


@register_lowering(keras.layers.Rescaling)
def _rescaling(g, node, inputs):
    dtype = node.outputs[0].dtype
    scale, offset = (g.constant(getattr(node.operation, name), dtype) for name in ("scale", "offset"))
    return g.op("Add", g.op("Mul", g.cast(inputs, dtype), scale), offset)


@register_lowering(keras.layers.Normalization)
def _normalization_layer(g, node, inputs):
    layer, dtype = node.operation, node.outputs[0].dtype
    mean, variance = (keras.ops.convert_to_numpy(x) for x in (layer.mean, layer.variance))
    mean, deviation = g.constant(mean, dtype), g.constant(np.maximum(np.sqrt(variance), keras.config.epsilon()), dtype)
    inputs = g.cast(inputs, dtype)
    if layer.invert:
        return g.op("Add", mean, g.op("Mul", inputs, deviation))
    return g.op("Div", g.op("Sub", inputs, mean), deviation)


@register_lowering(keras.layers.Softmax)
def _softmax_layer(g, node, inputs, mask=None):
    dtype, axis = inputs.dtype, node.operation.axis
    if mask is None:
        result = softmax(g, inputs, axis)
    else:
        if mask.dtype != "bool":
            mask = g.op("Greater", mask, g.scalar(0.5, mask.dtype), dtype="bool")
        hidden = g.scalar(-3e4 if dtype == "float16" else -1e9, dtype)
        weights = softmax(g, g.op("Where", mask, inputs, hidden, dtype=dtype), axis)
        result = g.op("Where", mask, weights, g.scalar(0.0, dtype), dtype=dtype)
    if axes_tuple(axis, inputs.rank) == (inputs.rank - 1,):
        note_softmax(g, node, result, inputs, mask)
    return result
