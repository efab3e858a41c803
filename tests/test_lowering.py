"""Lowering rules: each operation in ONNX Runtime against Keras at several sizes, and the form of the graphs."""

import collections

import hypothesis
import keras
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from hypothesis import strategies as st
from keras import ops
from keras.src.ops import numpy as knp

from keras_transformer import layers
from keras_transformer import ops as kt
from keras_transformer.export import ir
from keras_transformer.export.builder import GraphBuilder
from keras_transformer.export.dims import Axis, add, axes_of, evaluate, multiply
from keras_transformer.export.errors import ExportError, UnsupportedOperationError
from keras_transformer.export.generalise import generalise
from keras_transformer.export.lowering import find_rule, lower, register_lowering
from keras_transformer.export.trace import InputSpec, record

# Keras warns of a softmax over one entry; attention of length 1 is one.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*You are using a softmax over axis"),
    pytest.mark.filterwarnings("ignore:Tensor.T is deprecated"),  # Keras' count_nonzero on torch
]

B, T, S, P = Axis("batch"), Axis("length"), Axis("slots"), Axis("past", minimum=0)
AXES = {"B": B, "T": T, "S": S, "P": P, "P+T": add(P, T), "2T": multiply(T, 2)}

# Softmax, norms and products of a few tens of float32 terms; sums are taken in another order than in Keras.
TOLERANCE = 6e-6
# JAX compiles each operation at each size, and the graphs are the same on every backend.
SIZES = [(3, 5)] if keras.config.backend() == "jax" else [(1, 1), (3, 5)]


def spec(name, text):
    """An input such as `float32[B,T,6]`."""
    dtype, _, dims = text.rstrip("]").partition("[")
    dims = [dim for dim in dims.split(",") if dim]
    return InputSpec(name, tuple(AXES[d] if d in AXES else int(d) for d in dims), dtype)


def traced(function, texts, root=None):
    specs = [spec(f"x{i}", text) for i, text in enumerate(texts)]
    axes = [axis for axis in (B, T, S, P) if any(axis in axes_of(dim) for s in specs for dim in s.shape)]
    # As few traces as tell the axes apart: what more of them catch is the tracer's subject.
    base = {axis.name: size for axis, size in zip(axes, (3, 7, 11, 13), strict=False)}
    sizes = [base, *(base | {axis.name: base[axis.name] + 5} for axis in axes)]
    recordings = record(function, tuple(specs), sizes, root or {}, lambda layer: find_rule(type(layer)) is not None)
    return generalise(recordings, axes, [s.name for s in specs], [s.shape for s in specs])


def build(function, texts, root=None):
    """The checked ONNX model of a function, and the traced graph."""
    graph = traced(function, texts, root)
    proto = onnx_ir.to_proto(lower(graph))
    onnx.checker.check_model(proto, full_check=True)
    return proto, graph


def session(proto):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def feed(value, sizes, rng, whole=False):
    shape = [dim if isinstance(dim, int) else dim.evaluate(sizes) for dim in value.shape]
    if whole:
        return np.arange(np.prod(shape)).reshape(shape).astype(value.dtype)
    if value.dtype == "bool":
        return rng.random(shape) < 0.6
    if "int" in value.dtype:
        return rng.integers(0, 5, shape).astype(value.dtype)
    return rng.normal(size=shape).astype(value.dtype)


def compare(function, texts, root=None, sizes=SIZES, tolerance=TOLERANCE, whole=False):
    """Runs both at each of `sizes` ((B, T), then S and P follow); returns the ONNX model."""
    proto, graph = build(function, texts, root)
    run = session(proto)
    rng = np.random.default_rng(0)
    for batch, length in sizes:
        at = {"batch": batch, "length": length, "slots": length + 2, "past": length - 1}
        feeds = [feed(value, at, rng, whole) for value in graph.inputs]
        got = run.run(None, {value.name: array for value, array in zip(graph.inputs, feeds, strict=True)})
        wanted = keras.tree.flatten(function(*(ops.convert_to_tensor(array) for array in feeds)))
        assert len(got) == len(wanted)
        for mine, theirs, output in zip(got, wanted, graph.outputs, strict=True):
            assert str(mine.dtype) == keras.backend.standardize_dtype(theirs.dtype) == output.dtype
            theirs = ops.convert_to_numpy(theirs)
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine.astype("float64"), theirs.astype("float64"), rtol=tolerance, atol=tolerance)
    return proto


def histogram(proto):
    return dict(collections.Counter(node.op_type for node in proto.graph.node))


F, N, M = "float32[B,T,6]", "int32[B,T]", "bool[B,T]"
weight = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")
kernel = np.random.default_rng(2).normal(size=(6, 2, 3)).astype("float32")

