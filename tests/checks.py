"""What every layer must pass, and the little that depends on the backend: gradients and compilation."""

import inspect
import os
import tempfile

import keras
import numpy as np
from keras import ops

# float32 sums of a few dozen terms of size 1 against float64: a few units in the last place of the largest one.
TOLERANCE = 2e-5
# One pure and one mixed policy, one of each half precision: the four combinations differ in nothing else.
POLICIES = ("float16", "mixed_bfloat16")


def numpy(x):
    """Tensors in any structure as NumPy arrays; half precision widened to float32."""

    def convert(tensor):
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return ops.convert_to_numpy(ops.cast(tensor, "float32") if "float16" in dtype else tensor)

    return keras.tree.map_structure(convert, x)


def randomize(layer, seed=0, scale=0.3):
    """Gives every weight random values, so that a bias or a norm's gain that is left out shows."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        weight.assign(rng.normal(1.0 if weight.name == "gamma" else 0.0, scale, weight.shape))
    return layer


def named_weights(layer):
    """The layer's trainable weights by their names within it, such as "self_attention/query/kernel"."""
    names = {}

    def collect(owner, prefix):
        for variable in owner._trainable_variables:
            names[prefix + variable.name] = variable
        for child in owner._layers:
            collect(child, f"{prefix}{child.name}/")

    collect(layer, "")
    return names


def weights_of(layer):
    """The values of `named_weights` in float64."""
    return {name: numpy(variable.value).astype("float64") for name, variable in named_weights(layer).items()}


def named_gradients(layer, loss, *args, **kwargs):
    """The layer's outputs, as tensors, and the gradients, as arrays by the names of `named_weights`."""
    outputs, found = outputs_and_gradients(layer, loss, *args, **kwargs)
    by_variable = {id(v): g for v, g in zip(layer.trainable_variables, found, strict=True)}
    return outputs, {name: by_variable[id(variable)] for name, variable in named_weights(layer).items()}


def gradients(layer, loss, *args, **kwargs):
    """The gradients of `loss(layer(*args, **kwargs))` with respect to the layer's trainable weights, as arrays."""
    return outputs_and_gradients(layer, loss, *args, **kwargs)[1]


def outputs_and_gradients(layer, loss, *args, jit=None, **kwargs):
    """The layer's outputs, as tensors, and the gradients, as arrays.

    Args:
        layer: the layer; `args` and `kwargs` are what it is called with.
        loss: a function of its outputs.
        jit: compiled by XLA or operation by operation; on torch always the latter. None: as is quickest for one call,
            since JAX compiles each operation for each shape when run eagerly.
    """
    backend = keras.config.backend()
    args, kwargs = keras.tree.map_structure(_tensor, (args, kwargs))
    if backend == "tensorflow":
        import tensorflow as tf

        def function():
            with tf.GradientTape() as tape:
                outputs = layer(*args, **kwargs)
                value = loss(outputs)
            return outputs, tape.gradient(value, [v.value for v in layer.trainable_variables])

        outputs, result = tf.function(function, jit_compile=True)() if jit else function()
    elif backend == "jax":
        import jax

        def function(trainable):
            # Not `stateless_call`: it skips `__call__`, and with it the casts of mixed precision.
            with keras.StatelessScope(zip(layer.trainable_variables, trainable, strict=True)):
                outputs = layer(*args, **kwargs)
                return loss(outputs), outputs

        trainable = [v.value for v in layer.trainable_variables]
        function = jax.grad(function, has_aux=True)
        result, outputs = (function if jit is False else jax.jit(function))(trainable)
    else:
        for variable in layer.trainable_variables:
            variable.value.grad = None
        outputs = layer(*args, **kwargs)
        loss(outputs).backward()
        result = [v.value.grad for v in layer.trainable_variables]
    for variable, gradient in zip(layer.trainable_variables, result, strict=True):
        assert keras.backend.standardize_dtype(gradient.dtype) == variable.dtype, variable.path
    return outputs, [numpy(ops.convert_to_tensor(gradient)) for gradient in result]


