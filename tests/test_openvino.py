"""OpenVINO runs the graphs of an encoder and of a decoder with a cache, in every opset, and gives what Keras gives."""

import numpy as np
import pytest

from keras_transformer.export import export_onnx
from keras_transformer.models import CausalLM, Encoder
from tests.checks import numpy, roughen
from tests.test_decoder_export import LLAMA

openvino = pytest.importorskip("openvino", reason="openvino is in the extra `dev`")

# The graphs are the same bytes on every backend.
pytestmark = pytest.mark.once

# float32 sums in another order; OpenVINO would choose bfloat16 by itself on some CPUs.
TOLERANCE, FLOAT32 = 1e-5, {"INFERENCE_PRECISION_HINT": "f32"}


def compiled(path):
    core = openvino.Core()
    return core.compile_model(core.read_model(path), "CPU", FLOAT32)


@pytest.mark.parametrize("opset", [17, 20, 22, 23])
def test_encoder(opset, tmp_path):
    model = roughen(Encoder(31, num_layers=2, d_model=24, num_heads=3, d_ff=20, max_length=17, pad_id=0))
    export_onnx(model, tmp_path / "m.onnx", opset=opset, verify=False)
    run = compiled(tmp_path / "m.onnx")
    for batch, length in ((1, 1), (2, 8), (3, 13), (5, 17)):
        ids = np.random.default_rng(length).integers(1, 31, (batch, length)).astype("int32")
        ids[-1, length // 2 :] = 0
        np.testing.assert_allclose(run([ids])[0], numpy(model(ids)), atol=TOLERANCE)


@pytest.mark.parametrize("opset", [17, 22, 23])
def test_decoder_with_a_cache(opset, tmp_path):
    """Prompt and steps, the second row padded on the left."""
    model = roughen(CausalLM(37, **LLAMA | {"num_layers": 2, "max_length": 13}))
    export_onnx(model, tmp_path / "lm", opset=opset, verify=False)
    run = compiled(tmp_path / "lm" / "decoder.onnx")
    ids = np.random.default_rng(0).integers(1, 37, (2, 9))
    real = np.ones((2, 9), "int64")
    real[1, :3] = 0
    expected = numpy(model({"token_ids": ids.astype("int32")}))[0]
    alone = numpy(model({"token_ids": ids[1:, 3:].astype("int32")}))[0]
    past = {
        node.any_name: np.zeros(
            (2, node.partial_shape[1].get_length(), 0, node.partial_shape[3].get_length()), "float32"
        )
        for node in run.inputs
        if node.any_name.startswith("past")
    }
    found = []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        positions = np.maximum(real[:, :stop].cumsum(1) - 1, 0)[:, start:]
        feeds = {"input_ids": ids[:, start:stop], "attention_mask": real[:, :stop], "position_ids": positions}
        outputs = run(feeds | past)
        results = {key.any_name: value for key, value in outputs.items()}
        found.append(results["logits"])
        past = {name: results[name.replace("past_key_values", "present")] for name in past}
    logits = np.concatenate(found, axis=1)
    np.testing.assert_allclose(logits[0], expected, atol=TOLERANCE * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(logits[1, 3:], alone, atol=TOLERANCE * max(1, np.abs(alone).max()))
