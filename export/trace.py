"""Runs a Keras model on symbolic tensors of known shape, every layer opened, and records its operations.

The one file that knows Keras' internals. In Keras 3 layers and operations are both `keras.Operation`; called
on a `KerasTensor` they infer shapes and note a `Node`. Here, while tracing, a layer runs its `call` instead, the
nodes are kept in a list of our own rather than in the user's objects, and functions that make tensors from
numbers (`arange`, …) are recorded too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src import backend, tree
from keras.src.activations import activations
from keras.src.backend.common import global_state
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.layers import layer as layer_module
from keras.src.ops import nn, operation_utils
from keras.src.ops.core import ConvertToTensor
from keras.src.ops.numpy import (
    BitwiseAnd,
    BitwiseLeftShift,
    BitwiseOr,
    BitwiseRightShift,
    BitwiseXor,
    BroadcastTo,
    GetItem,
    LeftShift,
    Ndim,
    RightShift,
)
from keras.src.ops.operation import Operation
from keras.src.random.seed_generator import SeedGenerator

from keras_transformer.export.dims import Comparison, Dim, Expr, SizedInt, Sizes, evaluate
from keras_transformer.export.errors import TraceError
from keras_transformer.export.ir import Weight

# The operations that take a part of a table, for tables that grow with an axis.
TAKE_PART, EXPAND = GetItem, BroadcastTo


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input of a function to trace; its shape holds integers and expressions of the free axes."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str


@dataclasses.dataclass(eq=False)
class Symbol:
    """A tensor of one trace."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(eq=False)
class Array:
    """A concrete array that layer code used, with its Keras dtype."""

    array: np.ndarray
    dtype: str


@dataclasses.dataclass(eq=False)
class Call:
    """One recorded operation of one trace; the fields are those of `ir.Node`, at one size."""

    kind: type | str
    operation: Any
    attributes: dict[str, Any]
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[Symbol]
    path: str
    source: str


@dataclasses.dataclass(eq=False)
class Recording:
    """What one trace saw."""

    sizes: Sizes
    inputs: list[Symbol]
    outputs: list[Any]
    calls: list[Call]
    comparisons: set[Comparison]


def record(
    function: Callable,
    inputs: Any,
    sizes: Sequence[Sizes],
    root: keras.layers.Layer | dict[str, keras.layers.Layer],
    keep_whole: Callable[[keras.layers.Layer], bool] = lambda layer: False,
) -> list[Recording]:
    """Runs `function(*inputs)` on symbolic tensors once for each of `sizes` and returns what it did.

    The model is left as it was: weights, seeds, Keras' nodes and its automatic names.

    Args:
        function: takes and returns (nested structures of) tensors; calls layers and `keras.ops`.
        inputs: a tuple of (nested structures of) `InputSpec`.
        sizes: the size of each free axis, by name, one dict per trace.
        root: the model, or the layers by name, whose attributes give layers and weights their paths.
        keep_whole: says of which layers the `call` is not opened.

    Raises:
        TraceError: if the function fails on symbolic tensors, draws random numbers, or writes to a variable.
    """
    for layer in root.values() if isinstance(root, dict) else [root]:
        _sync_jax_state(layer)
    names = _Names(root)
    with _patched(), _keras_names_restored():
        try:
            return [_Tracer(size, names, keep_whole).run(function, inputs) for size in sizes]
        except _BackendAsked as error:
            failure = error.__cause__
        try:
            return [_Tracer(size, names, keep_whole, neutral=True).run(function, inputs) for size in sizes]
        except TraceError:
            raise failure from failure.__cause__


class _BackendAsked(Exception):
    """A trace failed in which layer code asked for the backend, perhaps to call it."""


