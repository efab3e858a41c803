"""Keras' own attention layers with their options: equal to their graphs, one node where no weights are asked for."""

import itertools

import keras
import numpy as np
import onnx
import pytest
from keras import layers

from keras_transformer.export import export_onnx

# The traced operations are the same on every backend; tests of the rules run on all.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore:.*You are using a softmax over axis")]

LAYERS = {
    "heads": lambda **options: layers.MultiHeadAttention(3, 5, value_dim=4, output_shape=6, **options),
    "grouped heads": lambda **options: layers.GroupQueryAttention(6, 4, 2, **options),
}
# Masks of the call, by name: which axes they have.
MASKS = {
    "no mask": (),
    "padding": ("query_mask", "value_mask"),
    "key padding": ("key_mask",),
    "pairs": ("attention_mask",),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mask", MASKS)
def test_options(name, mask, tmp_path):
    for bias, causal, scores, cross in itertools.product((True, False), repeat=4):
        if (bias, causal, scores, cross).count(True) % 2:
            continue  # three of them still in all ways
        layer = LAYERS[name](use_bias=bias, dropout=0.2)
        query = keras.Input((None, 7), name="query")
        memory = keras.Input((None, 7), name="memory") if cross else query
        inputs = [query, memory] if cross else [query]
        given = {"use_causal_mask": causal, "return_attention_scores": scores}
        for kind in MASKS[mask]:
            shape = (None, None) if kind == "attention_mask" else (None,)
            given[kind] = keras.Input(shape, dtype="bool", name=kind)
            inputs.append(given[kind])
        outputs = layer(query, memory, **given)
        model = keras.Model(inputs, outputs)
        rng = np.random.default_rng(3)
        for weight in model.weights:
            weight.assign(rng.normal(scale=0.4, size=weight.shape))
        queries, keys = "length", "memory_length" if cross else "length"
        axes = {"query": queries, "memory": keys, "query_mask": queries, "value_mask": keys, "key_mask": keys}
        names = {x.name: {0: "batch", 1: axes.get(x.name, queries)} for x in inputs}
        if "attention_mask" in names:
            names["attention_mask"] |= {1: queries, 2: keys}
        report = export_onnx(model, tmp_path / "m.onnx", dynamic_axes=names, force=True, verbose=False)
        assert report.passed and len(report.comparisons) >= 8
        operators = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
        # Weights that are handed out are made in single steps.
        assert operators.count("Attention") == (not scores) and "Einsum" not in operators
