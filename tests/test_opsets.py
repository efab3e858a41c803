"""Older opsets: the same results without the operators that came later."""

import keras
import onnx
import pytest

from keras_transformer.export import export_onnx
from keras_transformer.export.errors import ExportError
from keras_transformer.models import CausalLM, Encoder, Transformer
from tests.checks import roughen
from tests.test_decoder_export import LLAMA

# The graphs are the same bytes on every backend.
pytestmark = pytest.mark.once

SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 17, "max_length": 11, "seed": 5}
NEWER = {"Attention", "RMSNormalization", "RotaryEmbedding"}
CASES = {
    # Grouped heads, a window, and rotations of a part of each head.
    "decoder": (lambda: CausalLM(37, **LLAMA | {"num_layers": 1, "max_length": 13, "rotary_width": 4}), {}),
    "buffer": (lambda: CausalLM(37, **LLAMA | {"num_layers": 1, "max_length": 13}), {"target": "onnxruntime"}),
    "encoder-decoder": (lambda: Transformer(31, 37, **SIZES, activation="gelu"), {}),
    "encoder": (lambda: Encoder(31, **SIZES, pad_id=0, activation="gelu_tanh"), {}),
    "half": (lambda: CausalLM(137, **LLAMA | {"num_layers": 1, "max_length": 13}), {"form": "fp16"}),
    "int8": (lambda: CausalLM(137, **LLAMA | {"num_layers": 1, "max_length": 13}), {"form": "int8"}),
}


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_keras(name, opset, tmp_path):
    make, options = CASES[name]
    model = roughen(make())
    report = export_onnx(model, tmp_path / "model", opset=opset, verbose=False, **options)
    assert report.passed
    for path in (tmp_path / "model").glob("*.onnx"):
        graph = onnx.load(path)
        onnx.checker.check_model(graph, full_check=True)
        assert {entry.domain: entry.version for entry in graph.opset_import}[""] == opset
        kinds = {node.op_type for node in graph.graph.node}
        assert not kinds & NEWER and ("Gelu" in kinds) <= (opset >= 20)


def test_attention_that_is_causal_and_masked(tmp_path):
    x = keras.Input((None, 8), name="x")
    mask = keras.Input((None, None), dtype="bool", name="mask")
    attention = keras.layers.MultiHeadAttention(2, 4)
    model = keras.Model([x, mask], attention(x, x, attention_mask=mask, use_causal_mask=True))
    assert export_onnx(model, tmp_path / "model.onnx", opset=17, verbose=False).passed


def test_what_an_opset_lacks_is_named(tmp_path):
    model = CausalLM(37, **LLAMA | {"num_layers": 1})
    with pytest.raises(ExportError, match="at least 18 for this model.* is a BitwiseXor. Received: opset=17"):
        export_onnx(model, tmp_path / "generator.onnx", target="generator", opset=17)
    for opset in (16, 24):
        with pytest.raises(ExportError, match=f"from 17 to 23. Received: opset={opset}"):
            export_onnx(model, tmp_path / "model", opset=opset)
    assert not list(tmp_path.iterdir())
    assert export_onnx(model, tmp_path / "generator.onnx", target="generator", opset=18, verbose=False).passed
