"""The steps of random models: our layers, Keras' layers and `keras.ops`, each with random options."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_transformer import layers as ours
from keras_transformer import models
from keras_transformer import ops as kt

VOCABULARY = 11
# On torch Keras repeats the last entry where one end alone is padded, elsewhere padding does not count.
_AVERAGES_PADDED = keras.backend.backend() != "torch"


class Skip(Exception):
    """What was drawn does not fit together."""


@dataclasses.dataclass(frozen=True)
class Maker:
    """`make(draw)` gives a function, the entries that it takes, and its layers.

    `exact`: moves or counts entries, without rounding. `sharp`: jumps, so that its inputs must be exact. `sized`: reads
    sizes, for which a symbolic tensor with free axes has none, so that it stands in a layer.
    """

    make: Callable
    kind: str = "ops"
    exact: bool = False
    sharp: bool = False
    sized: bool = False


STEPS: dict[str, Maker] = {}


def step(name, **traits):
    def register(make):
        STEPS[name] = Maker(make, **traits)
        return make

    return register


class Draw:
    """Random choices, and entries that fit."""

    def __init__(self, rng: np.random.Generator, entries: list):
        self.rng = rng
        self.entries = entries

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def coin(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def entry(self, dtype="float", rank=None, test=lambda entry: True):
        """An entry of `dtype`, of at least rank[0] and at most rank[1]."""
        low, high = rank or (1, 5)
        fitting = [
            entry
            for entry in self.entries
            if (dtype in entry.dtype or dtype == "any")
            and (dtype != "int" or "uint" not in entry.dtype)
            and low <= len(entry.shape) <= high
            and test(entry)
        ]
        if not fitting:
            raise Skip
        return self.pick(*fitting)

    def sequence(self, widths=None, time=("T", "S", "U", "?"), dtype="float"):
        """(B, T, width)."""
        return self.entry(
            dtype,
            (3, 3),
            lambda e: (
                e.shape[0] == "B"
                and e.shape[1] in time
                and isinstance(e.shape[2], int)
                and (widths is None or e.shape[2] in widths)
            ),
        )

    def axis(self, rank: int) -> int:
        return self.integer(-rank, rank - 1)

    def axes(self, rank: int):
        """None, an axis, or several."""
        if self.coin(0.15):
            return None
        if self.coin(0.6):
            return self.axis(rank)
        chosen = self.rng.permutation(rank)[: self.integer(1, rank)].tolist()
        return tuple(axis - rank if self.coin() else axis for axis in chosen)


def wide(e):
    return isinstance(e.shape[-1], int) and e.shape[0] == "B"


_SMOOTH = {
    "tanh": ops.tanh,
    "sin": ops.sin,
    "cos": ops.cos,
    "relu": ops.relu,
    "relu6": ops.relu6,
    "gelu": ops.gelu,
    "gelu tanh": lambda x: ops.gelu(x, approximate=True),
    "gelu exact": lambda x: ops.gelu(x, approximate=False),
    "silu": ops.silu,
    "sigmoid": ops.sigmoid,
    "softplus": ops.softplus,
    "softsign": ops.softsign,
    "exp": lambda x: ops.exp(ops.minimum(x, 3.0)),
    "log": lambda x: ops.log(ops.abs(x) + 1.0),
    "log1p": lambda x: ops.log1p(ops.abs(x)),
    "log2": lambda x: ops.log2(ops.abs(x) + 0.5),
    "log10": lambda x: ops.log10(ops.abs(x) + 0.5),
    "expm1": lambda x: ops.expm1(ops.minimum(x, 2.0)),
    "exp2": lambda x: ops.exp2(ops.minimum(x, 3.0)),
    "sqrt": lambda x: ops.sqrt(ops.abs(x) + 0.1),
    "rsqrt": lambda x: ops.rsqrt(ops.abs(x) + 0.5),
    "square": ops.square,
    "abs": ops.abs,
    "negative": lambda x: -x,
    "clip": lambda x: ops.clip(x, -0.7, 1.1),
    "erf": ops.erf,
    "elu": ops.elu,
    "selu": ops.selu,
    "celu": lambda x: ops.celu(x, alpha=0.7),
    "leaky relu": lambda x: ops.leaky_relu(x, negative_slope=0.3),
    "hard tanh": ops.hard_tanh,
    "hard sigmoid": ops.hard_sigmoid,
    "hard silu": ops.hard_silu,
    "log sigmoid": ops.log_sigmoid,
    "tanh shrink": ops.tanh_shrink,
    "soft shrink": lambda x: ops.soft_shrink(x, 0.3),
    "squareplus": ops.squareplus,
    "sparse plus": ops.sparse_plus,
    "sparse sigmoid": ops.sparse_sigmoid,
    "mish": keras.activations.mish,
    "scale": lambda x: x * 1.7,
    "shift": lambda x: 2.5 + x,
    "from one": lambda x: 1.0 - x,
    "divide": lambda x: x / 3.0,
    "reciprocal": lambda x: 1.0 / (ops.abs(x) + 0.5),
    "power 2": lambda x: x**2,
    "power 3": lambda x: ops.clip(x, -3, 3) ** 3,
    "power": lambda x: ops.power(ops.abs(x) + 0.1, 0.7),
    "nan to num": ops.nan_to_num,
    "arctan": ops.arctan,
    "arcsinh": ops.arcsinh,
    "sinh": lambda x: ops.sinh(ops.clip(x, -2, 2)),
    "cosh": lambda x: ops.cosh(ops.clip(x, -2, 2)),
    "logaddexp": lambda x: ops.logaddexp(x, 0.3 - x),
    "stop gradient": ops.stop_gradient,
    "copy": ops.copy,
    "float64 and back": lambda x: ops.cast(ops.cast(x, "float64"), "float32"),
    "square difference": lambda x: ops.square(x - 0.3),
    "fmod": lambda x: ops.abs(x) % 50.0,
}


@step("smooth")
def _(d):
    return d.pick(*_SMOOTH.values()), [d.entry("float")], []


_JUMPS = {
    "floor": ops.floor,
    "ceil": ops.ceil,
    "round": ops.round,
    "round 1": lambda x: ops.round(x, 1),
    "sign": ops.sign,
    "trunc": ops.trunc,
    "floor divide": lambda x: ops.floor_divide(x, 0.3),
    "floor divide negative": lambda x: x // -0.7,
    "mod": lambda x: ops.mod(x, 0.7),
    "mod negative": lambda x: x % -0.9,
    "greater": lambda x: x > 0.1,
    "less": lambda x: ops.less(x, 0),
    "equal": lambda x: ops.equal(x, 0.0),
    "not equal": lambda x: ops.not_equal(ops.relu(x), 0),
    "int": lambda x: ops.cast(x * 3.0, "int32"),
    "bool": lambda x: ops.cast(ops.relu(x), "bool"),
    "hard shrink": lambda x: ops.hard_shrink(x, 0.4),
    "threshold": lambda x: ops.threshold(x, 0.2, -1.0),
    "isfinite": lambda x: ops.isfinite(ops.log(x)),
    "isnan": lambda x: ops.isnan(ops.sqrt(x)),
    "isinf": lambda x: ops.isinf(1.0 / ops.relu(x)),
    "nan to num": lambda x: ops.nan_to_num(1.0 / ops.relu(x), posinf=3.0),
    "argmax": lambda x: ops.argmax(x, axis=-1),
    "argmin": lambda x: ops.argmin(x, axis=1 if len(x.shape) > 1 else 0, keepdims=True),
    "argmax of all": lambda x: ops.argmax(x),
    "argsort": lambda x: ops.argsort(x, axis=-1),
    "argsort first": lambda x: ops.argsort(x, axis=0),
    "saturate": lambda x: ops.saturate_cast(x * 100.0, "int8"),
    "in top k": lambda x: ops.top_k(x, 2)[1],
}


@step("jump", sharp=True, exact=True)
def _(d):
    return d.pick(*_JUMPS.values()), [d.entry("float")], []


_INTEGERS = {
    "add": lambda i: i + 3,
    "multiply": lambda i: i * 2,
    "subtract": lambda i: 4 - i,
    "floor divide": lambda i: (i - 3) // 2,
    "floor divide negative": lambda i: i // -3,
    "mod": lambda i: (i - 5) % 4,
    "mod negative": lambda i: ops.mod(i, -3),
    "true divide": lambda i: i / 2,
    "power": lambda i: ops.clip(i, -9, 9) ** 2,
    "absolute": lambda i: ops.abs(i - 4),
    "sign": lambda i: ops.sign(i - 2),
    "clip": lambda i: ops.clip(i, 1, 5),
    "maximum": lambda i: ops.maximum(i, 3),
    "minimum float": lambda i: ops.minimum(i, 2.5),
    "float": lambda i: ops.cast(i, "float32") * 0.1,
    "int8": lambda i: ops.cast(i % 50, "int8") + 1,
    "uint8": lambda i: ops.cast(ops.abs(i) % 50, "uint8") * 2,
    "int64": lambda i: ops.cast(i, "int64") * 3,
    "not zero": lambda i: i != 0,
    "equal": lambda i: ops.equal(i, 3),
    "shift left": lambda i: ops.left_shift(ops.abs(i) % 50, 2),
    "shift right": lambda i: (i - 4) >> 1,
    "and": lambda i: ops.bitwise_and(i, 5),
    "or": lambda i: i | 2,
    "xor": lambda i: i ^ 3,
    "not": lambda i: ops.bitwise_not(i),
    "square": ops.square,
    "one hot": lambda i: ops.one_hot(i % 7, 7),
    "one hot before": lambda i: ops.one_hot(i, 5, axis=1, dtype="int32"),
    "one hot negative": lambda i: ops.one_hot(i - 2, 4, axis=-1),
    "bool": lambda i: ops.cast(i, "bool"),
    "round": ops.round,
    "table": lambda i: ops.take(np.linspace(-1, 1, 22).reshape(11, 2).astype("float32"), i % 11, axis=0),
    "table mode": lambda i: ops.take(np.linspace(-1, 1, 11).astype("float32"), -1 - i % 11),
    "exp": lambda i: ops.exp(ops.cast(ops.clip(i, -3, 3), "float32")),
    "sqrt": lambda i: ops.sqrt(ops.abs(i)),
    "sin": ops.sin,
    "mean": lambda i: ops.mean(i, axis=-1),
    "trunc": ops.trunc,
    "floor": ops.floor,
    "negative": ops.negative,
    "logical not": ops.logical_not,
    "isnan": ops.isnan,
    "divide no nan": lambda i: ops.divide_no_nan(3, i),
    "where": lambda i: ops.where(i > 2, i, -1),
    "where float": lambda i: ops.where(i, 0.5, i),
    "expand": lambda i: i[..., None] == ops.arange(5),
}


@step("integers", exact=True)
def _(d):
    return d.pick(*_INTEGERS.values()), [d.entry("int")], []


_BOOLEANS = {
    "not": ops.logical_not,
    "float": lambda m: ops.cast(m, "float32"),
    "int": lambda m: ops.cast(m, "int32"),
    "sum": lambda m: ops.sum(m, axis=-1),
    "mean": lambda m: ops.mean(m, axis=-1, keepdims=True),
    "any": lambda m: ops.any(m, axis=-1),
    "all": lambda m: ops.all(m, axis=1 if len(m.shape) > 1 else 0, keepdims=True),
    "cumsum": lambda m: ops.cumsum(m, axis=-1),
    "max": lambda m: ops.max(m, axis=-1),
    "prod": lambda m: ops.prod(m, axis=-1),
    "argmax": lambda m: ops.argmax(m, axis=-1),
    "where": lambda m: ops.where(m, 1.5, -0.5),
    "where int": lambda m: ops.where(m, 2, 5),
    "add": lambda m: m + 1,
    "multiply": lambda m: m * 0.5,
    "equal": lambda m: ops.equal(m, False),
    "square mask": lambda m: ops.logical_and(m[..., :, None], m[..., None, :]),
    "bias": lambda m: (1.0 - ops.cast(m, "float32")) * -9.0,
    "xor": lambda m: ops.logical_xor(m, ops.flip(m, axis=-1)),
    "invert": lambda m: ~m,
    "less": lambda m: ops.less(m, True),
    "sort": lambda m: ops.sort(m, axis=-1),
    "maximum": lambda m: ops.maximum(m, 0),
    "bitwise": lambda m: ops.bitwise_or(m, ops.roll(m, 1, axis=-1)),
}


@step("booleans", exact=True)
def _(d):
    return d.pick(*_BOOLEANS.values()), [d.entry("bool")], []


_PAIRS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
    "divide": lambda a, b: a / (ops.abs(b) + 0.5),
    "divide no nan": lambda a, b: ops.divide_no_nan(a, ops.relu(b) + ops.cast(b > 0, b.dtype)),
    "logaddexp": ops.logaddexp,
    "power": lambda a, b: ops.power(ops.abs(a) + 0.5, ops.clip(b, -2.0, 2.0)),
    "where": lambda a, b: ops.where(ops.cast(ops.abs(b) + 1.0, "bool"), a, b),
    "squared difference": lambda a, b: ops.square(a - b),
    "mix": lambda a, b: a * ops.sigmoid(b) + b * 0.3,
}


@step("pair")
def _(d):
    return d.pick(*_PAIRS.values()), [d.entry("float"), d.entry("float")], []


_SHARP_PAIRS = {
    "greater": lambda a, b: a > b,
    "less equal": ops.less_equal,
    "equal": ops.equal,
    "not equal": ops.not_equal,
    "where": lambda a, b: ops.where(a > 0, a, b),
    "where less": lambda a, b: ops.where(a < b, b, 1.0),
    "logical and": ops.logical_and,
    "logical or": ops.logical_or,
    "logical xor": ops.logical_xor,
    "add": ops.add,
    "multiply": ops.multiply,
    "maximum": ops.maximum,
    "floor divide": lambda a, b: a // (ops.abs(b) + 1),
    "mod": lambda a, b: a % (ops.abs(b) + 1),
    "subtract": lambda a, b: ops.cast(a, "float32") - ops.cast(b, "float32"),
}


@step("sharp pair", sharp=True, exact=True)
def _(d):
    return d.pick(*_SHARP_PAIRS.values()), [d.entry("any"), d.entry("any")], []


@step("choose", exact=True)
def _(d):
    condition, a = d.entry("bool"), d.entry("any")
    lead = len(condition.shape)
    if a.shape[:lead] != condition.shape:
        raise Skip
    other = d.pick(0, 1.5, -1)
    swap = d.coin()

    def choose(m, x):
        while len(m.shape) < len(x.shape):
            m = m[..., None]
        return ops.where(m, other, x) if swap else ops.where(m, x, other)

    return choose, [condition, a], []


_REDUCTIONS = (
    "sum",
    "mean",
    "max",
    "min",
    "var",
    "std",
    "logsumexp",
    "norm",
    "prod",
    "moments",
    "any",
    "ptp",
    "median",
)


@step("reduction")
def _(d):
    x = d.entry("float")
    kind, axis = d.pick(*_REDUCTIONS), d.axes(len(x.shape))
    keepdims = d.coin() and axis is not None  # which Keras forgets on torch
    if kind == "norm":
        order = d.pick(None, 1, 2, np.inf)
        return lambda x: ops.norm(x, ord=order, axis=axis, keepdims=keepdims), [x], []
    if kind == "prod":
        return lambda x: ops.prod(ops.tanh(x), axis=axis, keepdims=keepdims), [x], []
    if kind == "moments":
        axis = list(range(len(x.shape)))[:1] if axis is None else [axis] if isinstance(axis, int) else list(axis)
        return lambda x: ops.moments(x, axes=axis, keepdims=keepdims), [x], []
    if kind == "any":
        return lambda x: ops.any(ops.relu(x), axis=axis, keepdims=keepdims), [x], []
    initial = {"initial": 0.1} if kind in ("max", "min") and d.coin(0.3) else {}
    function = getattr(ops, kind)
    return lambda x: function(x, axis=axis, keepdims=keepdims, **initial), [x], []


@step("reduction of integers", exact=True)
def _(d):
    x = d.entry("int")
    function, axis = d.pick(ops.sum, ops.max, ops.min, ops.any, ops.all), d.axes(len(x.shape))
    keepdims = d.coin() and axis is not None
    return lambda x: function(x, axis=axis, keepdims=keepdims), [x], []


@step("along", exact=False)
def _(d):
    x = d.entry("float")
    axis = d.axis(len(x.shape))
    function = d.pick(
        lambda x: ops.cumsum(x, axis=axis),
        lambda x: ops.cumsum(x * 0.1),
        lambda x: ops.softmax(x, axis=axis),
        lambda x: ops.softmax(x, axis=tuple({axis % len(x.shape), len(x.shape) - 1})),
        lambda x: ops.log_softmax(x, axis=axis),
        lambda x: ops.normalize(x, axis=axis, order=1),
        lambda x: ops.normalize(x, axis=axis, order=2, epsilon=1e-3),
        lambda x: ops.logsumexp(x, axis=axis, keepdims=True) - x,
        lambda x: x - ops.mean(x, axis=axis, keepdims=True),
        lambda x: ops.rms_normalization(x, axis=axis),
        lambda x: ops.layer_normalization(x, axis=axis),
        lambda x: ops.sort(x, axis=axis),
        lambda x: ops.top_k(x, 2)[0],
        lambda x: ops.glu(x, axis=-1) if x.shape[-1] % 2 == 0 else x,
        lambda x: ops.cumsum(ops.flip(x, axis=axis), axis=axis),
    )
    return function, [x], []


@step("axes", exact=True)
def _(d):
    x = d.entry("any")
    rank = len(x.shape)
    one, other = d.axis(rank), d.axis(rank)
    order = d.rng.permutation(rank).tolist()
    offset = d.integer(-2, 2)
    function = d.pick(
        lambda x: ops.transpose(x, order),
        lambda x: ops.transpose(x),
        lambda x: ops.swapaxes(x, one, other),
        lambda x: ops.moveaxis(x, one, other),
        lambda x: ops.expand_dims(x, one),
        lambda x: ops.squeeze(ops.expand_dims(x, one), one),
        lambda x: ops.expand_dims(x, (0, 2)),
        lambda x: ops.stack([x, x], axis=one),
        lambda x: ops.concatenate([x, x * 2], axis=one),
        lambda x: ops.flip(x, axis=one),
        lambda x: ops.flip(x),
        lambda x: ops.repeat(x, 3, axis=one),
        lambda x: ops.repeat(x, 2),
        lambda x: ops.tile(x, 2),
        lambda x: ops.tile(x, (2,) + (1,) * rank),
        lambda x: ops.tile(x, [1] * (rank - 1) + [3]),
        lambda x: ops.roll(x, 1, axis=one),
        lambda x: ops.roll(x, -1, axis=one),
        lambda x: ops.roll(x, 2, axis=one),
        lambda x: ops.roll(x, 1),
        lambda x: ops.append(x, x, axis=one),
        lambda x: ops.append(x, x),
        lambda x: ops.hstack([x, x]),
        lambda x: ops.vstack([x, x]),
        lambda x: ops.ravel(x),
        lambda x: ops.split(ops.concatenate([x, x], axis=one), 2, axis=one)[1],
        lambda x: ops.array_split(x, 2, axis=-1)[0],
        lambda x: ops.unstack(ops.stack([x, x + 1], axis=one), axis=one)[1],
        lambda x: ops.tril(x, k=offset),
        lambda x: ops.triu(x, k=offset),
        lambda x: ops.ones_like(x),
        lambda x: ops.zeros_like(x) + x,
        lambda x: ops.full_like(x, 2),
        lambda x: ops.identity(3),
    )
    return function, [x], []


@step("part", exact=True)
def _(d):
    x = d.entry("any")
    rank = len(x.shape)
    last = x.shape[-1] if isinstance(x.shape[-1], int) else 1
    axis = d.axis(rank) % rank
    before = (slice(None),) * axis
    keys = [
        (*before, slice(None, None, 2)),
        (*before, slice(None, None, -1)),
        (*before, slice(1, None)),
        (*before, slice(None, -1)),
        (*before, slice(1, None, 2)),
        (*before, slice(-3, None)),
        (*before, slice(None, 3)),
        (*before, slice(None, None, 3)),
        (*before, slice(None, 0, -1)),
        (*before, slice(-2, None, -2)),
        (*before, 0),
        (*before, -1),
        (..., 0),
        (..., None),
        (slice(None), None),
        (None, ..., -1),
        (..., slice(None, max(last // 2, 1))),
        (..., slice(last // 2, None)),
        -1,
        slice(0, 1),
        ...,
    ]
    key = d.pick(*keys)
    return (lambda x: x[key]), [x], []


@step("pad", exact=True)
def _(d):
    x = d.entry("any", test=lambda e: e.dtype != "bool")
    rank = len(x.shape)
    widths = [(d.integer(0, 2), d.integer(0, 2)) if d.coin(0.6) else (0, 0) for _ in range(rank)]
    mode = d.pick("constant", "constant", "constant", "reflect", "edge", "symmetric")
    fill = {"constant_values": d.pick(0, 1, -3)} if mode == "constant" and d.coin() else {}
    return (lambda x: ops.pad(x, widths, mode=mode, **fill)), [x], []


@step("split")
def _(d):
    x = d.entry("float", test=wide)
    width = x.shape[-1]
    if width % 2 or width < 4:
        raise Skip
    how = d.pick(2, [1, 3], width)
    turn = d.integer(0, 2)

    def split(x):
        parts = ops.split(x, how, axis=-1)
        if turn == 0:
            return parts[0] * ops.sigmoid(parts[1])
        return ops.concatenate(parts[::-1], axis=-1) if turn == 1 else parts

    if turn == 2 and how == width:
        raise Skip
    return split, [x], []


@step("sized", sized=True)
def _(d):
    x = d.sequence()
    width = x.shape[2]

    def length(x):
        return ops.shape(x)[1]

    function = d.pick(
        lambda x: ops.reshape(x, (-1, length(x) * width)),
        lambda x: ops.reshape(x, (ops.shape(x)[0] * length(x), width)),
        lambda x: ops.reshape(x, (ops.shape(x)[0], length(x), width // 2, 2)),
        lambda x: ops.reshape(x, (ops.shape(x)[0], -1, width)),
        lambda x: ops.reshape(x, (ops.shape(x)[0], width, length(x))),
        lambda x: x + ops.cast(ops.arange(length(x)), "float32")[:, None] * 0.1,
        lambda x: x * ops.cast(length(x), "float32") * 0.05,
        lambda x: x[:, : length(x) // 2 + 1],
        lambda x: x[:, length(x) // 2 :],
        lambda x: x[:, : length(x) - 1],
        lambda x: x[:, length(x) - 1],
        lambda x: ops.pad(x, [[0, 0], [0, -length(x) % 4], [0, 0]]),
        lambda x: ops.pad(x, [[0, 0], [length(x), 0], [0, 0]]),
        lambda x: x + ops.ones((length(x), 1)),
        lambda x: ops.concatenate([x, ops.zeros((ops.shape(x)[0], 2, width))], axis=1),
        lambda x: ops.concatenate([ops.full((ops.shape(x)[0], 1, width), 0.5), x], axis=1),
        lambda x: ops.matmul(ops.eye(length(x)), x),
        lambda x: ops.matmul(ops.tri(length(x)), x) * 0.1,
        lambda x: ops.matmul(ops.tri(length(x), k=-1), x) * 0.1,
        lambda x: x * ops.reshape(ops.linspace(0.0, 1.0, length(x)), (-1, 1)),
        lambda x: ops.broadcast_to(x[:, :1], ops.shape(x)),
        lambda x: ops.broadcast_to(x[:, None], (ops.shape(x)[0], 2, length(x), width)),
        lambda x: ops.repeat(x[:, :1], length(x), axis=1) - x,
        lambda x: ops.tile(x[:, :1], (1, length(x), 1)),
        lambda x: x / length(x),
        lambda x: x if length(x) > 4 else x * 2.0,
        lambda x: x[:, : min(length(x), 20)],
        lambda x: sum((x[:, i] for i in range(length(x))), ops.zeros_like(x[:, 0])),
        lambda x: ops.where(ops.arange(length(x))[:, None] >= ops.arange(length(x)), ops.mean(x), 0.0),
        lambda x: ops.roll(x, length(x) // 2, axis=1),
        lambda x: ops.arange(length(x) - 1, -1, -1),
        lambda x: ops.arange(0, length(x), 2),
        lambda x: ops.cast(ops.arange(length(x), dtype="float32") / 3.0, "int32"),
        lambda x: ops.slice(x, (0, 1, 0), (ops.shape(x)[0], length(x) - 1, 3)),
        lambda x: ops.slice_update(x, (0, 0, 1), ops.zeros((ops.shape(x)[0], length(x), 2))),
        lambda x: ops.split(x, [length(x) // 2], axis=1)[0],
        lambda x: ops.mean(ops.reshape(x[:, : length(x) // 2 * 2], (ops.shape(x)[0], -1, 2, width)), axis=2),
        lambda x: ops.take(x, ops.arange(length(x) - 1, -1, -1), axis=1),
        lambda x: ops.meshgrid(ops.arange(length(x)), ops.arange(3))[0],
        lambda x: ops.squeeze(x[:, :1], 1),
        lambda x: ops.einsum("btd,t->bd", x, ops.cast(ops.arange(length(x)) % 3, "float32")),
        lambda x: ops.one_hot(ops.arange(length(x)) % 5, 5) + 0.0 * ops.mean(x),
        lambda x: x * np.float32(1.0) ** length(x),
        lambda x: x * (1.0 / np.sqrt(width)),
        lambda x: ops.reshape(ops.transpose(x, (1, 0, 2)), (length(x), ops.shape(x)[0] * width)),
        lambda x: x - x[:, ops.shape(x)[1] // 3][:, None],
    )
    return function, [x], []


@step("gather", exact=True)
def _(d):
    x = d.entry("any", (2, 4))
    rank = len(x.shape)
    axis = d.axis(rank)
    few = np.array([[0, -1], [0, 0]]) if isinstance(x.shape[axis], int) else np.array([0, 0])
    function = d.pick(
        lambda x: ops.take(x, few, axis=axis),
        lambda x: ops.take(x, 0, axis=axis),
        lambda x: ops.take(x, -1, axis=axis),
        lambda x: ops.take_along_axis(x, ops.argsort(x, axis=axis), axis=axis),
        lambda x: ops.take(x, np.array([0, 0, 0]), axis=None),
        lambda x: ops.flip(ops.sort(x, axis=axis), axis=axis),
        lambda x: ops.take_along_axis(x, ops.argmax(x, axis=axis, keepdims=True), axis=axis),
    )
    return function, [x], []


@step("rows by ids")
def _(d):
    ids = d.entry("int", (1, 3))
    x = d.entry("float", (2, 3), wide)
    width = x.shape[-1]
    function = d.pick(
        lambda x, i: ops.take(ops.reshape(x, (-1, width)), i * 0, axis=0),
        lambda x, i: ops.take(x, i % width, axis=-1),
        lambda x, i: ops.take_along_axis(x, i[..., None] % width, axis=-1),
    )
    return function, [x, ids], []


@step("products")
def _(d):
    x = d.entry("float", (2, 4), wide)
    rank, width = len(x.shape), x.shape[-1]
    kernel = (d.rng.normal(size=(width, 5)) / np.sqrt(width)).astype("float32")
    heads = (d.rng.normal(size=(width, 2, 3)) / np.sqrt(width)).astype("float32")
    choices = [
        lambda x: ops.matmul(x, kernel),
        lambda x: x @ ops.convert_to_tensor(kernel),
        lambda x: ops.dot(x, kernel),
        lambda x: ops.tensordot(x, kernel, axes=1),
        lambda x: ops.tensordot(x, kernel, axes=[[-1], [0]]),
        lambda x: ops.einsum("...d,dnh->...nh", x, heads),
        lambda x: ops.einsum("...d,dnh->...hn", x, heads),
        lambda x: ops.inner(x, kernel.T),
        lambda x: ops.einsum("...d,d->...", x, kernel[:, 0]),
        lambda x: ops.einsum("...d,...d->...", x, x),
        lambda x: ops.einsum("...d->...", x),
        lambda x: ops.outer(ops.mean(x, axis=tuple(range(rank - 1))), kernel[0]),
        lambda x: ops.matmul(x, ops.swapaxes(x, -1, -2)) * 0.1,
        lambda x: ops.matmul(ops.transpose(kernel), ops.swapaxes(x, -1, -2)),
        lambda x: ops.vdot(x, x) * 0.01,
        lambda x: ops.matmul(x, kernel[:, 0]),
        lambda x: ops.linalg.norm(x, axis=-1),
    ]
    if rank == 3:
        choices += [
            lambda x: ops.einsum("btd,bsd->bts", x, x) * 0.1,
            lambda x: ops.einsum("btd,bte->bde", x, x) * 0.1,
            lambda x: ops.einsum("btd->bdt", x),
            lambda x: ops.einsum("btd->d", x) * 0.05,
            lambda x: ops.einsum("btd,bte->tde", x, x) * 0.1,
            lambda x: ops.einsum("btd,de->ebt", x, kernel),
            lambda x: ops.einsum("btd,bt,de->be", x, x[..., 0], kernel) * 0.1,
        ]
    if rank == 4:
        choices += [
            lambda x: ops.einsum("btnh,bsnh->bnts", x, x) * 0.1,
            lambda x: ops.einsum("btnh,btmh->btnm", x, x) * 0.1,
            lambda x: ops.einsum("abcd->adbc", x),
        ]
    return d.pick(*choices), [x], []


@step("products of two")
def _(d):
    a, b = d.entry("float", (2, 4)), d.entry("float", (2, 4))
    function = d.pick(
        ops.matmul,
        lambda a, b: ops.matmul(a, ops.swapaxes(b, -1, -2)),
        lambda a, b: ops.einsum("...td,...sd->...ts", a, b),
        lambda a, b: ops.einsum("btd,bsd->bts", a, b),
        lambda a, b: ops.einsum("btd,bte->bde", a, b),
        lambda a, b: ops.einsum("btd,bd->bt", a, b),
        lambda a, b: ops.tensordot(a, b, axes=[[-1], [-1]]),
        lambda a, b: ops.inner(a, b),
    )
    return (lambda a, b: function(a, b) * 0.2), [a, b], []


@step("join")
def _(d):
    a, b = d.entry("float"), d.entry("float")
    if len(a.shape) != len(b.shape):
        raise Skip
    axis = d.axis(len(a.shape))
    cut = d.coin(0.3)

    def join(a, b):
        both = ops.concatenate([a, b], axis=axis)
        return both[:, 1:] if cut and len(a.shape) > 1 else both

    return join, [a, b], []


# Attention, norms and rotations in single steps: what the exporter recognises, and what only looks like it.


@step("attention in steps", sized=True)
def _(d):
    x = d.sequence((6, 12))
    memory = d.sequence((x.shape[2],)) if d.coin(0.4) else x
    width = x.shape[2]
    heads = 2 if d.coin() else 3
    size = width // heads
    kernels = [(d.rng.normal(size=(width, width)) / np.sqrt(width)).astype("float32") for _ in range(3)]
    where, scale, axis = d.pick("query", "scores", "none", "after"), d.pick(size**-0.5, 0.3), d.pick(-1, -1, -1, -2)
    mask, cap, double = d.pick(None, "where", "bias", "weights", "table", "last"), d.pick(None, None, 2.0), d.coin(0.2)
    order, also, grouped = d.pick("first", "last"), d.coin(0.2), d.coin(0.25)
    entries = [x] if memory is x else [x, memory]
    lengths = [d.entry("bool", (2, 2))] if mask in ("where", "bias", "weights") else []
    if lengths and lengths[0].shape != (memory.shape[0], memory.shape[1]):
        raise Skip
    single = d.coin(0.3)
    slope = d.coin(0.2)

    def attend(x, *rest):
        m = rest[0] if len(entries) == 2 else x
        b, t, s = ops.shape(x)[0], ops.shape(x)[1], ops.shape(m)[1]
        q, k, v = (
            ops.reshape(ops.matmul(y, kernel), (b, n, heads, size))
            for y, n, kernel in zip((x, m, m), (t, s, s), kernels, strict=True)
        )
        if grouped:
            k, v = (ops.repeat(y[:, :, :1], heads, axis=2) for y in (k, v))
        if where == "query":
            q = q * scale
        if order == "first":
            q, k, v = (ops.transpose(y, (0, 2, 1, 3)) for y in (q, k, v))
            scores = ops.matmul(q, ops.swapaxes(k, -1, -2))
        else:
            scores = ops.einsum("btnh,bsnh->bnts", q, k)
        if where == "scores":
            scores = scores * scale
        elif where == "after":
            scores = scores / (1 / scale)
        if cap is not None:
            scores = cap * ops.tanh(scores / cap) if not double else ops.tanh(scores) * cap
        if slope:
            distance = ops.arange(s)[None, :] - ops.arange(t)[:, None]
            scores = scores + ops.cast(distance, "float32") * 0.1
        if mask in ("where", "bias"):
            keep = rest[-1][:, None, None, :]
            if mask == "where":
                scores = ops.where(keep, scores, -1e9)
            else:
                scores = scores + (1.0 - ops.cast(keep, "float32")) * -1e9
        elif mask == "table":
            scores = ops.where(ops.arange(s)[None, :] <= ops.arange(t)[:, None], scores, -1e9)
        elif mask == "last":
            scores = scores - ops.max(scores, axis=-1, keepdims=True)
        weights = ops.softmax(scores, axis=axis)
        if mask == "weights":
            weights = ops.where(rest[-1][:, None, None, :], weights, 0.0)
        if single:
            weights = weights * 2.0
        if order == "first":
            out = ops.transpose(ops.matmul(weights, v), (0, 2, 1, 3))
        else:
            out = ops.einsum("bnts,bsnh->btnh", weights, v)
        out = ops.reshape(out, (b, t, width))
        return (out, ops.mean(weights, axis=1)) if also else out

    return attend, [*entries, *lengths], []


@step("norm in steps")
def _(d):
    x = d.entry("float", (2, 4), wide)
    width, epsilon = x.shape[-1], d.pick(1e-6, 1e-2, 0.3)
    scale = (1 + 0.3 * d.rng.normal(size=width)).astype("float32")
    axis, centre, root = d.pick(-1, -1, 1), d.coin(0.2), d.pick("rsqrt", "sqrt", "power", "outside")
    by, twice = d.pick("scale", "none", "one plus", "matrix"), d.coin(0.2)

    def norm(x):
        y = x - ops.mean(x, axis=axis, keepdims=True) if centre else x
        mean = ops.mean(ops.square(y if not twice else y * 2.0), axis=axis, keepdims=True)
        if root == "rsqrt":
            y = y * ops.rsqrt(mean + epsilon)
        elif root == "sqrt":
            y = y / ops.sqrt(mean + epsilon)
        elif root == "power":
            y = ops.power(mean + epsilon, -0.5) * y
        else:
            y = y * (1.0 / (ops.sqrt(mean) + epsilon + 0.1))
        if by == "scale":
            y = y * scale
        elif by == "one plus":
            y = (1.0 + scale) * y
        elif by == "matrix":
            y = y * ops.concatenate([scale[None], 2 * scale[None]])[:1]
        return y

    return norm, [x], []


@step("rotation in steps", sized=True)
def _(d):
    x = d.sequence((6, 12), ("T", "S", "U"))
    width = x.shape[2]
    heads = d.pick(1, width // 2 // 3 * 1 or 1, 3) if width == 12 else 1
    size = width // heads
    if size % 2:
        raise Skip
    half = size // 2
    frequencies = (1.0 / 10 ** (np.arange(half) / half)).astype("float32")
    order, sign, tables = d.pick("halves", "pairs"), d.pick(1, 1, -1), d.pick("same", "same", "different", "offset")
    first = d.coin(0.4)

    def rotate(x):
        b, t = ops.shape(x)[0], ops.shape(x)[1]
        y = ops.reshape(x, (b, t, heads, size))
        angle = ops.cast(ops.arange(t), "float32")[:, None] * frequencies
        if tables == "offset":
            angle = angle + 0.3
        angle = ops.concatenate([angle, angle * (1.5 if tables == "different" else 1.0)], axis=-1)
        cosine, sine = (f(angle)[None, :, None, :] for f in (ops.cos, ops.sin))
        if first:
            y, cosine, sine = (ops.transpose(z, (0, 2, 1, 3)) for z in (y, cosine, sine))
        if order == "halves":
            a, c = ops.split(y, 2, axis=-1)
            turned = ops.concatenate([-c, a] if sign == 1 else [c, -a], axis=-1)
        else:
            a, c = y[..., ::2], y[..., 1::2]
            turned = ops.reshape(ops.stack([-c, a], axis=-1), ops.shape(y))
        y = y * cosine + turned * sine
        if first:
            y = ops.transpose(y, (0, 2, 1, 3))
        return ops.reshape(y, (b, t, width))

    return rotate, [x], []


# Keras' layers.


@step("layer on features", kind="layer")
def _(d):
    x = d.entry("float", (2, 4), wide)
    width = x.shape[-1]
    act = d.pick(None, "relu", "gelu", "tanh", "silu", "softmax", "hard_sigmoid", "leaky_relu")
    epsilon = d.pick(1e-6, 1e-3)
    layer = d.pick(
        lambda: keras.layers.Dense(d.pick(6, 12, 1, 7), activation=act, use_bias=d.coin(0.8)),
        lambda: keras.layers.Dense(12),
        lambda: keras.layers.LayerNormalization(epsilon=epsilon, center=d.coin(0.8), scale=d.coin(0.8)),
        lambda: keras.layers.LayerNormalization(axis=d.pick(-1, [-1], [-1, -2] if len(x.shape) > 3 else -1)),
        lambda: keras.layers.RMSNormalization(epsilon=epsilon),
        lambda: keras.layers.BatchNormalization(epsilon=epsilon, center=d.coin(), scale=d.coin()),
        lambda: keras.layers.UnitNormalization(),
        lambda: keras.layers.GroupNormalization(2 if width % 2 == 0 else 1),
        lambda: keras.layers.Dropout(0.3),
        lambda: keras.layers.GaussianNoise(0.3),
        lambda: keras.layers.Activation(act or "linear"),
        lambda: keras.layers.LeakyReLU(0.2),
        lambda: keras.layers.PReLU(shared_axes=list(range(1, len(x.shape) - 1)) or None),
        lambda: keras.layers.ELU(0.8),
        lambda: keras.layers.ReLU(max_value=1.0, negative_slope=0.1, threshold=0.2),
        lambda: keras.layers.Softmax(d.pick(-1, -1, 1)),
        lambda: keras.layers.Rescaling(0.5, offset=0.3),
        lambda: keras.layers.Flatten(),
        lambda: keras.layers.Reshape((-1, 2)),
        lambda: keras.layers.Reshape((-1, width, 1)),
        lambda: keras.layers.Permute(tuple((1 + d.rng.permutation(len(x.shape) - 1)).tolist())),
        lambda: keras.layers.ActivityRegularization(0.1),
        lambda: keras.layers.Identity(),
        lambda: keras.layers.Masking(0.0),
    )()
    return layer, [x], [layer]


@step("layer on time", kind="layer")
def _(d):
    x = d.sequence()
    width = x.shape[2]
    padding, dilation = d.pick("same", "same", "valid", "causal"), d.pick(1, 1, 2, 3)
    strides = d.pick(1, 1, 2, 3) if dilation == 1 else 1
    groups = 2 if width % 2 == 0 and d.coin(0.2) else 1
    pool, stride = d.pick(2, 3), d.pick(None, 1, 2)
    some = d.pick("same", "valid")
    layer = d.pick(
        lambda: keras.layers.Conv1D(
            6, d.pick(1, 2, 3, 4), strides, padding, dilation_rate=dilation, groups=groups, activation="tanh"
        ),
        lambda: keras.layers.SeparableConv1D(6, 3, strides, some, dilation_rate=dilation),
        lambda: keras.layers.DepthwiseConv1D(d.pick(2, 3), strides, some, depth_multiplier=2),
        lambda: keras.layers.MaxPooling1D(pool, stride, some),
        lambda: keras.layers.AveragePooling1D(pool, stride, some if _AVERAGES_PADDED else "valid"),
        lambda: keras.layers.GlobalAveragePooling1D(keepdims=d.coin()),
        lambda: keras.layers.GlobalMaxPooling1D(keepdims=d.coin()),
        lambda: keras.layers.UpSampling1D(d.pick(2, 3)),
        lambda: keras.layers.ZeroPadding1D(d.pick(1, (2, 0))),
        lambda: keras.layers.Cropping1D(d.pick(1, (0, 2), (1, 0))),
        lambda: keras.layers.TimeDistributed(keras.layers.Dense(6)),
        lambda: keras.layers.SpatialDropout1D(0.3),
        lambda: keras.layers.EinsumDense("abc,cde->abde", output_shape=(None, 4, 6), bias_axes="de"),
        lambda: keras.layers.EinsumDense("abc,cd->abd", output_shape=(None, 6), bias_axes="d", activation="relu"),
        lambda: keras.layers.EinsumDense("...c,cd->...d", output_shape=(6,)),
    )()
    return layer, [x], [layer]


@step("layer on images", kind="layer")
def _(d):
    x = d.entry("float", (4, 4), wide)
    width = x.shape[-1]
    padding, dilation = d.pick("same", "valid"), d.pick(1, 1, 2)
    strides = d.pick(1, 2, (1, 2)) if dilation == 1 else 1
    pool = d.pick(2, (3, 2))
    layer = d.pick(
        lambda: keras.layers.Conv2D(6, d.pick(1, 2, (3, 2)), strides, padding, dilation_rate=dilation),
        lambda: keras.layers.DepthwiseConv2D(d.pick(2, 3), 1, padding, depth_multiplier=2),
        lambda: keras.layers.SeparableConv2D(6, 3, 1, padding),
        lambda: keras.layers.MaxPooling2D(pool, d.pick(None, 1, 2), padding),
        lambda: keras.layers.AveragePooling2D(pool, d.pick(None, 1, 2), padding if _AVERAGES_PADDED else "valid"),
        lambda: keras.layers.GlobalAveragePooling2D(keepdims=d.coin()),
        lambda: keras.layers.GlobalMaxPooling2D(),
        lambda: keras.layers.UpSampling2D(d.pick(2, (1, 3)), interpolation=d.pick("nearest", "nearest", "bilinear")),
        lambda: keras.layers.ZeroPadding2D(((1, 0), (0, 2))),
        lambda: keras.layers.Cropping2D(((1, 0), (0, 2))),
        lambda: keras.layers.Reshape((-1, width)),
        lambda: keras.layers.SpatialDropout2D(0.2),
        lambda: keras.layers.Normalization(mean=0.3, variance=1.7),
    )()
    return layer, [x], [layer]


@step("merge", kind="layer")
def _(d):
    a, b = d.entry("float", (2, 4)), d.entry("float", (2, 4))
    axis = d.pick(-1, 1)
    layer = d.pick(
        lambda: keras.layers.Add(),
        lambda: keras.layers.Subtract(),
        lambda: keras.layers.Multiply(),
        lambda: keras.layers.Average(),
        lambda: keras.layers.Maximum(),
        lambda: keras.layers.Minimum(),
        lambda: keras.layers.Concatenate(axis),
        lambda: keras.layers.Dot(axes=d.pick(-1, 1, (2, 2), (1, 2)), normalize=d.coin(0.3)),
    )()
    return (lambda a, b: layer([a, b])), [a, b], [layer]


@step("Keras' attention", kind="layer")
def _(d):
    x = d.sequence()
    memory = d.sequence() if d.coin() else x
    causal = d.coin(0.3)
    kind = d.pick("mha", "mha", "gqa", "attention", "additive")
    same = memory is x
    if kind in ("attention", "additive"):
        if memory.shape[2] != x.shape[2]:
            raise Skip
        cls = keras.layers.Attention if kind == "attention" else keras.layers.AdditiveAttention
        layer = cls(use_scale=d.coin())
        call = (lambda x: layer([x, x], use_causal_mask=causal)) if same else (lambda x, m: layer([x, m]))
        return call, [x] if same else [x, memory], [layer]
    weights = d.coin(0.2)
    if kind == "mha":
        layer = keras.layers.MultiHeadAttention(
            d.pick(1, 2, 3), d.pick(4, 5), value_dim=d.pick(None, 3), use_bias=d.coin(0.7), output_shape=d.pick(None, 6)
        )
    else:
        layer = keras.layers.GroupQueryAttention(d.pick(4, 5), d.pick(2, 4), d.pick(1, 2))
    masks = [e for e in d.entries if e.dtype == "bool" and e.shape == (*x.shape[:2], memory.shape[1])]
    masks = masks[:1] if d.coin() else []
    options = {"return_attention_scores": weights}
    if same:
        options["use_causal_mask"] = causal

    def call(x, *rest):
        mask = {"attention_mask": rest[-1]} if masks else {}
        return layer(x, x if same else rest[0], **options, **mask)

    return call, [x, *([] if same else [memory]), *masks], [layer]


@step("embedding", kind="layer")
def _(d):
    ids = d.entry("int", (2, 2))
    clean = ids.exact and ids.dtype == "int32"
    width, zero = d.pick(6, 12), d.coin()
    layer = d.pick(
        lambda: keras.layers.Embedding(VOCABULARY, width, mask_zero=zero),
        lambda: ours.TokenEmbedding(VOCABULARY, width, scale=d.coin(), mask_zero=zero),
    )()
    if not clean:
        raise Skip
    given = any(ids is entry for entry in d.entries[:4]) and ids.shape == ("B", "T")
    return (layer if given and d.coin(0.9) else (lambda i: layer(i % VOCABULARY))), [ids], [layer]


@step("tied embedding", kind="layer")
def _(d):
    ids, x = d.entry("int", (2, 2)), d.sequence((6, 12))
    layer = ours.TokenEmbedding(VOCABULARY, x.shape[2], scale=d.coin(), mask_zero=d.coin())
    return (lambda i, x: (layer(i % VOCABULARY), layer(x, reverse=True))), [ids, x], [layer]


# Our layers.


def _padding(d, x) -> list:
    found = [e for e in d.entries if e.shape == x.shape[:2] and (e.dtype in ("bool", "int32"))]
    return [d.pick(*found)] if found and d.coin(0.6) else []


@step("ours on features", kind="layer")
def _(d):
    x = d.sequence((6, 12), ("T", "S"))
    layer = d.pick(
        lambda: ours.FeedForward(d.pick(5, 14), activation=d.pick("relu", "gelu", "silu"), gated=d.coin()),
        lambda: ours.FeedForward(5, use_bias=False),
        lambda: ours.SinusoidalPositionalEncoding(max_wavelength=d.pick(10000, 100), interleaved=d.coin()),
        lambda: ours.LearnedPositionalEncoding(45),
        lambda: ours.MultiHeadSelfAttention(d.pick(1, 2, 3), causal=d.coin()),
        lambda: ours.TransformerEncoderBlock(2, 7),
        lambda: ours.TransformerDecoderBlock(3, 7),
    )()
    return layer, [x], [layer]


@step("our attention", kind="layer", sized=True)
def _(d):
    x = d.sequence((6, 12), ("T", "S"))
    options = {"head_dim": d.pick(None, 4, 8), "use_bias": d.coin(), "dropout": d.pick(0.0, 0.2)}
    options |= {"num_kv_heads": d.pick(None, 1)}
    weights, padding = d.coin(0.3), _padding(d, x)
    squares = [e for e in d.entries if e.dtype == "bool" and e.shape in (("B", x.shape[1], x.shape[1]),)]
    squares = squares[:1] if d.coin() else []
    rotary = options["head_dim"] is not None and d.coin(0.3)
    layer = ours.MultiHeadSelfAttention(
        d.pick(2, 3), causal=d.coin(), sliding_window=d.pick(None, None, 1, 3), **options
    )

    def call(x, *rest):
        rest = list(rest)
        given = {"padding_mask": rest.pop(0)} if padding else {}
        given |= {"attention_mask": rest.pop(0)} if squares else {}
        if rotary:
            positions = ops.arange(ops.shape(x)[1])[None]
            given["rotary"] = kt.rotary_encoding(positions, kt.rotary_frequencies(options["head_dim"]))
        return layer(x, return_weights=weights, **given)

    return call, [x, *padding, *squares], [layer]


@step("our single head", kind="layer")
def _(d):
    x = d.sequence((6, 12), ("T", "S"))
    padding = _padding(d, x)
    layer = ours.SelfAttention(d.pick(3, 8), d.pick(None, 5), causal=d.coin(), use_bias=d.coin())
    return (lambda x, *p: layer(x, *p)), [x, *padding], [layer]


@step("our cross-attention", kind="layer")
def _(d):
    x, memory = d.sequence((6, 12), ("T", "S")), d.sequence(None, ("T", "S"))
    padding, weights = _padding(d, memory), d.coin(0.3)
    layer = ours.CrossAttention(d.pick(1, 2, 3), head_dim=d.pick(None, 5), use_bias=d.coin())
    return (
        lambda x, m, *p: layer(x, m, **({"padding_mask": p[0]} if p else {}), return_weights=weights),
        [x, memory, *padding],
        [layer],
    )


def _block(d) -> dict:
    return {
        "num_heads": d.pick(2, 3),
        "d_ff": d.pick(7, 10),
        "head_dim": d.pick(None, 4),
        "num_kv_heads": d.pick(None, 1),
        "dropout": d.pick(0.0, 0.1),
        "activation": d.pick("relu", "gelu", "silu", "gelu_tanh"),
        "gated": d.coin(),
        "norm_first": d.coin(),
        "norm": d.pick("layer", "rms"),
        "norm_epsilon": d.pick(1e-6, 1e-3),
        "use_bias": d.coin(),
        "sliding_window": d.pick(None, None, 3),
    }


@step("our blocks", kind="layer")
def _(d):
    x = d.sequence((6, 12), ("T", "S"))
    options, stacked, encoder = _block(d), d.coin(), d.coin()
    memory = d.sequence(None, ("T", "S")) if not encoder and d.coin(0.6) else None
    weights, padding = d.coin(0.3), _padding(d, x)
    names = {
        (True, True): ours.TransformerEncoder,
        (True, False): ours.TransformerEncoderBlock,
        (False, True): ours.TransformerDecoder,
        (False, False): ours.TransformerDecoderBlock,
    }
    layer = names[encoder, stacked](**options, **({"num_layers": 2} if stacked else {}))

    def call(x, *rest):
        rest = list(rest)
        given = {"memory": rest.pop(0)} if memory is not None else {}
        given |= {"padding_mask": rest.pop(0)} if padding else {}
        return keras.tree.flatten(layer(x, return_weights=weights, **given))

    return call, [x, *([memory] if memory is not None else []), *padding], [layer]


@step("causal mask", kind="layer", exact=True)
def _(d):
    x = d.entry("any", (2, 3), lambda e: e.shape[0] == "B" and e.shape[1] in ("T", "S"))
    layer = ours.CausalMask()
    return layer, [x], [layer]


@step("whole model", kind="layer")
def _(d):
    ids = d.entry("int", (2, 2), lambda e: e.shape == ("B", "T") and e.dtype == "int32")
    options = _block(d) | {"vocabulary_size": VOCABULARY, "num_layers": 1, "d_model": d.pick(6, 12), "max_length": 45}
    position = d.pick("learned", "sinusoidal", None)
    encoder = {"position_encoding": position, "pad_id": d.pick(None, 0), "embedding_norm": d.coin()}
    layer = d.pick(
        lambda: models.CausalLM(
            **options | ({"position_encoding": "rotary", "head_dim": 4} if d.coin() else _without_norm(encoder)),
            tie_output=d.coin(),
        ),
        lambda: models.Encoder(**options, **encoder),
        lambda: models.MaskedLM(models.Encoder(**options, **encoder)),
        lambda: models.TokenClassifier(models.Encoder(**options, **encoder), 3),
        lambda: models.SequenceClassifier(models.Encoder(**options, **encoder), 3, pooling=d.pick("cls", "mean")),
        lambda: models.SentenceEncoder(
            models.Encoder(**options, **encoder), pooling=d.pick("cls", "mean"), normalize=d.coin()
        ),
    )()
    return (lambda i: layer(i % VOCABULARY)), [ids], [layer]


@step("shared layer", kind="layer")
def _(d):
    a, b = d.sequence((6, 12), ("T", "S")), d.sequence((6, 12), ("T", "S"))
    if a.shape[2] != b.shape[2]:
        raise Skip
    layer = d.pick(
        lambda: keras.layers.Dense(6),
        lambda: ours.TransformerEncoderBlock(2, 7),
        lambda: ours.MultiHeadSelfAttention(2, causal=True),
        lambda: keras.layers.LayerNormalization(),
    )()
    return (lambda a, b: (layer(a), layer(b))), [a, b], [layer]


@step("dot product attention")
def _(d):
    x = d.entry("float", (4, 4), lambda e: isinstance(e.shape[2], int) and isinstance(e.shape[3], int))
    causal, scale = d.coin(), d.pick(None, 0.3)
    cap = d.pick(None, None, 3.0)
    return (
        lambda x: ops.dot_product_attention(
            x, x * 0.5, ops.flip(x, axis=1), is_causal=causal, scale=scale, attn_logits_soft_cap=cap
        ),
        [x],
        [],
    )


@step("without a rule", kind="layer")
def _(d):
    if d.coin(0.6):
        raise Skip  # each ends a model
    x = d.sequence()
    layer = d.pick(
        None,
        keras.layers.GRU(6, return_sequences=d.coin()),
        keras.layers.LSTM(6),
        keras.layers.SimpleRNN(6),
        keras.layers.Bidirectional(keras.layers.GRU(6)),
        keras.layers.Conv1DTranspose(6, 3, 2),
    )
    if layer is not None:
        return layer, [x], [layer]
    function = d.pick(
        lambda x: ops.map(lambda row: row * 2.0, x),
        lambda x: ops.vectorized_map(lambda row: ops.tanh(row), x),
        lambda x: ops.fori_loop(0, 3, lambda i, y: y * 0.5, x),
        lambda x: ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (0, x))[1],
        lambda x: ops.scan(lambda carry, row: (carry + row, carry * 0.5), ops.zeros_like(x[0]), x)[1],
        lambda x: ops.associative_scan(ops.add, x, axis=1),
        lambda x: ops.cond(ops.mean(x) > -100.0, lambda: x * 2.0, lambda: x),
        lambda x: ops.image.resize(x[..., None], (4, 4)),
        lambda x: ops.extract_sequences(x[..., 0], 4, 2),
        lambda x: ops.arctan2(x, ops.abs(x) + 0.5),
        lambda x: ops.cumprod(ops.tanh(x), axis=1),
        lambda x: ops.diff(x, axis=1),
        lambda x: ops.quantile(x, 0.3, axis=1),
        lambda x: ops.diagonal(x),
        lambda x: ops.rot90(x),
        lambda x: ops.erfinv(ops.tanh(x) * 0.8),
        lambda x: ops.segment_sum(x, np.zeros(x.shape[0], "int32"), num_segments=5),
    )
    return function, [x], []


@step("Fourier")
def _(d):
    x = d.sequence()
    part = d.integer(0, 1)
    function = d.pick(
        lambda x: ops.fft((x, ops.zeros_like(x)))[part] * 0.1,
        lambda x: ops.fft2((x, ops.zeros_like(x)))[part] * 0.03,
        lambda x: ops.fft((x, x * 0.3))[part] * 0.1,
    )
    return function, [x], []


def _without_norm(options: dict) -> dict:
    return {name: value for name, value in options.items() if name != "embedding_norm"}
