"""What every layer and model must pass, and the little that depends on the backend: gradients and compilation."""

import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import onnxruntime
from keras import ops
from keras.src.backend import get_keras_mask

from keras_transformer.export import export_onnx
from keras_transformer.models import Encoder

# float32 sums of a few dozen terms of size 1 against float64: a few units in the last place of the largest one.
TOLERANCE = 2e-5
# Half precision has 8 or 11 bits, and the largest values here are near 4; errors add up over two blocks.
HALF_TOLERANCES = {"bfloat16": 0.1, "float16": 0.01}
POLICIES = ("float16", "bfloat16", "mixed_float16", "mixed_bfloat16")


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


def roughen(layer, seed=3, scale=0.1):
    """Moves every weight a little, so that no bias is 0 and no gain is 1; returns the layer."""
    rng = np.random.default_rng(seed)
    for weight in layer.weights:
        weight.assign(weight + rng.normal(scale=scale, size=weight.shape))
    return layer


def random_values(weight, name, seed):
    """Values for a weight called `name`, of sizes that layers keep: norms' scales near 1, kernels by their inputs."""
    noise = np.random.default_rng(seed).normal(size=weight.shape)
    if "variance" in name:
        return (0.5 + np.abs(noise)).astype("float32")
    if len(weight.shape) > 1:
        return (noise / np.sqrt(np.prod(weight.shape[:-1]) if "embedding" not in name else 2)).astype("float32")
    return (0.2 * noise + (name in ("gamma", "scale"))).astype("float32")


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


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and what it is called with in the shared checks.

    Attributes:
        cls: the layer's class.
        config: constructor arguments: every one.
        inputs: the arrays that it is called with, by argument name; the first axis is the batch, the second a length.
        call: other arguments of the call.
        masks: for each input that may carry an implicit mask, the argument that takes it explicitly, None if none does.
        carries: the input whose mask the first output carries; None if it carries none. Ids mean the mask `ids != 0`.
        fixed: whether the second axis is no length, and has to have the size that it has.
    """

    cls: type
    config: dict
    inputs: dict
    call: dict = dataclasses.field(default_factory=dict)
    masks: dict = dataclasses.field(default_factory=dict)
    carries: str | None = "x"
    fixed: bool = False

    def instance(self, **kwargs):
        """An object of the class."""
        return self.cls(**self.config, **kwargs)

    @property
    def arguments(self):
        """The inputs and their explicit masks."""
        return {**self.inputs, **{mask: padding(self.inputs[name]) for name, mask in self.masks.items() if mask}}

    def make(self, seed=0, **kwargs):
        """A layer that is built and has random weights."""
        layer = self.instance(**kwargs)
        self.build(layer)
        return randomize(layer, seed)

    def build(self, layer):
        """Builds the layer as Keras does at its first call."""
        shapes = {name: (None, *array.shape[1:]) for name, array in self.inputs.items()}
        names = [name.removesuffix("_shape") for name in inspect.signature(layer.build).parameters]
        layer.build(*([shapes[name] for name in names if name in shapes] or [next(iter(shapes.values()))]))

    def run(self, layer, arguments):
        """What the layer returns for arrays, tensors or specs by argument name."""
        args, kwargs = self._as_called(arguments)
        return layer(*args, **kwargs)

    def gradients(self, layer, jit):
        """The layer's outputs, as tensors, and its gradients, as arrays."""

        def loss(outputs):
            return ops.mean(ops.square(ops.cast(keras.tree.flatten(outputs)[0], "float32")))

        args, kwargs = self._as_called(self.arguments)
        return outputs_and_gradients(layer, loss, *args, jit=jit, **kwargs)

    def functional(self, layer):
        """The functional model that is the layer alone, with batch and lengths free."""
        symbolic = {
            name: keras.Input(
                array.shape[1:] if self.fixed else (None, *array.shape[2:]), None, str(array.dtype), name=name
            )
            for name, array in self.arguments.items()
        }
        return keras.Model(symbolic, self.run(layer, symbolic))

    def saved(self, layer):
        """The model that is saved for the layer."""
        return self.functional(layer)

    def _as_called(self, arguments):
        return (), {**arguments, **self.call}


class ModelCase(Case):
    """A model: it takes its inputs in one dict, and knows the shapes of its weights by itself."""

    def build(self, layer):
        layer.build()

    def saved(self, layer):
        return layer

    def _as_called(self, arguments):
        return (arguments,), self.call


class HeadCase(ModelCase):
    """A model that is given another one, `encoder`, here the arguments of an `Encoder`."""

    def instance(self, **kwargs):
        encoder = Encoder(**self.config["encoder"], dtype=kwargs.get("dtype"))
        return self.cls(**{**self.config, "encoder": encoder}, **kwargs)


