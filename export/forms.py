"""Smaller forms of a graph: half precision, and weights of 8 and 4 bits.

| form | weights | products |
|---|---|---|
| `"fp16"` | float16 | in float16; norms, softmax and position encodings in float32 |
| `"int8"` | int8, one scale an output | of int8, the activations quantized as they come (`MatMulInteger`) |
| `"int8-weights"` | 8 bits, one scale for 32 inputs of an output | `MatMulNBits` |
| `"int4"` | 4 bits, one scale for 32 inputs of an output | `MatMulNBits` |

In the integer forms a table of embeddings shrinks with the rest, and one that is the output projection too is stored
once. `MatMulNBits` and `GatherBlockQuantized` are operators of ONNX Runtime.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from keras_transformer.export.builder import CONTRIB
from keras_transformer.export.rewriting import Writer, add_initializer, replace

FORMS = ("fp32", "fp16", "int8", "int8-weights", "int4")
# The least cosine of Keras' output and the form's that passes: about twice the distance from 1 that all-MiniLM-L6-v2
# has with random ids, which are harder than sentences.
LEAST_COSINE = {"fp16": 0.9999, "int8": 0.95, "int8-weights": 0.995, "int4": 0.8}

_BLOCK = 32
# Smaller tables are positions, types of segments and the like.
_LEAST_ROWS = 64


def convert(model: onnx_ir.Model, form: str) -> onnx_ir.Model:
    """The model in another form; it may be changed in place.

    Args:
        model: a float32 model.
        form: one of `FORMS`.
    """
    if form == "fp16":
        return _half(model)
    if form != "fp32":
        _shrink(model, {"int8": _Dynamic(), "int8-weights": _Blocks(8), "int4": _Blocks(4)}[form])
    return model


def _half(model):
    """Weights, activations and caches in float16; other inputs and outputs stay what they are."""
    nodes, graphs = list(model.graph.all_nodes()), [model.graph, *model.graph.subgraphs()]
    wide = _waves(nodes) | {node for node in nodes if node.op_type in _WIDE or _has_extreme_constant(node)}
    wide |= _choices(nodes)
    # A norm's reciprocal may be as large as it likes, until it is multiplied.
    scaled = [user for node in wide if node.op_type in _UNBOUNDED for user, _ in node.outputs[0].uses()]
    wide |= {node for node in scaled if node.op_type in ("Mul", "Div", *_UNBOUNDED)}
    wide |= {user for node in scaled if node.op_type in _UNBOUNDED for user, _ in node.outputs[0].uses()}
    for node in nodes:
        if node.op_type == "Attention":
            node.attributes["softmax_precision"] = onnx_ir.AttrInt64("softmax_precision", 1)
        if node not in wide:
            _make_half(node)
    for value in [value for graph in graphs for value in [*graph.inputs, *graph.initializers.values()]]:
        # What a loop carries are caches.
        cached = value.graph is not model.graph or value.name.startswith(("past_key_values", "cross_key_values"))
        if value.dtype == _FLOAT and (cached or value.const_value is not None and _narrow_uses(value, wide)):
            value.dtype = _HALF
            if value.const_value is not None:
                value.const_value = onnx_ir.tensor(value.const_value.numpy().astype(np.float16), name=value.name)
    for node in nodes:
        want = _FLOAT if node in wide else _HALF
        for place, value in enumerate(node.inputs):
            if value is not None and value.dtype in (_FLOAT, _HALF) and value.dtype != want and node.op_type != "Cast":
                node.replace_input_with(place, _cast(value, want))
    outputs = model.graph.outputs
    for place, value in enumerate(outputs):
        if value.dtype == _HALF and not value.name.startswith(("present", "cross_key_values")):
            name, value.name = value.name, f"{value.name}.half"
            outputs[place] = _cast(value, _FLOAT)
            outputs[place].name = name
    return model


_FLOAT, _HALF = onnx_ir.DataType.FLOAT, onnx_ir.DataType.FLOAT16
# What float16 has too little range or precision for.
_UNBOUNDED = ("Sqrt", "Reciprocal")
_WIDE = ("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax", "Pow", "Exp", "Log", "CumSum", *_UNBOUNDED)
_WIDE += ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2")


def _waves(nodes) -> set:
    """The nodes that make waves of positions, whose angles float16 cannot hold."""
    waiting, found = [node for node in nodes if node.op_type in ("Sin", "Cos")], set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [value.producer() for value in node.inputs if value is not None and value.producer() is not None]
    return found


def _choices(nodes) -> set:
    """The nodes that choose a token, or how to: temperatures and random numbers need the range and the places."""
    found = set()
    for node in nodes:
        if node.op_type == "If":
            found.add(node.inputs[0].producer())
            found.update(inner for attribute in node.attributes.values() for inner in attribute.as_graph())
    return found


def _has_extreme_constant(node):
    """Whether a number that is not 0 becomes 0 or infinite in float16, as the epsilon under a root does."""
    constants = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
    arrays = [np.abs(constant.numpy()) for constant in constants if constant.size == 1 and constant.dtype == _FLOAT]
    return any(((array > 0) & (array < 6e-5) | (array > 65504)).any() for array in arrays)


def _make_half(node):
    for value in node.outputs:
        if value.dtype == _FLOAT:
            value.dtype = _HALF
    if node.op_type == "Cast" and node.attributes["to"].as_int() == _FLOAT:
        node.attributes["to"] = onnx_ir.AttrInt64("to", _HALF)
    if node.op_type == "ConstantOfShape" and "value" in node.attributes:
        value = node.attributes["value"].as_tensor()
        if value.dtype == _FLOAT:
            node.attributes["value"] = onnx_ir.AttrTensor("value", onnx_ir.tensor(value.numpy().astype(np.float16)))


def _narrow_uses(value, wide):
    """Whether some node that computes in float16 reads a weight; norms have theirs as they are."""
    return any(node not in wide for node, _ in value.uses())


def _cast(value, dtype):
    """`value` as `dtype`, cast once for all its readers, in the graph that it is in."""
    graph, producer = value.graph, value.producer()
    for user, _ in value.uses():
        if user.op_type == "Cast" and user.attributes["to"].as_int() == dtype and user.graph is graph:
            return user.outputs[0]
    made = onnx_ir.node("Cast", [value], {"to": int(dtype)}, name=f"{value.name}/as_{dtype.name.lower()}")
    (result,) = made.outputs
    result.name, result.type, result.shape = made.name, onnx_ir.TensorType(dtype), value.shape
    if producer is not None:
        graph.insert_after(producer, made)
    else:
        graph.insert_before(graph[0], made)
    return result


def _shrink(model, scheme):
    """Quantizes what `scheme` can of the weights that are only multiplied with, or looked up in."""
    graph = model.graph
    for name, weight in list(graph.initializers.items()):
        array = weight.const_value.numpy()
        if array.ndim != 2 or array.dtype != np.float32:
            continue
        products, tables, transposed = _uses(weight)
        if products is None or not (products or tables) or tables and array.shape[0] < _LEAST_ROWS:
            continue
        if products and not transposed:
            array = array.T
        stored = scheme.store(graph, name, np.ascontiguousarray(array), bool(tables), bool(transposed))
        if stored is None:
            continue
        for node in products:
            replace(node, scheme.product(node, stored))
        for node in tables:
            replace(node, scheme.look_up(node, stored))
        for node in transposed:
            node.graph.remove(node, safe=True)
        if not weight.uses():
            del graph.initializers[name]
    if any(node.domain == CONTRIB for node in model.graph.all_nodes()):
        model.graph.opset_imports[CONTRIB] = 1


def _uses(weight):
    """Products with a weight, look-ups in it, and the transposes between; (None, None, None) for any other use."""
    products, tables, transposed = [], [], []
    for node, place in weight.uses():
        if node.op_type == "MatMul" and place == 1:
            products.append(node)
        elif node.op_type == "Gather" and place == 0 and _axis(node) == 0:
            tables.append(node)
        elif node.op_type == "Transpose" and all(
            user.op_type == "MatMul" and at == 1 for user, at in node.outputs[0].uses()
        ):
            transposed.append(node)
            products += [user for user, _ in node.outputs[0].uses()]
        else:
            return None, None, None
    if (
        transposed
        and any(value is weight for node in products for value in node.inputs)
        or tables
        and products
        and not transposed
    ):
        # As it is and transposed: the scales would be those of the one or of the other.
        return None, None, None
    return products, tables, transposed


def _axis(node):
    return node.attributes["axis"].as_int() if "axis" in node.attributes else 0


class _Dynamic:
    """Products of int8, one scale for each output."""

    def store(self, graph, name, array, table, transposed):
        """A weight (N, K): its int8 as the products want it, and its scales (N,)."""
        largest = np.abs(array).max(1)
        scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
        integers = np.clip(np.round(array / scales[:, None]), -127, 127).astype(np.int8)
        if not table and not transposed:
            integers = np.ascontiguousarray(integers.T)
        stored = add_initializer(graph, f"{name}.int8", integers), add_initializer(graph, f"{name}.scale", scales)
        return *stored, table or transposed

    def product(self, node, stored):
        weight, scales, as_rows = stored
        write, x = Writer(node), node.inputs[0]
        quantized, scale, zero = _quantized(x)
        if as_rows:
            weight = write("Transpose", weight, perm=[1, 0])
        sums = write("MatMulInteger", quantized, weight, zero)
        return write("Mul", write("Cast", sums, to=1), write("Mul", scale, scales, name=f"{node.name}/scales"))

    def look_up(self, node, stored):
        weight, scales, _ = stored
        write, ids = Writer(node), node.inputs[1]
        rows = write("Cast", write("Gather", weight, ids, name=f"{node.name}/rows", axis=0), to=1)
        factor = write("Gather", scales, ids, name=f"{node.name}/scales", axis=0)
        last = write("Constant", name=f"{node.name}/last", value_ints=[-1])
        return write("Mul", rows, write("Unsqueeze", factor, last))


def _quantized(x):
    """`DynamicQuantizeLinear` of `x`, one for all products that read it, in the graph that it is in."""
    graph, producer = x.graph, x.producer()
    for user, _ in x.uses():
        if user.op_type == "DynamicQuantizeLinear" and user.graph is graph:
            return user.outputs
    made = onnx_ir.node("DynamicQuantizeLinear", [x], num_outputs=3, name=f"{x.name}/quantized")
    for index, value in enumerate(made.outputs):
        value.name = f"{made.name}.{index}" if index else made.name
    if producer is not None:
        graph.insert_after(producer, made)
    else:
        graph.insert_before(graph[0], made)
    return made.outputs


def _rounded(array, scales, half):
    return np.clip(np.round(array / scales), -half, half - 1)


class _Blocks:
    """Products with weights of `bits` bits, of which each 32 along the inputs have a scale of their own."""

    def __init__(self, bits: int):
        self.bits = bits

    def store(self, graph, name, array, table, transposed):
        """A weight (N, K): its packed numbers (N, blocks, bytes) and their scales (N, blocks)."""
        count, width = array.shape
        if table and width % _BLOCK:
            return None
        padded = np.pad(array, ((0, 0), (0, -width % _BLOCK))).reshape(count, -1, _BLOCK)
        # The number of the largest size is the lowest integer, of which there is one more than above 0.
        place = np.abs(padded).argmax(-1, keepdims=True)
        half = 2 ** (self.bits - 1)
        widest = np.take_along_axis(padded, place, -1) / -half
        widest = np.where(widest == 0, 1, widest).astype(np.float32)
        scales, least = widest, np.full_like(widest, np.inf)
        # With few integers it pays to cut the largest number off for a finer step: the least square error decides.
        for factor in np.linspace(1, 0.7, 13, dtype=np.float32) if self.bits < 8 else [np.float32(1)]:
            error = np.square(_rounded(padded, factor * widest, half) * factor * widest - padded).sum(-1, keepdims=True)
            scales, least = np.where(error < least, factor * widest, scales), np.minimum(error, least)
        integers = (_rounded(padded, scales, half) + half).astype(np.uint8)
        if self.bits == 4:
            integers = integers[..., ::2] | integers[..., 1::2] << 4
        return (
            add_initializer(graph, f"{name}.int{self.bits}", integers),
            add_initializer(graph, f"{name}.scale", scales[..., 0]),
            (width, count),
        )

    def product(self, node, stored):
        packed, scales, (width, count) = stored
        return Writer(node)(
            "MatMulNBits",
            node.inputs[0],
            packed,
            scales,
            domain=CONTRIB,
            K=width,
            N=count,
            bits=self.bits,
            block_size=_BLOCK,
            accuracy_level=4,  # the activations as int8 in the kernel: without it there is no gain in time
        )

    def look_up(self, node, stored):
        packed, scales, (width, count) = stored
        write = Writer(node)
        shape = write("Constant", name=f"{node.name}/shape", value_ints=[count, width * self.bits // 8])
        rows = write("Reshape", packed, shape, name=f"{node.name}/packed")
        return write(
            "GatherBlockQuantized",
            rows,
            node.inputs[1],
            scales,
            domain=CONTRIB,
            gather_axis=0,
            quantize_axis=1,
            block_size=_BLOCK,
            bits=self.bits,
        )
