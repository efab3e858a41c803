"""What passes over a finished ONNX graph share: adding nodes and weights, and putting a value in a node's place."""

from __future__ import annotations

import numpy as np
import onnx_ir


class Writer:
    """Adds nodes before another one, in its graph, under its name and with its origin."""

    def __init__(self, node: onnx_ir.Node):
        self.node = node
        self.graph = node.graph

    def __call__(self, op_type: str, *inputs, domain: str = "", outputs: int = 1, name: str = "", **attributes):
        made = onnx_ir.node(op_type, list(inputs), attributes, domain=domain, num_outputs=outputs)
        made.metadata_props.update(self.node.metadata_props)
        made.name = name or f"{self.node.name}/{op_type}"
        for index, value in enumerate(made.outputs):
            value.name = f"{made.name}.{index}" if index else made.name
        self.graph.insert_before(self.node, made)
        return made.outputs[0] if outputs == 1 else made.outputs


def replace(node, value):
    """Lets `value` stand for the only result of `node`."""
    old = node.outputs[0]
    name = old.name
    value.type, value.shape = old.type, old.shape
    outputs = node.graph.outputs
    for index, output in enumerate(outputs):
        if output is old:
            outputs[index] = value
    old.replace_all_uses_with(value)
    node.graph.remove(node, safe=True)
    value.producer().name = node.name
    value.name = name


def add_initializer(graph: onnx_ir.Graph, name: str, array: np.ndarray) -> onnx_ir.Value:
    """A weight that `graph` gets."""
    tensor = onnx_ir.tensor(array, name=name)
    value = onnx_ir.Value(name=name, const_value=tensor, type=onnx_ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph.register_initializer(value)
    return value
