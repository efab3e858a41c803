"""A key/value cache of int8: its scales, what it holds, how near it is to Keras, and what refuses it."""

import json

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from keras import ops

from keras_transformer.export import cli, export_onnx, verify_onnx, writing
from keras_transformer.export.decoding import empty_cache
from keras_transformer.export.errors import ExportError, VerificationError
from keras_transformer.export.forms import LEAST_COSINE
from keras_transformer.export.int8_cache import MARGIN, measure_cache, quantize_cache
from keras_transformer.export.runtime import OnnxCausalLM, OnnxTransformer
from keras_transformer.export.sessions import open_session
from keras_transformer.export.verify_cached import INT8_CACHE_COSINE
from keras_transformer.models import CausalLM, Transformer
from tests import test_decoder_export
from tests.checks import numpy, roughen
from tests.test_decoder_export import PROMPTS, served_by_genai
from tests.test_verify_cached import changed

# The graph and its runner are the same on every backend.
pytestmark = pytest.mark.once

# Grouped heads of width 8, rotations, a window and biases; the output is the table of embeddings.
LLAMA = {**test_decoder_export.LLAMA, "use_bias": True, "tie_output": True, "max_length": 23, "seed": 3}
INT8 = {"target": "onnxruntime", "cache": "int8", "verbose": False}


@pytest.fixture(scope="module")
def model():
    return roughen(CausalLM(97, **LLAMA), scale=0.2)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    """The directory with a cache of int8, that with a float cache, and the report of the former."""
    folder = tmp_path_factory.mktemp("exported")
    report = export_onnx(model, folder / "int8", **INT8)
    export_onnx(model, folder / "float", target="onnxruntime", verify=False)
    return folder / "int8", folder / "float", report


def attention_graph(batch, heads, kv_heads, width, slots):
    """One `GroupQueryAttention` over a float buffer."""
    value = onnx.helper.make_tensor_value_info
    kinds = {"float": onnx.TensorProto.FLOAT, "int32": onnx.TensorProto.INT32}
    flat = {name: (batch, "T", n * width) for name, n in (("query", heads), ("key", kv_heads), ("value", kv_heads))}
    past = {f"past_key_values.0.{part}": (batch, kv_heads, slots, width) for part in ("key", "value")}
    inputs = [value(name, kinds["float"], shape) for name, shape in (flat | past).items()]
    inputs += [value("last", kinds["int32"], [batch]), value("total", kinds["int32"], [])]
    outputs = {"output": flat["query"], "present.0.key": (), "present.0.value": ()}
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        [entry.name for entry in inputs],
        list(outputs),
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
    )
    made = [value(name, kinds["float"], shape or past["past_key_values.0.key"]) for name, shape in outputs.items()]
    graph = onnx.helper.make_graph([node], "g", inputs, made)
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx_ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))