class _Tracer:
    """Records one trace."""

    def __init__(self, sizes: Sizes, names: _Names, keep_whole, neutral: bool = False):
        self.sizes = sizes
        self.names = names
        self.keep_whole = keep_whole
        self.neutral = neutral
        self.asked = False
        self.paths = [""]
        self.opaque = 0
        self.calls: list[Call] = []
        self.comparisons: set[Comparison] = set()
        self.symbols: dict[int, Symbol] = {}
        self.alive: list[Any] = []

    def run(self, function, inputs) -> Recording:
        previous, _ACTIVE.tracer = _any_tracer(), self
        # Inside a layer's `call` there may be one: its `training` is not this trace's.
        context = global_state.get_global_attribute("current_call_ctx")
        global_state.set_global_attribute("current_call_ctx", None)
        try:
            tensors = tree.map_structure(self._input, inputs)
            symbols = [self._symbol(tensor) for tensor in tree.flatten(tensors)]
            outputs = function(*tensors)
        except Exception as error:
            failure = error
            if not isinstance(error, TraceError):
                where = f" in layer '{self.paths[-1]}'" if self.paths[-1] else ""
                failure = TraceError(
                    f"The model fails on symbolic tensors{where}{_failing_line(error)}, traced at sizes {self.sizes}. "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
            if self.asked and not self.neutral:
                raise _BackendAsked from failure
            raise failure from failure.__cause__
        finally:
            _ACTIVE.tracer = previous
            global_state.set_global_attribute("current_call_ctx", context)
        outputs = [self._freeze(output) for output in tree.flatten(outputs)]
        return Recording(self.sizes, symbols, outputs, self.calls, self.comparisons)

    def symbolic_call(self, operation: Operation, args, kwargs):
        """What `Operation.symbolic_call` does while tracing."""
        if isinstance(operation, keras.layers.Layer) and not self.keep_whole(operation):
            with self._inside(operation):
                call = operation.quantized_call if operation.quantization_mode else operation.call
                return call(*args, **kwargs)
        if isinstance(operation, Ndim):
            # Of a rank, a number everywhere else, Keras' shape inference makes a tensor.
            return len(args[0].shape)
        if isinstance(operation, GetItem) and not isinstance(args[1], tuple | list):
            x, key = args
            if isinstance(key, keras.KerasTensor) and "int" in key.dtype:
                return keras.ops.take(x, key, axis=0)
            # Of keys that are no tuples Keras' shape inference knows integers only.
            args = (x, (key,))
        if isinstance(operation, _BITWISE):
            # Keras' shape inference knows tensors only.
            dtype = next(x.dtype for x in args if hasattr(x, "dtype"))
            args = tuple(np.array(x, dtype) if isinstance(x, int) else x for x in args)
        # Shape inference may run the operation's own code on the backend; that is not part of the trace.
        self.opaque += 1
        try:
            outputs = operation.compute_output_spec(*args, **kwargs)
            if isinstance(operation, _BITWISE):
                outputs = keras.KerasTensor(_broadcast_shape(args), outputs.dtype)
        finally:
            self.opaque -= 1
        is_layer = isinstance(operation, keras.layers.Layer)
        attributes = {} if is_layer else _public_attributes(operation)
        with self._inside(operation) if is_layer else contextlib.nullcontext():
            self._call(type(operation), operation, attributes, args, kwargs, outputs)
        return outputs

    def source_tensor(self, name: str, shape, dtype: str, arguments: dict[str, Any]) -> keras.KerasTensor:
        """A tensor made from numbers alone."""
        output = keras.KerasTensor(shape, dtype)
        self._call(name, None, {}, (), arguments, output)
        return output

    def weight_tensor(self, variable: KerasVariable, dtype: str) -> keras.KerasTensor:
        """A weight as a tensor."""
        output = keras.KerasTensor(variable.shape, dtype)
        self._call(ConvertToTensor, None, {}, (variable,), {}, output)
        return output

    def note(self, comparison: Comparison) -> None:
        if not self.opaque and not _is_plumbing(comparison.source.rpartition(":")[0]):
            self.comparisons.add(comparison)

    @property
    def path(self) -> str:
        return self.paths[-1]

    @contextlib.contextmanager
    def _inside(self, layer) -> Iterator[None]:
        self.paths.append(self.names.path(layer, self.paths[-1]))
        yield
        # Left as it is when `call` fails, so that the message can name the layer.
        self.paths.pop()

    def _input(self, spec: InputSpec) -> keras.KerasTensor:
        shape = tuple(
            SizedInt(evaluate(dim, self.sizes), dim, self.note) if isinstance(dim, Expr) else dim for dim in spec.shape
        )
        return keras.KerasTensor(shape, spec.dtype, name=spec.name)

    def _call(self, kind, operation, attributes, args, kwargs, outputs) -> None:
        outputs = tree.flatten(outputs)
        self._tag(outputs, (args, kwargs, attributes))
        self.calls.append(
            Call(
                kind=kind,
                operation=operation,
                attributes=self._freeze(attributes),
                args=self._freeze(tuple(args)),
                kwargs=self._freeze(kwargs),
                outputs=[self._symbol(output) for output in outputs],
                path=self.path,
                source=_source_line(),
            )
        )

    def _tag(self, outputs, arguments) -> None:
        """Gives sizes that lost their expression in shape inference that of an equal size in what it had."""
        known: dict[int, SizedInt] = {}
        for sized in reversed(list(_sizes_in(arguments))):
            known[int(sized)] = SizedInt(sized, sized.expr, sized.note, sure=False)
        for output in outputs:
            output._shape = tuple(d if isinstance(d, SizedInt) else known.get(d, d) for d in output.shape)

    def _symbol(self, tensor: keras.KerasTensor) -> Symbol:
        if id(tensor) not in self.symbols:
            self.symbols[id(tensor)] = Symbol(tuple(tensor.shape), tensor.dtype)
            self.alive.append(tensor)
        return self.symbols[id(tensor)]

    def _freeze(self, x):
        """A copy of call arguments in which tensors, variables and arrays are ours."""
        if isinstance(x, keras.KerasTensor):
            return self._symbol(x)
        if isinstance(x, KerasVariable):
            return self.names.weight(x, keras.backend.standardize_dtype(x.dtype))
        if isinstance(x, np.ndarray | np.generic) or backend.is_tensor(x):
            with backend.AutocastScope(None):
                return Array(backend.convert_to_numpy(x), keras.backend.standardize_dtype(x.dtype))
        if isinstance(x, slice):
            return slice(self._freeze(x.start), self._freeze(x.stop), self._freeze(x.step))
        if isinstance(x, list | tuple):
            frozen = [self._freeze(item) for item in x]
            return frozen if isinstance(x, list) else tuple(frozen)
        if isinstance(x, dict):
            return {key: self._freeze(item) for key, item in x.items()}
        return x


class _Names:
    """Names of layers and weights from the attributes that hold them, which are the same in every process."""

    def __init__(self, root: keras.layers.Layer | dict[str, keras.layers.Layer]):
        self._paths: dict[int, str] = {}
        self._variables: dict[int, str] = {}
        self._weights: dict[tuple[int, str], Weight] = {}
        self._taken: set[str] = set()
        for name, layer in root.items() if isinstance(root, dict) else [("", root)]:
            self._walk(layer, name)

    def path(self, layer, parent: str) -> str:
        """The path of `layer`; if no attribute holds it, its class under the layer that called it."""
        if id(layer) not in self._paths:
            return _join(parent, _snake_case(type(layer).__name__))
        return self._paths[id(layer)]

    def weight(self, variable: KerasVariable, dtype: str) -> Weight:
        """The weight that `variable` holds, as seen in `dtype`."""
        key = (id(variable), dtype)
        if key not in self._weights:
            name = self._variables.get(id(variable), variable.name)
            if keras.backend.standardize_dtype(variable._dtype) != dtype:
                name = f"{name}.{dtype}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            with backend.AutocastScope(None):
                value = backend.convert_to_numpy(backend.cast(variable.value, dtype))
            self._weights[key] = Weight(name, np.asarray(value), dtype)
        return self._weights[key]

    def _walk(self, layer, path: str) -> None:
        if id(layer) in self._paths:
            return
        self._paths[id(layer)] = path
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            self._variables.setdefault(id(variable), _join(path, variable.name))
        for name, child in _children(layer):
            self._walk(child, _join(path, name))


def _children(layer) -> Iterator[tuple[str, Any]]:
    """The layers that `layer` holds, with names that do not depend on what was built before."""
    if isinstance(layer, keras.Sequential) or hasattr(layer, "_operations_by_depth"):
        counts: dict[str, int] = {}
        for child in layer.layers:
            automatic = _snake_case(type(child).__name__)
            if re.fullmatch(rf"{automatic}(_\d+)?", child.name):
                count = counts[automatic] = counts.get(automatic, -1) + 1
                yield (f"{automatic}_{count}" if count else automatic), child
            else:
                yield child.name, child
        return
    # Bookkeeping of Keras and the backends holds the same layers again; torch keeps attributes in `_modules`.
    attributes = {**vars(layer), **vars(layer).get("_modules", {})}
    for name in sorted(attributes):
        if name not in _BOOKKEEPING and not name.startswith("_self_"):
            yield from _layers_in(attributes[name], name.strip("_"))
    for child in layer._layers:
        yield _snake_case(type(child).__name__), child


_BOOKKEEPING = {"_layers", "_metrics", "_losses", "_functional", "_tracker", "_modules"}


def _layers_in(value, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.layers.Layer):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _layers_in(item, f"{name}.{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _layers_in(item, f"{name}.{key}")


def _sizes_in(x) -> Iterator[SizedInt]:
    """Sizes in call arguments, those of the first tensor first and numbers last."""
    numbers = []

    def walk(x):
        if isinstance(x, SizedInt):
            numbers.append(x)
        elif isinstance(x, keras.KerasTensor):
            yield from (d for d in x.shape if isinstance(d, SizedInt))
        elif isinstance(x, slice):
            yield from walk((x.start, x.stop, x.step))
        elif isinstance(x, list | tuple | dict):
            for item in x.values() if isinstance(x, dict) else x:
                yield from walk(item)

    yield from walk(x)
    yield from numbers


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _snake_case(name: str) -> str:
    return keras.src.utils.naming.to_snake_case(name)


# Of these Keras infers the first operand's shape, whatever the second one's is.
_BITWISE = (BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseLeftShift, BitwiseRightShift, LeftShift, RightShift)


def _broadcast_shape(operands):
    """The shape that `operands`, tensors and numbers, broadcast to."""
    return functools.reduce(operation_utils.broadcast_shapes, (list(getattr(x, "shape", ())) for x in operands))


def _public_attributes(operation) -> dict[str, Any]:
    return {key: value for key, value in vars(operation).items() if not key.startswith("_") and key != "name"}


# Where a call or a comparison comes from: code of these folders only carries out what layer code asked for.
_KERAS = os.path.dirname(keras.src.__file__)
_PLUMBING = tuple(os.path.join(_KERAS, "layers", part) for part in ("layer.py", "input_spec.py"))
_TORCH_MODULE = os.path.join("torch", "nn", "modules", "module.py")
_NUMPY = os.path.dirname(np.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = tuple(os.path.join(_PACKAGE, part) for part in ("ops", "export"))


@functools.cache
def _is_plumbing(filename: str) -> bool:
    if filename.startswith(_KERAS):
        return not filename.startswith(os.path.join(_KERAS, "layers")) or filename.startswith(_PLUMBING)
    return filename.startswith((*_OURS, _NUMPY)) or filename.endswith(("contextlib.py", _TORCH_MODULE))


def _source_line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_plumbing(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _failing_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if not _is_plumbing(frame.filename)]
    return f" ({lines[-1]})" if lines else ""


def _sync_jax_state(layer) -> None:
    """In a batch callback on JAX the trained values are in the trainer's hands until they are asked for."""
    if keras.backend.backend() == "jax" and getattr(layer, "_jax_state", None):
        layer.jax_state_sync()


# The patches: installed once however many traces run, inert in every thread that is not tracing.

_ACTIVE = threading.local()
_LOCK = threading.RLock()
_installed = 0


def _any_tracer() -> _Tracer | None:
    """The tracer of this thread."""
    return getattr(_ACTIVE, "tracer", None)


def _tracer() -> _Tracer | None:
    """The tracer of this thread, unless it is inside an operation's own code."""
    tracer = _any_tracer()
    return tracer if tracer is not None and not tracer.opaque else None


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    global _installed
    with _LOCK:
        _installed += 1
        if _installed == 1:
            _install()
    try:
        yield
    finally:
        with _LOCK:
            _installed -= 1
            if _installed == 0:
                _uninstall()


_originals: list[tuple[Any, str, Any]] = []
_MISSING = object()


def _install() -> None:
    for owner, name, replacement in _patches():
        _originals.append((owner, name, inspect.getattr_static(owner, name, _MISSING)))
        setattr(owner, name, replacement)


def _uninstall() -> None:
    while _originals:
        owner, name, original = _originals.pop()
        delattr(owner, name) if original is _MISSING else setattr(owner, name, original)


def _patches() -> Iterator[tuple[Any, str, Any]]:
    """Every attribute that is replaced while tracing, with its replacement."""
    for cls in (Operation, keras.layers.Layer):
        yield cls, "symbolic_call", _symbolic_call(cls.symbolic_call)
    yield keras.layers.Layer, "_maybe_build", _opaque(keras.layers.Layer._maybe_build)
    yield layer_module, "Node", _node(layer_module.Node)
    yield backend, "standardize_shape", _standardize_shape(backend.standardize_shape)
    for name, shape_of in _SOURCES.items():
        yield backend.numpy, name, _source(name, getattr(backend.numpy, name), shape_of)
    for name in ("cast", "convert_to_tensor"):
        yield backend.core, name, _number(getattr(backend.core, name))
    yield backend, "convert_to_tensor", _symbolic_is_a_tensor(backend.convert_to_tensor)
    yield activations.Mish, "static_call", staticmethod(_mish(activations.Mish.static_call))
    yield keras.layers.TimeDistributed, "call", _time_distributed(keras.layers.TimeDistributed.call)
    for name, operation in _OPERATORS.items():
        yield KerasVariable, name, _operator(getattr(KerasVariable, name), operation)
    yield keras.KerasTensor, "__jax_array__", _hidden(keras.KerasTensor.__jax_array__)
    # NumPy numbers on the left of an operator leave it to the `KerasTensor`.
    yield keras.KerasTensor, "__array_ufunc__", None
    for name in (*_OPERATORS, "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__"):
        if name != "__getitem__":
            yield keras.KerasTensor, name, _plain_number(getattr(keras.KerasTensor, name))
    for module in (keras.config, keras.backend):
        yield module, "backend", _neutral(module.backend)
    # Keras leaves `==` out, so that tensors can be looked for in lists: layer code would always read False.
    yield keras.KerasTensor, "__eq__", _equal
    yield nn, "check_conv_input_channels", _check_channels(nn.check_conv_input_channels)
    yield nn.BatchNorm, "compute_output_spec", _norm_spec(nn.BatchNorm.compute_output_spec)
    yield keras.layers.Layer, "add_loss", _not_traced(keras.layers.Layer.add_loss)
    yield KerasVariable, "assign", _forbidden(KerasVariable.assign, _tracer, "writes to a variable")
    yield KerasVariable, "__init__", _forbidden(KerasVariable.__init__, _any_tracer, "creates a variable")
    yield SeedGenerator, "next", _forbidden(SeedGenerator.next, _tracer, "draws random numbers")


def _symbolic_call(original):
    @functools.wraps(original)
    def symbolic_call(self, *args, **kwargs):
        tracer = _tracer()
        return original(self, *args, **kwargs) if tracer is None else tracer.symbolic_call(self, args, kwargs)

    return symbolic_call


def _node(original):
    def node(*args, **kwargs):
        return original(*args, **kwargs) if _any_tracer() is None else None

    return node


def _standardize_shape(original):
    @functools.wraps(original)
    def standardize_shape(shape):
        if _any_tracer() is None:
            return original(shape)
        shape = tuple(shape)
        plain = original(tuple(int(d) if isinstance(d, SizedInt) else d for d in shape))
        return tuple(d if isinstance(d, SizedInt) else p for d, p in zip(shape, plain, strict=True))

    return standardize_shape


def _arange_shape(start, stop=None, step=None, dtype=None):
    if stop is None:
        start, stop = 0, start
    if step in (None, 1) and type(start) is int and start == 0:
        return (stop,) if isinstance(stop, int) else (max(0, math.ceil(stop)),)
    return (max(0, math.ceil((float(stop) - float(start)) / float(1 if step is None else step))),)


# Functions that make tensors from numbers alone, with the shape of their result.
_SOURCES = {
    "arange": _arange_shape,
    "zeros": lambda shape, dtype=None: _as_shape(shape),
    "ones": lambda shape, dtype=None: _as_shape(shape),
    "full": lambda shape, fill_value, dtype=None: _as_shape(shape),
    "eye": lambda N, M=None, k=0, dtype=None: (N, N if M is None else M),  # noqa: N803 - Keras' own names
    "identity": lambda n, dtype=None: (n, n),
    "tri": lambda N, M=None, k=0, dtype=None: (N, N if M is None else M),  # noqa: N803
    "linspace": lambda start, stop, num=50, endpoint=True, retstep=False, dtype=None, axis=0: (num,),
}


def _as_shape(shape):
    return tuple(shape) if isinstance(shape, list | tuple) else (shape,)


def _source(name, original, shape_of):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def source(*args, **kwargs):
        tracer = _tracer()
        # Backend code that calls its own functions is not layer code.
        if tracer is None or not _called_by_ops():
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        arguments = dict(arguments.arguments)
        numbers = {key: value for key, value in arguments.items() if key not in ("shape", "dtype")}
        if not all(value is None or isinstance(value, bool | int | float) for value in numbers.values()):
            return original(*args, **kwargs)
        shape = shape_of(**arguments)
        small = {"shape": (1,), "N": 1, "M": 1, "n": 1, "num": 1}
        small = {"start": 0, "stop": 1, "step": 1} if name == "arange" else small
        sample = {key: _small(value, small.get(key)) for key, value in arguments.items()}
        dtype = keras.backend.standardize_dtype(original(**sample).dtype)
        return tracer.source_tensor(name, shape, dtype, arguments)

    return source


def _small(value, small):
    """A stand-in of the same type, with which only the result's dtype is asked for."""
    if small is None or value is None:
        return int(value) if isinstance(value, SizedInt) else value
    return float(small) if isinstance(value, float) else small


def _number(original):
    """Integers that become tensors are recorded, all of them: a size may look like a width and a width like a size."""

    @functools.wraps(original)
    def convert(x, dtype=None, **kwargs):
        tracer = _tracer()
        if tracer is None or not _called_by_ops():
            return original(x, dtype=dtype, **kwargs)
        if isinstance(x, KerasVariable) and "float" in keras.backend.standardize_dtype(x.dtype):
            # What is then computed of a weight alone is left to the graph, which keeps the weight's name.
            return tracer.weight_tensor(x, keras.backend.standardize_dtype(dtype or x.dtype))
        if type(x) not in (int, SizedInt):
            return original(x, dtype=dtype, **kwargs)
        dtype = keras.backend.standardize_dtype(dtype or "int32")
        return tracer.source_tensor("full", (), dtype, {"shape": (), "fill_value": x, "dtype": dtype})

    return convert


def _called_by_ops() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("keras.src.ops")


def _symbolic_is_a_tensor(original):
    """Some activations convert what they are given with the backend's own function."""

    @functools.wraps(original)
    def convert_to_tensor(x, *args, **kwargs):
        symbolic = _tracer() is not None and isinstance(x, keras.KerasTensor)
        return keras.ops.convert_to_tensor(x, *args, **kwargs) if symbolic else original(x, *args, **kwargs)

    return convert_to_tensor


def _plain_number(original):
    """A tensor's operators take a NumPy `float64`, which is a `float`, for a plain number on every backend."""

    @functools.wraps(original)
    def operator(self, other):
        plain = _any_tracer() is not None and isinstance(other, float)
        return original(self, float(other) if plain else other)

    return operator


def _neutral(original):
    """Layer code that asks for the backend may call it; when that failed it is told of one that it does not know."""

    @functools.wraps(original)
    def backend():
        tracer = _tracer()
        if tracer is None or sys._getframe(1).f_code.co_filename.startswith((_KERAS, _PACKAGE)):
            return original()
        tracer.asked = True
        return "numpy" if tracer.neutral else original()

    return backend


def _equal(self, other):
    plain = isinstance(other, keras.KerasTensor | KerasVariable | bool | int | float | np.ndarray | np.generic)
    asked = plain or backend.is_tensor(other)
    if not asked or _tracer() is None or _is_plumbing(sys._getframe(1).f_code.co_filename):
        return NotImplemented
    return keras.ops.equal(self, other)


def _check_channels(original):
    """Keras' shape inference refuses convolutions in groups, whose kernels have fewer channels than the inputs."""

    @functools.wraps(original)
    def check(inputs, kernel, data_format):
        channels = inputs.shape[-1 if data_format == "channels_last" else 1]
        if _any_tracer() is None or channels % kernel.shape[-2]:
            original(inputs, kernel, data_format)

    return check


def _norm_spec(original):
    """Keras' shape inference looks at the scale where there is none, if there is an offset."""

    @functools.wraps(original)
    def compute_output_spec(self, x, mean, variance, offset, scale):
        if _any_tracer() is None or scale is not None:
            return original(self, x, mean, variance, offset, scale)
        return original(self, x, mean, variance, offset, mean)

    return compute_output_spec


def _not_traced(original):
    @functools.wraps(original)
    def ignored(*args, **kwargs):
        return original(*args, **kwargs) if _any_tracer() is None else None

    return ignored


def _mish(original):
    def static_call(x):
        return activations.Mish().symbolic_call(x) if any_symbolic_tensors((x,)) else original(x)

    return static_call


def _time_distributed(original):
    """Keras loops over a known number of steps; here they are rows of one batch."""

    @functools.wraps(original)
    def call(self, inputs, training=None, mask=None):
        if _tracer() is None:
            return original(self, inputs, training=training, mask=mask)
        lead = keras.ops.shape(inputs)[:2]

        def rows(x):
            return keras.ops.reshape(x, (lead[0] * lead[1], *x.shape[2:]))

        kwargs = {"mask": rows(mask)} if self.layer._call_has_mask_arg and mask is not None else {}
        kwargs |= {"training": training} if self.layer._call_has_training_arg else {}
        outputs = self.layer.call(rows(inputs), **kwargs)
        return keras.ops.reshape(outputs, (*lead, *outputs.shape[1:]))

    return call


# Python operators of variables go to the backend at once; with a symbolic operand they are operations.
_OPERATORS = {
    "__add__": lambda a, b: keras.ops.add(a, b),
    "__radd__": lambda a, b: keras.ops.add(b, a),
    "__sub__": lambda a, b: keras.ops.subtract(a, b),
    "__rsub__": lambda a, b: keras.ops.subtract(b, a),
    "__mul__": lambda a, b: keras.ops.multiply(a, b),
    "__rmul__": lambda a, b: keras.ops.multiply(b, a),
    "__truediv__": lambda a, b: keras.ops.true_divide(a, b),
    "__rtruediv__": lambda a, b: keras.ops.true_divide(b, a),
    "__matmul__": lambda a, b: keras.ops.matmul(a, b),
    "__rmatmul__": lambda a, b: keras.ops.matmul(b, a),
    "__pow__": lambda a, b: keras.ops.power(a, b),
    "__rpow__": lambda a, b: keras.ops.power(b, a),
    "__getitem__": lambda a, b: keras.ops.take(a, b, axis=0),
}


def _operator(original, operation):
    @functools.wraps(original)
    def operator(self, other):
        return original(self, other) if not any_symbolic_tensors((other,)) else operation(self, other)

    return operator


def _hidden(original):
    """Without `__jax_array__` a JAX array on the left of an operator leaves it to the `KerasTensor` on its right."""

    def attribute(self):
        if _any_tracer() is not None:
            raise AttributeError("__jax_array__")
        return original.__get__(self)

    return property(attribute)


def _opaque(original):
    """Keras builds a layer that has no `build` by running it once, which is not part of the trace."""

    @functools.wraps(original)
    def maybe_build(self, call_spec):
        tracer = _any_tracer()
        if tracer is None or self.built:
            return original(self, call_spec)
        tracer.opaque += 1
        try:
            return original(self, call_spec)
        finally:
            tracer.opaque -= 1

    return maybe_build


def _forbidden(original, active: Callable[[], _Tracer | None], what: str):
    @functools.wraps(original)
    def forbidden(*args, **kwargs):
        tracer = active()
        if tracer is None:
            return original(*args, **kwargs)
        where = f"Layer '{tracer.path}'" if tracer.path else "The model"
        raise TraceError(f"{where} {what} during inference ({_source_line()}): a graph cannot do this.")

    return forbidden


@contextlib.contextmanager
def _keras_names_restored() -> Iterator[None]:
    """Tracing makes tensors and operations; these must not shift the names of the user's next layers."""
    counts = global_state.get_global_attribute("object_name_uids")
    saved = None if counts is None else counts.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", saved)
