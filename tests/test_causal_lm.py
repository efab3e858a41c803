"""The decoder-only model: it generates as it computes without a cache, alone and in batches, and as others do."""

import keras
import numpy as np
import pytest

from keras_transformer import models
from tests.checks import numpy, quick, randomize

V, D, N, F, T = 23, 16, 4, 19, 6
SIZES = {
    "vocabulary_size": V,
    "num_layers": 2,
    "d_model": D,
    "num_heads": N,
    "d_ff": F,
    "dropout": 0.0,
    "max_length": 29,
}
KINDS = {
    "GPT-2": {},
    "sinusoidal": {"position_encoding": "sinusoidal", "max_length": None, "scale_embedding": True, "tie_output": False},
    "Llama": {
        "num_kv_heads": 2,
        "position_encoding": "rotary",
        "gated": True,
        "activation": "silu",
        "norm": "rms",
        "use_bias": False,
        "tie_output": False,
        "max_length": None,
    },
    "Mistral": {
        "num_kv_heads": 1,
        "position_encoding": "rotary",
        "rotary_width": 2,
        "sliding_window": 3,
        "tie_output": False,
    },
    "no positions, post-norm": {"position_encoding": None, "norm_first": False, "tie_output": False},
}


def model_of(kind, **arguments):
    return randomize(models.CausalLM(**{**SIZES, **KINDS[kind], **arguments}), scale=0.5)


# Keeps random models from saying one token for ever.
PENALTY = {"max_new_tokens": T, "repetition_penalty": 100.0}


def greedy_by_recomputation(model, prompt, count, penalty=1.0):
    """The whole text through the model for each token; what stands behind it, one program's room, it cannot see."""
    row = list(prompt)
    run = quick(model)
    for _ in range(count):
        ids = np.zeros((1, len(prompt) + count), "int32")
        ids[0, : len(row)] = row
        logits = numpy(run(ids))[0, len(row) - 1].copy()
        logits[row] = np.where(logits[row] < 0, logits[row] * penalty, logits[row] / penalty)
        row.append(int(logits.argmax()))
    return row[len(prompt) :]


RAGGED = [[1, 2, 3, 4, 5], [6, 7], [8]]
PADDED = np.array([[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 0, 0, 0, 0]], "int32")