def test_attention_over_what_the_buffer_holds():
    batch, length, heads, kv_heads, width, slots = 2, 5, 6, 3, 16, 7
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(batch, length, n, width)).astype("float32") for n in (heads, 3, 3))
    # Of one channel larger values come than were measured: they are clipped.
    largest = {
        f"past_key_values.0.{name}": np.abs(x).max((0, 1)) * np.where(np.arange(width) == 4, 0.3, 1)
        for name, x in (("key", key), ("value", value))
    }
    graph = attention_graph(batch, heads, kv_heads, width, slots)
    quantize_cache(graph, largest)
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(graph).SerializeToString())
    empty = np.zeros((batch, kv_heads, slots, width), "int8")
    feeds = {name: x.reshape(batch, length, -1) for name, x in (("query", query), ("key", key), ("value", value))}
    feeds |= {name: empty for name in largest}
    feeds |= {"last": np.full(batch, length - 1, "int32"), "total": np.array(length, "int32")}
    output, *present = session.run(None, feeds)

    held = []
    for found, x, scale in zip(present, (key, value), largest.values(), strict=True):
        scale = MARGIN * scale[:, None] / 127
        x = x.transpose(0, 2, 1, 3)
        assert found.dtype == np.int8
        wanted = np.clip(x / scale, -128, 127)
        # Half a step, and what float32 divides otherwise.
        assert np.abs(found[:, :, :length] - wanted).max() <= 0.5 + 1e-4
        assert np.abs(wanted).max() == 128 and not found[:, :, length:].any()
        held.append((found[:, :, :length] * scale).repeat(heads // kv_heads, 1))
    scores = np.einsum("btnh,bnsh->bnts", query, held[0]) / np.sqrt(width)
    scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bnts,bnsh->btnh", weights / weights.sum(-1, keepdims=True), held[1])
    # Float32 sums of a few tens of products of a few units.
    np.testing.assert_allclose(output, expected.reshape(batch, length, -1), atol=2e-5)


def test_the_largest_values_are_those_of_the_keys_and_values_in_keras(model, exported):
    ids = np.array([[5, 6, 7, 8, 9, 3, 4], [11, 12, 13, 0, 0, 0, 0]], "int32")
    config = json.loads((exported[1] / "config.json").read_text())
    largest = measure_cache(model, exported[1], config, {"token_ids": ids})
    empty = np.zeros((2, 7, 2, 8), "float32")
    cache = tuple((ops.convert_to_tensor(empty),) * 2 for _ in range(2))
    positions = ops.convert_to_tensor(np.arange(7, dtype="int32")[None].repeat(2, 0))
    _, cache = model.decode(ops.convert_to_tensor(ids), positions=positions, cache=cache, start=0)
    real = (np.arange(7) < np.array([[7], [3]]))[:, :, None, None]
    for layer, pair in enumerate(cache):
        for part, tensor in zip(("key", "value"), pair, strict=True):
            expected = np.abs(np.where(real, numpy(tensor), 0)).max((0, 1))
            # Float32 sums in another order.
            np.testing.assert_allclose(largest[f"past_key_values.{layer}.{part}"], expected, rtol=1e-5)
    assert len(largest) == 4


def test_is_near_to_keras_in_a_quarter_of_the_memory(model, exported):
    directory, floats, report = exported
    assert report.passed and report.agreement > 0.9
    worst = [c for c in report.comparisons if c.output == "logits"]
    assert all(c.measure == "1 - cosine" and c.allowed == pytest.approx(1 - INT8_CACHE_COSINE) for c in worst)
    # It is int8, not float: an int8 step is 1/254 of the range, and the logits are sums over some of them.
    assert 1e-6 < report.max_error < 5e-3
    assert report.tokens.tokens > 20 and "int8" in report.notes[0]
    assert json.loads((directory / "config.json").read_text())["cache"] == "int8"
    assert "cache" not in json.loads((floats / "config.json").read_text())
    sizes = []
    for path in (directory, floats):
        cache = empty_cache(open_session(path / "decoder.onnx"), "onnxruntime", 3, 23).cache
        sizes.append(sum(array.nbytes for array in cache.values()))
    assert sizes[1] == 2 * 2 * 3 * 2 * 23 * 8 * 4 == 4 * sizes[0]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7}, {"num_beams": 3}])
def test_rows_are_what_they_are_alone(model, exported, options):
    runner = OnnxCausalLM(exported[0])
    ids = runner.generate(PROMPTS, 11, **options)
    if "temperature" in options:
        np.testing.assert_array_equal(np.stack(list(runner.stream(PROMPTS, 11, **options)), 1), ids)
        return  # a row draws by its number
    for row, prompt in zip(ids, PROMPTS, strict=True):
        alone = runner.generate([prompt], 11, **options)[0]
        np.testing.assert_array_equal(alone, row[: len(alone)])
        assert not row[len(alone) :].any()


@pytest.mark.parametrize("form, opset", [("fp32", 17), ("fp16", 23), ("int8", 23), ("int8-weights", 23), ("int4", 23)])
def test_with_smaller_forms_and_older_opsets(tmp_path, form, opset):
    arguments = {"num_layers": 1, "d_model": 64, "num_heads": 4, "d_ff": 96, "max_length": 17, "seed": 3}
    model = roughen(CausalLM(131, **arguments, position_encoding="sinusoidal", end_id=2, pad_id=0), scale=0.05)
    report = export_onnx(model, tmp_path / "model", form=form, opset=opset, **INT8)
    allowed = 1 - LEAST_COSINE.get(form, 1) + 1 - INT8_CACHE_COSINE
    assert report.comparisons[-1].allowed == pytest.approx(allowed) and report.form == form
    runner = OnnxCausalLM(tmp_path / "model")
    assert runner.generate(PROMPTS, 5).shape == (3, 5)
    types = {node.name: node.type for node in runner._sessions["decoder"].get_inputs()}
    assert types["past_key_values.0.key"] == types["past_key_values.0.value"] == "tensor(int8)"


