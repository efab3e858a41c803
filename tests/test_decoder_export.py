"""Decoder-only models with a key/value cache in ONNX: both forms of the cache, their runner, and onnxruntime-genai."""

import json

import keras
import numpy as np
import onnx
import pytest
import tokenizers

from keras_transformer.export import OnnxGenerator, export_onnx, verify_onnx
from keras_transformer.export.decoding import empty_cache
from keras_transformer.export.errors import ExportError, NotAnExportError, VerificationError
from keras_transformer.export.runtime import OnnxCausalLM, OnnxTransformer
from keras_transformer.models import CausalLM, Transformer
from keras_transformer.text import Tokenizer
from tests.checks import roughen
from tests.test_runtime import in_threads

TEXTS = ["one two three", "two three", "three one one two", "two"] * 3
TOKENIZER = Tokenizer.train(TEXTS, vocabulary_size=263)
# Heads of width 8, the least that ONNX Runtime's buffer takes; all other sizes differ.
LLAMA = {
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 40,
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "use_bias": False,
    "position_encoding": "rotary",
    "sliding_window": 5,
    "tie_output": False,
    "max_length": 29,
    "end_id": 2,
    "pad_id": 0,
}
GPT2 = {"num_layers": 1, "d_model": 24, "num_heads": 3, "d_ff": 31, "max_length": 27, "end_id": (2, 9)}
PROMPTS = [[5, 6, 7, 8, 9, 3, 4], [11], [13, 5, 4]]
TARGETS = ("portable", "onnxruntime")


def made(**arguments):
    """A model whose biases and norms are not what they start as."""
    return roughen(CausalLM(TOKENIZER.vocabulary_size, **arguments, seed=3), scale=0.2)


@pytest.fixture(scope="module")
def models():
    return {"llama": made(**LLAMA), "gpt2": made(**GPT2)}


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """The directory of a model, by its name and target."""
    folder, known = tmp_path_factory.mktemp("exported"), {}

    def directory(name, target):
        if (name, target) not in known:
            known[name, target] = folder / f"{name}-{target}"
            export_onnx(models[name], known[name, target], target=target, tokenizer=TOKENIZER, verify=False)
        return known[name, target]

    return directory


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.once
def test_is_verified(models, exported, target):
    report = verify_onnx(models["llama"], exported("llama", target), verbose=False)
    logits = [c for c in report.comparisons if c.output == "logits"]
    assert report.max_error < 2e-5 and report.tokens.passed and report.tokens.tokens > 20
    assert {c.sizes["length"] for c in logits} == {1, 7, 12, 24, 29}
    assert {f"padded, prefill {n}, then single steps" for n in range(1, 7)} < {c.case for c in logits}


OPTIONS = [
    {},
    {"temperature": 0.9, "seed": 2**32 - 1, "top_k": 40, "top_p": 0.8, "min_p": 0.001, "repetition_penalty": 1.5},
    {"num_beams": 3, "length_penalty": 0.5},
    {"temperature": 1.0, "seed": 7},
    {"min_new_tokens": 5, "stop_sequences": [[262, 3], [17]], "repetition_penalty": 1.2},
]
if keras.config.backend() != "torch":
    # Each is a program of its own in Keras; the graph is the same.
    OPTIONS = OPTIONS[:3]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.once)])
def test_generates_what_keras_generates(models, exported, name, target):
    runner = OnnxCausalLM(exported(name, target))
    for options in OPTIONS:
        expected = models[name].generate(PROMPTS, 13, **options)
        np.testing.assert_array_equal(runner.generate(PROMPTS, 13, **options), expected, err_msg=str(options))
    streamed = np.stack(list(runner.stream(PROMPTS, 13)), 1)
    np.testing.assert_array_equal(streamed, runner.generate(PROMPTS, 13))
    # Up to the last slot, from one token on, and from padding on the left.
    longest = models[name].max_length - 1
    expected = models[name].generate([[7]], longest, compile=False)
    np.testing.assert_array_equal(runner.generate([[7]], longest), expected)
    left = {"token_ids": [[0, 0, 5, 3]], "padding_mask": np.array([[False, False, True, True]])}
    np.testing.assert_array_equal(runner.generate(left, 5), runner.generate([[5, 3]], 5))


