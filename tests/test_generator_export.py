"""One graph that generates: the tokens of Keras, greedy and drawn, from one call without a loop outside."""

import json
import types

import keras
import numpy as np
import onnx
import pytest

from keras_transformer.export import OnnxGenerator, export_onnx, verify_generator, verify_onnx, writing
from keras_transformer.export.errors import ExportError, NotAnExportError, VerificationError
from keras_transformer.export.runtime import OnnxCausalLM
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
SAMPLES = {"token_ids": np.array([[5, 6, 7, 8, 9, 3, 4], [11, 0, 0, 0, 0, 0, 0]])}
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


def subgraphs(graph):
    """The graphs within `graph`, by the names of their attributes: the loop's body, or the branches of a choice."""
    found = [attribute for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return {attribute.name: attribute.g for attribute in found}


def test_is_one_standard_graph(exported):
    model = onnx.load(exported("llama")[1])
    onnx.checker.check_model(model, full_check=True)
    graph = model.graph
    body = subgraphs(graph)["body"]
    drawn, best = subgraphs(body)["then_branch"], subgraphs(body)["else_branch"]
    nodes = [node for part in (graph, body, drawn, best) for node in part.node]
    assert {node.domain for node in nodes} == {""} and not any("Random" in node.op_type for node in nodes)
    assert len({node.name for node in nodes}) == len(nodes)
    # The weights are there once, outside of the loop, and so is the decoder, within it.
    assert not any(part.initializer for part in (body, drawn, best))
    names = [tensor.name for tensor in graph.initializer]
    assert len(set(names)) == len(names) and sum("/kernel" in name for name in names) == 2 * 7
    for kind, count in {"Attention": 2, "MatMul": 2 * 7 + 1}.items():
        assert sum(node.op_type == kind for node in nodes) == sum(node.op_type == kind for node in body.node) == count
    # What draws, sorting above all, runs where it is asked for.
    assert {"TopK", "Log"} < {node.op_type for node in drawn.node}
    assert not {"TopK", "Log"} & {node.op_type for part in (graph, body, best) for node in part.node}
    inputs = ["input_ids", "attention_mask", "max_new_tokens", "temperature", "top_k", "top_p", "seed"]
    assert [value.name for value in graph.input] == inputs
    assert [value.name for value in graph.output] == ["ids"]
    said = {entry["name"]: entry for entry in json.loads(_metadata(model)["keras_transformer.inputs"])}
    assert said["input_ids"] == {"name": "input_ids", "dtype": "int64", "kind": "ids", "minimum": 0, "maximum": 36}


def _metadata(model):
    return {entry.key: entry.value for entry in model.metadata_props}


def test_what_a_caller_in_another_language_may_feed(exported):
    model, path = exported("llama")
    session = OnnxGenerator(path)._session

    def run(rows, **numbers):
        numbers = {"max_new_tokens": 9, "temperature": 0, "top_k": 0, "top_p": 1, "seed": 0} | numbers
        types = {name: "float32" if name in ("temperature", "top_p") else "int64" for name in numbers}
        feeds = {name: np.array(value, types[name]) for name, value in numbers.items()}
        mask = (rows != 0).astype(np.int64)
        return session.run(None, {"input_ids": rows, "attention_mask": mask, **feeds})[0]

    # Padding on either side.
    rows = np.array([[0, 0, 5, 6, 7], [11, 0, 0, 0, 0], [0, 3, 4, 0, 0]])
    np.testing.assert_array_equal(run(rows), model.generate([[5, 6, 7], [11], [3, 4]], 9))
    # The largest number for no limit, and a seed's bits with a sign.
    most = np.iinfo(np.int64).max
    drawn = run(rows, temperature=1, seed=2**32 - 3)
    np.testing.assert_array_equal(run(rows, temperature=1, seed=-3, top_k=most), drawn)
    assert run(rows, max_new_tokens=most).shape[1] <= LLAMA["max_length"] - rows.shape[1]


@pytest.fixture(scope="module")
def faulty(exported, tmp_path_factory):
    """A file with a fault, put into one of its graphs; see `tests.mutations`."""

    def make(fault, path):
        model = onnx.load(exported("llama")[1])
        graph = model.graph
        for name in path:
            graph = subgraphs(graph)[name]
        # Weights and constants lie in the outermost graph.
        part = types.SimpleNamespace(node=graph.node, initializer=model.graph.initializer)
        fault(types.SimpleNamespace(graph=part))
        file = tmp_path_factory.mktemp("faulty") / "model.onnx"
        onnx.save(model, file)
        return file

    return make


@pytest.mark.once
def test_is_verified(exported):
    model, path = exported("llama")
    report = verify_onnx(model, path, verbose=False)
    assert report.passed and report.agreement == 1
    cases = {c.case.split(", ", 1)[1] for c in report.comparisons}
    assert cases == {"greedy", "temperature, seed", "temperature, seed, top_k, top_p"}
    # Logits differ by what the order of sums makes; by the graph's own logits the tokens are those of the rules.
    errors = {name: max(c.max_error for c in report.comparisons if c.output == name) for name in ("logits", "ids")}
    assert 0 < errors["logits"] < 1e-4 and errors["ids"] < 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    "fault, path, output",
    [
        (mutations.swapped_heads, ["body"], "logits"),
        (mutations.no_mask, ["body"], "logits"),
        (mutations.heavier_weight("decoder/blocks.1/feed_forward/output_dense/kernel"), [], "logits"),
        (lambda g: mutations.insert(g, "step/next.logits", "Neg"), ["body", "else_branch"], "ids"),
        (lambda g: mutations.insert(g, "temperature", "Sqrt"), ["body", "then_branch"], "ids"),
        (lambda g: mutations.insert(g, "top_k", "Add", np.int64(1)), [], "ids"),
        (lambda g: mutations.insert(g, "seed", "Add", np.int64(1)), [], "ids"),
    ],
    ids=["heads", "mask", "weight", "best", "temperature", "top_k", "seed"],
)
def test_a_fault_is_found_where_it_is(exported, faulty, fault, path, output):
    with pytest.raises(VerificationError) as error:
        verify_onnx(exported("llama")[0], faulty(fault, path), samples=SAMPLES, verbose=False)
    assert {comparison.output for comparison in error.value.report.failures} == {output}


