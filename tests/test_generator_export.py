"""One graph that generates: the tokens of Keras, greedy and drawn, from one call without a loop outside."""

import keras
import numpy as np
import onnx
import pytest

from keras_transformer.export import OnnxGenerator, export_onnx, verify_onnx
from keras_transformer.export.errors import ExportError, NotAnExportError, VerificationError
from keras_transformer.export.runtime import OnnxCausalLM
from keras_transformer.export.verify_generator import _compare
from keras_transformer.generation.rules import Rules
from keras_transformer.models import CausalLM, Transformer
from tests import mutations
from tests.checks import roughen

LLAMA = {"num_layers": 2, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ff": 31, "norm": "rms", "gated": True}
LLAMA |= {"use_bias": False, "position_encoding": "rotary", "sliding_window": 5, "max_length": 29}
MODELS = {
    "llama": lambda: CausalLM(37, **LLAMA, end_id=(2, 9), pad_id=0, seed=3),
    "gpt2": lambda: CausalLM(41, num_layers=1, d_model=15, num_heads=3, d_ff=31, max_length=27, seed=4),
    "encoder-decoder": lambda: Transformer(31, 37, num_layers=1, d_model=14, num_heads=2, d_ff=17, max_length=19),
}
PROMPTS = [[5, 6, 7, 8, 9, 3, 4], [11], [13, 5, 4]]
OPTIONS = [
    {},
    {"temperature": 0.9, "seed": 2**32 - 1, "top_k": 7, "top_p": 0.8},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.1, "seed": 2**31, "top_k": 1000},
]
if keras.config.backend() != "torch":
    # Each is a program of its own in Keras; the graph is the same.
    OPTIONS = OPTIONS[:2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model and its file, by its name."""
    folder, known = tmp_path_factory.mktemp("exported"), {}

    def export(name):
        if name not in known:
            model = roughen(MODELS[name](), scale=0.2)
            export_onnx(model, folder / f"{name}.onnx", target="generator", verify=False)
            known[name] = model, folder / f"{name}.onnx"
        return known[name]

    return export


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.once), "llama", "encoder-decoder"])
def test_generates_what_keras_generates(exported, name):
    model, path = exported(name)
    generator = OnnxGenerator(path)
    for options in OPTIONS:
        expected = model.generate(PROMPTS, 11, **options)
        np.testing.assert_array_equal(generator.generate(PROMPTS, 11, **options), expected, err_msg=str(options))
    for length in (1, 18):
        expected = model.generate([[7]], length, compile=False)
        np.testing.assert_array_equal(generator.generate([[7]], length), expected)
    assert generator.generate([[7]], temperature=1.0).shape[0] == 1  # a seed of its own


def test_is_one_standard_graph(exported):
    graph = onnx.load(exported("llama")[1])
    onnx.checker.check_model(graph, full_check=True)
    (loop,) = (node for node in graph.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    nodes = [*graph.graph.node, *body.node]
    assert {node.domain for node in nodes} == {""} and not any("Random" in node.op_type for node in nodes)
    # The weights are there once, outside of the loop.
    assert not body.initializer
    names = [tensor.name for tensor in graph.graph.initializer]
    assert len(set(names)) == len(names) and sum("/kernel" in name for name in names) == 2 * 7
    assert sum(node.op_type == "Attention" for node in body.node) == 2
    inputs = ["input_ids", "attention_mask", "max_new_tokens", "temperature", "top_k", "top_p", "seed"]
    assert [value.name for value in graph.graph.input] == inputs
    assert [value.name for value in graph.graph.output] == ["ids"]


def test_padding_on_either_side(exported):
    """What a caller in another language may feed."""
    model, path = exported("llama")
    session = OnnxGenerator(path)._session
    rows = np.array([[0, 0, 5, 6, 7], [11, 0, 0, 0, 0], [0, 3, 4, 0, 0]])
    numbers = {"max_new_tokens": np.int64(9), "top_k": np.int64(0), "top_p": np.float32(1), "seed": np.int64(0)}
    feeds = {"input_ids": rows, "attention_mask": (rows != 0).astype(np.int64), "temperature": np.float32(0), **numbers}
    (ids,) = session.run(None, {name: np.asarray(value) for name, value in feeds.items()})
    np.testing.assert_array_equal(ids, model.generate([[5, 6, 7], [11], [3, 4]], 9))


@pytest.mark.once
def test_is_verified(exported, tmp_path):
    model, path = exported("llama")
    report = verify_onnx(model, path, verbose=False)
    assert report.passed and report.max_error < 1e-3
    assert {c.case.split(", ", 1)[1] for c in report.comparisons} == {
        "greedy",
        "temperature, seed",
        "temperature, seed, top_k, top_p",
    }
    for fault in (
        mutations.swapped_heads,
        mutations.no_mask,
        lambda g: mutations.insert(g, "top_k", "Add", np.int64(1)),
    ):
        graph = onnx.load(path)
        fault(graph)
        onnx.save(graph, tmp_path / "faulty.onnx")
        with pytest.raises(VerificationError):
            verify_onnx(model, tmp_path / "faulty.onnx", verbose=False)


def test_tokens_are_judged_by_the_logits():
    logits = np.log(np.array([[[1, 4, 2, 3], [4, 1, 2, 3]], [[1, 2, 4, 3], [1, 2, 3, 4.0]]]))
    rules = Rules(end_id=2, pad_id=0)

    def judged(ids, length=2):
        return _compare(rules, np.array(ids), logits, {}, "", length)

    assert judged([[1, 0], [2, 0]]).passed and judged([[1, 0], [2, 0]]).max_error == 0
    worse = judged([[1, 3], [2, 0]])
    assert not worse.passed and worse.place == (0, 1) and worse.max_error == pytest.approx(np.log(4 / 3))
    assert "row 1 goes on after its end" in judged([[1, 0], [2, 3]]).problem
    assert "ends after 2 of 3 tokens" in judged([[1, 0], [2, 0]], 3).problem


@pytest.mark.once
def test_bad_input(exported, tmp_path):
    model, path = exported("gpt2")
    with pytest.raises(ExportError, match="A graph with a tokenizer becomes a directory"):
        from keras_transformer.text import Tokenizer

        tokenizer = Tokenizer.train(["a"], vocabulary_size=259)
        other = CausalLM(300, num_layers=1, d_model=8, num_heads=2, d_ff=9, max_length=9)
        export_onnx(other, tmp_path / "x.onnx", target="generator", tokenizer=tokenizer)
    generator = OnnxGenerator(path)
    with pytest.raises(ValueError, match="at least one token in each row"):
        generator.generate({"token_ids": [[1, 2]], "padding_mask": [[False, False]]}, 3)
    with pytest.raises(ValueError, match="Received: 999 in row 0"):
        generator.generate([[999]], 3)
    with pytest.raises(ValueError, match="`top_p` must be in"):
        generator.generate([[3]], 3, top_p=1.5)
    with pytest.raises(ValueError, match="of kind 'decoder'"):
        verify_onnx(lambda x: x, path)
    export_onnx(model, tmp_path / "directory", target="generator", verify=False)
    with pytest.raises(NotAnExportError, match="generates by itself: run it with OnnxGenerator"):
        OnnxCausalLM(tmp_path / "directory")
    assert OnnxGenerator(tmp_path / "directory").generate([[3]], 3).shape == (1, 3)
    export_onnx(model, tmp_path / "plain.onnx", verify=False)
    with pytest.raises(NotAnExportError, match="no graph that generates by itself"):
        OnnxGenerator(tmp_path / "plain.onnx")
