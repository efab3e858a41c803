"""One small computation written three times by hand, in Keras, NumPy and ONNX: ground for the verifier."""

import json
import math

import keras
import numpy as np
import onnx
from keras import ops
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, LONGEST, WIDTH, HEADS, HIDDEN = 23, 19, 8, 2, 12
AXES = {"batch": {"minimum": 1, "maximum": None}, "length": {"minimum": 1, "maximum": LONGEST}}
INPUTS = [
    {"name": "ids", "dtype": "int32", "kind": "ids", "maximum": VOCABULARY - 1},
    {"name": "mask", "dtype": "bool", "kind": "mask"},
]


class Toy(keras.Layer):
    """One causal, masked, post-norm block over embedded ids; empty rows of attention give 0."""

    SHAPES = {
        "tokens": (VOCABULARY, WIDTH),
        "positions": (LONGEST, WIDTH),
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "output": (WIDTH, WIDTH),
        "gamma": (WIDTH,),
        "beta": (WIDTH,),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
    }

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        random = keras.initializers.RandomNormal
        self.w = {name: self.add_weight(shape=shape, name=name) for name, shape in self.SHAPES.items()}
        for seed, weight in enumerate(self.w.values()):
            weight.assign(random(stddev=0.5, seed=seed)(weight.shape))
        self.built = True

    def call(self, ids, mask):
        length = ops.shape(ids)[1]
        x = ops.take(self.w["tokens"], ids, axis=0) + self.w["positions"][:length]
        split = (-1, length, HEADS, WIDTH // HEADS)
        query, key, value = (
            ops.transpose(ops.reshape(ops.matmul(x, self.w[name]), split), (0, 2, 1, 3))
            for name in ("query", "key", "value")
        )
        scores = ops.matmul(query, ops.transpose(key, (0, 1, 3, 2))) / (WIDTH // HEADS) ** 0.5
        index = ops.arange(length)
        allowed = ops.logical_and(ops.less_equal(index[None, :], index[:, None])[None], mask[:, None, :])
        allowed = allowed[:, None]
        weights = ops.softmax(ops.where(allowed, scores, -1e9), axis=-1)
        weights = ops.where(ops.any(allowed, axis=-1, keepdims=True), weights, 0.0)
        mixed = ops.reshape(ops.transpose(ops.matmul(weights, value), (0, 2, 1, 3)), (-1, length, WIDTH))
        x = x + ops.matmul(mixed, self.w["output"])
        mean = ops.mean(x, axis=-1, keepdims=True)
        x = (x - mean) / ops.sqrt(ops.var(x, axis=-1, keepdims=True) + 1e-4)
        x = x * self.w["gamma"] + self.w["beta"]
        return x + ops.matmul(ops.gelu(ops.matmul(x, self.w["up"]), approximate=False), self.w["down"])


def toy_numpy(toy):
    """The computation of `toy` as a function on NumPy arrays."""
    w = {name: ops.convert_to_numpy(weight).astype(np.float64) for name, weight in toy.w.items()}
    erf = np.vectorize(math.erf)

    def call(ids, mask):
        ids, mask = (ops.convert_to_numpy(x) for x in (ids, mask))
        batch, length = ids.shape
        x = w["tokens"][ids] + w["positions"][:length]
        query, key, value = (
            (x @ w[name]).reshape(batch, length, HEADS, -1).swapaxes(1, 2) for name in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(2, 3) / math.sqrt(WIDTH // HEADS)
        allowed = np.tril(np.ones((length, length), bool)) & mask[:, None, None, :]
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * allowed
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
        x = x + (weights @ value).swapaxes(1, 2).reshape(batch, length, WIDTH) @ w["output"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-4)
        x = x * w["gamma"] + w["beta"]
        hidden = x @ w["up"]
        return (x + hidden * (1 + erf(hidden / math.sqrt(2))) / 2 @ w["down"]).astype(np.float32)

    return call


def toy_onnx(toy, path, metadata=True):
    """Writes the graph of `toy` to `path` and returns it."""
    weights = [numpy_helper.from_array(ops.convert_to_numpy(w), name) for name, w in toy.w.items()]
    constants = {"zero": [0], "one": [1], "two": [2]}
    weights += [numpy_helper.from_array(np.array(v, np.int64), name) for name, v in constants.items()]

    def node(kind, inputs, output, **attributes):
        return helper.make_node(kind, inputs, [output], name=f"toy/{output}", **attributes)

    nodes = [
        node("Shape", ["ids"], "length", start=1, end=2),
        node("Slice", ["positions", "zero", "length", "zero"], "encoding"),
        node("Gather", ["tokens", "ids"], "embedded"),
        node("Add", ["embedded", "encoding"], "x"),
        *[node("MatMul", ["x", name], f"x_{name}") for name in ("query", "key", "value")],
        node("Shape", ["mask"], "batch", start=0, end=1),
        node("Concat", ["batch", "one", "length", "length"], "mask_shape", axis=0),
        node("Unsqueeze", ["mask", "mask_axes"], "mask_4d"),
        node("Expand", ["mask_4d", "mask_shape"], "mask_full"),
        helper.make_node(
            "Attention",
            ["x_query", "x_key", "x_value", "mask_full"],
            ["mixed"],
            name="toy/mixed",
            q_num_heads=HEADS,
            kv_num_heads=HEADS,
            is_causal=1,
        ),
        node("MatMul", ["mixed", "output"], "projected"),
        node("Sum", ["x", "projected"], "residual"),
        node("LayerNormalization", ["residual", "gamma", "beta"], "normed", epsilon=1e-4),
        node("MatMul", ["normed", "up"], "hidden"),
        node("Gelu", ["hidden"], "activated", approximate="none"),
        node("MatMul", ["activated", "down"], "fed"),
        node("Add", ["normed", "fed"], "y"),
    ]
    weights.append(numpy_helper.from_array(np.array([1, 2], np.int64), "mask_axes"))
    graph = helper.make_graph(
        nodes,
        "toy",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT32, ["batch", "length"]),
            helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "length"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", WIDTH])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    if metadata:
        entries = {
            "keras_transformer.axes": json.dumps(AXES),
            "keras_transformer.inputs": json.dumps(INPUTS),
        }
        helper.set_model_props(model, entries)
    onnx.save(model, path)
    return model
