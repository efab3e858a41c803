"""One computation in every form it is used in: eager, as a functional model, compiled, and as an ONNX graph."""

import os
import tempfile

import keras
import numpy as np
from keras import ops

from keras_transformer.export import export_onnx
from tests.checks import TOLERANCE, compiled, numpy, quick, run_onnx

# What Keras runs, and what ONNX Runtime runs: with its graph optimisations, which rewrite attention, and without.
KERAS_FORMS = ("eager", "functional", "compiled")
ONNX_FORMS = ("ONNX", "ONNX, not optimised")
FORMS = KERAS_FORMS + ONNX_FORMS


def in_every_form(function, inputs, forms=FORMS, free=None, **kwargs):
    """What `function(**inputs)` gives in each form: {form: flat list of arrays}.

    The specs of the functional model's outputs are held against the arrays on the way.

    Args:
        function: takes tensors by name and returns tensors in any nesting; its layers are kept between calls.
        inputs: arrays by name; the first axis is the batch.
        forms: which of `FORMS`; those of ONNX Runtime on torch only.
        free: by name, which axes are free beside the batch; axis 1 of the others.
        **kwargs: for `export_onnx`.
    """
    tensors = {name: ops.convert_to_tensor(array) for name, array in inputs.items()}
    if keras.config.backend() != "torch":
        # The graph is the same on all backends, which tests of its bytes show: it is tried where that takes least.
        forms = [form for form in forms if form not in ONNX_FORMS]
    found = {}
    if "eager" in forms:
        found["eager"] = flat(function(**tensors))
    if set(forms) - {"eager", "compiled"}:
        model = functional(function, inputs, free)
    if "functional" in forms:
        found["functional"] = flat(quick(model)(tensors))
        _check_specs(model, found["functional"])
    if "compiled" in forms:
        program = compiled(lambda *values: function(**dict(zip(tensors, values, strict=True))))
        found["compiled"] = flat(program(*tensors.values()))
    if set(forms) & set(ONNX_FORMS):
        found |= {form: outputs for form, outputs in exported(model, inputs, **kwargs).items() if form in forms}
    return found


def functional(function, inputs, free=None):
    """The functional model of `function`, whose inputs are named as in `inputs`."""
    symbolic = {}
    for name, array in inputs.items():
        axes = (free or {}).get(name, (1,))
        shape = [None if axis in axes else size for axis, size in enumerate(array.shape)]
        symbolic[name] = keras.Input(shape[1:], dtype=str(array.dtype), name=name)
    return keras.Model(symbolic, function(**symbolic))


def exported(model, inputs, **kwargs):
    """What the exported `model` gives in ONNX Runtime, by form; not verified, as the caller knows what is right."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        export_onnx(model, path, verify=False, verbose=False, **kwargs)
        return {form: run_onnx(path, inputs, optimised=form == "ONNX") for form in ONNX_FORMS}


def close_in_every_form(found, expected, tolerance=TOLERANCE):
    """Every form gave the arrays `expected`, of any nesting."""
    expected = keras.tree.flatten(expected)
    for form, outputs in found.items():
        assert len(outputs) == len(expected), form
        for number, (output, array) in enumerate(zip(outputs, expected, strict=True)):
            np.testing.assert_allclose(output, array, rtol=0, atol=tolerance, err_msg=f"{form}, output {number}")


def program(function, *args):
    """The operations that `function(*args)` runs, as text, the same for equal computations."""
    backend = keras.config.backend()
    args = [ops.convert_to_tensor(x) for x in args]
    if backend == "tensorflow":
        import tensorflow as tf

        graph = tf.function(function).get_concrete_function(*args).graph
        return "\n".join(f"{op.type} {[tuple(x.shape) for x in op.outputs]}" for op in graph.get_operations())
    if backend == "jax":
        import jax

        return str(jax.make_jaxpr(function)(*args))
    from torch.fx.experimental.proxy_tensor import make_fx

    return "\n".join(f"{node.target} {node.args}" for node in make_fx(function)(*args).graph.nodes)


def flat(outputs):
    return keras.tree.flatten(numpy(outputs))


def _check_specs(model, outputs):
    """Every size and dtype that the model's specs promise holds."""
    for spec, array in zip(keras.tree.flatten(model.outputs), outputs, strict=True):
        assert len(spec.shape) == array.ndim
        assert all(size in (None, actual) for size, actual in zip(spec.shape, array.shape, strict=True)), spec
        assert ("float32" if "float16" in spec.dtype else spec.dtype) == array.dtype
