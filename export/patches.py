"""What is replaced in Keras while a trace runs: installed once however many run, inert in every other thread."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src import backend
from keras.src.activations import activations
from keras.src.backend.common.keras_tensor import any_symbolic_tensors
from keras.src.backend.common.variables import Variable as KerasVariable
from keras.src.layers import layer as layer_module
from keras.src.ops import nn
from keras.src.ops.operation import Operation
from keras.src.random.seed_generator import SeedGenerator

from keras_transformer.export.dims import SizedInt
from keras_transformer.export.errors import TraceError
from keras_transformer.export.source_lines import KERAS, PACKAGE, is_plumbing, source_line

if TYPE_CHECKING:
    from keras_transformer.export.trace import _Tracer

ACTIVE = threading.local()
_LOCK = threading.RLock()
_installed = 0


def any_tracer() -> _Tracer | None:
    """The tracer of this thread."""
    return getattr(ACTIVE, "tracer", None)


def active_tracer() -> _Tracer | None:
    """The tracer of this thread, unless it is inside an operation's own code."""
    tracer = any_tracer()
    return tracer if tracer is not None and not tracer.opaque else None


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """The patches are there inside, and gone when the last of those that run has left."""
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
    yield KerasVariable, "assign", _forbidden(KerasVariable.assign, active_tracer, "writes to a variable")
    yield KerasVariable, "__init__", _forbidden(KerasVariable.__init__, any_tracer, "creates a variable")
    yield SeedGenerator, "next", _forbidden(SeedGenerator.next, active_tracer, "draws random numbers")


def _symbolic_call(original):
    @functools.wraps(original)
    def symbolic_call(self, *args, **kwargs):
        tracer = active_tracer()
        return original(self, *args, **kwargs) if tracer is None else tracer.symbolic_call(self, args, kwargs)

    return symbolic_call


def _node(original):
    def node(*args, **kwargs):
        return original(*args, **kwargs) if any_tracer() is None else None

    return node


def _standardize_shape(original):
    @functools.wraps(original)
    def standardize_shape(shape):
        if any_tracer() is None:
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
        tracer = active_tracer()
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
        tracer = active_tracer()
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
        symbolic = active_tracer() is not None and isinstance(x, keras.KerasTensor)
        return keras.ops.convert_to_tensor(x, *args, **kwargs) if symbolic else original(x, *args, **kwargs)

    return convert_to_tensor


def _plain_number(original):
    """A tensor's operators take a NumPy `float64`, which is a `float`, for a plain number on every backend."""

    @functools.wraps(original)
    def operator(self, other):
        plain = any_tracer() is not None and isinstance(other, float)
        return original(self, float(other) if plain else other)

    return operator


def _neutral(original):
    """Layer code that asks for the backend may call it; when that failed it is told of one that it does not know."""

    @functools.wraps(original)
    def backend():
        tracer = active_tracer()
        if tracer is None or sys._getframe(1).f_code.co_filename.startswith((KERAS, PACKAGE)):
            return original()
        tracer.asked = True
        return "numpy" if tracer.neutral else original()

    return backend


def _equal(self, other):
    plain = isinstance(other, keras.KerasTensor | KerasVariable | bool | int | float | np.ndarray | np.generic)
    asked = plain or backend.is_tensor(other)
    if not asked or active_tracer() is None or is_plumbing(sys._getframe(1).f_code.co_filename):
        return NotImplemented
    return keras.ops.equal(self, other)


def _check_channels(original):
    """Keras' shape inference refuses convolutions in groups, whose kernels have fewer channels than the inputs."""

    @functools.wraps(original)
    def check(inputs, kernel, data_format):
        channels = inputs.shape[-1 if data_format == "channels_last" else 1]
        if any_tracer() is None or channels % kernel.shape[-2]:
            original(inputs, kernel, data_format)

    return check


def _norm_spec(original):
    """Keras' shape inference looks at the scale where there is none, if there is an offset."""

    @functools.wraps(original)
    def compute_output_spec(self, x, mean, variance, offset, scale):
        if any_tracer() is None or scale is not None:
            return original(self, x, mean, variance, offset, scale)
        return original(self, x, mean, variance, offset, mean)

    return compute_output_spec


def _not_traced(original):
    @functools.wraps(original)
    def ignored(*args, **kwargs):
        return original(*args, **kwargs) if any_tracer() is None else None

    return ignored


def _mish(original):
    def static_call(x):
        return activations.Mish().symbolic_call(x) if any_symbolic_tensors((x,)) else original(x)

    return static_call


def _time_distributed(original):
    """Keras loops over a known number of steps; here they are rows of one batch."""

    @functools.wraps(original)
    def call(self, inputs, training=None, mask=None):
        if active_tracer() is None:
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
        if any_tracer() is not None:
            raise AttributeError("__jax_array__")
        return original.__get__(self)

    return property(attribute)


def _opaque(original):
    """Keras builds a layer that has no `build` by running it once, which is not part of the trace."""

    @functools.wraps(original)
    def maybe_build(self, call_spec):
        tracer = any_tracer()
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
        raise TraceError(f"{where} {what} during inference ({source_line()}): a graph cannot do this.")

    return forbidden
