"""Runs a Keras model on symbolic tensors of known shape, every layer opened, and records its operations.

With patches.py the part that knows Keras' internals. In Keras 3 layers and operations are both `keras.Operation`;
called on a `KerasTensor` they infer shapes and note a `Node`. Here, while tracing, a layer runs its `call` instead, the
nodes are kept in a list of our own rather than in the user's objects, and functions that make tensors from
numbers (`arange`, …) are recorded too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src import backend, tree
from keras.src.backend.common import global_state
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.ops import operation_utils
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

from keras_transformer.export.dims import Comparison, Dim, Expr, SizedInt, Sizes, evaluate
from keras_transformer.export.errors import TraceError
from keras_transformer.export.names import Names
from keras_transformer.export.patches import ACTIVE, any_tracer, patched
from keras_transformer.export.source_lines import failing_line, is_plumbing, source_line

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
    names = Names(root)
    with patched(), _keras_names_restored():
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

    def __init__(self, sizes: Sizes, names: Names, keep_whole, neutral: bool = False):
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
        previous, ACTIVE.tracer = any_tracer(), self
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
                    f"The model fails on symbolic tensors{where}{failing_line(error)}, traced at sizes {self.sizes}. "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
            if self.asked and not self.neutral:
                raise _BackendAsked from failure
            raise failure from failure.__cause__
        finally:
            ACTIVE.tracer = previous
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
        if not self.opaque and not is_plumbing(comparison.source.rpartition(":")[0]):
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
                source=source_line(),
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


# Of these Keras infers the first operand's shape, whatever the second one's is.
_BITWISE = (BitwiseAnd, BitwiseOr, BitwiseXor, BitwiseLeftShift, BitwiseRightShift, LeftShift, RightShift)


def _broadcast_shape(operands):
    """The shape that `operands`, tensors and numbers, broadcast to."""
    return functools.reduce(operation_utils.broadcast_shapes, (list(getattr(x, "shape", ())) for x in operands))


def _public_attributes(operation) -> dict[str, Any]:
    return {key: value for key, value in vars(operation).items() if not key.startswith("_") and key != "name"}


def _sync_jax_state(layer) -> None:
    """In a batch callback on JAX the trained values are in the trainer's hands until they are asked for."""
    if keras.backend.backend() == "jax" and getattr(layer, "_jax_state", None):
        layer.jax_state_sync()


@contextlib.contextmanager
def _keras_names_restored() -> Iterator[None]:
    """Tracing makes tensors and operations; these must not shift the names of the user's next layers."""
    counts = global_state.get_global_attribute("object_name_uids")
    saved = None if counts is None else counts.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", saved)