def compiled(function):
    """The function compiled by XLA; itself on torch, whose compiler is no concern of layers."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if keras.config.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


def quick(function):
    """The function itself, but compiled on JAX, which compiles each operation for each shape when run eagerly."""
    return compiled(function) if keras.config.backend() == "jax" else function


def check_layer(cls, config, inputs, *, call=None, trainable=True):
    """Runs the shared checks.

    Args:
        cls: the layer's class.
        config: constructor arguments: every one, each with a value that is not its default, but for dropout.
        inputs: the arrays that it is called with, by argument name.
        call: other arguments of the call.
        trainable: whether the layer has weights and gradients.
    """
    call = call or {}
    _check_config(cls, config)
    layer = _check_build(cls, config, inputs, call)
    expected = numpy(layer(**inputs, **call))
    _check_symbolic(layer, inputs, call, expected)
    _check_compiled(layer, inputs, call, expected)
    _check_saved(layer, inputs, call, expected)
    for policy in POLICIES:
        _check_policy(cls, config, policy, inputs, call, trainable)


def _check_config(cls, config):
    parameters = dict(inspect.signature(cls.__init__).parameters)
    for extra in ("self", "kwargs"):
        parameters.pop(extra)
    assert set(parameters) == set(config), "the test gives every constructor argument"
    for name, parameter in parameters.items():
        assert config[name] != parameter.default or name == "dropout", f"{name} has its default value"
    first = cls(**config, name="named", dtype="mixed_bfloat16").get_config()
    assert set(parameters) | {"name", "dtype", "trainable"} <= set(first)
    assert cls.from_config(first).get_config() == first


def _check_build(cls, config, inputs, call):
    """`build` alone makes every weight that a call makes."""
    layer, called = cls(**config), cls(**config)
    _build(layer, inputs)
    built = [(w.name, tuple(w.shape)) for w in layer.weights]
    called(**inputs, **call)
    assert [(w.name, tuple(w.shape)) for w in called.weights] == built
    layer(**inputs, **call)
    assert [(w.name, tuple(w.shape)) for w in layer.weights] == built
    return randomize(layer)


def _check_symbolic(layer, inputs, call, expected):
    """The spec of the output equals the output, with known shapes and with free ones."""
    for free in (0, 1, 2):
        specs = {
            name: keras.KerasTensor((None,) * free + array.shape[free:], array.dtype) for name, array in inputs.items()
        }
        outputs = layer(**specs, **call)
        keras.tree.assert_same_structure(outputs, expected)
        for spec, array in zip(keras.tree.flatten(outputs), keras.tree.flatten(expected), strict=True):
            assert spec.dtype == array.dtype
            assert len(spec.shape) == array.ndim
            assert all(size in (None, actual) for size, actual in zip(spec.shape, array.shape, strict=True))
            assert free or spec.shape == array.shape


def _check_compiled(layer, inputs, call, expected):
    tensors = [_tensor(array) for array in inputs.values()]
    function = compiled(lambda *args: layer(**dict(zip(inputs, args, strict=True)), **call))
    close(numpy(function(*tensors)), expected)


def _check_saved(layer, inputs, call, expected):
    symbolic = {
        name: keras.Input(array.shape[1:], batch_size=array.shape[0], dtype=str(array.dtype), name=name)
        for name, array in inputs.items()
    }
    model = keras.Model(symbolic, layer(**symbolic, **call))
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
    outputs = numpy(loaded({name: _tensor(array) for name, array in inputs.items()}))
    # Keras turns the tuples of a loaded model's outputs into lists.
    close(keras.tree.flatten(outputs), keras.tree.flatten(expected), 1e-6)
    assert [w.path.split("/")[1:] for w in loaded.weights] == [w.path.split("/")[1:] for w in model.weights]


def _check_policy(cls, config, policy, inputs, call, trainable):
    """Outputs have the compute dtype, outputs and gradients are finite, variables have the variable dtype."""
    layer = cls(**config, dtype=policy)
    _build(layer, inputs)

    def loss(outputs):
        first = keras.tree.flatten(outputs)[0]
        return ops.mean(ops.square(ops.cast(first, "float32")))

    if trainable:
        assert {keras.backend.standardize_dtype(w.dtype) for w in layer.weights} == {layer.variable_dtype}
        outputs, found = outputs_and_gradients(layer, loss, **inputs, **call)
        assert all(np.isfinite(gradient).all() for gradient in found)
    else:
        outputs = layer(**inputs, **call)
    for tensor in keras.tree.flatten(outputs):
        assert keras.backend.standardize_dtype(tensor.dtype) in (layer.compute_dtype, "bool")
        assert np.isfinite(numpy(tensor)).all()


def _build(layer, inputs):
    """Builds the layer as Keras does at its first call."""
    shapes = {name: (None, *array.shape[1:]) for name, array in inputs.items()}
    names = [name.removesuffix("_shape") for name in inspect.signature(layer.build).parameters]
    layer.build(*([shapes[name] for name in names if name in shapes] or [next(iter(shapes.values()))]))


def close(actual, expected, tolerance=TOLERANCE):
    """Structures of arrays agree to an absolute tolerance."""
    keras.tree.assert_same_structure(actual, expected)
    for one, other in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def _tensor(x):
    return ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
