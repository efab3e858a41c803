"""Older opsets: what opset 23 has a node for is written in single steps of opset 17.

A graph is built for opset 23 and rewritten afterwards, so that the rules know one opset only.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir

from keras_transformer.export.errors import ExportError
from keras_transformer.export.rewriting import Writer, replace

OPSETS = tuple(range(17, 24))


def lower_opset(model: onnx_ir.Model, opset: int) -> onnx_ir.Model:
    """The model, changed in place to use operators of `opset`.

    Args:
        model: of opset 23, or of `opset`.
        opset: one of `OPSETS`.

    Raises:
        ExportError: an operator has no form in that opset; the message names the node and the opset that it needs.
    """
    if opset == model.graph.opset_imports[""]:
        return model
    graphs = [model.graph, *(graph for graph in model.graph.subgraphs())]
    for graph in graphs:
        for node in list(graph):
            since, rewrite = _NEWER.get(node.op_type, (0, None))
            if node.domain or since <= opset:
                continue
            if rewrite is None:
                raise ExportError(
                    f"`opset` must be at least {since} for this model, whose node '{node.name}' is a {node.op_type}. "
                    f"Received: opset={opset}"
                )
            rewrite(node, opset)
    for graph in graphs:
        graph.opset_imports[""] = opset
    return model


def _attention(node, opset):
    """softmax(scale · q @ kᵀ + mask) @ v, with heads first; rows that a boolean mask hides are 0."""
    query, key, value, mask, past_key, past_value, *_ = [*node.inputs, None, None, None]
    write = Writer(node)
    attributes = node.attributes
    flat = len(query.shape) == 3
    num_heads = attributes["q_num_heads"].as_int() if flat else query.shape[1]
    num_kv_heads = attributes["kv_num_heads"].as_int() if flat else key.shape[1]
    width = query.shape[2] // num_heads if flat else query.shape[3]
    dtype = query.dtype
    if flat:
        query, key, value = (
            _heads_first(write, x, name, heads)
            for x, name, heads in ((query, "q", num_heads), (key, "k", num_kv_heads), (value, "v", num_kv_heads))
        )
    if past_key is not None:
        key = write("Concat", past_key, key, axis=2, name=f"{node.name}/key")
        value = write("Concat", past_value, value, axis=2, name=f"{node.name}/value")
    for index, present in ((1, key), (2, value)):
        if (
            len(node.outputs) > index
            and node.outputs[index].name
            and (node.outputs[index].uses() or _is_output(node, index))
        ):
            _hand_over(node.outputs[index], present)
    key, value = (_repeated(write, x, name, num_heads, num_kv_heads) for x, name in ((key, "k"), (value, "v")))
    scale = attributes["scale"].as_float() if "scale" in attributes else 1 / math.sqrt(width)
    query = write("Mul", query, _number(write, scale, dtype, "scale"), name=f"{node.name}/scaled")
    turned = write("Transpose", key, perm=[0, 1, 3, 2], name=f"{node.name}/turned")
    scores = write("MatMul", query, turned, name=f"{node.name}/scores")
    wide = attributes.get("softmax_precision") is not None and dtype == onnx_ir.DataType.FLOAT16
    if wide:
        scores = write("Cast", scores, to=1, name=f"{node.name}/wide")
    allowed = mask if mask is not None and mask.dtype == onnx_ir.DataType.BOOL else None
    if "is_causal" in attributes and attributes["is_causal"].as_int():
        causal = _causal(write, query, key)
        allowed = causal if allowed is None else write("And", allowed, causal, name=f"{node.name}/allowed")
    if mask is not None and mask.dtype != onnx_ir.DataType.BOOL:
        mask = write("Cast", mask, to=1, name=f"{node.name}/mask") if wide else mask
        scores = write("Add", scores, mask, name=f"{node.name}/masked")
    precise = onnx_ir.DataType.FLOAT if wide else dtype
    if allowed is not None:
        hidden = _number(write, -1e30 if precise != onnx_ir.DataType.FLOAT16 else -6e4, precise, "hidden")
        scores = write("Where", allowed, scores, hidden, name=f"{node.name}/shown")
    weights = write("Softmax", scores, axis=-1, name=f"{node.name}/weights")
    if allowed is not None:
        # A row that is hidden as a whole has no weights.
        weights = write("Where", allowed, weights, _number(write, 0, precise, "nothing"), name=f"{node.name}/kept")
    if wide:
        weights = write("Cast", weights, to=int(dtype), name=f"{node.name}/narrow")
    output = write("MatMul", weights, value, name=f"{node.name}/output")
    if flat:
        output = write("Transpose", output, perm=[0, 2, 1, 3], name=f"{node.name}/output_heads_last")
        shape = write("Constant", value_ints=[0, 0, -1], name=f"{node.name}/output_shape")
        output = write("Reshape", output, shape, name=f"{node.name}/output_flat")
    replace(node, output)


def _heads_first(write, x, name, heads):
    shape = write("Constant", value_ints=[0, 0, heads, -1], name=f"{write.node.name}/{name}_shape")
    split = write("Reshape", x, shape, name=f"{write.node.name}/{name}_heads")
    return write("Transpose", split, perm=[0, 2, 1, 3], name=f"{write.node.name}/{name}_heads_first")


def _repeated(write, x, name, num_heads, num_kv_heads):
    """Keys or values (B, K, S, H) as often as query heads share them, (B, N, S, H)."""
    groups, path = num_heads // num_kv_heads, f"{write.node.name}/{name}"
    if groups == 1:
        return x
    axis = write("Constant", value_ints=[2], name=f"{path}_axis")
    many = write("Constant", value_ints=[1, 1, groups, 1, 1], name=f"{path}_groups")
    tiled = write("Tile", write("Unsqueeze", x, axis, name=f"{path}_one"), many, name=f"{path}_many")
    heads = write("Constant", value_ints=[num_heads], name=f"{path}_count")
    batch = write("Shape", x, start=0, end=1, name=f"{path}_batch")
    rest = write("Shape", x, start=2, end=4, name=f"{path}_rest")
    target = write("Concat", batch, heads, rest, axis=0, name=f"{path}_target")
    return write("Reshape", tiled, target, name=f"{path}_repeated")


def _causal(write, query, key):
    """(T, S): position t attends to 0 … t."""
    path = write.node.name
    zero, one = (write("Constant", value_int=number, name=f"{path}/{number}") for number in (0, 1))
    axis = write("Constant", value_ints=[2], name=f"{path}/length_axis")
    ranges = []
    for x, name in ((query, "rows"), (key, "columns")):
        size = write("Gather", write("Shape", x, name=f"{path}/{name}_shape"), axis, axis=0, name=f"{path}/{name}_size")
        empty = write("Constant", value_ints=[0], name=f"{path}/{name}_axes")
        size = write("Squeeze", size, empty, name=f"{path}/{name}_count")
        ranges.append(write("Range", zero, size, one, name=f"{path}/{name}"))
    last = write("Constant", value_ints=[1], name=f"{path}/last_axis")
    rows = write("Unsqueeze", ranges[0], last, name=f"{path}/rows_column")
    return write("LessOrEqual", ranges[1], rows, name=f"{path}/causal")


def _rms_normalization(node, opset):
    x, scale = node.inputs
    write, dtype = Writer(node), node.inputs[0].dtype
    wide = dtype == onnx_ir.DataType.FLOAT16
    x = write("Cast", x, to=1, name=f"{node.name}/wide") if wide else x
    precise = onnx_ir.DataType.FLOAT if wide else dtype
    square = write("Mul", x, x, name=f"{node.name}/square")
    rank = len(x.shape) if x.shape is not None else len(node.inputs[0].shape)
    first = node.attributes["axis"].as_int() % rank if "axis" in node.attributes else rank - 1
    axes = list(range(first, rank))
    mean = write("ReduceMean", square, axes=axes, keepdims=1, name=f"{node.name}/mean")
    if opset >= 18:
        _axes_as_input(write, mean.producer(), axes)
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    safe = write("Add", mean, _number(write, epsilon, precise, "epsilon"), name=f"{node.name}/safe")
    normed = write("Div", x, write("Sqrt", safe, name=f"{node.name}/root"), name=f"{node.name}/normed")
    normed = write("Cast", normed, to=int(dtype), name=f"{node.name}/narrow") if wide else normed
    replace(node, write("Mul", normed, scale, name=f"{node.name}/scaled"))


def _axes_as_input(write, node, axes):
    del node.attributes["axes"]
    constant = onnx_ir.node("Constant", [], {"value_ints": axes}, name=f"{node.name}/axes")
    constant.outputs[0].name = constant.name
    node.graph.insert_before(node, constant)
    node.resize_inputs(2)
    node.replace_input_with(1, constant.outputs[0])


def _rotary_embedding(node, opset):
    """Pairs (x_i, x_{i+r}) of the first entries of each head turned by their angles."""
    x, cosine, sine = node.inputs[:3]
    attributes = node.attributes
    if len(node.inputs) > 3 and node.inputs[3] is not None or len(x.shape) != 3:
        raise ExportError(f"`opset` must be at least 23 for '{node.name}'. Received: opset={opset}")
    write = Writer(node)
    heads = attributes["num_heads"].as_int()
    width = x.shape[2] // heads
    rotated = attributes["rotary_embedding_dim"].as_int() if "rotary_embedding_dim" in attributes else 0
    rotated = rotated or width
    half = rotated // 2
    shape = write("Constant", value_ints=[0, 0, heads, width], name=f"{node.name}/shape")
    split = write("Reshape", x, shape, name=f"{node.name}/heads")
    axis = write("Constant", value_ints=[2], name=f"{node.name}/head_axis")
    cosine, sine = (
        write("Unsqueeze", table, axis, name=f"{node.name}/{name}") for table, name in ((cosine, "cos"), (sine, "sin"))
    )
    sizes = [half, half, *([width - rotated] if width > rotated else [])]
    lengths = write("Constant", value_ints=sizes, name=f"{node.name}/lengths")
    left, right, *rest = write("Split", split, lengths, axis=3, outputs=len(sizes), name=f"{node.name}/parts")

    def product(a, b, name):
        return write("Mul", a, b, name=f"{node.name}/{name}")

    first = write("Sub", product(left, cosine, "lc"), product(right, sine, "rs"), name=f"{node.name}/first")
    second = write("Add", product(right, cosine, "rc"), product(left, sine, "ls"), name=f"{node.name}/second")
    joined = write("Concat", first, second, *rest, axis=3, name=f"{node.name}/joined")
    flat = write("Constant", value_ints=[0, 0, heads * width], name=f"{node.name}/flat")
    replace(node, write("Reshape", joined, flat, name=f"{node.name}/rotated"))


def _gelu(node, opset):
    (x,) = node.inputs
    write, dtype = Writer(node), x.dtype
    tanh = "approximate" in node.attributes and node.attributes["approximate"].as_string() == "tanh"

    def number(value, name):
        return _number(write, value, dtype, name)

    if tanh:
        cube = write("Mul", write("Mul", x, x, name=f"{node.name}/square"), x, name=f"{node.name}/cube")
        inner = write("Mul", cube, number(0.044715, "cubic"), name=f"{node.name}/inner")
        inner = write("Add", x, inner, name=f"{node.name}/sum")
        inner = write("Mul", inner, number(math.sqrt(2 / math.pi), "root"), name=f"{node.name}/angle")
        curve = write("Tanh", inner, name=f"{node.name}/tanh")
    else:
        curve = write(
            "Erf", write("Mul", x, number(math.sqrt(0.5), "root"), name=f"{node.name}/angle"), name=f"{node.name}/erf"
        )
    half = write("Mul", x, number(0.5, "half"), name=f"{node.name}/halved")
    replace(
        node,
        write("Mul", half, write("Add", curve, number(1, "one"), name=f"{node.name}/share"), name=f"{node.name}/gelu"),
    )


def _reduction(node, opset):
    """Before opset 18 the axes are an attribute."""
    if len(node.inputs) < 2 or node.inputs[1] is None:
        return
    axes = node.inputs[1].const_value
    if axes is None:
        raise ExportError(f"`opset` must be at least 18 for '{node.name}'. Received: opset={opset}")
    node.attributes["axes"] = onnx_ir.AttrInt64s("axes", axes.numpy().tolist())
    node.resize_inputs(1)


def _number(write, value, dtype, name):
    tensor = onnx_ir.tensor(np.array(value, dtype.numpy()))
    return write("Constant", value=tensor, name=f"{write.node.name}/{name}")


def _is_output(node, index):
    return any(output is node.outputs[index] for output in node.graph.outputs)


def _hand_over(old, new):
    """Lets `new`, which nobody reads by its name so far, stand for `old`."""
    name = old.name
    new.type, new.shape = old.type, old.shape
    for index, output in enumerate(old.producer().graph.outputs):
        if output is old:
            old.producer().graph.outputs[index] = new
    old.replace_all_uses_with(new)
    old.name, new.name = f"{name}/replaced", name


# From which opset on an operator, or its form, is there; and what writes it without.
_NEWER = {
    "Attention": (23, _attention),
    "RMSNormalization": (23, _rms_normalization),
    "RotaryEmbedding": (23, _rotary_embedding),
    "Gelu": (20, _gelu),
    "DFT": (20, None),
    "Swish": (24, None),
    "GroupNormalization": (21, None),
    "BitwiseAnd": (18, None),
    "BitwiseOr": (18, None),
    "BitwiseXor": (18, None),
    "BitwiseNot": (18, None),
    "Mish": (18, None),
    "CenterCropPad": (18, None),
    "Resize": (18, None),
    "Pad": (18, None),
    **{
        f"Reduce{name}": (18, _reduction)
        for name in ("Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    },
}
