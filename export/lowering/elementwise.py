"""Rules for operations on single elements: arithmetic, comparisons, logic, casts and activations."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np

# The classes of operations are not public in Keras; a trace is made of them.
from keras.src.activations import activations
from keras.src.ops import core, nn
from keras.src.ops import math as kmath
from keras.src.ops import numpy as knp

from keras_transformer.export.builder import GraphBuilder, Operand, Tensor
from keras_transformer.export.dims import Expr
from keras_transformer.export.lowering.patterns import rms_norm, rotation
from keras_transformer.export.lowering.registry import register_lowering

_FLOATS = ("float16", "bfloat16", "float32", "float64")

# ONNX Runtime's CPU kernels leave these out of most operators.
_NARROW = ("int8", "int16", "uint8", "uint16", "uint32")


def is_float(dtype: str) -> bool:
    """Whether `dtype` is a floating-point type."""
    return dtype in _FLOATS


def compute_dtype(dtype: str) -> str:
    """The dtype in which numbers of `dtype` are computed: int32 or int64 in place of the rarer integers."""
    return "int64" if dtype == "uint32" else "int32" if dtype in (*_NARROW, "bool") else dtype


def promoted(*operands: Operand) -> str:
    """The dtype that Keras promotes `operands` to; Python numbers count as weakly typed."""
    return keras.backend.result_type(*(_type(operand) for operand in operands))


def to_bool(g: GraphBuilder, x: Operand) -> Tensor:
    """`x != 0`."""
    return g.cast(x, "bool")


def _type(operand):
    if isinstance(operand, Tensor):
        return operand.dtype
    if isinstance(operand, np.generic):
        return str(operand.dtype)
    return int if isinstance(operand, Expr) else type(operand)


def _result_dtype(node) -> str:
    return node.outputs[0].dtype


# Arithmetic.

_BINARY = {
    knp.Add: ("Add", "Or"),
    knp.Multiply: ("Mul", "And"),
    knp.Maximum: ("Max", "Or"),
    knp.Minimum: ("Min", "And"),
    knp.Subtract: ("Sub", None),
    knp.Divide: ("Div", None),
    knp.TrueDivide: ("Div", None),
    knp.Power: ("Pow", None),
}


@register_lowering(*_BINARY)
def _binary(g, node, x1, x2):
    op_type, logical = _BINARY[node.kind]
    dtype = _result_dtype(node)
    if dtype == "bool" and logical:
        return g.op(logical, to_bool(g, x1), to_bool(g, x2), dtype="bool")
    dtype = compute_dtype(dtype)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    x1 = _unexpanded(g, x1, x2)
    x2 = _unexpanded(g, x2, x1)
    for x, number in ((x1, x2), (x2, x1)):
        if op_type in ("Add", "Mul") and number.rank == 0 and number.array == (1 if op_type == "Mul" else 0):
            return x
    if op_type == "Add":
        return rotation(g, x1, x2) or add(g, x1, x2)
    if op_type == "Mul":
        return rms_norm(g, x1, x2) or g.op("Mul", x1, x2)
    if op_type == "Pow" and x2.rank == 0 and x2.array is not None and x2.array == 2:
        return g.op("Mul", x1, x1)
    return g.op(op_type, x1, x2)


def _unexpanded(g, x: Tensor, other: Tensor) -> Tensor:
    """`x` as it was before it was broadcast to the shape of `other`, which does it anyway."""
    source = g.producer(x, "Expand")
    return source[0] if source is not None and x.shape == other.shape else x


def add(g: GraphBuilder, x1: Tensor, x2: Tensor) -> Tensor:
    """x1 + x2. A bias per head is added before the heads are split, where attention can take it as it is."""
    for x, bias in ((x1, x2), (x2, x1)):
        source = g.producer(x, "Reshape")
        if source is None or bias.array is None or bias.rank < 2:
            continue
        x_in = source[0]
        lead = x.rank - bias.rank
        if (
            lead == x_in.rank - 1
            and x.shape[:lead] == x_in.shape[:lead]
            and x.shape[lead:] == bias.shape
            and x_in.shape[-1] == math.prod(bias.shape)
        ):
            return g.reshape(g.op("Add", x_in, g.reshape(bias, (x_in.shape[-1],))), x.shape)
    # A bias stands second, where the search for residuals looks for it.
    return g.op("Add", x2, x1) if x1.array is not None and x2.array is None else g.op("Add", x1, x2)


@register_lowering(knp.FloorDivide)
def _floor_divide(g, node, x1, x2):
    dtype = compute_dtype(_result_dtype(node))
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    if is_float(dtype):
        # Not the quotient rounded down: it may have been rounded up to an integer, as that of 3.0 and 0.3 is.
        remainder = g.op("Mod", x1, x2, fmod=1)
        result = g.op("Round", g.op("Div", g.op("Sub", x1, remainder), x2))
        zero, one = g.scalar(0.0, dtype), g.scalar(1.0, dtype)
        opposite = g.op("Less", g.op("Mul", remainder, x2), zero, dtype="bool")
        result = g.op("Where", opposite, g.op("Sub", result, one), result, dtype=dtype)
        return g.op("Where", g.op("Equal", x2, zero, dtype="bool"), g.op("Div", x1, x2), result, dtype=dtype)
    # Div rounds towards zero, `//` down; Mod has the sign of the divisor.
    return g.op("Div", g.op("Sub", x1, g.op("Mod", x1, x2)), x2)


@register_lowering(knp.Mod)
def _mod(g, node, x1, x2):
    dtype = compute_dtype(_result_dtype(node))
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    if not is_float(dtype):
        return g.op("Mod", x1, x2)
    zero = g.scalar(0.0, dtype)
    remainder = g.op("Mod", x1, x2, fmod=1)  # has the sign of x1; Python's has that of x2
    opposite = g.op("Less", g.op("Mul", remainder, x2), zero, dtype="bool")
    return g.op("Where", opposite, g.op("Add", remainder, x2), remainder, dtype=dtype)


@register_lowering(knp.DivideNoNan)
def _divide_no_nan(g, node, x1, x2):
    dtype = _result_dtype(node)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    zero = g.scalar(0.0, dtype)
    return g.op("Where", g.op("Equal", x2, zero, dtype="bool"), zero, g.op("Div", x1, x2), dtype=dtype)


@register_lowering(knp.Logaddexp)
def _logaddexp(g, node, x1, x2):
    dtype = _result_dtype(node)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    gap = g.op("Neg", g.op("Abs", g.op("Sub", x1, x2)))
    return g.op("Add", g.op("Max", x1, x2), g.op("Softplus", gap))


_UNARY = {
    knp.Absolute: "Abs",
    knp.Negative: "Neg",
    knp.Sqrt: "Sqrt",
    knp.Exp: "Exp",
    knp.Log: "Log",
    knp.Sin: "Sin",
    knp.Cos: "Cos",
    knp.Tan: "Tan",
    knp.Sinh: "Sinh",
    knp.Cosh: "Cosh",
    knp.Tanh: "Tanh",
    knp.Arcsin: "Asin",
    knp.Arccos: "Acos",
    knp.Arctan: "Atan",
    knp.Arcsinh: "Asinh",
    knp.Arccosh: "Acosh",
    knp.Arctanh: "Atanh",
    knp.Floor: "Floor",
    knp.Ceil: "Ceil",
    knp.Sign: "Sign",
    knp.Reciprocal: "Reciprocal",
    kmath.Erf: "Erf",
    nn.Relu: "Relu",
    nn.Sigmoid: "Sigmoid",
    nn.Softplus: "Softplus",
    nn.Softsign: "Softsign",
    activations.Mish: "Mish",
}


@register_lowering(*_UNARY)
def _unary(g, node, x):
    return g.op(_UNARY[node.kind], g.cast(x, compute_dtype(_result_dtype(node))))


@register_lowering(knp.Square)
def _square(g, node, x):
    x = g.cast(x, compute_dtype(_result_dtype(node)))
    return g.op("Mul", x, x)


@register_lowering(kmath.Rsqrt)
def _rsqrt(g, node, x):
    return g.op("Reciprocal", g.op("Sqrt", g.cast(x, _result_dtype(node))))


@register_lowering(kmath.Erfc)
def _erfc(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Sub", g.scalar(1.0, x.dtype), g.op("Erf", x))


@register_lowering(knp.Log1p)
def _log1p(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Log", g.op("Add", x, g.scalar(1.0, x.dtype)))


@register_lowering(knp.Expm1)
def _expm1(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Sub", g.op("Exp", x), g.scalar(1.0, x.dtype))


@register_lowering(knp.Log2, knp.Log10)
def _log_base(g, node, x):
    x = g.cast(x, _result_dtype(node))
    base = 2 if node.kind is knp.Log2 else 10
    return g.op("Mul", g.op("Log", x), g.scalar(1 / math.log(base), x.dtype))


@register_lowering(knp.Exp2)
def _exp2(g, node, x):
    dtype = _result_dtype(node)
    return g.op("Pow", g.scalar(2.0, dtype), g.cast(x, dtype))


@register_lowering(knp.Trunc)
def _trunc(g, node, x):
    if not is_float(x.dtype):
        return x
    return g.op("Mul", g.op("Sign", x), g.op("Floor", g.op("Abs", x)))


@register_lowering(knp.Round)
def _round(g, node, x):
    decimals = node.attributes["decimals"]
    if not is_float(x.dtype):
        if decimals < 0:
            raise NotImplementedError("it rounds integers to tens")
        return x
    if not decimals:
        return g.op("Round", x)
    factor = g.scalar(10.0**decimals, x.dtype)
    return g.op("Div", g.op("Round", g.op("Mul", x, factor)), factor)


@register_lowering(knp.Clip)
def _clip(g, node, x):
    dtype = compute_dtype(_result_dtype(node))
    low, high = (node.attributes[name] for name in ("x_min", "x_max"))
    x = g.cast(x, dtype)
    if low is not None:
        x = g.op("Max", x, g.scalar(low, dtype))
    return x if high is None else g.op("Min", x, g.scalar(high, dtype))


# Comparisons and logic.

_COMPARISONS = {
    knp.Equal: "Equal",
    knp.NotEqual: "Equal",
    knp.Less: "Less",
    knp.LessEqual: "LessOrEqual",
    knp.Greater: "Greater",
    knp.GreaterEqual: "GreaterOrEqual",
}


@register_lowering(*_COMPARISONS)
def compare(g, node, x1, x2):
    """A comparison in the dtype that both are promoted to."""
    dtype = compute_dtype(promoted(x1, x2))
    result = g.op(_COMPARISONS[node.kind], g.cast(x1, dtype), g.cast(x2, dtype), dtype="bool")
    return g.op("Not", result) if node.kind is knp.NotEqual else result


_LOGICAL = {knp.LogicalAnd: "And", knp.LogicalOr: "Or", knp.LogicalXor: "Xor"}


@register_lowering(*_LOGICAL)
def _logical(g, node, x1, x2):
    return g.op(_LOGICAL[node.kind], to_bool(g, x1), to_bool(g, x2), dtype="bool")


@register_lowering(knp.LogicalNot)
def _logical_not(g, node, x):
    return g.op("Not", to_bool(g, x))


_BITWISE = {knp.BitwiseAnd: "And", knp.BitwiseOr: "Or", knp.BitwiseXor: "Xor"}


@register_lowering(*_BITWISE)
def _bitwise(g, node, x1, x2):
    dtype = _result_dtype(node)
    if dtype == "bool":
        return g.op(_BITWISE[node.kind], to_bool(g, x1), to_bool(g, x2), dtype="bool")
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    shifted = g.facts.get(x1.value)
    if node.kind is knp.BitwiseAnd and isinstance(shifted, _ShiftedRight) and x2.array is not None:
        bits = 8 * x2.array.itemsize
        if x2.array.size == 1 and 0 < shifted.count < bits and x2.array.item() == 2 ** (bits - shifted.count) - 1:
            # The copies of the sign are masked away.
            return _shifted(g, shifted.x, shifted.count, "RIGHT")
    return g.op("Bitwise" + _BITWISE[node.kind], x1, x2)


@dataclasses.dataclass(frozen=True)
class _ShiftedRight:
    """The tensor is `x` with its bits moved to the right by `count` and copies of the sign on their left."""

    x: Tensor
    count: int


@register_lowering(knp.LeftShift, knp.RightShift, knp.BitwiseLeftShift, knp.BitwiseRightShift)
def _shift(g, node, x, count):
    dtype = _result_dtype(node)
    x = g.cast(x, dtype)
    if node.kind in (knp.LeftShift, knp.BitwiseLeftShift):
        return _shifted(g, x, count, "LEFT")
    if dtype.startswith("u"):
        return _shifted(g, x, count, "RIGHT")
    # Of a negative number the inverted bits are moved, and inverted again.
    sign = g.op("Neg", g.cast(g.op("Less", x, g.scalar(0, dtype), dtype="bool"), dtype))
    result = g.op("BitwiseXor", _shifted(g, g.op("BitwiseXor", x, sign), count, "RIGHT"), sign)
    if isinstance(count, Tensor) and count.array is not None and count.array.size == 1:
        count = count.array.item()
    if isinstance(count, int):
        g.facts[result.value] = _ShiftedRight(x, count)
    return result


def _shifted(g, x, count, direction) -> Tensor:
    """The bits of `x` moved by `count`, zeros after them; ONNX moves those of unsigned numbers only."""
    unsigned = x.dtype if x.dtype.startswith("u") else f"u{x.dtype}"
    moved = g.op("BitShift", g.cast(x, unsigned), g.cast(count, unsigned), direction=direction)
    return g.cast(moved, x.dtype)


@register_lowering(knp.BitwiseNot, knp.BitwiseInvert)
def _bitwise_not(g, node, x):
    return g.op("Not" if x.dtype == "bool" else "BitwiseNot", x)


@register_lowering(knp.Isnan)
def _isnan(g, node, x):
    return g.op("IsNaN", g.cast(x, x.dtype if is_float(x.dtype) else "float32"), dtype="bool")


@register_lowering(knp.Isinf, knp.Isposinf, knp.Isneginf)
def _isinf(g, node, x):
    x = g.cast(x, x.dtype if is_float(x.dtype) else "float32")
    signs = {knp.Isposinf: {"detect_negative": 0}, knp.Isneginf: {"detect_positive": 0}}
    return g.op("IsInf", x, dtype="bool", **signs.get(node.kind, {}))


@register_lowering(knp.Isfinite)
def _isfinite(g, node, x):
    x = g.cast(x, x.dtype if is_float(x.dtype) else "float32")
    return g.op("Not", g.op("Or", g.op("IsNaN", x, dtype="bool"), g.op("IsInf", x, dtype="bool")))


@register_lowering(knp.Where)
def _where(g, node, condition, x1=None, x2=None):
    if x1 is None or x2 is None:
        raise NotImplementedError("the size of its result depends on the values of the condition")
    dtype = _result_dtype(node)
    condition = to_bool(g, condition)
    if dtype == "bool":
        yes = g.op("And", condition, to_bool(g, x1), dtype="bool")
        no = g.op("And", g.op("Not", condition), to_bool(g, x2), dtype="bool")
        return g.op("Or", yes, no)
    dtype = compute_dtype(dtype)
    return g.op("Where", condition, g.cast(x1, dtype), g.cast(x2, dtype), dtype=dtype)


# Casts and copies.


@register_lowering(core.Cast, core.SaturateCast)
def _cast(g, node, x):
    if node.kind is core.SaturateCast:
        _refuse_narrowing(x.dtype, _result_dtype(node))
    return g.cast(x, _result_dtype(node))


def _refuse_narrowing(source: str, target: str) -> None:
    if target != "bool" and not (is_float(source) and is_float(target)) and source != target:
        raise NotImplementedError(f"it saturates from {source} to {target}")


@register_lowering(core.ConvertToTensor, core.StopGradient, knp.Array, knp.Copy)
def _same(g, node, x):
    return g.cast(x, _result_dtype(node))


# Activations.


@register_lowering(nn.Gelu)
def _gelu(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Gelu", x, approximate="tanh" if node.attributes["approximate"] else "none")


@register_lowering(nn.Silu)
def _silu(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Mul", x, g.op("Sigmoid", x))


@register_lowering(nn.Relu6)
def _relu6(g, node, x):
    x = g.cast(x, compute_dtype(_result_dtype(node)))
    return g.op("Min", g.op("Relu", x), g.scalar(6, x.dtype))


@register_lowering(activations.ReLU)
def _relu_with_arguments(g, node, x):
    slope, ceiling, threshold = (node.attributes[name] for name in ("negative_slope", "max_value", "threshold"))
    x = g.cast(x, compute_dtype(_result_dtype(node)))
    if threshold == 0 and slope == 0:
        result = g.op("Relu", x)
    elif threshold == 0 and ceiling is None:
        return g.op("LeakyRelu", x, alpha=float(slope))
    else:
        edge, zero = g.scalar(threshold, x.dtype), g.scalar(0, x.dtype)
        result = g.op("Where", g.op("Greater", x, edge, dtype="bool"), x, zero, dtype=x.dtype)
    if ceiling is not None:
        result = g.op("Min", result, g.scalar(ceiling, x.dtype))
    if slope != 0:
        below = g.op("Relu", g.op("Sub", g.scalar(threshold, x.dtype), x))
        result = g.op("Sub", result, g.op("Mul", below, g.scalar(slope, x.dtype)))
    return result


@register_lowering(nn.LogSigmoid)
def _log_sigmoid(g, node, x):
    return g.op("Neg", g.op("Softplus", g.op("Neg", g.cast(x, _result_dtype(node)))))


@register_lowering(nn.LeakyRelu)
def _leaky_relu(g, node, x):
    return g.op("LeakyRelu", g.cast(x, _result_dtype(node)), alpha=float(node.attributes["negative_slope"]))


@register_lowering(nn.Elu, nn.Celu)
def _elu(g, node, x):
    op_type = "Elu" if node.kind is nn.Elu else "Celu"
    return g.op(op_type, g.cast(x, _result_dtype(node)), alpha=float(node.attributes["alpha"]))


@register_lowering(nn.Selu)
def _selu(g, node, x):
    return g.op("Selu", g.cast(x, _result_dtype(node)))


@register_lowering(nn.HardSigmoid)
def _hard_sigmoid(g, node, x):
    return g.op("HardSigmoid", g.cast(x, _result_dtype(node)), alpha=1 / 6, beta=0.5)


@register_lowering(nn.HardSilu)
def _hard_silu(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Mul", x, g.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))


@register_lowering(nn.HardTanh)
def _hard_tanh(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Min", g.op("Max", x, g.scalar(-1.0, x.dtype)), g.scalar(1.0, x.dtype))


@register_lowering(nn.TanhShrink)
def _tanh_shrink(g, node, x):
    x = g.cast(x, _result_dtype(node))
    return g.op("Sub", x, g.op("Tanh", x))


@register_lowering(nn.SoftShrink)
def _soft_shrink(g, node, x):
    x = g.cast(x, _result_dtype(node))
    threshold = g.scalar(node.attributes["threshold"], x.dtype)
    return g.op("Mul", g.op("Sign", x), g.op("Relu", g.op("Sub", g.op("Abs", x), threshold)))


@register_lowering(nn.HardShrink)
def _hard_shrink(g, node, x):
    x = g.cast(x, _result_dtype(node))
    kept = g.op("Greater", g.op("Abs", x), g.scalar(node.attributes["threshold"], x.dtype), dtype="bool")
    return g.op("Where", kept, x, g.scalar(0, x.dtype), dtype=x.dtype)


@register_lowering(nn.Threshold)
def _threshold(g, node, x):
    x = g.cast(x, _result_dtype(node))
    kept = g.op("Greater", x, g.scalar(node.attributes["threshold"], x.dtype), dtype="bool")
    return g.op("Where", kept, x, g.scalar(node.attributes["default_value"], x.dtype), dtype=x.dtype)


@register_lowering(nn.Squareplus)
def _squareplus(g, node, x):
    x = g.cast(x, _result_dtype(node))
    root = g.op("Sqrt", g.op("Add", g.op("Mul", x, x), g.scalar(node.attributes["b"], x.dtype)))
    return g.op("Mul", g.op("Add", x, root), g.scalar(0.5, x.dtype))


@register_lowering(nn.SparseSigmoid)
def _sparse_sigmoid(g, node, x):
    return g.op("HardSigmoid", g.cast(x, _result_dtype(node)), alpha=0.5, beta=0.5)


@register_lowering(nn.SparsePlus)
def _sparse_plus(g, node, x):
    # The integral of the piecewise linear sigmoid: max(x, 1) - 1 beyond it, a square within.
    x = g.cast(x, _result_dtype(node))
    gate, one = g.op("HardSigmoid", x, alpha=0.5, beta=0.5), g.scalar(1, x.dtype)
    return g.op("Add", g.op("Mul", gate, gate), g.op("Relu", g.op("Sub", x, one)))


@register_lowering(nn.Glu)
def _glu(g, node, x):
    axis = node.attributes["axis"] % x.rank
    half = node.outputs[0].shape
    first, second = g.op("Split", x, axis=axis, num_outputs=2, outputs=[(half, x.dtype)] * 2)
    return g.op("Mul", first, g.op("Sigmoid", second))