def check_layer(case, directory, policies=POLICIES, gradients=True, exported=True):
    """Runs the shared checks of a layer; `directory` is for files. What is saved is checked by `reload`."""
    _check_config(case)
    _check_build(case)
    layer = case.make()
    expected = numpy(case.run(layer, case.arguments))
    _check_symbolic(case, layer, expected)
    _check_compiled(case, layer, expected, gradients)
    for policy in policies:
        _check_policy(case, policy, expected)
    _check_masks(case, layer)
    if exported:
        _check_exported(case, layer, directory, expected)


def check_model(case, directory):
    """The same of a `ModelCase`, but for what its layers have shown: XLA's gradients, pure half precision, and, where
    shapes are compiled, the graphs, which are the same on all backends.
    """
    here = keras.config.backend() == "torch"
    check_layer(case, directory, ("mixed_float16", "mixed_bfloat16"), gradients=False, exported=here)


def _check_config(case):
    parameters = dict(inspect.signature(case.cls.__init__).parameters)
    for extra in ("self", "kwargs"):
        parameters.pop(extra)
    assert set(parameters) == set(case.config), "the test gives every constructor argument"
    first = case.instance(name="named", dtype="mixed_bfloat16", trainable=False).get_config()
    for name, value in case.config.items():
        if name == "encoder":
            continue
        if name.endswith("initializer"):
            value = keras.initializers.serialize(keras.initializers.get(value))
        assert first[name] == value, name
    second = case.cls.from_config(first)
    assert second.get_config() == first
    assert (second.name, second.dtype_policy.name, second.trainable) == ("named", "mixed_bfloat16", False)


def _check_build(case):
    """`build` alone makes every weight that a call makes."""
    layer, called = case.instance(), case.instance()
    case.build(layer)
    built = [(w.name, tuple(w.shape)) for w in layer.weights]
    for one in (called, layer):
        case.run(one, case.arguments)
        assert [(w.name, tuple(w.shape)) for w in one.weights] == built


def _check_symbolic(case, layer, expected):
    """The spec of the output equals the output, with known shapes and with free ones."""
    for free in (0, 1) if case.fixed else (0, 1, 2):
        specs = {
            name: keras.KerasTensor((None,) * free + array.shape[free:], array.dtype)
            for name, array in case.arguments.items()
        }
        outputs = case.run(layer, specs)
        keras.tree.assert_same_structure(outputs, expected)
        for spec, array in zip(keras.tree.flatten(outputs), keras.tree.flatten(expected), strict=True):
            assert spec.dtype == array.dtype
            assert len(spec.shape) == array.ndim
            assert all(size in (None, actual) for size, actual in zip(spec.shape, array.shape, strict=True))
            assert free or spec.shape == array.shape


def _check_compiled(case, layer, expected, gradients):
    """XLA gives the same outputs and gradients; torch's compiler is no concern of layers."""
    if not (gradients and layer.trainable_variables):
        tensors = [_tensor(array) for array in case.arguments.values()]
        function = compiled(lambda *args: case.run(layer, dict(zip(case.arguments, args, strict=True))))
        close(numpy(function(*tensors)), expected)
    elif keras.config.backend() != "torch":
        (outputs, one), (_, other) = (case.gradients(layer, jit) for jit in (True, False))
        close(numpy(outputs), expected)
        # By the largest of all, since the gradient of the keys' bias is the rounding of what cancels.
        close(one, other, TOLERANCE * max(np.abs(gradient).max() for gradient in other))


def _check_policy(case, policy, expected):
    """Outputs have the compute dtype and float32's values, gradients are finite and have the dtype of their weights."""
    layer = case.make(dtype=policy)
    assert {w.dtype for w in layer.weights} <= {layer.variable_dtype}
    if layer.trainable_variables:
        # Not compiled: the cases have shapes in common, so that JAX compiles few operations.
        outputs, found = case.gradients(layer, jit=False)
        assert all(np.isfinite(gradient).all() for gradient in found)
    else:
        outputs = case.run(layer, case.arguments)
    for tensor in keras.tree.flatten(outputs):
        assert keras.backend.standardize_dtype(tensor.dtype) in (layer.compute_dtype, "bool")
    close(numpy(outputs), expected, HALF_TOLERANCES[layer.compute_dtype])


def _check_masks(case, layer):
    """Implicit masks do what explicit ones do, to every layer that is fed by a tensor, and go on to what follows."""
    masks = {name: padding(array) for name, array in case.inputs.items()}
    inputs = {name: _masked(a, masks[name]) if name in case.masks else _tensor(a) for name, a in case.inputs.items()}
    plain = {name: _tensor(numpy(tensor)) for name, tensor in inputs.items()}
    explicit = {argument: masks[name] for name, argument in case.masks.items() if argument}
    for one in (layer, case.make(seed=1)):
        outputs = case.run(one, inputs)
        close(numpy(outputs), numpy(case.run(one, {**plain, **explicit})), 1e-6)
        output = keras.tree.flatten(outputs)[0]
        if explicit:
            unmasked = keras.tree.flatten(case.run(one, plain))[0]
            assert np.abs(numpy(output) - numpy(unmasked)).max() > 1e-2, "the masks play a part"
        for name in case.masks:
            np.testing.assert_array_equal(numpy(implicit_mask(inputs[name])), masks[name])
        if case.carries is None:
            assert implicit_mask(output) is None
            continue
        np.testing.assert_array_equal(numpy(implicit_mask(output)), masks[case.carries])
        if output.shape == inputs[case.carries].shape:
            residual = keras.layers.Add()([inputs[case.carries], output])
            np.testing.assert_array_equal(numpy(implicit_mask(residual)), masks[case.carries])


