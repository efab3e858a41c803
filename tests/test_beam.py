"""Beam search: against every sequence there is, against Hugging Face, and in both loops."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.generation.beam import Beams
from keras_transformer.generation.loop import loop_tokens
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Engine, Rules
from keras_transformer.generation.stream import collect_tokens, stream_tokens
from tests.checks import compiled, numpy

CODES = 97


def table(vocabulary, seed):
    """Logits for each of `CODES` histories, without ties."""
    return np.random.default_rng(seed).normal(0, 1.5, (CODES, vocabulary)).astype("float32")


def following(code, token):
    """The history `code` with one token more."""
    return (code * 5 + token + 1) % CODES


def engine(logits, xp=np):
    """A model that looks its logits up in a table; its cache is the history, which has to follow the beams."""

    def step(tokens, position, codes):
        codes = following(codes, tokens[:, 0])
        return xp.take(logits, codes, axis=0), codes

    return Engine(step, lambda codes, index: xp.take(codes, index, axis=0), xp)


def request(logits, length, batch=3, end_id=2, **arguments):
    """For rows that start with the tokens 0, 1, …"""
    start = np.arange(batch, dtype="int32")
    return Request({}, start, start[:, None], length, logits.shape[1], None, Rules(end_id, 0)).asking(**arguments)


def search(logits, length, **arguments):
    """What the Python loop makes of it in NumPy."""
    asked = request(logits, length, **arguments)
    begun = asked.rules.begin(engine(logits), np.zeros_like(asked.start), asked.start, length + 3)
    ids, _, (_, notes) = collect_tokens(stream_tokens(asked.rules.advance(engine(logits)), *begun, range(length)))
    return asked.rules.result(ids, notes)


def compiled_search(logits, length, **arguments):
    """What the compiled loop makes of it."""
    asked = request(logits, length, **arguments)
    end_id, pad_id, num_beams = asked.rules.end_id, asked.rules.pad_id, asked.rules.num_beams

    @compiled
    def run(logits, start, settings, length):
        rules = Beams(end_id, pad_id, settings, num_beams)
        begun = rules.begin(engine(logits, ops), ops.zeros_like(start), start, 16)
        ids, _, (_, notes) = loop_tokens(rules.advance(engine(logits, ops)), *begun, length, 16)
        return ids, notes

    arrays = logits, asked.start, dict(asked.rules.settings), np.array(length, "int32")
    return asked.rules.result(*numpy(run(*keras.tree.map_structure(ops.convert_to_tensor, arrays))))


def score(logits, start, ids, length_penalty):
    """The sum of the log-probabilities of `ids`, in float64, over their number to the power `length_penalty`."""
    code, total = following(0, start), 0.0
    for token in ids:
        row = logits[code].astype("float64")
        total += row[token] - np.log(np.exp(row).sum())
        code = following(code, token)
    return total / len(ids) ** length_penalty


def best_of_all(logits, start, length, length_penalty, end_id=2):
    """The best of all sequences that end with `end_id` or are `length` long."""
    inner = [token for token in range(logits.shape[1]) if token != end_id]
    sequences = [
        (*body, last)
        for made in range(1, length + 1)
        for body in itertools.product(inner, repeat=made - 1)
        for last in (range(logits.shape[1]) if made == length else [end_id])
    ]
    return max(sequences, key=lambda ids: score(logits, start, ids, length_penalty))


@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("find", [search, compiled_search])
def test_with_beams_enough_it_finds_the_best_sequence(length_penalty, find):
    """4 tokens of 4 ids, one of which ends: 27 unfinished ones at most, and 121 in all."""
    lengths = set()
    for seed in range(5):
        logits = table(4, seed)
        ids = find(logits, 4, num_beams=125, length_penalty=length_penalty)
        for start, row in enumerate(ids.tolist()):
            best = best_of_all(logits, start, 4, length_penalty)
            assert row == [*best, *[0] * (len(row) - len(best))]
            lengths.add(len(best))
    assert len(lengths) > 1 or length_penalty > 1


CASES = [
    {"num_beams": 2},
    {"num_beams": 3, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.5, "end_id": (2, 5)},
    {"num_beams": 3, "length_penalty": -1.0, "min_new_tokens": 4},
    {"num_beams": 5, "repetition_penalty": 1.4},
]


@pytest.mark.parametrize("arguments", [*CASES, {"num_beams": 3, "stop_sequences": [[4, 3], [6]]}])
def test_both_loops_find_the_same(arguments):
    logits = table(7, 11)
    found = search(logits, 9, **arguments)
    np.testing.assert_array_equal(compiled_search(logits, 9, **arguments), found)
    assert found.dtype == np.int32


def test_rows_do_not_see_each_other():
    """Neither their scores nor when they are done."""
    logits = table(7, 3)
    together = search(logits, 12, num_beams=3, batch=5)
    for count in range(1, 5):
        alone = search(logits, 12, num_beams=3, batch=count)
        np.testing.assert_array_equal(alone, together[:count, : alone.shape[1]])
        assert (together[:count, alone.shape[1] :] == 0).all()


def test_a_stop_sequence_ends_a_sequence():
    logits = table(7, 11)
    found = search(logits, 9, num_beams=3, stop_sequences=[[4, 3], [6]])
    for row in found.tolist():
        text = [token for token in row if token]
        ends = [i for i in range(len(text)) if text[i] in (2, 6) or text[i - 1 : i + 1] == [4, 3]]
        assert ends in ([], [len(text) - 1])
    assert not np.array_equal(found, search(logits, 9, num_beams=3)), "the example must meet one"


def test_more_beams_than_continuations():
    """Two ids, one of which ends: a row has one unfinished sequence, whatever the number of beams."""
    logits = table(2, 0)
    found = search(logits, 5, num_beams=8, end_id=1, length_penalty=0.0)
    for start, row in enumerate(found.tolist()):
        best = best_of_all(logits, start, 5, 0.0, end_id=1)
        assert row[: len(best)] == list(best)


@pytest.mark.backends("torch")
@pytest.mark.parametrize("arguments", CASES)
def test_equals_hugging_face(arguments):
    """Their vectorised beam search, on a model of theirs that looks its logits up in the same table."""
    import torch

    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    class Table(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.GPT2Config
        _supports_cache_class = False

        def __init__(self, logits):
            super().__init__(transformers.GPT2Config(vocab_size=logits.shape[1], n_layer=1, n_head=1, n_embd=2))
            self.logits = torch.nn.Parameter(torch.tensor(logits))

        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return {"input_ids": input_ids}

        def forward(self, input_ids, **kwargs):
            code = torch.zeros_like(input_ids[:, 0])
            for column in input_ids.T:
                code = following(code, column)
            return CausalLMOutput(logits=self.logits[code][:, None])

    arguments = {"end_id": 2, "length_penalty": 1.0, **arguments}
    end_id = arguments.pop("end_id")
    differ = 0
    for seed in range(6):
        logits = table(7, seed)
        theirs = Table(logits).generate(
            torch.arange(3)[:, None],
            max_new_tokens=9,
            eos_token_id=[end_id] if isinstance(end_id, int) else list(end_id),
            pad_token_id=0,
            use_cache=False,
            do_sample=False,
            early_stopping=False,
            **arguments,
        )[:, 1:]
        ours = search(logits, 9, end_id=end_id, **arguments)
        # Where the padding id is 0, theirs pads with the first end id.
        ended = np.cumsum(np.isin(ours, end_id), axis=1) - np.isin(ours, end_id) > 0
        np.testing.assert_array_equal(np.where(ended, np.ravel(end_id)[0], ours), theirs.numpy())
        differ += not np.array_equal(ours, search(logits, 9, end_id=end_id, **{**arguments, "num_beams": 7}))
    assert differ, "so few beams must make a difference somewhere"