@pytest.mark.parametrize(
    "kind", [kind if kind == "Llama" else pytest.param(kind, marks=pytest.mark.once) for kind in KINDS]
)
def test_prompts_of_unequal_length_continue_as_they_do_alone(kind):
    model = model_of(kind)
    expected = [greedy_by_recomputation(model, row, T, 100.0) for row in RAGGED]
    assert len({tuple(row) for row in expected}) == 3 and min(len(set(row)) for row in expected) > T - 2
    mask = PADDED > 0
    left = np.array([np.roll(row, 5 - real.sum()) for row, real in zip(PADDED, mask, strict=True)])
    left_mask = np.sort(mask, axis=1)
    for inputs in (
        RAGGED,
        {"token_ids": PADDED, "padding_mask": mask},
        {"token_ids": left, "padding_mask": left_mask.astype("int32")},
    ):
        np.testing.assert_array_equal(model.generate(inputs, **PENALTY), expected)
    np.testing.assert_array_equal(model.generate(RAGGED, **PENALTY, compile=False), expected)
    alone = [model.generate([row], **PENALTY)[0] for row in RAGGED]
    np.testing.assert_array_equal(alone, expected)
    with_padding = models.CausalLM.from_config({**model.get_config(), "pad_id": 0})
    with_padding.set_weights(model.get_weights())
    for inputs in (PADDED, left):
        np.testing.assert_array_equal(with_padding.generate(inputs, **PENALTY), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_a_cache_are_those_without(kind):
    model = model_of(kind)
    ids = np.random.default_rng(0).integers(1, V, (2, 7)).astype("int32")
    whole = numpy(model(ids))
    decode = quick(lambda ids, cache, start: model.decode(ids, cache=cache, start=start))
    for pieces in ([3, 1, 1, 2], [1] * 7, [7]):
        cache, start, found = model.decoder.init_cache(2, 11), 0, []
        for piece in pieces:
            logits, cache = decode(ids[:, start : start + piece], cache, start)
            found.append(numpy(logits))
            start += piece
        np.testing.assert_allclose(np.concatenate(found, 1), whole, atol=1e-4)  # float32, values of size 10


def test_several_texts_in_a_row_are_as_each_alone():
    for kind in ("GPT-2", "Llama"):
        model = quick(model_of(kind))
        packed = {
            "token_ids": np.array([[1, 2, 3, 4, 5, 6, 7]], "int32"),
            "segment_ids": np.array([[0, 0, 0, 1, 1, 2, 2]], "int32"),
            "positions": np.array([[0, 1, 2, 0, 1, 0, 1]], "int32"),
        }
        found = numpy(model(packed))
        for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
            np.testing.assert_allclose(found[:, part], numpy(model(packed["token_ids"][:, part])), atol=1e-5)


def test_learns_to_count_and_goes_on_counting():
    keras.utils.set_random_seed(1)
    model = models.CausalLM(**{**SIZES, "vocabulary_size": 12})
    rows = (np.arange(12)[:, None] + np.arange(9)) % 12
    model.compile(keras.optimizers.Adam(0.02))
    model.fit(rows[:, :-1], rows[:, 1:], epochs=60, batch_size=12, verbose=0)
    assert model.evaluate(rows[:, :-1], rows[:, 1:], return_dict=True, verbose=0)["masked_accuracy"] > 0.95
    np.testing.assert_array_equal(model.generate([[3, 4, 5]], max_new_tokens=3), [[6, 7, 8]])


def test_ends_at_any_end_id_and_pads():
    model = model_of("GPT-2")
    tokens = model.generate(RAGGED, max_new_tokens=T)
    ends = (int(tokens[0, 2]), int(tokens[1, 1]))
    ending = models.CausalLM.from_config({**model.get_config(), "end_id": list(ends)})
    ending.set_weights(model.get_weights())
    found = ending.generate(RAGGED, max_new_tokens=T)
    for row, whole in zip(found, tokens, strict=True):
        length = next((i + 1 for i, token in enumerate(whole) if token in ends), T)
        np.testing.assert_array_equal(row[:length], whole[:length])
        assert (row[length:] == ends[0]).all()


@pytest.mark.parametrize(
    "inputs, arguments, message",
    [
        ([[1, 2], []], {}, "at least one token in each row. Received: row 1 has none"),
        ([], {}, "`inputs` must hold at least one row"),
        ([[1, V]], {}, rf"`inputs` must be ids from 0 to {V - 1}. Received: {V} in row 0, position 1"),
        ([[1.5]], {}, "`inputs` must hold integers"),
        ([[1] * 30], {}, "`length of inputs` must not exceed the model's max_length=29. Received: .*=30"),
        ([[1] * 20], {"max_new_tokens": 10}, "max_length=29. Received: a prompt of 20 tokens, max_new_tokens=10"),
        ([[1]], {"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1"),
        (
            {"token_ids": [[1, 2, 3]], "padding_mask": np.array([[True, False, True]])},
            {},
            "padding at the ends of rows only. Received: padding inside of row 0",
        ),
        ({"token_ids": [[1, 2, 3]], "padding_mask": np.ones((1, 2), bool)}, {}, r"`padding_mask` .*\(1, 3\).*\(1, 2\)"),
        (
            {"token_ids": [[1, 2], [3]], "padding_mask": [[1, 1], [1]]},
            {},
            r"`padding_mask` must be a rectangle \(B, P\). Received: rows of unequal length",
        ),
        ({"token_ids": [[1, 2, 3]]}, {}, r'a dict of "token_ids" and "padding_mask". Received: \[.token_ids.\]'),
    ],
)
def test_bad_prompts_are_refused(inputs, arguments, message):
    with pytest.raises(ValueError, match=message):
        model_of("GPT-2").generate(inputs, **arguments)


@pytest.mark.once
def test_a_prompt_and_its_continuation_may_fill_the_model():
    model = model_of("GPT-2")
    prompt = np.random.default_rng(0).integers(0, V, (2, 20)).astype("int32")
    assert model.generate(prompt).shape == (2, 9)
    np.testing.assert_array_equal(
        model.generate(prompt, max_new_tokens=9)[0], greedy_by_recomputation(model, prompt[0], 9)
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"position_encoding": "alibi"}, "`position_encoding` must be one of .*'alibi'"),
        ({"max_length": None}, "`position_encoding='learned'` needs a `max_length`"),
        ({"end_id": V}, f"`end_id` must be ids from 0 to {V - 1}. Received: {V}"),
        ({"num_heads": 3}, "`num_heads` must divide the width"),
        ({"norm": "batch"}, "`norm` must be one of .*'batch'"),
        ({"num_kv_heads": 3}, "`num_kv_heads` must divide `num_heads`"),
        ({"position_encoding": "rotary", "rotary_width": 3}, "`rotary_width` must be even.*rotary_width=3"),
        ({"position_encoding": "rotary", "rotary_width": 0}, "`rotary_width` must be an integer of at least 1"),
        ({"position_encoding": "rotary", "rotary_width": 40}, "`rotary_width` .* at most head_dim=.*rotary_width=40"),
        ({"position_encoding": "rotary", "head_dim": 5}, "an even `head_dim` .*Received: head_dim=5"),
        ({"position_encoding": "rotary", "rotary_base": 0}, "`rotary_base` must be a positive number"),
        ({"position_encoding": "rotary", "rotary_scaling": "yarn"}, "`rotary_scaling` must be a dict or None"),
        (
            {"position_encoding": "rotary", "rotary_scaling": {"rope_type": "linear", "factor": 0}},
            r"`rotary_scaling\['factor'\]` must be a positive number. Received: .*=0",
        ),
        ({"seed": 1.5}, "`seed` must be an integer or None. Received: seed=1.5"),
        (
            {"position_encoding": "rotary", "rotary_scaling": {"rope_type": "llama3", "factor": 2.0}},
            r"must give \['low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'\]",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.CausalLM(**{**SIZES, **arguments})


def test_inputs_that_do_not_belong_together_are_refused():
    given = {"token_ids": np.ones((2, 3), int), "segment_ids": np.ones((2, 4), int), "positions": np.ones((2, 3), int)}
    with pytest.raises(ValueError, match=r"Inputs must be of one shape .*'segment_ids': \(2, 4\)"):
        model_of("GPT-2")(given)


def test_a_text_longer_than_the_model_is_refused():
    model = model_of("GPT-2")
    ids = np.ones((1, 30), "int32")
    assert model(ids[:, :29]).shape == (1, 29, V)
    for run in (model, lambda x: model.predict(x, verbose=0), lambda x: model(keras.Input(x.shape[1:], dtype="int32"))):
        with pytest.raises(ValueError, match="`length` must not exceed the model's max_length=29. Received: length=30"):
            run(ids)