@pytest.mark.once
def test_the_file_gives_the_ids_of_its_copy(exported, faulty, monkeypatch):
    model, path = exported("llama")
    other = verify_generator._with_logits(faulty(mutations.no_mask, ["body"]))
    monkeypatch.setattr(verify_generator, "_with_logits", lambda file: other)
    with pytest.raises(VerificationError, match="the file does not give the ids of its copy"):
        verify_onnx(model, path, verbose=False)


@pytest.mark.once
def test_weights_beside_the_file(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_EXTERNAL_DATA_FROM", 1000)
    model, _ = exported("gpt2")
    assert export_onnx(model, tmp_path / "large", target="generator", verbose=False).passed
    assert (tmp_path / "large" / "model.onnx.data").stat().st_size > 1000


WIDE = {"num_layers": 1, "d_model": 64, "num_heads": 4, "d_ff": 96, "max_length": 13, "seed": 3}
SMALLER = {
    "fp16": (lambda: CausalLM(131, **WIDE, num_kv_heads=2, norm="rms", gated=True, position_encoding="rotary"), 23),
    "int8": (lambda: CausalLM(131, **WIDE, position_encoding="sinusoidal", end_id=2, pad_id=0), 18),
    "int8-weights": (lambda: CausalLM(131, **WIDE, num_kv_heads=2, norm="rms", gated=True), 23),
    "int4": (lambda: CausalLM(131, **WIDE), 22),
    "encoder-decoder": (lambda: Transformer(131, 137, **WIDE), 18),
}


@pytest.mark.once
@pytest.mark.parametrize("form", SMALLER)
def test_smaller_forms(form, tmp_path):
    make, opset = SMALLER[form]
    form = "fp16" if form == "encoder-decoder" else form
    model = roughen(make(), scale=0.05)
    path = tmp_path / "generator.onnx"
    report = export_onnx(model, path, target="generator", form=form, opset=opset, verbose=False)
    kinds = {comparison.output: comparison.measure for comparison in report.comparisons}
    assert report.passed and kinds == {"logits": "1 - cosine", "ids": "error"}
    assert report.agreement > (0.99 if form == "fp16" else 0.6)
    largest = max(comparison.max_error for comparison in report.comparisons if comparison.output == "logits")
    assert f"Form {form}: {report.size:,} bytes, 1 - cosine {largest:.3g} at most" in report.summary()
    graph = onnx.load(path).graph
    body = subgraphs(graph)["body"]
    assert not body.initializer
    types = {value.type.tensor_type.elem_type for value in body.input if "key_values" in value.name}
    assert types == {onnx.TensorProto.FLOAT16 if form == "fp16" else onnx.TensorProto.FLOAT}
    if isinstance(model, CausalLM):
        # Each weight is stored once, as in the graph without a loop.
        export_onnx(model, tmp_path / "decoder", form=form, opset=opset, logits="last", verify=False)
        one, other = (
            {t.name: (t.data_type, *t.dims) for t in g.initializer if not t.name.startswith("constant.")}
            for g in (graph, onnx.load(tmp_path / "decoder" / "decoder.onnx").graph)
        )
        assert one == other


def test_tokens_are_judged_by_the_logits():
    logits = np.log(np.array([[[1, 4, 2, 3], [4, 1, 2, 3]], [[1, 2, 4, 3], [1, 2, 3, 4.0]]]))
    rules = Rules(end_id=2, pad_id=0)

    def judged(ids, length=2):
        return verify_generator._compare(rules, np.array(ids), logits, {}, "", length)

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
    export_onnx(model, tmp_path / "cached", verify=False)
    with pytest.raises(NotAnExportError, match="run it with OnnxCausalLM"):
        OnnxGenerator(tmp_path / "cached")
    with pytest.raises(ExportError, match="`max_length` must be at least 2 for target='generator'"):
        export_onnx(model, tmp_path / "short", target="generator", max_length=1)
    with pytest.raises(ExportError, match="`logits` is for graphs .* not for target='generator'"):
        export_onnx(model, tmp_path / "short", target="generator", logits="last")
