"""Faults put into a good ONNX graph; each must be noticed by the verifier. A fault changes an `onnx.ModelProto`."""

import numpy as np
from onnx import helper, numpy_helper


def nodes(model, kind):
    found = [node for node in model.graph.node if node.op_type == kind]
    assert found, f"the graph has no {kind}, so this fault cannot be put into it"
    return found


def attribute(node, name, default=None):
    for entry in node.attribute:
        if entry.name == name:
            return helper.get_attribute_value(entry)
    return default


def set_attribute(node, name, value):
    for entry in list(node.attribute):
        if entry.name == name:
            node.attribute.remove(entry)
    node.attribute.append(helper.make_attribute(name, value))


def set_array(model, name, array):
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
            return
    raise KeyError(name)


def arrays(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def producer(model, name):
    return next(node for node in model.graph.node if name in node.output)


def insert(model, name, kind, *operands):
    """Everything that reads `name` reads `kind(name, *operands)` instead."""
    changed = f"{name}/mutated"
    for node in model.graph.node:
        for i, source in enumerate(node.input):
            if source == name:
                node.input[i] = changed
    names = []
    for i, operand in enumerate(operands):
        names.append(f"{changed}/{i}")
        model.graph.initializer.append(numpy_helper.from_array(operand, names[-1]))
    at = next((i + 1 for i, node in enumerate(model.graph.node) if name in node.output), 0)
    model.graph.node.insert(at, helper.make_node(kind, [name, *names], [changed]))


def other_gelu(model):
    for node in nodes(model, "Gelu"):
        form = attribute(node, "approximate", b"none")
        set_attribute(node, "approximate", "tanh" if form == b"none" else "none")


def larger_epsilon(model):
    for node in nodes(model, "LayerNormalization"):
        set_attribute(node, "epsilon", 100 * attribute(node, "epsilon", 1e-5))


def no_mask(model, where=""):
    """Attention whose node name contains `where` forgets its mask."""
    masked = [n for n in nodes(model, "Attention") if where in n.name and len(n.input) > 3 and n.input[3]]
    assert masked
    for node in masked:
        node.input[3] = ""


def flipped_causal(model):
    for node in nodes(model, "Attention"):
        set_attribute(node, "is_causal", 1 - attribute(node, "is_causal", 0))


def swapped_heads(model):
    """The first two heads of the values of the first attention change places."""
    attention = nodes(model, "Attention")[0]
    node = producer(model, attention.input[2])
    while node.op_type != "MatMul":
        node = producer(model, node.input[0])
    weight = arrays(model)[node.input[1]]
    heads = np.split(weight, attribute(attention, "q_num_heads", 2), axis=1)
    set_array(model, node.input[1], np.concatenate([heads[1], heads[0], *heads[2:]], axis=1))


def fixed_length(model):
    """A length of the signature is baked in."""
    dim = next(d for d in model.graph.input[0].type.tensor_type.shape.dim if "length" in d.dim_param)
    dim.dim_value = 7


def heavier_weight(name):
    """A fault: the weight `name` is 1% too large."""

    def change(model):
        set_array(model, name, arrays(model)[name] * np.float32(1.01))

    return change


def swap_names(model, first, second):
    """Whatever reads `first` reads `second`, and the other way round."""
    other = {first: second, second: first}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = other.get(name, name)