def test_encoder_decoder(tmp_path):
    """The decoder's own cache is int8; the encoder's keys and values stay float, and exact."""
    model = roughen(Transformer(31, 37, num_layers=2, d_model=16, num_heads=2, d_ff=17, max_length=19, seed=5))
    report = export_onnx(model, tmp_path / "model", **INT8)
    measures = {c.output: c.measure for c in report.comparisons}
    assert measures.pop("logits") == "1 - cosine" and set(measures.values()) == {"error"}
    runner = OnnxTransformer(tmp_path / "model")
    types = {node.name: node.type for node in runner._sessions["decoder"].get_inputs()}
    assert types["past_key_values.1.value"] == "tensor(int8)" and types["cross_key_values.1.value"] == "tensor(float)"
    for options in ({}, {"num_beams": 3}):
        ids = runner.generate(PROMPTS, 13, **options)
        # Nearly all tokens are those of Keras: beyond the first that differs all may.
        assert (ids[:, :3] == model.generate(PROMPTS, 13, **options)[:, :3]).mean() > 0.7


def test_weights_beside_the_graph(exported, model, tmp_path, monkeypatch):
    """As those of a large model lie: the graph is written twice, with the same ones."""
    monkeypatch.setattr(writing, "_EXTERNAL_DATA_FROM", 1000)
    assert export_onnx(model, tmp_path / "model", **INT8).passed
    assert {path.name for path in (tmp_path / "model").glob("decoder*")} == {"decoder.onnx", "decoder.onnx.data"}
    ids = OnnxCausalLM(tmp_path / "model").generate(PROMPTS, 11)
    np.testing.assert_array_equal(ids, OnnxCausalLM(exported[0]).generate(PROMPTS, 11))


def test_a_wrong_scale_is_noticed(model, exported, tmp_path):
    def narrower(graph):
        (scale,) = (t for t in graph.graph.initializer if t.name == "past_key_values.1.value.scale")
        scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) / 8, scale.name))

    path = changed(exported[0], tmp_path / "wrong", "decoder.onnx", narrower)
    with pytest.raises(VerificationError) as error:
        verify_onnx(model, path, verbose=False)
    assert error.value.report.worst.output == "logits"


def test_genai_serves_the_directory(exported):
    _, ids = served_by_genai(exported[0])
    np.testing.assert_array_equal(ids, OnnxCausalLM(exported[0]).generate(PROMPTS[:1], 13)[0][: len(ids)])


def test_the_command(model, tmp_path):
    model.save(tmp_path / "model.keras")
    arguments = ["export", str(tmp_path / "model.keras"), str(tmp_path / "out"), "--target", "onnxruntime"]
    assert cli.main([*arguments, "--cache", "int8", "--logits", "last"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["cache"] == "int8"


def padded():
    return CausalLM(11, num_layers=1, d_model=16, num_heads=2, d_ff=9, max_length=9, pad_id=0)


def test_bad_input(model, tmp_path):
    path = tmp_path / "x"
    with pytest.raises(ExportError, match="`cache` must be None or 'int8'. Received: cache='int4'"):
        export_onnx(model, path, target="onnxruntime", cache="int4")
    for target in ("portable", "generator"):
        with pytest.raises(ExportError, match=f"`cache` must be None for target='{target}'.*Received: cache='int8'"):
            export_onnx(model, path, target=target, cache="int8")
    with pytest.raises(ExportError, match="`target` is for graphs with a cache"):
        export_onnx(model, tmp_path / "x.onnx", target="onnxruntime", cache="int8")
    double = CausalLM(11, num_layers=1, d_model=8, num_heads=1, d_ff=9, max_length=9, dtype="float64")
    with pytest.raises(ExportError, match="computes in float64: GroupQueryAttention takes.*Received: cache='int8'"):
        export_onnx(double, path, **INT8)
    with pytest.raises(ExportError, match="`samples` must hold texts .* Received: 0 tokens"):
        export_onnx(padded(), path, samples={"token_ids": np.zeros((2, 6), "int32")}, **INT8)
    export_onnx(model, tmp_path / "portable", verify=False)
    graph = onnx_ir.load(tmp_path / "portable" / "decoder.onnx")
    with pytest.raises(ExportError, match=r"'past_key_values.0.key' is read by '.*' \(Attention\)"):
        quantize_cache(graph, {"past_key_values.0.key": np.ones((2, 8))})
    assert [entry.name for entry in tmp_path.iterdir()] == ["portable"]
