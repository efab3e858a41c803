"""Where the nodes of a graph come from: the operation in Keras, and the rule that wrote it; imports no Keras."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from keras_transformer.export.errors import NotAnExportError

if TYPE_CHECKING:
    import onnx_ir

# What the exporter notes at a node, in the metadata that ONNX has for this.
OPERATION, RULE = "keras.operation", "keras_transformer.rule"


class Origin(NamedTuple):
    """What a node is and where it comes from.

    Attributes:
        node: its name, which begins with the path of the layer that called the operation.
        operator: of ONNX.
        operation: the operation, layer or function in Keras; empty for what is of none, as the casts of a smaller form.
        rule: module and name of the function that wrote the node, or the one that it stands for in a smaller form or
            an older opset.
    """

    node: str
    operator: str
    operation: str
    rule: str


def list_origins(path: str | os.PathLike) -> list[Origin]:
    """The nodes of an exported `.onnx` file, in the order of the file; those of a subgraph follow its node.

    Args:
        path: the file. Needs the package `onnx`.

    Raises:
        NotAnExportError: it is no ONNX file.
    """
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own kinds, and OSError
        raise NotAnExportError(f"{path} is not an ONNX file: {str(error).strip()}") from error
    return list(_origins(model.graph))


def note_rule(model: onnx_ir.Model, rule: Callable) -> None:
    """Notes `rule` at the nodes that have none yet."""
    for node in model.graph.all_nodes():
        node.metadata_props.setdefault(RULE, f"{rule.__module__}.{rule.__qualname__}")


def _origins(graph):
    for node in graph.node:
        noted = {entry.key: entry.value for entry in node.metadata_props}
        yield Origin(node.name, node.op_type, noted.get(OPERATION, ""), noted.get(RULE, ""))
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _origins(attribute.g)
