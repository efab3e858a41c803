"""Exported encoders run on text: vectors and classes as in Keras, whatever shares a batch."""

import numpy as np
import pytest
import tokenizers

from keras_transformer.export import OnnxEncoder, export_onnx
from keras_transformer.export.errors import ExportError, NotAnExportError
from keras_transformer.models import CausalLM, Encoder, SentenceEncoder, SequenceClassifier
from tests.checks import numpy
from tests.test_runtime import in_threads

TEXTS = ["one two three four five", "two", "three one", "five four three two one two three"]
WORDS = ["[PAD]", "[CLS]", "one", "two", "three", "four", "five"]


def tokenizer():
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    made.enable_padding(length=11)  # as published files have it
    return made


def encoder(types=0):
    arguments = {"num_layers": 1, "d_model": 12, "num_heads": 3, "d_ff": 17, "max_length": 9, "pad_id": 0, "seed": 3}
    return Encoder(len(WORDS), num_token_types=types, **arguments)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A sentence encoder with token types and a classifier without, each with its directory."""
    folder, made = tmp_path_factory.mktemp("exported"), {}
    for name, model in (("embed", SentenceEncoder(encoder(2))), ("classify", SequenceClassifier(encoder(), 4))):
        export_onnx(model, folder / name, tokenizer=tokenizer(), verify=False)
        made[name] = model, folder / name
    return made


def ids():
    rows = [[1, *(WORDS.index(word) for word in text.split())] for text in TEXTS]
    return np.array([row + [0] * (8 - len(row)) for row in rows], "int32")


def test_vectors_are_those_of_keras(exported):
    model, directory = exported["embed"]
    runner = OnnxEncoder(directory, threads=1)
    expected = numpy(model({"token_ids": ids(), "token_types": np.zeros_like(ids())}))
    for size in (1, 3, 32):
        # Float32 sums of a few tens of terms.
        np.testing.assert_allclose(runner.embed(TEXTS, batch_size=size), expected, atol=1e-6)
    assert runner.embed([]).shape == (0, 12)


def test_probabilities_are_those_of_keras(exported):
    model, directory = exported["classify"]
    logits = numpy(model(ids()))
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(OnnxEncoder(directory).classify(TEXTS), expected, atol=1e-6)


@pytest.mark.once
def test_threads_share_a_runner(exported):
    for task in ("embed", "classify"):
        run = getattr(OnnxEncoder(exported[task][1], threads=1), task)
        calls = [lambda chosen=TEXTS[i:], run=run: run(chosen, batch_size=len(chosen) % 3 + 1) for i in range(4)]
        calls += [lambda run=run: run(["one", "two three"]), lambda run=run: run(TEXTS[::-1])]
        for expected, result in zip(*in_threads(calls), strict=True):
            np.testing.assert_array_equal(result, expected)


def test_bad_input(exported, tmp_path):
    runner = OnnxEncoder(exported["embed"][1])
    with pytest.raises(ValueError, match="holds a model for `embed`. Received: a call of `classify`"):
        runner.classify(TEXTS)
    with pytest.raises(TypeError, match="sequence of strings"):
        runner.embed("one two")
    with pytest.raises(ValueError, match="max_length=9 tokens each. Received: 10 tokens in text 1"):
        runner.embed(["one", "one " * 9])
    with pytest.raises(ValueError, match="`batch_size` must be"):
        runner.embed(TEXTS, batch_size=0)
    model = SentenceEncoder(encoder())
    export_onnx(model, tmp_path / "bare", verify=False)
    with pytest.raises(ValueError, match="holds no tokenizer.json"):
        OnnxEncoder(tmp_path / "bare").embed(TEXTS)
    export_onnx(encoder(), tmp_path / "plain", verify=False)
    with pytest.raises(NotAnExportError, match="no SentenceEncoder or SequenceClassifier"):
        OnnxEncoder(tmp_path / "plain")
    with pytest.raises(ExportError, match="`tokenizer` is for models that a runner feeds with text.*a Encoder"):
        export_onnx(encoder(), tmp_path / "x", tokenizer=tokenizer())
    with pytest.raises(ExportError, match="no more ids than the model, 5. Received: 7 ids"):
        small = CausalLM(5, num_layers=1, d_model=8, num_heads=2, d_ff=9, max_length=9)
        export_onnx(small, tmp_path / "x", tokenizer=tokenizer())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "plain"]