CASES = {
    # Arithmetic and promotion.
    "add": (lambda x, y: x + y, [F, "float32[T,6]"]),
    "add scalar": (lambda x: x + 1.5, [F]),
    "add int and float": (lambda x, y: ops.add(x, y[:, :, None]), [F, N]),
    "int plus python float": (lambda x: ops.add(x, 0.5), [N]),
    "subtract from scalar": (lambda x: 1.0 - x, [F]),
    "multiply": (lambda x, y: x * y, [F, "float32[6]"]),
    "multiply int": (lambda x: x * 3, [N]),
    "divide": (lambda x, y: x / (ops.abs(y) + 1.0), [F, F]),
    "divide int": (lambda x: ops.divide(x, 3), [N]),
    "true divide": (lambda x: ops.true_divide(x, 2), [F]),
    "floor divide": (lambda x: (x - 3) // 2, [N]),
    "floor divide float": (lambda x: [ops.floor_divide(x, 0.3), x // -0.3, x // 0.0], [F]),
    "mod": (lambda x: (x - 3) % 4, [N]),
    "mod float": (lambda x: ops.mod(x, 0.7), [F]),
    "mod negative divisor": (lambda x: ops.mod(x, -3), [N]),
    "divide no nan": (lambda x, y: ops.divide_no_nan(x, ops.cast(y, "float32")[:, :, None]), [F, N]),
    "power": (lambda x: ops.abs(x) ** 1.5, [F]),
    "power int": (lambda x: x**3, [N]),
    "negative": (lambda x: -x, [F]),
    "abs square sqrt": (lambda x: ops.sqrt(ops.abs(ops.square(x) - 1.0)), [F]),
    "rsqrt": (lambda x: ops.rsqrt(ops.abs(x) + 1.0), [F]),
    "exp log": (lambda x: ops.log(ops.exp(x) + 1.0), [F]),
    "log1p expm1": (lambda x: ops.log1p(ops.abs(x)) + ops.expm1(x), [F]),
    "log2 log10": (lambda x: ops.log2(ops.abs(x) + 1.0) + ops.log10(ops.abs(x) + 1.0), [F]),
    "sin cos tan": (lambda x: ops.sin(x) + ops.cos(x) + ops.tan(x * 0.3), [F]),
    "hyperbolic": (lambda x: ops.sinh(x * 0.5) + ops.cosh(x * 0.5) + ops.tanh(x), [F]),
    "arc": (lambda x: ops.arctan(x) + ops.arcsin(x * 0.1) + ops.arccos(x * 0.1), [F]),
    "erf": (lambda x: ops.erf(x), [F]),
    "sign floor ceil": (lambda x: ops.sign(x) + ops.floor(x) + ops.ceil(x), [F]),
    "round": (lambda x: ops.round(x) + ops.round(x, 2), [F]),
    "trunc": (lambda x: ops.trunc(x * 3.0), [F]),
    "reciprocal": (lambda x: ops.reciprocal(ops.abs(x) + 1.0), [F]),
    "maximum minimum": (lambda x, y: ops.maximum(x, 0.5) + ops.minimum(x, y), [F, F]),
    "clip": (lambda x: ops.clip(x, -0.5, 0.7), [F]),
    "clip int": (lambda x: ops.clip(x, 1, 3), [N]),
    "logaddexp": (lambda x, y: ops.logaddexp(x, y), [F, F]),
    "narrow integers": (lambda x: ops.add(ops.cast(x, "int8"), ops.cast(x, "uint8")), [N]),
    # Comparisons, logic, selection.
    "compare": (lambda x, y: [x < y, x <= y, x > y, x >= y], [F, F]),
    "equal": (lambda x: [ops.equal(x, 2), ops.not_equal(x, 0)], [N]),
    "equal by sign": (lambda x, y: [x == y, x == 2], [N, N]),
    "equal bool": (lambda x, y: ops.equal(x, y), [M, M]),
    "compare int with float": (lambda x: ops.greater(x, 1.5), [N]),
    "logical": (lambda x, y: [x & y, ops.logical_or(x, y), ops.logical_xor(x, y), ops.logical_not(x)], [M, M]),
    "bitwise, broadcast": (
        lambda x, y: ops.bitwise_xor(x[:, None], y) + ops.bitwise_and(x[:, None], y),
        ["int32[B]", "int32[T]"],
    ),
    "shifts": (
        lambda x: (
            ops.right_shift(x * -77777777, 3)
            + ops.bitwise_and(ops.right_shift(x * -77777777, 9), 2**23 - 1)
            + ops.left_shift(x * 77777777, 5)
        ),
        [N],
    ),
    "bitwise": (lambda x: ops.bitwise_and(x, x + 1) + ops.bitwise_or(x, x * 2), [N]),
    "isfinite": (lambda x: [ops.isnan(x / x), ops.isinf(1 / x), ops.isfinite(1 / x)], ["float32[B,T]"]),
    "where": (lambda m, x: ops.where(m[:, :, None], x, -1.0), [M, F]),
    "where bool": (lambda m, x: ops.where(m, x, ops.logical_not(x)), [M, M]),
    "where int": (lambda m, x: ops.where(m, x, 7), [M, N]),
    "casts": (lambda x: [ops.cast(x * 3.0, "int32"), ops.cast(x, "bool"), ops.cast(x, "float16")], [F]),
    "cast of a size": (lambda x: x / ops.cast(ops.shape(x)[1], "float32"), [F]),
    "a size as number": (lambda x: ops.multiply(x, ops.shape(x)[1]), [F]),
    # Shapes.
    "reshape": (lambda x: ops.reshape(x, (-1, ops.shape(x)[1], 2, 3)), [F]),
    "reshape merges": (lambda x: ops.reshape(x, (ops.shape(x)[0] * ops.shape(x)[1], 6)), [F]),
    "reshape splits": (
        lambda x: ops.reshape(ops.reshape(x, (-1, 6)) * 2.0, (ops.shape(x)[0], ops.shape(x)[1], 6)),
        [F],
    ),
    "reshape to half": (lambda x: ops.reshape(x, (ops.shape(x)[0], -1, 12)), ["float32[B,2T,6]"]),
    "ravel": (lambda x: ops.ravel(x), [F]),
    "transpose": (lambda x: [ops.transpose(x[:, 0]), ops.transpose(x, (1, 0, 2)), ops.swapaxes(x, 0, -1)], [F]),
    "moveaxis": (lambda x: ops.moveaxis(x, (0, 2), (2, 0)), [F]),
    "expand squeeze": (lambda x: ops.squeeze(ops.expand_dims(ops.expand_dims(x, -1), 1), 1), [F]),
    "concatenate": (lambda x, y: ops.concatenate([x, y[:, :, None]], axis=-1), [F, N]),
    "concatenate lengths": (lambda x, y: ops.concatenate([x, y], axis=1), [F, "float32[B,S,6]"]),
    "stack": (lambda x, y: ops.stack([x, y * 2.0], axis=-2), [F, F]),
    "unstack": (lambda x: ops.unstack(x, axis=-1), [F]),
    "split": (lambda x: ops.split(x, 3, axis=-1), [F]),
    "split at": (lambda x: ops.split(x, [1, 4], axis=-1), [F]),
    "take": (lambda x, i: ops.take(x, i, axis=-1), [F, "int32[3]"]),
    "take rows": (lambda i: ops.take(weight, i, axis=0), [N]),
    "take negative": (lambda x: ops.take(x, np.array([-1, 0]), axis=2), [F]),
    "take flat": (lambda i: ops.take(weight, i), [N]),
    "take along axis": (lambda x, i: ops.take_along_axis(x, ops.expand_dims(i, -1) % 6, axis=-1), [F, N]),
    "slices": (lambda x: [x[:, :1], x[:, -1:], x[..., 1:5:2], x[:1, 0:, 2]], [F]),
    "index": (lambda x: [x[:, 0], x[:, -1], x[:, :, -2], x[0]], [F]),
    "new axes": (lambda x: [x[:, None, :, None], x[..., None], x[None, :, 0]], [F]),
    "take counted places": (
        lambda x: [
            ops.take(x, ops.arange(ops.shape(x)[1] - 1, -1, -1), axis=1),
            ops.take(x, ops.arange(-1, ops.shape(x)[1] - 1), axis=1),
            ops.take(x, ops.arange(ops.shape(x)[1]), axis=1),
        ],
        [F],
    ),
    "slice by size": (lambda x, y: y[:, : ops.shape(x)[1]] * 1.0, [F, "float32[B,2T,6]"]),
    "all but the last": (lambda x: ops.concatenate([x[:, 1:], x[:, :1]], axis=1)[:, :-1], ["float32[B,S,6]"]),
    "slice": (lambda x: ops.slice(x, (0, 0, 1), (ops.shape(x)[0], 1, 3)), [F]),
    "slice at tensor": (
        lambda x, i: ops.slice(x, ops.stack([0 * i[0], 0 * i[0], i[0]]), (ops.shape(x)[0], ops.shape(x)[1], 2)),
        [F, "int32[1]"],
    ),
    "slice update": (lambda x, y: ops.slice_update(x, (0, 0, 2), y), [F, "float32[B,T,3]"]),
    "slice update twice": (lambda x, y: ops.slice_update(x, (0, 1, 2), y), ["float32[B,S,6]", "float32[B,1,3]"]),
    "scatter": (lambda i, x: ops.scatter(i[:, :1], x, (5, 6)), ["int32[B,2]", "float32[B,6]"]),
    "scatter update": (lambda x, i, y: ops.scatter_update(x, i % 3, y), ["float32[3,6]", "int32[1,1]", "float32[1,6]"]),
    "scatter add": (
        lambda x, i, y: ops.scatter_update(x, i[:, :1], y, reduction="add"),
        ["float32[5,6]", "int32[B,2]", "float32[B,6]"],
    ),
    "broadcast to": (lambda x: ops.broadcast_to(x[:, :, None], (*ops.shape(x), 4)), [N]),
    "repeat": (lambda x: [ops.repeat(x, 2, axis=1), ops.repeat(x, 3, axis=-1)], [F]),
    "repeat each": (lambda x: ops.repeat(x, np.array([1, 0, 2, 1, 3, 1]), axis=-1), [F]),
    "tile": (lambda x: ops.tile(x, (1, 2, 1)), [F]),
    "pad": (lambda x: ops.pad(x, ((0, 0), (1, 2), (0, 1))), [F]),
    "pad with": (lambda x: ops.pad(x, ((0, 0), (1, 0)), constant_values=7), [N]),
    "pad more than there is": (
        lambda x: [
            ops.pad(x, ((0, 0), (0, 0), (2, 5)), mode="reflect"),
            ops.pad(x, ((0, 0), (0, 0), (1, 1)), mode="symmetric"),
        ],
        [F],
    ),
    "flip": (lambda x: ops.flip(x, axis=1), [F]),
    "roll": (lambda x: [ops.roll(x, 2, axis=-1), ops.roll(x, -1, axis=1)], [F]),
    "roll round and round": (lambda x: [ops.roll(x, 7, axis=1), ops.roll(x, (-3, 2), axis=(1, 0))], [F]),
    "peak to peak": (lambda x: [ops.ptp(x, axis=1), ops.ptp(x, axis=(0, -1), keepdims=True)], [F]),
    "resize": (
        lambda x: [ops.image.resize(x, (7, 4), how) for how in ("bilinear", "nearest")],
        ["float32[B,T,5,3]"],
    ),
    "resize one image": (lambda x: ops.image.resize(x, (3, 8), data_format="channels_first"), ["float32[2,T,5]"]),
    "resize to sizes": (
        lambda x: ops.image.resize(x, (2 * ops.shape(x)[1], 3 * ops.shape(x)[1])),
        ["float32[B,T,5,3]"],
    ),
    "tril triu": (lambda x: [ops.tril(x, k=-1), ops.triu(x, k=1)], [F]),
    "meshgrid": (lambda x, y: ops.meshgrid(x, y), ["float32[T]", "float32[S]"]),
    "bare keys": (lambda x: [x[:2], x[None], x[...], x[1], ops.arange(6.0)[None] * x], ["float32[3,T,6]"]),
    # Reductions and order.
    "sum": (lambda x: [ops.sum(x), ops.sum(x, axis=1), ops.sum(x, axis=(0, -1), keepdims=True)], [F]),
    "sum of bool": (lambda x: ops.sum(x, axis=-1), [M]),
    "mean": (lambda x: [ops.mean(x, axis=-1, keepdims=True), ops.mean(x)], [F]),
    "mean of int": (lambda x: ops.mean(x, axis=-1), [N]),
    "max min": (lambda x: [ops.max(x, axis=1), ops.min(x, axis=-1), ops.max(x, axis=1, initial=0.5)], [F]),
    "max of int": (lambda x: ops.max(x, axis=1), [N]),
    "prod": (lambda x: ops.prod(x, axis=-1), [F]),
    "all any": (lambda x: [ops.all(x, axis=-1), ops.any(x, axis=0), ops.any(x)], [M]),
    "count nonzero": (lambda x: ops.count_nonzero(x), [N]),
    "var std": (lambda x: [ops.var(x, axis=-1), ops.std(x, axis=(1, 2), keepdims=True)], [F]),
    "moments": (lambda x: list(ops.moments(x, axes=[-1])), [F]),
    "logsumexp": (lambda x: ops.logsumexp(x * 30.0, axis=-1), [F]),
    "cumsum": (lambda x: ops.cumsum(x, axis=1), [F]),
    "cumsum of mask": (lambda x: ops.cumsum(ops.cast(x, "int32"), axis=-1), [M]),
    "argmax argmin": (lambda x: [ops.argmax(x, axis=-1), ops.argmin(x, axis=1), ops.argmax(x)], [F]),
    "top k": (lambda x: [ops.top_k(x, 3)[0], ops.cast(ops.top_k(x, 3)[1], "int32")], [F]),
    "sort": (lambda x: [ops.sort(x, axis=1), ops.argsort(x, axis=-1)], [F]),
    # Products.
    "matmul": (lambda x, y: ops.matmul(x, ops.transpose(y, (0, 2, 1))), [F, F]),
    "matmul weight": (lambda x: ops.matmul(x, weight), [F]),
    "matmul vector": (lambda x: ops.matmul(x, np.ones(6, "float32")), [F]),
    "dot": (lambda x: ops.dot(x, weight), [F]),
    "tensordot": (lambda x, y: ops.tensordot(x, y, axes=[[2], [1]]), [F, "float32[3,6]"]),
    "outer": (lambda x, y: ops.outer(x, y), ["float32[T]", "float32[S]"]),
    "einsum dense": (lambda x: ops.einsum("abc,cde->abde", x, kernel), [F]),
    "einsum dense out": (lambda x: ops.einsum("abcd,ecd->abe", ops.reshape(x, (*ops.shape(x)[:2], 2, 3)), kernel), [F]),
    "einsum scores": (lambda x, y: ops.einsum("aecd,abcd->acbe", x, y), ["float32[B,S,2,3]", "float32[B,T,2,3]"]),
    "einsum combine": (lambda x, y: ops.einsum("acbe,aecd->abcd", x, y), ["float32[B,2,T,S]", "float32[B,S,2,3]"]),
    "einsum outer": (lambda x, y: ops.einsum("i,j->ij", x, y), ["float32[T]", "float32[3]"]),
    "einsum transpose": (lambda x: ops.einsum("btd->dbt", x), [F]),
    "einsum sum": (lambda x: ops.einsum("btd->b", x), [F]),
    "einsum implicit": (lambda x, y: ops.einsum("ij,jk", x, y), ["float32[T,6]", "float32[6,3]"]),
    "einsum ellipsis": (lambda x: ops.einsum("...d,de->...e", x, weight), [F]),
    "einsum three": (lambda x, y: ops.einsum("btd,de,bte->bt", x, weight, y), [F, "float32[B,T,4]"]),
    "einsum left free": (lambda x, y: ops.einsum("bsd,btd->bst", x, y), ["float32[B,S,6]", F]),
    "fourier": (lambda x, y: [*ops.fft((x, y)), *ops.fft2((x, y)), *ops.ifft2((x, y))], [F, F]),
    "fourier of a real signal": (lambda x: ops.fft2((x, ops.zeros_like(x)))[0], [F]),
    # Activations, softmax, norms.
    "relu": (lambda x: [ops.relu(x), ops.relu6(x * 5.0), ops.leaky_relu(x, 0.1)], [F]),
    "relu layer": (lambda x: keras.activations.relu(x * 3, negative_slope=0.2, max_value=2.0, threshold=0.5), [F]),
    "gelu": (lambda x: [ops.gelu(x, approximate=False), ops.gelu(x, approximate=True)], [F]),
    "silu": (lambda x: [ops.silu(x), ops.sigmoid(x), ops.softplus(x), ops.softsign(x)], [F]),
    "elu": (lambda x: [ops.elu(x, 0.7), ops.selu(x), ops.celu(x, 0.9)], [F]),
    "hard": (lambda x: [ops.hard_sigmoid(x * 3), ops.hard_silu(x * 3), ops.hard_tanh(x * 2)], [F]),
    "log sigmoid": (lambda x: [ops.log_sigmoid(x), ops.tanh_shrink(x)], [F]),
    "glu": (lambda x: ops.glu(x, axis=-1), [F]),
    "softmax": (lambda x: [ops.softmax(x), ops.softmax(x, axis=(1, 2)), ops.log_softmax(x, axis=-1)], [F]),
    "one hot": (lambda x: [ops.one_hot(x, 5), ops.one_hot(x, 6, axis=1, dtype="int32")], [N]),
    "layer norm": (
        lambda x: ops.layer_normalization(x, np.arange(6, dtype="float32"), np.ones(6, "float32"), epsilon=1e-3),
        [F],
    ),
    "layer norm plain": (lambda x: ops.layer_normalization(x, epsilon=1e-6), [F]),
    "layer norm two axes": (lambda x: ops.layer_normalization(x, axis=(-2, -1), epsilon=1e-5), ["float32[B,4,6]"]),
    "layer norm of scattered axes": (
        lambda x: ops.layer_normalization(x, axis=[0, 2], epsilon=1e-5),
        ["float32[4,B,6]"],
    ),
    "rms norm": (lambda x: ops.rms_normalization(x, np.arange(6, dtype="float32"), epsilon=1e-5), [F]),
    "batch norm": (
        lambda x: ops.batch_normalization(x, np.ones(6, "float32"), np.full(6, 2.0, "float32"), axis=-1),
        [F],
    ),
    "norm": (
        lambda x: [
            ops.norm(x, axis=-1),
            ops.norm(x, axis=(0, 1)),
            ops.norm(x, 1, 1, keepdims=True),
            ops.norm(x, np.inf, -1),
        ],
        [F],
    ),
    "nan to num": (lambda x: ops.nan_to_num((x - 0.5) / ops.relu(x), nan=2.0, neginf=-9.0), [F]),
    "normalize": (lambda x: ops.normalize(x, axis=-1), [F]),
    # Tensors from numbers.
    "arange": (lambda x: ops.arange(ops.shape(x)[1])[None, :] + x, [N]),
    "arange float": (lambda x: x[:, :, 0] * ops.arange(0, ops.shape(x)[1], dtype="float32"), [F]),
    "arange down": (lambda x: x[:, :, 0] * ops.cast(ops.arange(ops.shape(x)[1] - 1, -1, -1), "float32"), [F]),
    "zeros ones": (lambda x: ops.concatenate([x, ops.ones((ops.shape(x)[0], 2, 6)), ops.zeros_like(x)], 1), [F]),
    "full": (lambda x: ops.full(ops.shape(x), 3, dtype="int32") + ops.full_like(x, 2), [N]),
    "tri": (lambda x: ops.matmul(ops.tri(ops.shape(x)[1], dtype="float32"), x), [F]),
    "eye": (lambda x: ops.matmul(ops.eye(ops.shape(x)[1], dtype="float32"), x), [F]),
    "identity": (lambda x: [ops.identity(ops.shape(x)[1]), x @ ops.identity(6)], [F]),
    # TensorFlow has no identity matrix whose diagonal lies outside of it.
    "diagonals below a length": (
        lambda x: [
            ops.tri(3, k=ops.shape(x)[1] - 2),
            *([] if keras.config.backend() == "tensorflow" else [ops.eye(3, 4, k=1 - ops.shape(x)[1])]),
        ],
        [F],
    ),
    # Our operations.
    "causal mask": (lambda x, y: kt.causal_mask(x, y), [N, "int32[B,S]"]),
    "square causal mask": (lambda x: kt.square_causal_mask(x), [F]),
    "sinusoids": (lambda x: kt.sinusoidal_encoding(x * 1000 + 3, 7), [N]),
    "sinusoids from the start": (lambda x: x + kt.sinusoidal_encoding(kt.positions(ops.shape(x)[1]), 6), [F]),
    "rotary": (
        lambda x, p: kt.rotate(x, kt.rotary_encoding(p * 1000, kt.rotary_frequencies(6))),
        ["float32[B,T,2,6]", N],
    ),
    "rotary, a part of each head": (
        lambda x: kt.rotate(x, kt.rotary_encoding(kt.positions(ops.shape(x)[1], 3), kt.rotary_frequencies(4, 100.0))),
        ["float32[B,T,3,6]"],
    ),
    "write at slots": (
        lambda c, k, i: list(kt.write_cache((c, c * 2.0), k, k * 3.0, start=i % 2)),
        ["float32[B,2T,2,3]", "float32[B,T,2,3]", "int32[B]"],
    ),
    "write at slot": (
        lambda c, k: list(kt.write_cache((c, c * 2.0), k, k, start=1)),
        ["float32[B,2T,2,3]", "float32[B,T,2,3]"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_operation_equals_keras(name):
    compare(*CASES[name])


@pytest.mark.backends("torch")  # elsewhere an einsum does not broadcast
def test_an_einsum_over_a_broadcast_axis():
    def function(x, y):
        return [ops.einsum("btd,bsd->bts", x, y), ops.einsum("bsd,btd->bst", y, x)]

    compare(function, [F, "float32[B,S,1]"])


@pytest.mark.backends("jax", "tensorflow")  # torch has no steps backwards
def test_slices_backwards_from_a_place_that_short_axes_lack():
    def function(x):
        return [x[:, ::-1], x[:, -2::-1], x[-2::-1], x[..., -2:0:-2], x[..., -2:-5:-1], x[..., -9::-1]]

    compare(function, [F], sizes=[(1, 1), (3, 5)])


@pytest.mark.backends("jax", "torch")  # TensorFlow rounds the quotient first
def test_a_quotient_that_rounds_up_to_an_integer_is_divided_down():
    compare(lambda x: [x // 0.3, x // -0.3, (0.0 - x) // 0.1], ["float32[T]"], sizes=[(1, 12)], whole=True)


# Attention.

X, H4 = "float32[B,T,8]", "float32[B,T,2,4]"


def test_attention_takes_projected_heads_without_transposes():
    layer = layers.MultiHeadSelfAttention(2)
    layer.build((None, None, 8))
    proto = compare(layer, [X], {"attention": layer})
    assert histogram(proto) == {"MatMul": 4, "Add": 4, "Attention": 1}
    (node,) = (node for node in proto.graph.node if node.op_type == "Attention")
    assert {a.name: a.i for a in node.attribute} == {"q_num_heads": 2, "kv_num_heads": 2}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_keras_attention_is_one_node(dropout):
    layer = keras.layers.MultiHeadAttention(2, 4, value_dim=5, dropout=dropout)
    layer.build((None, None, 8), (None, None, 8))
    if dropout:
        # Keras infers the query's width for the fused form whatever the value's is.
        assert histogram(compare(lambda x: layer(x, x), [X], {"a": layer})) == {"MatMul": 4, "Add": 4, "Attention": 1}
    layer = keras.layers.MultiHeadAttention(2, 4, dropout=dropout)
    layer.build((None, None, 8), (None, None, 8))
    causal = compare(lambda x: layer(x, x, use_causal_mask=True), [X], {"a": layer})
    assert histogram(causal) == {"MatMul": 4, "Add": 4, "Attention": 1}
    # Some rows of the mask are empty: Keras' fused form gives the mean there, the other 0.
    masked = lambda x, m: layer(x, x, attention_mask=m)  # noqa: E731
    counts = histogram(compare(masked, [X, "bool[B,T,T]"], {"a": layer}))
    assert counts["Attention"] == 1 and "Softmax" not in counts and "Transpose" not in counts
    both = lambda x, m: layer(x, x, attention_mask=m[:, None, :], use_causal_mask=True)  # noqa: E731
    counts = histogram(compare(both, [X, M], {"a": layer}))
    assert counts["Attention"] == 1 and "CumSum" not in counts and "Softmax" not in counts


def test_keras_attention_with_scores():
    layer = keras.layers.MultiHeadAttention(2, 4)
    layer.build((None, None, 8), (None, None, 8))
    scores = lambda x, m: layer(x, x, attention_mask=m, return_attention_scores=True)  # noqa: E731
    counts = histogram(compare(scores, [X, "bool[B,T,T]"], {"a": layer}, sizes=[(2, 3), (3, 5)]))
    assert counts["Softmax"] == 1 and "Attention" not in counts


@pytest.mark.parametrize("mask", ["bool[B,T]", "bool[B,1,T,T]", "bool[B,2,1,T]", "bool[1,T,T]"])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_attention(mask, causal):
    def function(q, k, v, m):
        m = m[:, None, :] if len(m.shape) == 2 else m
        return kt.attention(q, k, v, mask=m, causal=causal)

    counts = histogram(compare(function, [H4, H4, H4, mask]))
    assert counts["Attention"] == 1 and "Where" not in counts and "Einsum" not in counts


def test_empty_rows_are_zero():
    proto, graph = build(lambda q, m: kt.attention(q, q, q, mask=m), [H4, "bool[B,T,T]"])
    mask = np.ones((2, 3, 3), bool)
    mask[0, 1] = False
    query = np.random.default_rng(0).normal(size=(2, 3, 2, 4)).astype("float32")
    (output,) = session(proto).run(None, {"x0": query, "x1": mask})
    assert (output[0, 1] == 0).all() and (output[0, 0] != 0).all()


def test_mask_of_the_causal_mask_layer_becomes_is_causal():
    def with_flag(q, m):
        return kt.attention(q, q, q, mask=m[:, None, :], causal=True)

    def with_mask(q, m):
        return kt.attention(q, q, q, mask=ops.logical_and(m[:, None, :], kt.square_causal_mask(q)))

    assert histogram(compare(with_flag, [H4, M])) == histogram(compare(with_mask, [H4, M]))
    alone = compare(lambda q: kt.attention(q, q, q, mask=kt.square_causal_mask(q)), [H4])
    assert histogram(alone) == {"Reshape": 2, "Attention": 1}


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("weights", [False, True])
def test_grouped_heads(heads, weights):
    function = lambda q, k, m: kt.attention(q, k, k, mask=m, scale=0.3, return_weights=weights)  # noqa: E731
    counts = histogram(compare(function, ["float32[B,T,4,3]", f"float32[B,S,{heads},3]", "bool[B,T,S]"]))
    assert counts.get("Attention", 0) == (not weights)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_weights(causal):
    function = lambda q, m: kt.attention(q, q, q, mask=m, causal=causal, return_weights=True)  # noqa: E731
    compare(function, [H4, "bool[B,T,T]"])


def test_dot_product_attention():
    def function(q, k, v, bias):
        return ops.dot_product_attention(q, k, v, bias=bias, scale=0.7)

    compare(function, [H4, "float32[B,S,2,4]", "float32[B,S,2,4]", "float32[B,1,T,S]"])
    compare(lambda q: ops.dot_product_attention(q, q, q, is_causal=True), [H4])


@pytest.mark.parametrize("scale, cap", [(-0.5, None), (0.0, None), (-0.5, 2.0)])
def test_attention_whose_scores_are_scaled_by_no_positive_number(scale, cap):
    """For which ONNX Runtime's node has no scale."""

    def function(q, k, v):
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * scale
        scores = scores if cap is None else cap * ops.tanh(scores / cap)
        return ops.matmul(ops.softmax(scores), v)

    compare(function, ["float32[B,3,T,6]"] * 3)
    compare(lambda q, k, v: ops.dot_product_attention(q, k, v, scale=scale), ["float32[B,T,3,6]"] * 3)


def test_attention_in_single_steps_becomes_one_node():
    def function(q, k, v, bias):
        q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / 2.0 + bias
        return ops.transpose(ops.matmul(ops.softmax(scores, axis=-1), v), (0, 2, 1, 3))

    shapes = [H4, "float32[B,S,2,4]", "float32[B,S,2,4]", "float32[B,1,1,S]"]
    counts = histogram(compare(function, shapes, sizes=[(2, 3), (3, 5)]))
    assert counts["Attention"] == 1 and not {"Softmax", "MatMul", "Transpose"} & set(counts)


@pytest.mark.parametrize("mask", [None, "bool[B,1,T,S]"])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_with_a_bias_a_cap_or_a_mask_in_single_steps_becomes_one_node(cap, mask):
    hide = keras.layers.Softmax()

    def function(q, k, v, bias, *masks):
        q, k, v = (ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2)))
        scores = scores if cap is None else cap * ops.tanh(scores / cap)
        scores = scores + bias + 1.0 if cap else (scores + bias) * 0.5
        return ops.transpose(ops.matmul(hide(scores, *masks), v), (0, 2, 1, 3))

    shapes = [H4, "float32[B,S,2,4]", "float32[B,S,2,4]", "float32[1,2,1,S]", *([mask] if mask else [])]
    counts = histogram(compare(function, shapes, sizes=[(2, 3), (3, 5)]))
    assert counts["Attention"] == 1 and not {"Softmax", "MatMul", "Tanh"} & set(counts)


@pytest.mark.parametrize("combine", ["bkgts,bskh->btkgh", "bkgts,bskh->bkgth"])
@pytest.mark.parametrize("mask", [None, "bool[B,1,1,T,S]", "bool[B,1,3,T,S]"])
def test_grouped_attention_in_single_steps_becomes_one_node(combine, mask):
    hide = keras.layers.Softmax()

    def function(q, k, v, *masks):
        scores = ops.einsum("btkgh,bskh->bkgts", q * 0.7, k)
        return ops.einsum(combine, hide(scores, *masks), v)

    shapes = ["float32[B,T,2,3,4]", "float32[B,S,2,4]", "float32[B,S,2,5]", *([mask] if mask else [])]
    counts = histogram(compare(function, shapes, sizes=[(2, 3), (3, 5)]))
    each = mask == "bool[B,1,3,T,S]"
    assert counts.get("Attention", 0) == (not each) and counts.get("Softmax", 0) == each


CACHE = "float32[B,2,P,4]"


def heads_first(x):
    return ops.transpose(x, (0, 2, 1, 3))


@pytest.mark.parametrize("power", [False, True])
def test_rms_norm_in_single_steps_becomes_one_node(power):
    scale = np.random.default_rng(3).normal(size=6).astype("float32")

    def norm(x):
        square = ops.power(x, 2) if power else ops.square(x)
        return ops.multiply(scale, x * ops.rsqrt(ops.mean(square, axis=-1, keepdims=True) + 1e-5))

    assert histogram(compare(norm, [F])) == {"RMSNormalization": 1}


@pytest.mark.parametrize("scale", [None, np.ones((4, 6), "float32")])
def test_a_factor_after_an_rms_norm_over_two_axes_is_not_its_scale(scale):
    def function(x):
        return ops.multiply(ops.rms_normalization(x, scale, axis=(-2, -1)), np.arange(6, dtype="float32"))

    compare(function, ["float32[B,4,6]"])


def test_what_only_looks_like_an_rms_norm_stays_in_single_steps():
    def off(x, y):
        mean = ops.mean(ops.square(y), axis=-1, keepdims=True)
        across = ops.mean(ops.square(x), axis=1, keepdims=True)
        return x * ops.rsqrt(mean + 1e-5) + x * ops.rsqrt(across + 1e-5)

    assert "RMSNormalization" not in histogram(compare(off, [F, F]))


def rotated_in_single_steps(x, twist=None, heads_first=False):
    """Rotary positions as layers write them; with a `twist` the two halves' angles differ."""
    angles = ops.arange(ops.shape(x)[2 if heads_first else 1], dtype="float32")[:, None]
    angles = ops.multiply(angles, np.array([1.0, 0.3, 0.1], "float32"))
    angles = ops.concatenate([angles, angles if twist is None else angles * twist], axis=-1)
    angles = angles[None, None] if heads_first else angles[None, :, None]
    lower, upper = ops.split(x, 2, axis=-1)
    turned = ops.reshape(ops.stack([-upper, lower], axis=-2), ops.shape(x))
    return x * ops.cos(angles) + turned * ops.sin(angles)


@pytest.mark.parametrize("heads_first", [False, True])
def test_rotation_in_single_steps_becomes_one_node(heads_first):
    text = "float32[B,2,T,6]" if heads_first else "float32[B,T,2,6]"
    counts = histogram(compare(lambda x: rotated_in_single_steps(x, heads_first=heads_first), [text]))
    assert counts["RotaryEmbedding"] == 1 and not {"Split", "Neg"} & set(counts)


def test_what_only_looks_like_a_rotation_stays_in_single_steps():
    counts = histogram(compare(lambda x: rotated_in_single_steps(x, twist=1.5), ["float32[B,T,2,6]"]))
    assert "RotaryEmbedding" not in counts


def test_appended_cache_becomes_past_and_present():
    layer = layers.MultiHeadSelfAttention(2)
    layer.build((None, None, 8))

    def step(x, mask, past_key, past_value):
        past = heads_first(past_key), heads_first(past_value)
        y, present = layer(x, attention_mask=mask, cache=past)
        return y, heads_first(present[0]), heads_first(present[1])

    proto = compare(step, [X, "bool[B,T,P+T]", CACHE, CACHE], {"a": layer})
    assert histogram(proto) == {"MatMul": 4, "Add": 4, "Attention": 1, "Unsqueeze": 1}
    (node,) = (node for node in proto.graph.node if node.op_type == "Attention")
    assert list(node.input[4:]) == ["x2", "x3"]
    assert list(node.output[1:]) == [output.name for output in proto.graph.output][1:]


def test_appended_cache_that_is_used_otherwise():
    def function(k, v, past):
        cache = heads_first(past)
        keys, values = kt.write_cache((cache, cache), k, v)
        total = ops.sum(keys, axis=1)
        return kt.attention(k, keys, values), total

    compare(function, [H4, H4, CACHE], sizes=[(2, 3), (3, 5)])
    causal = lambda k, past: ops.dot_product_attention(  # noqa: E731
        k, *kt.write_cache((heads_first(past),) * 2, k, k), is_causal=True
    )
    assert histogram(compare(causal, [H4, CACHE], sizes=[(2, 3)]))["Concat"] == 1


def test_cached_keys_of_a_memory_are_taken_heads_first():
    layer = layers.CrossAttention(2)
    layer.build((None, None, 8), (None, None, 8))

    def step(x, key, value, mask):
        return layer(x, cache=(heads_first(key), heads_first(value)), padding_mask=mask)

    memory = "float32[B,2,S,4]"
    counts = histogram(compare(step, [X, memory, memory, "bool[B,S]"], {"a": layer}))
    assert counts["Attention"] == 1 and counts["Transpose"] == 2 and counts["MatMul"] == 2


# Whole blocks.


def block_counts(**extra):
    return {"MatMul": 6, "Add": 4, "Sum": 2, "LayerNormalization": 2, "Attention": 1, "Relu": 1} | extra


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_block(norm_first):
    block = layers.TransformerEncoderBlock(2, 12, norm_first=norm_first, dropout=0.1)
    block.build((None, None, 8))
    assert histogram(compare(block, [X], {"block": block})) == block_counts()
    masked = compare(lambda x, m: block(x, padding_mask=m), [X, M], {"block": block})
    assert histogram(masked) == block_counts(Unsqueeze=1, Shape=1, Concat=1, Expand=1)


def test_runtime_keeps_the_residual_sums(tmp_path):
    """ONNX Runtime's own optimiser finds nothing to turn into its slow SkipLayerNormalization."""
    block = layers.TransformerEncoderBlock(2, 12, activation="gelu")
    block.build((None, None, 8))
    proto, _ = build(lambda x: block(x * 2.0 + 1.0), [X], {"block": block})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert {"Sum", "LayerNormalization", "Attention"} <= found
    assert not {"SkipLayerNormalization", "Einsum", "EmbedLayerNormalization"} & found


@pytest.mark.parametrize("policy", ["mixed_float16", "float16"])
def test_half_precision(policy):
    block = layers.TransformerEncoderBlock(2, 12, dtype=policy)
    block.build((None, None, 8))
    # One rounding of float16 is 5e-4, and layer norm brings every value to about 1.
    compare(block, ["float16[B,T,8]"], {"block": block}, tolerance=6e-3)


# Without mish and hard_silu, which Keras 3.15 cannot call on symbolic tensors.
ACTIVATIONS = (
    "celu elu exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear "
    "log_sigmoid log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign "
    "sparse_plus sparse_sigmoid squareplus tanh tanh_shrink threshold"
).split()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_equals_keras(name):
    function = getattr(keras.activations, name)
    arguments = {"threshold": 0.3, "default_value": -2.0} if name == "threshold" else {}
    compare(lambda x: function(x * 2.0, **arguments), [F])


LAYERS = {
    "embedding": (lambda: keras.layers.Embedding(5, 4, mask_zero=True), N),
    "dense": (lambda: keras.layers.Dense(3, activation="gelu"), F),
    "einsum dense": (lambda: keras.layers.EinsumDense("bti,ij->btj", (None, 3), bias_axes="j"), F),
    "layer norm": (lambda: keras.layers.LayerNormalization(epsilon=1e-3), F),
    "rms norm": (lambda: keras.layers.RMSNormalization(), F),
    "batch norm": (lambda: keras.layers.BatchNormalization(), F),
    "softmax": (lambda: keras.layers.Softmax(), F),
    "dropout": (lambda: keras.layers.Dropout(0.3), F),
    "noise": (lambda: keras.layers.GaussianNoise(0.3), F),
    "spatial dropout": (lambda: keras.layers.SpatialDropout1D(0.3), F),
    "average": (lambda: keras.layers.GlobalAveragePooling1D(), F),
    "maximum": (lambda: keras.layers.GlobalMaxPooling1D(), F),
    "permute": (lambda: keras.layers.Permute((2, 1)), F),
    "repeat vector": (lambda: keras.layers.RepeatVector(3), "float32[B,6]"),
    "flatten": (lambda: keras.layers.Flatten(), "float32[B,3,6]"),
    "unit norm": (lambda: keras.layers.UnitNormalization(), F),
    "prelu": (lambda: keras.layers.PReLU(shared_axes=[1]), F),
    "zero padding": (lambda: keras.layers.ZeroPadding1D((1, 2)), F),
    "cropping": (lambda: keras.layers.Cropping1D((0, 0)), F),
    "up sampling": (lambda: keras.layers.UpSampling1D(2), F),
    "conv": (lambda: keras.layers.Conv1D(4, 3, padding="causal", dilation_rate=2), F),
    "conv same": (lambda: keras.layers.Conv1D(4, 4, padding="same"), F),
    "conv strided": (lambda: keras.layers.Conv1D(4, 2, strides=2, padding="same"), "float32[B,2T,6]"),
    "conv 2d": (lambda: keras.layers.Conv2D(3, (2, 3), padding="same"), "float32[B,T,5,4]"),
    "conv transposed": (lambda: keras.layers.Conv1DTranspose(4, 3, strides=2), F),
    "conv transposed same": (lambda: keras.layers.Conv1DTranspose(4, 5, strides=2, padding="same"), F),
    "conv transposed with gaps": (lambda: keras.layers.Conv1DTranspose(4, 2, strides=3), F),
    "conv transposed 2d": (
        lambda: keras.layers.Conv2DTranspose(4, (4, 3), strides=(2, 1), padding="same"),
        "float32[B,T,5,3]",
    ),
    "up sampling 2d": (lambda: keras.layers.UpSampling2D((2, 3), interpolation="bilinear"), "float32[B,T,5,3]"),
    "grouped conv": (lambda: keras.layers.Conv1D(4, 3, groups=2), "float32[B,5,6]"),
    "depthwise conv": (lambda: keras.layers.DepthwiseConv1D(3, padding="same", depth_multiplier=2), F),
    "separable conv": (lambda: keras.layers.SeparableConv1D(4, 3, padding="same"), F),
    "max pool": (lambda: keras.layers.MaxPooling1D(2), "float32[B,2T,6]"),
    "average pool": (lambda: keras.layers.AveragePooling1D(3, strides=1, padding="same"), F),
    "rescaling": (lambda: keras.layers.Rescaling(0.5, 1.0), F),
    "normalization": (lambda: keras.layers.Normalization(mean=[0.5] * 6, variance=[2.0, 0.0] * 3), F),
    "inverse normalization": (lambda: keras.layers.Normalization(mean=0.5, variance=2.0, invert=True), F),
    "time distributed": (lambda: keras.layers.TimeDistributed(keras.layers.Dense(3)), F),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_keras(name):
    make, text = LAYERS[name]
    layer = make()
    layer.build(tuple(dim if isinstance(dim, int) else None for dim in spec("x", text).shape))
    assert "Einsum" not in histogram(compare(layer, [text], {"layer": layer}))


def test_batch_norm_after_a_convolution_is_one_node():
    random = keras.initializers.RandomUniform(0.5, 1.5)
    norm = keras.layers.BatchNormalization(
        beta_initializer=random, moving_mean_initializer=random, moving_variance_initializer=random, scale=False
    )
    conv = keras.layers.Conv2D(3, (2, 3), padding="same", use_bias=False)
    conv.build((None, None, 5, 4))
    norm.build((None, None, 5, 3))
    proto = compare(lambda x: norm(conv(x)), ["float32[B,T,5,4]"], {"conv": conv, "norm": norm})
    assert histogram(proto) == {"Transpose": 2, "Conv": 1, "BatchNormalization": 1}


KERAS_ATTENTION = {
    "single head": lambda: keras.layers.Attention(use_scale=True),
    "additive": lambda: keras.layers.AdditiveAttention(),
    "grouped": lambda: keras.layers.GroupQueryAttention(4, 4, 2),
}


@pytest.mark.parametrize("name", KERAS_ATTENTION)
def test_keras_attention_layers(name):
    layer = KERAS_ATTENTION[name]()
    if name == "grouped":
        layer.build((None, None, 8), (None, None, 8))
        function = layer
    else:
        layer.build([(None, None, 8)] * 2)
        function = lambda x, y: layer([x, y])  # noqa: E731
    counts = histogram(compare(function, [X, "float32[B,S,8]"], {"a": layer}, sizes=[(2, 3), (3, 5)]))
    assert "Einsum" not in counts and counts.get("Attention", 0) == (name == "grouped")
    if name == "grouped":
        assert counts == {"MatMul": 4, "Add": 4, "Attention": 1}


def test_reshapes_of_what_may_be_empty():
    function = lambda x: ops.reshape(ops.reshape(x, (-1, 3)) * 2.0, (ops.shape(x)[0], ops.shape(x)[1], 3))  # noqa: E731
    compare(function, ["float32[B,P,3]"], sizes=[(2, 1), (3, 4)])


@pytest.mark.parametrize("mask", ["bool[B,1,T,T]", "int32[B,1,1,T]"])
def test_softmax_layer_with_a_mask(mask):
    layer = keras.layers.Softmax()
    compare(lambda x, m: layer(x, mask=m), ["float32[B,2,T,T]", mask], {"softmax": layer}, sizes=[(2, 3), (3, 5)])


# The graph around the rules.


def einsum_graph(subscripts, shapes):
    """A graph of one einsum, without a trace."""
    inputs = [ir.Value(shape, "float32", f"x{i}") for i, shape in enumerate(shapes)]
    result = np.einsum(subscripts, *(np.empty([2] * len(shape)) for shape in shapes))
    output = ir.Value((2,) * result.ndim, "float32")
    node = ir.Node(knp.Einsum, None, {"subscripts": subscripts}, tuple(inputs), {}, [output], "", "")
    return ir.Graph((), inputs, [output], ["y"], [node], [])


@hypothesis.given(st.data())
def test_any_einsum_of_two(data):
    """Random labels on both sides, in any order, with sizes that tell them apart."""
    labels = st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True)
    left, right = data.draw(labels), data.draw(labels)
    output = data.draw(st.permutations(sorted({*left, *right})))
    output = output[: data.draw(st.integers(0, len(output)))]
    sizes = dict(zip("abcde", (2, 3, 5, 7, 1), strict=True))
    subscripts = f"{''.join(left)},{''.join(right)}->{''.join(output)}"
    shapes = [tuple(sizes[label] for label in term) for term in (left, right)]
    arrays = [np.random.default_rng(i).normal(size=shape).astype("float32") for i, shape in enumerate(shapes)]
    proto = onnx_ir.to_proto(lower(einsum_graph(subscripts, shapes)))
    assert "Einsum" not in histogram(proto)
    (got,) = session(proto).run(None, {f"x{i}": array for i, array in enumerate(arrays)})
    wanted = np.einsum(subscripts, *(array.astype("float64") for array in arrays))
    np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@hypothesis.given(st.data())
def test_any_chain_of_shape_changes(data):
    """What the builder cancels and merges moves no element."""
    value = ir.Value((B, T, 2, 3), "float32", "x")
    g = GraphBuilder(ir.Graph((B, T), [value], [], [], [], []))
    x, steps = g.inputs[0], []
    for _ in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(["transpose", "merge", "split", "unsqueeze", "squeeze"]))
        axis = data.draw(st.integers(0, max(x.rank - 1, 0)))
        shape = x.shape
        if kind == "transpose":
            order = data.draw(st.permutations(range(x.rank)))
            x = g.transpose(x, order)
            steps.append(lambda a, at, order=order: a.transpose(order))
            continue
        if kind == "unsqueeze" and x.rank < 6:
            x = g.unsqueeze(x, [axis])
        elif kind == "squeeze" and shape[axis] == 1:
            x = g.squeeze(x, [axis])
        elif kind == "merge" and axis + 1 < x.rank:
            x = g.reshape(x, (*shape[:axis], multiply(shape[axis], shape[axis + 1]), *shape[axis + 2 :]))
        elif kind == "split" and shape[axis] == 6:
            x = g.reshape(x, (*shape[:axis], 3, 2, *shape[axis + 1 :]))
        target = x.shape
        steps.append(lambda a, at, target=target: a.reshape([evaluate(dim, at) for dim in target]))
    proto = onnx_ir.to_proto(g.finish([x], ["y"]))
    onnx.checker.check_model(proto, full_check=True)
    for batch, length in ((1, 1), (2, 5)):
        array = np.arange(batch * length * 6, dtype="float32").reshape(batch, length, 2, 3)
        (got,) = session(proto).run(None, {"x": array})
        for step in steps:
            array = step(array, {"batch": batch, "length": length})
        np.testing.assert_array_equal(got, array)


def test_equal_graphs_have_equal_bytes():
    block = layers.TransformerEncoderBlock(2, 12)
    block.build((None, None, 8))
    keras.layers.Dense(3)  # moves Keras' automatic names on
    protos = [build(lambda x, m: block(x, padding_mask=m), [X, M], {"block": block})[0] for _ in range(2)]
    assert protos[0].SerializeToString(deterministic=True) == protos[1].SerializeToString(deterministic=True)
    names = [node.name for node in protos[0].graph.node]
    assert len(set(names)) == len(names)
    assert "block/self_attention/query_dense/MatMul" in names
    assert all(not name.split("/")[-1].startswith("val_") for name in names)


def test_shapes_are_named():
    proto, _ = build(lambda x, m: ops.concatenate([x, m], axis=1), ["float32[B,P,3]", "float32[B,T,3]"])
    (output,) = proto.graph.output
    dims = [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim]
    assert dims == ["batch", str(add(P, T)), 3]
    assert {entry.version for entry in proto.opset_import} == {23} and proto.ir_version == 10


def test_a_size_that_is_only_seen_in_a_sum():
    compare(lambda x, y: ops.arange(ops.shape(y)[1] - ops.shape(x)[1]), ["float32[B,T]", "float32[B,P+T]"])


def test_a_weight_may_be_a_scalar():
    layer = keras.layers.Layer()
    layer.factor = layer.add_weight(shape=(), initializer="ones")
    layer.factor.assign(2.5)
    compare(lambda x: [x * layer.factor, x * ops.cast(layer.factor, "float32")], [F], {"layer": layer})


def test_tied_weights_are_stored_once():
    embedding = layers.TokenEmbedding(5, 6)
    embedding.build((None, None))
    proto = compare(lambda ids: embedding(embedding(ids), reverse=True), [N], {"embedding": embedding})
    assert sum(int(np.prod(i.dims)) == 30 for i in proto.graph.initializer) == 1
    assert histogram(proto)["Transpose"] == 1


def test_a_constant_that_equals_a_weight_refers_to_it():
    dense = keras.layers.Dense(11, use_bias=False)
    dense.build((None, 7))
    value = ops.convert_to_numpy(dense.kernel)
    proto = compare(lambda x: ops.matmul(dense(x), value.T), ["float32[B,7]"], {"dense": dense})
    assert [tuple(i.dims) for i in proto.graph.initializer] == [(7, 11)]


def test_outputs_may_be_inputs_and_repeat():
    proto = compare(lambda x: [x, x * 2.0, x * 2.0], [F])
    assert len({output.name for output in proto.graph.output}) == 3


def test_an_operation_without_a_rule_is_named():
    class Unknown(keras.Operation):
        def call(self, x):
            return x + 1

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    class Wrapper(keras.layers.Layer):
        def call(self, x):
            return Unknown()(x)

    layer = Wrapper()
    graph = traced(layer, [F], {"outer": layer})
    with pytest.raises(UnsupportedOperationError) as error:
        lower(graph)
    for part in ("Unknown", "outer", "test_lowering.py", "float32(batch, length, 6)", "register_lowering"):
        assert part in str(error.value)

    @register_lowering(Unknown)
    def rule(g, node, x):
        return g.op("Add", x, g.scalar(1, x.dtype))

    compare(layer, [F], {"outer": layer})
    assert find_rule(type("Derived", (Unknown,), {})) is rule


def test_a_case_that_a_rule_does_not_cover_is_named():
    graph = traced(lambda x: ops.einsum("bii->bi", x), ["float32[B,3,3]"])
    with pytest.raises(UnsupportedOperationError, match="diagonal"):
        lower(graph)


def test_attention_to_nothing_is_refused_where_the_runtime_has_none():
    with pytest.raises(UnsupportedOperationError, match="at {'length': 1} there are no queries.*`min_length`"):
        lower(traced(lambda x: kt.attention(x[:, : ops.shape(x)[1] // 2], x, x), ["float32[B,T,2,4]"]))


@pytest.mark.backends("jax")  # torch repeats the edge; TensorFlow takes no more than there is
@pytest.mark.parametrize("mode", ["reflect", "symmetric"])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_mirrored_padding_is_that_of_numpy(mode, length):
    proto, _ = build(lambda x: ops.pad(x, ((0, 0), (3, 5), (0, 0)), mode=mode), [F])
    x = np.random.default_rng(0).normal(size=(2, length, 6)).astype("float32")
    expected = np.pad(x, ((0, 0), (3, 5), (0, 0)), mode=mode)
    np.testing.assert_array_equal(session(proto).run(None, {"x0": x})[0], expected)


@pytest.mark.backends("torch")
def test_one_width_that_is_not_that_of_all_axes_is_refused():
    with pytest.raises(UnsupportedOperationError, match="on torch Keras pads the last axis alone"):
        lower(traced(lambda x: ops.pad(x, 1, mode="reflect"), [F]))


@pytest.mark.backends("torch")
def test_symmetric_padding_that_mirrors_nothing_is_refused():
    with pytest.raises(UnsupportedOperationError, match="on torch Keras' symmetric padding"):
        lower(traced(lambda x: ops.pad(x, ((0, 0), (0, 2), (0, 0)), mode="symmetric"), [F]))


def test_a_rule_that_makes_another_shape_is_named():
    class Halves(keras.Operation):
        def call(self, x):
            return x[:, 0]

    @register_lowering(Halves)
    def rule(g, node, x):
        return x

    with pytest.raises(ExportError, match="Halves makes float32"):
        lower(traced(Halves(), [F]))


def test_a_graph_that_hands_its_input_back():
    value = ir.Value((B, 3), "float32", "x")
    proto = onnx_ir.to_proto(lower(ir.Graph((B,), [value], [value], ["y"], [], [])))
    assert [node.op_type for node in proto.graph.node] == ["Identity"]
