"""The second road from Keras to ONNX: TensorFlow's own graph of the model, converted by the package tf2onnx.

It takes what the tracer refuses, recurrent layers among it, and knows nothing of attention: its graphs are larger and
slower. What it writes is verified like every other export.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import onnx
import onnx_ir

from keras_transformer.export import ir
from keras_transformer.export.dims import Axis, Expr
from keras_transformer.export.errors import ExportError, UnsupportedOperationError
from keras_transformer.export.trace import InputSpec

# What tf2onnx writes of the opsets that are offered; it ends there.
OPSETS = (17, 18)


def convert_with_tf2onnx(
    model: keras.Layer,
    call: Callable[..., Any],
    specs: Sequence[InputSpec],
    axes: Sequence[Axis],
    output_names: Sequence[str] | None,
    opset: int,
) -> tuple[ir.Graph, onnx_ir.Model]:
    """The graph of `call`: its interface and weights as those of a traced graph without nodes, and the ONNX model.

    Args:
        model: a built model, on TensorFlow.
        call: takes one tensor for each of `specs` and returns a nested structure of tensors.
        specs: the inputs.
        axes: the free axes in their shapes.
        output_names: names of the flattened outputs; `output`, or `output_0` and so on, if None.
        opset: one of `OPSETS`.

    Raises:
        ExportError: the backend is not TensorFlow, or tf2onnx is not installed.
        UnsupportedOperationError: the graph has an operation that tf2onnx cannot write.
    """
    tf2onnx = check_tf2onnx()
    import tensorflow as tf
    from keras.src.export.tf2onnx_lib import patch_tf2onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        patch_tf2onnx()  # tf2onnx asks NumPy for names that NumPy 2 has not

    signature = [
        tf.TensorSpec([None if isinstance(dim, Expr) else dim for dim in spec.shape], spec.dtype, spec.name)
        for spec in specs
    ]

    @tf.function(input_signature=signature)
    def function(*tensors):
        # Identity: tf2onnx would merge an output with an input, or with another output, that is the same tensor.
        return [tf.identity(output) for output in keras.tree.flatten(call(*tensors))]

    logger = logging.getLogger("tf2onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs an unsupported operation, writes an invalid graph and goes on
    try:
        proto, _ = tf2onnx.convert.from_function(
            function, signature, opset=opset, custom_op_handlers={"Erfc": (_erfc, [])}
        )
    finally:
        logger.setLevel(level)
    lowered = onnx_ir.from_proto(proto)
    _refuse_unknown_operators(lowered)
    _name_interface(lowered, specs, output_names)
    largest = _largest_id(model)
    inputs = [ir.Value(spec.shape, spec.dtype, spec.name, largest) for spec in specs]
    weights = [
        ir.Weight(variable.path, keras.ops.convert_to_numpy(variable), keras.backend.standardize_dtype(variable.dtype))
        for variable in model.weights
    ]
    names = [output.name for output in lowered.graph.outputs]
    return ir.Graph(tuple(axes), inputs, [], names, [], weights), lowered


def check_tf2onnx():
    """The module `tf2onnx`.

    Raises:
        ExportError: the backend is not TensorFlow, or tf2onnx is not installed.
    """
    if (backend := keras.backend.backend()) != "tensorflow":
        raise ExportError(
            "`converter` 'tf2onnx' reads graphs of TensorFlow: set KERAS_BACKEND=tensorflow. "
            f"Received: backend {backend!r}"
        )
    try:
        import tf2onnx
    except ImportError as error:
        raise ExportError(
            "`converter` 'tf2onnx' needs the package: pip install 'keras-transformer-onnx[tf2onnx]'"
        ) from error
    return tf2onnx


def _largest_id(model) -> int | None:
    """The last row of the smallest table of embeddings: right for whichever an id is looked up in; None without any."""
    sizes = [
        size
        for layer in model._flatten_layers()
        for size in (getattr(layer, "input_dim", None), getattr(layer, "vocabulary_size", None))
        if any(len(variable.shape) == 2 and variable.shape[0] == size for variable in layer.variables)
    ]
    return min(sizes) - 1 if sizes else None


def _erfc(ctx, node, name, args):
    """`Erfc`, of which exact GELU is made, for which tf2onnx has no rule: 1 - erf(x)."""
    (x,), outputs = node.input, node.output
    dtype, shape = ctx.get_dtype(outputs[0]), ctx.get_shape(outputs[0])
    ctx.remove_node(node.name)
    erf = ctx.make_node("Erf", [x], dtypes=[dtype], shapes=[shape])
    one = ctx.make_const(f"{name}/one", np.array(1, onnx.helper.tensor_dtype_to_np_dtype(dtype)))
    ctx.make_node("Sub", [one.output[0], erf.output[0]], outputs=outputs, name=name, dtypes=[dtype], shapes=[shape])


def _refuse_unknown_operators(model: onnx_ir.Model) -> None:
    known = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()}
    unknown = sorted({node.op_type for node in model.graph.all_nodes() if (node.domain, node.op_type) not in known})
    if unknown:
        raise UnsupportedOperationError(f"tf2onnx cannot write the operations {', '.join(unknown)} as ONNX.")


def _name_interface(model: onnx_ir.Model, specs, output_names) -> None:
    graph = model.graph
    given = {value.name: value for value in graph.inputs}
    graph.inputs[:] = [given[spec.name] for spec in specs]
    for value, spec in zip(graph.inputs, specs, strict=True):
        value.shape = onnx_ir.Shape([str(dim) if isinstance(dim, Expr) else dim for dim in spec.shape])
    count = len(graph.outputs)
    names = output_names or (["output"] if count == 1 else [f"output_{i}" for i in range(count)])
    if len(names) != count or len({*names, *given}) != count + len(given):
        raise ExportError(
            f"`output_names` must give each of the {count} outputs a name that no other output and no input has; the "
            f"inputs are {list(given)}. Received: output_names={names!r}"
        )
    taken = {value.name: value for node in graph.all_nodes() for value in node.outputs}
    for value, name in zip(graph.outputs, names, strict=True):
        if name in taken and taken[name] is not value:
            taken[name].name = f"{name}/inner"
        value.name = name