@pytest.mark.parametrize("target", TARGETS)
def test_graph_and_its_files(exported, target):
    directory = exported("llama", target)
    graph = onnx.load(directory / "decoder.onnx")
    onnx.checker.check_model(graph, full_check=True)
    counts = {}
    for node in graph.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    attention = {"portable": "Attention", "onnxruntime": "GroupQueryAttention"}[target]
    assert counts[attention] == 2 and counts["RotaryEmbedding"] == 4 and counts["RMSNormalization"] == 5
    assert {node.domain for node in graph.graph.node} == ({""} if target == "portable" else {"", "com.microsoft"})
    # The cache is neither transposed nor copied.
    assert not counts.keys() & {"ScatterND", "ScatterElements", "Where", "Einsum", "Concat"} - {"Concat"}
    names = [value.name for value in graph.graph.input]
    assert names[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert [value.name for value in graph.graph.output][:2] == ["logits", "present.0.key"]
    config = json.loads((directory / "config.json").read_text())
    assert set(config["files"]) == {"decoder.onnx", "genai_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.once
def test_text_in_and_out(models, exported):
    runner = OnnxCausalLM(exported("llama", "portable"))
    texts = ["one two", "three", "two one three"]
    ids = models["llama"].generate([row[:-1] for row in TOKENIZER.encode(texts)], 9)
    expected = TOKENIZER.decode(ids)
    assert runner.complete(texts, 9) == runner.complete(texts, 9, batch_size=1) == expected
    drawn = runner.complete(texts, 9, temperature=1.0, seed=5)
    assert drawn == runner.complete(texts, 9, batch_size=1, temperature=1.0, seed=5) != expected
    with pytest.raises(ValueError, match="at least one token each. Received: none in text 1"):
        runner.complete(["one", ""], 3)
    with pytest.raises(TypeError, match="sequence of strings"):
        runner.complete("one", 3)
    with pytest.raises(ValueError, match="max_length=29 tokens each. Received: 30 tokens in text 0"):
        runner.complete(["é" * 15], 3)


@pytest.mark.once
def test_a_tokenizer_that_pads_and_cuts(models, exported, tmp_path):
    """As published files may: prompts are padded by batches, and none is cut."""
    padding = tokenizers.Tokenizer.from_str(TOKENIZER._tokenizer.to_str())
    padding.enable_padding(length=11)
    padding.enable_truncation(4)
    export_onnx(models["gpt2"], tmp_path / "model", tokenizer=padding, verify=False)
    texts = ["one two", "three", "two one three two three one"]
    expected = OnnxCausalLM(exported("gpt2", "portable")).complete(texts, 5)
    assert OnnxCausalLM(tmp_path / "model").complete(texts, 5) == expected


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.once
def test_threads_share_a_runner(exported, target):
    runner = OnnxCausalLM(exported("llama", target))
    requests = [
        (PROMPTS, {}),
        ([[12, 200]], {"temperature": 1.0, "seed": 3}),
        ([[4, 3], [7, 7, 7]], {"num_beams": 3}),
        ([[8, 200, 100, 50, 60], [9], [10, 11]], {"repetition_penalty": 1.5, "min_p": 0.1}),
    ]
    calls = [lambda rows=rows, options=options: runner.generate(rows, 13, **options) for rows, options in requests]
    calls += [lambda: np.stack(list(runner.stream([[5, 6], [7]], 9)), 1)]
    for expected, ids in zip(*in_threads(calls), strict=True):
        np.testing.assert_array_equal(ids, expected)
    texts = ["one two three", "two", "three one one", "one two two one three two", "two three"]
    calls = [lambda chosen=texts[i:]: runner.complete(chosen, 9, batch_size=1 + len(chosen) % 3) for i in range(5)]
    expected, results = in_threads(calls)
    assert results == expected


@pytest.mark.once
def test_threads_share_a_generator(models, tmp_path):
    export_onnx(models["gpt2"], tmp_path / "model.onnx", target="generator", verify=False)
    runner = OnnxGenerator(tmp_path / "model.onnx")
    requests = [
        (PROMPTS, {}),
        ([[12, 200]], {"temperature": 1.0, "seed": 3}),
        ([[4, 3], [7, 7, 7]], {"temperature": 0.8, "top_k": 9, "seed": 5}),
        ([[8, 200, 100, 50, 60], [9], [10, 11]], {}),
    ]
    calls = [lambda rows=rows, options=options: runner.generate(rows, 13, **options) for rows, options in requests]
    for expected, ids in zip(*in_threads(calls), strict=True):
        np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.once
def test_rows_of_a_cache_are_taken(exported, target):
    """Any rows, again and again; all in their order are not copied."""
    runner = OnnxCausalLM(exported("gpt2", target))
    prompts, lengths = np.array([[5, 6, 7], [11, 8, 0], [13, 5, 4]]), np.array([3, 2, 3])
    rows = np.arange(3)
    decoding = empty_cache(runner._sessions["decoder"], target, 3, 27)
    decoding.prefill(prompts, lengths)
    decoding.step(prompts[rows, lengths - 1][:, None])
    tokens = [np.array([7, 9, 12])]
    # Rows of one source change places, and rows of others.
    within = [1, 0, 2, 2, 4], [0, 1, 2, 3, 4], [0, 1, 3, 2, 4]
    for index in ([0, 0, 1, 1, 2], *within, [4, 1, 0, 2, 3], [1, 2, 1, 3, 4], [2, 0, 0, 4, 3], [3, 0]):
        assert decoding.take(np.array(index)) is decoding
        rows, tokens = rows[index], [token[index] for token in tokens]
        logits = decoding.step(tokens[-1][:, None])
        whole = [[*prompts[row, : lengths[row]], *(token[i] for token in tokens)] for i, row in enumerate(rows)]
        for row, ids in zip(logits, whole, strict=True):
            alone = empty_cache(runner._sessions["decoder"], target, 1, 27)
            expected = alone.extend(np.array([ids]))[0, -1]
            # Float32 sums in another order, of logits of a few units.
            np.testing.assert_allclose(row, expected, atol=2e-5)
        tokens.append(np.arange(20, 20 + len(index)))
    decoding._past = None  # which is not looked at
    decoding.take(np.arange(2))


def served_by_genai(directory):
    """The model in onnxruntime-genai, and the ids that it generates after the first of `PROMPTS`."""
    genai = pytest.importorskip("onnxruntime_genai")
    model = genai.Model(str(directory))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=20)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(np.array([PROMPTS[0]], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    ids = generator.get_sequence(0)[7:]
    assert len(ids) > 5
    return model, ids


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.once
def test_genai_serves_the_directory(models, exported, target):
    genai = pytest.importorskip("onnxruntime_genai")
    model, ids = served_by_genai(exported("llama", target))
    np.testing.assert_array_equal(ids, models["llama"].generate(PROMPTS[:1], 13)[0][: len(ids)])
    text = "two one, é"
    np.testing.assert_array_equal(genai.Tokenizer(model).encode(text), TOKENIZER.encode([text])[0][:-1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.once
def test_encoder_decoder_in_both_forms(tmp_path, target):
    arguments = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 17, "max_length": 19, "seed": 5}
    model = Transformer(31, 37, **arguments)
    report = export_onnx(model, tmp_path / "model", target=target, logits="last", verbose=False)
    assert report.tokens.passed and report.tokens.tokens
    runner = OnnxTransformer(tmp_path / "model")
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"num_beams": 3}):
        expected = model.generate(PROMPTS, 13, **options)
        np.testing.assert_array_equal(runner.generate(PROMPTS, 13, **options), expected)
    streamed = np.stack(list(runner.stream(PROMPTS, 13)), 1)
    np.testing.assert_array_equal(streamed, runner.generate(PROMPTS, 13))


@pytest.mark.once
@pytest.mark.parametrize("form, size", [("fp32", 4), ("int8", 1)])
def test_what_both_graphs_hold_is_stored_once(tmp_path, form, size):
    model = Transformer(211, 211, num_layers=1, d_model=24, num_heads=2, d_ff=17, max_length=19, share_embeddings=True)
    export_onnx(model, tmp_path / "model", form=form, verify=False)
    assert (tmp_path / "model" / "shared.data").stat().st_size == 211 * 24 * size
    for name in ("encoder", "decoder"):
        graph = onnx.load(tmp_path / "model" / f"{name}.onnx", load_external_data=False).graph
        (table,) = (tensor for tensor in graph.initializer if tensor.external_data)
        assert table.dims == [211, 24]
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "model").rename(tmp_path / "elsewhere" / "model")
    ids = OnnxTransformer(moved).generate(PROMPTS, 5)
    if form == "fp32":
        np.testing.assert_array_equal(ids, model.generate(PROMPTS, 5))
    (moved / "shared.data").unlink()
    with pytest.raises(NotAnExportError, match="is not complete: shared.data is missing"):
        OnnxTransformer(moved)


@pytest.mark.once
def test_a_wrong_cache_is_noticed(models, exported, tmp_path):
    """A window that is off by one."""
    from tests.test_verify_cached import changed

    def wider(graph):
        for node in graph.graph.node:
            for attribute in node.attribute:
                if attribute.name == "local_window_size":
                    attribute.i += 1

    path = changed(exported("llama", "onnxruntime"), tmp_path / "wrong", "decoder.onnx", wider)
    with pytest.raises(VerificationError) as error:
        verify_onnx(models["llama"], path, verbose=False)
    assert error.value.report.worst.output == "logits"


def test_bad_input(models, exported, tmp_path):
    with pytest.raises(ExportError, match="`target` must be one of .*Received: target='openvino'"):
        export_onnx(models["gpt2"], tmp_path / "x", target="openvino")
    with pytest.raises(ExportError, match="`target` is for graphs with a cache.*Received: target='onnxruntime'"):
        export_onnx(models["gpt2"], tmp_path / "x.onnx", target="onnxruntime")
    with pytest.raises(ExportError, match="multiple of 8. Received: target='onnxruntime', with heads of width 6"):
        export_onnx(made(**GPT2 | {"num_heads": 4}), tmp_path / "x", target="onnxruntime")
    with pytest.raises(NotAnExportError, match="of kind 'decoder': run it with OnnxCausalLM"):
        OnnxTransformer(exported("gpt2", "portable"))
    runner = OnnxCausalLM(exported("gpt2", "portable"))
    with pytest.raises(ValueError, match="`inputs` must hold ids|Received: 999"):
        runner.generate([[999]], 3)
    with pytest.raises(ValueError, match="must together not exceed the model's max_length=27"):
        runner.generate([[3, 4]], 26)
    with pytest.raises(ValueError, match="at least one token in each row"):
        runner.generate({"token_ids": [[1, 2]], "padding_mask": [[False, False]]}, 3)
    with pytest.raises(ValueError, match="`path` must be the directory, not a graph"):
        verify_onnx(models["gpt2"], exported("gpt2", "portable") / "decoder.onnx")
    for sizes, match in (
        ({"min_length": 9}, "`min_length` is for other models.*min_length=9"),
        ({"max_length": 0}, "must be a range of sizes. Received: min_length=None, max_length=0"),
        ({"max_length": -1}, "max_length=-1"),
        ({"max_length": 28}, "within the model's own, 27. Received: max_length=28"),
    ):
        with pytest.raises(ExportError, match=match):
            export_onnx(models["gpt2"], tmp_path / "x", **sizes)
    with pytest.raises(ValueError, match="holds a decoder-only model"):
        verify_onnx(lambda x: x, exported("gpt2", "portable"))
    assert not list(tmp_path.iterdir())