def _check_exported(case, layer, directory, expected):
    """ONNX Runtime gives the layer's outputs at the case's own sizes and smaller ones: the exporter is told none."""
    path = directory / "model.onnx"
    export_onnx(case.functional(layer), path, verify=False, verbose=False)
    cut = 0 if case.fixed else 4
    shorter = {name: array[:1, : array.shape[1] - cut] for name, array in case.arguments.items()}
    of_shorter = quick(lambda arguments: case.run(layer, arguments))(keras.tree.map_structure(_tensor, shorter))
    for arguments, outputs in ((case.arguments, expected), (shorter, numpy(of_shorter))):
        close(run_onnx(path, arguments), keras.tree.flatten(outputs))


def run_onnx(path, inputs, optimised=True):
    """The outputs of the graph at `path`, half precision widened to float32."""
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    outputs = session.run(None, {name: array for name, array in inputs.items() if name in wanted})
    return [x.astype("float32") if x.dtype == np.float16 else x for x in outputs]


# Run where nothing but the package was imported, and no layer made: Keras' automatic numbering starts anew.
_RELOAD = """
import pathlib, sys
import keras, keras_transformer, numpy
for folder in pathlib.Path(sys.argv[1]).iterdir():
    with numpy.load(folder / "given.npz") as file:
        given = dict(file)
    labels = given.pop("labels", None)
    loaded = keras.saving.load_model(folder / "model.keras")
    other = type(loaded).from_config(loaded.get_config())
    other.load_weights(folder / "model.weights.h5")
    found = {}
    for kind, model in ("weight", loaded), ("weight by itself", other):
        found |= {f"{kind} {number}, {weight.name}": weight for number, weight in enumerate(model.weights)}
    # Compiled on JAX, which compiles each operation for each shape otherwise.
    outputs = loaded.predict_on_batch(given) if keras.config.backend() == "jax" else loaded(given)
    found |= {f"output {number}": output for number, output in enumerate(keras.tree.flatten(outputs))}
    if labels is not None:
        found |= {f"optimizer {number}": value for number, value in enumerate(loaded.optimizer.variables)}
        found["loss"] = loaded.compute_loss(given, labels, outputs)
    numpy.savez(folder / "found.npz", **{name: keras.ops.convert_to_numpy(value) for name, value in found.items()})
"""


def reload(models, directory, setup=""):
    """Saves models, loads them all in one new process, and says by name what that found and what was to be found.

    Args:
        models: by name a model, its inputs by name, and labels if it is compiled, else None.
        directory: for the files.
        setup: code that the new process runs first, such as the import of users' own classes.
    """
    wanted = {}
    for name, (model, inputs, labels) in models.items():
        folder = directory / name
        folder.mkdir()
        model.save(folder / "model.keras")
        model.save_weights(folder / "model.weights.h5")
        np.savez(folder / "given.npz", **inputs, **({} if labels is None else {"labels": labels}))
        outputs = model(inputs)
        found = {}
        for kind in ("weight", "weight by itself"):
            found |= {f"{kind} {number}, {weight.name}": weight for number, weight in enumerate(model.weights)}
        found |= {f"output {number}": output for number, output in enumerate(keras.tree.flatten(outputs))}
        if labels is not None:
            found |= {f"optimizer {number}": value for number, value in enumerate(model.optimizer.variables)}
            found["loss"] = model.compute_loss(inputs, labels, outputs)
        wanted[name] = {key: ops.convert_to_numpy(value) for key, value in found.items()}
    root = pathlib.Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", setup + _RELOAD, directory], check=True, env={**os.environ, "PYTHONPATH": str(root)}
    )
    return {name: (dict(np.load(directory / name / "found.npz")), wanted[name]) for name in models}


def padding(array):
    """A padding mask (B, T): `ids != 0` of ids; else all of the first row is real, then half, then nothing."""
    if "int" in str(array.dtype):
        return array != 0
    mask = np.ones(array.shape[:2], bool)
    mask[1:2, (array.shape[1] + 1) // 2 :] = False
    mask[2:] = False
    return mask


def implicit_mask(tensor):
    """The Keras mask that a tensor carries, or None."""
    return get_keras_mask(tensor)


def _masked(array, mask):
    return keras.layers.Masking(-9.0)(np.where(mask[..., None], array, -9.0).astype("float32"))


def close(actual, expected, tolerance=TOLERANCE):
    """Structures of arrays agree to an absolute tolerance."""
    keras.tree.assert_same_structure(actual, expected)
    for one, other in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def _tensor(x):
    return ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x
