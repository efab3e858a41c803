import json
import shutil
import types

import keras
import numpy as np
import onnx
import pytest

from keras_transformer.export import verify_cached
from keras_transformer.export.decoding import Decoding
from keras_transformer.export.errors import NotAnExportError, VerificationError
from keras_transformer.export.exporter import export_onnx
from keras_transformer.export.report import TokenCheck
from keras_transformer.export.sessions import ort_value
from keras_transformer.export.verify import verify_onnx
from keras_transformer.generation.rules import Rules
from keras_transformer.models import Transformer
from tests import mutations
from tests.checks import roughen

# The verifier is NumPy and ONNX Runtime.
pytestmark = pytest.mark.once

SIZES = {
    "source_vocabulary_size": 23,
    "target_vocabulary_size": 29,
    "num_layers": 1,
    "d_model": 12,
    "num_heads": 2,
    "d_ff": 20,
    "max_length": 16,
}


def make_model(seed=3):
    return roughen(Transformer(**SIZES, activation="gelu", seed=seed), seed)


def remember(function):
    results = {}

    def call(*args, **kwargs):
        key = repr([np.asarray(a).tobytes() + repr(np.shape(a)).encode() for a in keras.tree.flatten((args, kwargs))])
        if key not in results:
            results[key] = function(*args, **kwargs)
        return results[key]

    return call


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A model, the same with what it computes remembered, and its directory."""
    model = make_model()
    directory = tmp_path_factory.mktemp("exported") / "model"
    export_onnx(model, directory, verify=False)
    forward = remember(verify_cached.keras_forward(model))
    remembered = types.SimpleNamespace(
        encode=None, project_memory=None, generate=remember(model.generate), forward=forward
    )
    return model, remembered, directory


@pytest.fixture
def check(monkeypatch):
    """`verify_onnx` for a remembered model."""
    monkeypatch.setattr(verify_cached, "keras_forward", lambda model: model.forward)
    return lambda model, path, **kwargs: verify_onnx(model, path, verbose=False, **kwargs)


def changed(directory, target, file, change):
    """A copy of an exported directory with a fault in one graph, as if it had been exported so."""
    shutil.copytree(directory, target)
    graph = onnx.load(target / file)
    change(graph)
    onnx.save(graph, target / file)
    sign(target, file)
    return target


def sign(directory, file):
    import hashlib

    config = json.loads((directory / "config.json").read_text())
    data = (directory / file).read_bytes()
    config["files"][file] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (directory / "config.json").write_text(json.dumps(config))


def test_passes(good, check):
    _, model, directory = good
    report = check(model, directory)
    assert report.passed and report.max_error < 1e-5
    layers = range(SIZES["num_layers"])
    cross = [f"cross_key_values.{i}.{part}" for i in layers for part in ("key", "value")]
    assert [row[0] for row in report.rows()] == ["source_mask", *cross, "logits"]
    logits = [c for c in report.comparisons if c.output == "logits"]
    assert {c.sizes["batch"] for c in logits} == {1, 2, 3}
    assert {c.sizes["source_length"] for c in logits} == {c.sizes["length"] for c in logits} == {1, 7, 12, 16}
    assert all(c.sizes["source_length"] != c.sizes["length"] for c in logits)
    words = {c.case for c in logits if c.sizes["length"] == 7}
    assert {f"padded, prefill {n}, then single steps" for n in range(1, 7)} < words
    assert {"padded, in one piece", "padded, pieces of 2, 4, 1"} < words
    assert report.tokens.rows == 3 and report.tokens.tokens > 3 and not report.tokens.mismatches


ENCODER_FAULTS = {
    "gelu": mutations.other_gelu,
    "epsilon": mutations.larger_epsilon,
    "mask": mutations.no_mask,
    "causal": mutations.flipped_causal,
    "heads": mutations.swapped_heads,
    "fixed length": mutations.fixed_length,
    "positions": lambda graph: mutations.insert(
        graph, mutations.nodes(graph, "Range")[0].output[0], "Add", np.int32(1)
    ),
    "1% of embedding": mutations.heavier_weight("source_embedding/embeddings"),
    "1% of value": mutations.heavier_weight("decoder/blocks.0/cross_attention/value_dense/kernel"),
    "other mask": lambda graph: mutations.insert(graph, "source_mask", "Not"),
}
DECODER_FAULTS = {
    "gelu": mutations.other_gelu,
    "epsilon": mutations.larger_epsilon,
    "own mask": lambda graph: mutations.no_mask(graph, "self_attention"),
    "source mask": lambda graph: mutations.no_mask(graph, "cross_attention"),
    "causal": mutations.flipped_causal,
    "heads": mutations.swapped_heads,
    "fixed length": mutations.fixed_length,
    "positions": lambda graph: mutations.insert(graph, "position_ids", "Add", np.int64(1)),
    "padding": lambda graph: mutations.insert(graph, "attention_mask", "Max", np.int64(1)),
    "key cache not used": lambda graph: mutations.insert(graph, "past_key_values.0.key", "Mul", np.float32(0)),
    "value cache not used": lambda graph: mutations.insert(graph, "past_key_values.0.value", "Mul", np.float32(0)),
    "memory's keys and values swapped": lambda graph: mutations.swap_names(
        graph, "cross_key_values.0.key", "cross_key_values.0.value"
    ),
    "1% of feed-forward": mutations.heavier_weight("decoder/blocks.0/feed_forward/inner_dense/kernel"),
    "1% of bias": mutations.heavier_weight("decoder/blocks.0/self_attention/value_dense/bias"),
}


@pytest.mark.parametrize("fault", ENCODER_FAULTS)
def test_encoder_fault_is_noticed(good, check, tmp_path, fault):
    _, model, directory = good
    assert check(model, directory).passed
    path = changed(directory, tmp_path / "faulty", "encoder.onnx", ENCODER_FAULTS[fault])
    with pytest.raises(VerificationError):
        check(model, path)


@pytest.mark.parametrize("fault", DECODER_FAULTS)
def test_decoder_fault_is_noticed(good, check, tmp_path, fault):
    _, model, directory = good
    path = changed(directory, tmp_path / "faulty", "decoder.onnx", DECODER_FAULTS[fault])
    with pytest.raises(VerificationError) as error:
        check(model, path)
    assert error.value.report.worst.output == "logits"


def test_cache_not_fed_back(good, check, monkeypatch):
    """The fault is in the loop, not in the graph."""
    _, model, directory = good
    run = Decoding._run

    def forgetful(self, input_ids, attention_mask, position_ids):
        logits = run(self, input_ids, attention_mask, position_ids)
        if attention_mask.shape[1] > 3:
            first = next(iter(self._past))
            self._past[first] = ort_value(0 * self._past[first].numpy())
        return logits

    monkeypatch.setattr(Decoding, "_run", forgetful)
    with pytest.raises(VerificationError):
        check(model, directory)


def test_last_logits_only(good, check, tmp_path):
    model, remembered, _ = good
    export_onnx(model, tmp_path / "last", logits="last", verify=False)
    assert check(remembered, tmp_path / "last").passed


def test_given_sentences(good, check):
    _, model, directory = good
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 23, (1, 2)), rng.integers(1, 23, (1, 3))
    report = check(model, directory, samples={"source": source, "target": target})
    assert {c.case.split(",")[0] for c in report.comparisons} == {"samples"}
    assert {c.sizes["length"] for c in report.comparisons} == {1, 3}
    report = check(model, directory, samples={"source": source})
    assert {c.sizes["length"] for c in report.comparisons} == {1, 2}
    with pytest.raises(ValueError, match="Received: 23 in row 0"):
        check(model, directory, samples={"source": source * 0 + 23})


def test_wrong_model_or_directory(good, tmp_path):
    _, _, directory = good
    with pytest.raises(ValueError, match="encoder–decoder"):
        verify_onnx(keras.Sequential([keras.layers.Dense(2)]), directory)
    with pytest.raises(NotAnExportError, match="no config.json"):
        verify_onnx(None, tmp_path)


def test_splits_cover_the_target():
    for length in range(1, 30):
        cuts = verify_cached.splits(length)
        assert all(sum(pieces) == length for pieces in cuts)
        assert [length] in cuts
    assert [[first, *[1] * (7 - first)] for first in range(1, 8)][::-1] == verify_cached.splits(7)[:7]


def test_ties_are_counted_and_excused():
    rng = np.random.default_rng(0)
    keras_logits = rng.normal(size=(2, 5, 7)).astype("float32")
    keras_logits[..., :3] = -9  # no row ends
    onnx_logits = keras_logits.copy()
    top = np.argsort(keras_logits[1, 2])[-2:]
    keras_logits[1, 2, top] = onnx_logits[1, 2, top] = 3.0
    keras_logits[1, 2, top[0]] += 1e-4
    onnx_logits[1, 2, top[1]] += 1e-4

    def compare(onnx_logits):
        ids = onnx_logits.argmax(-1)
        return verify_cached.compare_tokens(keras_logits.argmax(-1), ids, ids, Rules(end_id=2), lambda: keras_logits)

    tie = compare(onnx_logits)
    assert tie.passed and tie.excused == len(tie.mismatches) == 1 and tie.tokens == 10
    assert tie.mismatches[0]["row"] == 1 and tie.mismatches[0]["position"] == 2
    assert tie.mismatches[0]["gap"] == pytest.approx(1e-4, rel=0.01)
    assert tie.mismatches[0]["keras"] == top[0] and tie.mismatches[0]["onnx"] == top[1]

    wrong = onnx_logits.copy()
    wrong[0, 3, 5] = 99
    result = compare(wrong)
    assert not result.passed and isinstance(result, TokenCheck)
    assert [(m["row"], m["position"]) for m in result.mismatches] == [(0, 3), (1, 2)]
