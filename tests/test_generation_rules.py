"""Token rules: random numbers, what may follow, the draw, the end of a row, and the checks of their arguments."""

import random

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.generation import noise
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Rules, best_ranked, generated_length, greedy
from tests.checks import compiled, numpy

# The 0.999 quantile of chi-square with 255 degrees of freedom. The seeds are fixed: a test always passes, or never.
CHI_SQUARE = 330.5
P = np.log(np.array([[0.1, 0.45, 0.2, 0.25]]))
BACKENDS = pytest.mark.parametrize("xp", [np, ops], ids=["numpy", "keras.ops"])


def run(function, xp, *arrays):
    """What `function(*arrays, xp)` gives, in NumPy; through `keras.ops` also compiled, with the same result."""
    if xp is np:
        return function(*arrays, np)
    tensors = keras.tree.map_structure(ops.convert_to_tensor, arrays)
    result = numpy(function(*tensors, ops))
    in_program = numpy(compiled(lambda *tensors: function(*tensors, ops))(*tensors))
    for a, b in zip(keras.tree.flatten(result), keras.tree.flatten(in_program), strict=True):
        # Logarithms and sums of a few dozen terms differ in the last places.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return result


def request(batch=1, vocabulary=4, max_new_tokens=9, rules=None, history=None, rows=None):
    start = np.ones(batch, "int32")
    history = start[:, None] if history is None else np.array(history, "int32")
    return Request({}, start, history, max_new_tokens, vocabulary, None, rules or Rules(end_id=2), rows)


def processed(logits, xp=np, position=0, **arguments):
    """What the rules make of `logits` (B, V)."""
    rules = request(*logits.shape, **{k: arguments.pop(k) for k in ("rules", "history") if k in arguments})
    rules = rules.asking(**arguments).rules

    def function(logits, settings, xp):
        rules_now = Rules(rules.end_id, rules.pad_id, settings)
        return rules_now.processed(logits, position, rules_now.first_notes(len(rules_now.settings), xp), xp)

    return run(function, xp, logits, dict(rules.settings))


def probabilities(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draws(logits, seed, xp, **arguments):
    """One draw for each row of `logits` (B, V)."""
    rules = request(*logits.shape, rules=Rules(end_id=None)).asking(temperature=1.0, seed=seed, **arguments).rules

    def function(logits, settings, xp):
        finished = xp.zeros((logits.shape[0],), dtype="bool")
        return Rules(None, 0, settings).next_tokens(logits, 0, finished, {}, xp)[0]

    return run(function, xp, logits, dict(rules.settings))


# Random numbers


@BACKENDS
def test_bits_are_those_of_python_integers(xp):
    """Worked out with integers of any size, taken modulo 2**32."""
    expected = {
        (0, 0, 0, 0): 1106484830,
        (1, 0, 0, 0): 191656671,
        (0, 1, 0, 0): 335112171,
        (0, 0, 1, 0): -1326475877,
        (0, 0, 0, 1): 522703523,
        (4294967295, 3, 1000, 5): -1431689658,
        (2147483648, 63, 7, 4999): -265718293,
    }
    for (seed, row, step, token), bits in expected.items():
        arrays = np.array([seed], "uint32").view("int32"), np.array([row, 9], "int32"), np.array(step, "int32")
        found = run(lambda *args, size=token + 1: noise.random_bits(*args[:3], size, args[3]), xp, *arrays)
        assert found.dtype == np.int32
        assert found[0, token] == bits


def unsigned(seed, rows, step, size):
    rows = np.arange(rows, dtype="int32")
    return noise.random_bits(np.array([seed], "uint32").view("int32"), rows, step, size).view("uint32")


def chi_square(bytes_):
    """Of the frequencies of 256 values."""
    expected = bytes_.size / 256
    return ((np.bincount(bytes_.ravel(), minlength=256) - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("shift", [9, 16, 24])
def test_bits_are_uniform_along_each_part_of_the_counter(shift):
    along = {
        "ids": unsigned(3, 1, 0, 30_000),
        "rows": unsigned(3, 30_000, 0, 1),
        "steps": np.array([unsigned(3, 1, step, 1) for step in range(30_000)]),
        "seeds": np.array([unsigned(seed, 1, 0, 1) for seed in range(30_000)]),
    }
    for name, bits in along.items():
        assert chi_square(bits >> shift & 255) < CHI_SQUARE, name


def test_neighbours_are_independent():
    """Pairs of the leading four bits, of neighbouring ids, rows, steps and seeds, all 256 equally often."""
    bits = unsigned(5, 50, 7, 1000) >> 28
    pairs = {
        "ids": (bits[:, :-1], bits[:, 1:]),
        "rows": (bits[:-1], bits[1:]),
        "steps": (bits, unsigned(5, 50, 8, 1000) >> 28),
        "seeds": (bits, unsigned(6, 50, 7, 1000) >> 28),
        "row and id": (bits[1:, :-1], bits[:-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        assert chi_square(16 * a + b) < CHI_SQUARE, name


@BACKENDS
def test_noise_is_gumbel_and_finite(xp, monkeypatch):
    extremes = np.array([[0, -1, -(2**31), 2**31 - 1]], "int32")
    monkeypatch.setattr(noise, "random_bits", lambda *args: xp.asarray(extremes) if xp is np else extremes_tensor)
    extremes_tensor = ops.convert_to_tensor(extremes)
    found = run(lambda *args: noise.gumbel(*args[:3], 4, args[3]), xp, *np.zeros((3, 1), "int32"))
    uniform = np.array([[2.0**-24, 1 - 2.0**-24, 0.5 + 2.0**-24, 0.5 - 2.0**-24]])
    # The logarithm of a number next to 1 is as exact as that number is, which is exact.
    np.testing.assert_allclose(found, -np.log(-np.log(uniform)), rtol=1e-5, atol=1e-6)


# What may follow


@BACKENDS
def test_greedy_takes_the_lowest_of_equal_ids(xp):
    ids = run(greedy, xp, np.array([[1, 3, 3, 0], [2, 2, 2, 2], [0, -1, -2, 5]], "float32"))
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 0, 3]


def test_default_length():
    assert generated_length(7) == 57
    assert generated_length(7, 30) == 30


def test_what_is_not_asked_for_is_not_there():
    """So that a program pays for nothing that it does not do."""
    inert = {"top_k": 4, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0, "repetition_penalty": 1.0}
    assert request().asking(**inert, stop_sequences=[], seed=3).rules.settings == {}
    assert request().asking(top_k=2, top_p=0.5, min_p=0.5).rules.settings == {}, "greedy"
    assert set(request().asking(**inert, temperature=0.5).rules.settings) == {"temperature", "seed", "rows"}


@BACKENDS
@pytest.mark.parametrize(
    "top_p, expected",
    [
        (0.6, {1: 0.6429, 3: 0.3571}),
        (0.8, {1: 0.5, 3: 0.2778, 2: 0.2222}),
        (1.0, {0: 0.1, 1: 0.45, 2: 0.2, 3: 0.25}),
        (1e-8, {1: 1.0}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_top_p_keeps_what_crosses_it(xp, top_p, expected, dtype):
    """In each of two rows, by probabilities and by 4000 draws."""
    logits = np.concatenate([P, P[:, ::-1] + 3]).astype(dtype)
    wanted = np.zeros((2, 4))
    wanted[0, list(expected)] = list(expected.values())
    wanted[1] = wanted[0, ::-1]
    # float16 logits have 11 bits.
    tolerance = 1e-4 if dtype == "float32" else 2e-3
    found = probabilities(processed(logits, xp, temperature=1.0, top_p=top_p, seed=0))
    np.testing.assert_allclose(found, wanted, atol=tolerance)
    tokens = draws(np.repeat(logits, 4000, axis=0), 11, xp, top_p=top_p)
    for row, ids in zip(wanted, np.split(tokens, 2), strict=True):
        frequencies = np.bincount(ids, minlength=4) / 4000
        np.testing.assert_allclose(frequencies, row, atol=0.03)
        assert (frequencies[row == 0] == 0).all()


@BACKENDS
def test_top_k(xp):
    logits = np.array([[1.0, 3.0, 2.0, 3.0, 0.0, 2.0]], "float32")
    kept = {k: np.isfinite(processed(logits, xp, temperature=2.0, top_k=k, seed=0)).tolist()[0] for k in (1, 2, 3, 5)}
    assert kept[1] == kept[2] == [False, True, False, True, False, False], "both that are best"
    assert kept[3] == [False, True, True, True, False, True], "both that are third"
    assert kept[5] == [True, True, True, True, False, True]
    np.testing.assert_array_equal(processed(logits, xp, temperature=2.0, top_k=99, seed=0), (logits - 3) / 2)


@BACKENDS
def test_top_p_counts_what_top_k_keeps(xp):
    """0.45 and 0.25 of 0.7 are 0.64 and 0.36: of two ids the first is enough for 0.6, of all four it is not."""
    arrays = P.astype("float32"), np.array(2, "int32"), np.array(0.6, "float32")
    found = run(lambda x, k, p, xp: best_ranked(x, k, p, xp), xp, *arrays)
    assert np.isfinite(found).tolist() == [[False, True, False, False]]


@BACKENDS
def test_equal_ids_at_the_border_of_top_p_are_all_kept(xp):
    logits = np.log(np.array([[0.2, 0.3, 0.2, 0.3]]))
    assert np.isfinite(processed(logits, xp, temperature=1.0, top_p=0.4, seed=0)).tolist() == [[False, True] * 2]
    assert np.isfinite(processed(logits, xp, temperature=1.0, top_p=0.7, seed=0)).all()


@BACKENDS
def test_min_p(xp):
    found = processed(P, xp, temperature=1.0, min_p=0.4, seed=0)
    assert np.isfinite(found).tolist() == [[False, True, True, True]], "at least 0.4 * 0.45 = 0.18"
    found = processed(P, xp, temperature=1.0, min_p=1.0, seed=0)
    assert np.isfinite(found).tolist() == [[False, True, False, False]]


@BACKENDS
@pytest.mark.parametrize("temperature", [1e-45, 1e-9, 0.5, 3.0, 1e30])
def test_temperature(xp, temperature):
    found = probabilities(processed(P, xp, temperature=temperature, seed=0))
    wanted = np.exp((P - P.max()) / temperature)
    np.testing.assert_allclose(found, wanted / wanted.sum(), atol=1e-6)


@BACKENDS
def test_repetition_penalty(xp):
    """What the row has met, in its history or since: a positive logit is divided, a negative one multiplied."""
    logits = np.array([[2.0, -2.0, 4.0, -4.0, 6.0], [2.0, -2.0, 4.0, -4.0, 6.0]], "float32")
    rules = request(2, 5, history=[[1, -1], [3, 4]]).asking(repetition_penalty=2.0).rules

    def function(logits, settings, xp):
        rules = Rules(2, 0, settings)
        notes = rules.first_notes(2, xp)
        first = rules.processed(logits, 0, notes, xp)
        _, notes = rules.noted(xp.asarray([0, 1]) if xp is np else ops.convert_to_tensor([0, 1]), 0, notes, xp)
        return first, rules.processed(logits, 1, notes, xp)

    first, second = run(function, xp, logits, dict(rules.settings))
    np.testing.assert_allclose(first, [[2, -4, 4, -4, 6], [2, -2, 4, -8, 3]])
    np.testing.assert_allclose(second, [[1, -4, 4, -4, 6], [2, -4, 4, -8, 3]])


@BACKENDS
@pytest.mark.parametrize("end_id, forbidden", [(2, [2]), ((1, 3), [1, 3]), (None, [])])
def test_min_new_tokens_forbids_the_end(xp, end_id, forbidden):
    for position in range(4):
        found = processed(P, xp, position, rules=Rules(end_id=end_id), min_new_tokens=2)
        assert np.flatnonzero(~np.isfinite(found)).tolist() == (forbidden if position < 2 else [])


@pytest.mark.backends("torch")
@pytest.mark.parametrize("seed", range(4))
def test_order_and_values_are_those_of_hugging_face(seed):
    """All processors at once, on logits without ties."""
    import torch

    processors = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (5, 31)).astype("float32")
    history = rng.integers(0, 31, (5, 7))
    arguments = {"repetition_penalty": 1.7, "temperature": 0.7, "top_k": 11, "top_p": 0.8, "min_p": 0.05}
    theirs = torch.tensor(logits)
    for processor in (
        processors.RepetitionPenaltyLogitsProcessor(1.7),
        processors.MinNewTokensLengthLogitsProcessor(7, 3, [2, 5], "cpu"),
        processors.TemperatureLogitsWarper(0.7),
        processors.TopKLogitsWarper(11),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.05),
    ):
        theirs = processor(torch.tensor(history), theirs)
    rules = Rules(end_id=(2, 5))
    for xp in (np, ops):
        ours = processed(logits, xp, 0, rules=rules, history=history, min_new_tokens=3, seed=0, **arguments)
        # Ours are moved, so that the best is 0. An exponential of float32 has about 7 digits.
        np.testing.assert_allclose(probabilities(ours), probabilities(theirs.numpy()), atol=1e-6)
        assert 1 < np.isfinite(ours).sum(axis=-1).max() < 11, "some filter after top_k is at work"


# The draw


@BACKENDS
def test_draws_follow_the_temperature(xp):
    tokens = draws(np.repeat(P * 2, 4000, axis=0), 5, xp)
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, probabilities(P * 2)[0], atol=0.03)


@BACKENDS
def test_a_row_draws_by_seed_and_number_alone(xp):
    logits = np.random.default_rng(0).normal(size=(7, 97))
    tokens = draws(logits, 5, xp)
    np.testing.assert_array_equal(draws(logits[:3], 5, xp), tokens[:3])
    changed = logits.copy()
    changed[4, tokens[4]] = -99
    assert (draws(changed, 5, xp) == tokens).tolist() == [True] * 4 + [False] + [True] * 2
    assert (draws(logits, 6, xp) != tokens).sum() >= 5
    assert len(set(draws(np.repeat(logits[:1], 7, axis=0), 5, xp).tolist())) > 3, "rows draw for themselves"


def test_a_seed_of_its_own_follows_keras():
    """And is drawn only where something is drawn with it."""

    def seeds():
        keras.utils.set_random_seed(13)
        return [int(request().asking(temperature=1.0).rules.settings["seed"][0]) for _ in range(3)]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3
    state = random.getstate()
    request().asking()
    request().asking(temperature=1.0, seed=0)
    assert random.getstate() == state


# The end of a row


def made(tokens, xp=np, end_id=2, **arguments):
    """From tokens (B, L) that a model would make: what comes out, and how many steps each row is unfinished."""
    tokens = np.array(tokens)
    batch, length = tokens.shape
    rules = request(batch, 9, length, rules=Rules(end_id, 0)).asking(**arguments).rules

    def function(logits, settings, xp):
        rules = Rules(end_id, 0, settings)
        finished, notes = xp.zeros((batch,), dtype="bool"), rules.first_notes(batch, xp)
        columns = []
        for position in range(length):
            ids, finished, notes = rules.next_tokens(logits[:, position], position, finished, notes, xp)
            columns.append(ids)
        return xp.stack(columns, axis=1), finished

    return run(function, xp, np.eye(9, dtype="float32")[tokens], dict(rules.settings))


@BACKENDS
def test_padding_follows_any_end(xp):
    ids, finished = made([[3, 2, 4, 5], [6, 6, 6, 2], [7, 4, 4, 4]], xp)
    assert ids.tolist() == [[3, 2, 0, 0], [6, 6, 6, 2], [7, 4, 4, 4]]
    assert finished.tolist() == [True, True, False]
    ids, _ = made([[3, 2, 4, 5], [6, 6, 6, 2], [7, 4, 4, 4]], xp, end_id=(4, 6))
    assert ids.tolist() == [[3, 2, 4, 0], [6, 0, 0, 0], [7, 4, 0, 0]]
    ids, finished = made([[3, 2, 4, 5]], xp, end_id=None)
    assert ids.tolist() == [[3, 2, 4, 5]] and not finished.any()


@BACKENDS
def test_stop_sequences(xp):
    """Of unequal lengths, overlapping, and across nothing but new tokens."""
    rows = [[5, 6, 7, 8, 8], [5, 5, 6, 7, 8], [6, 7, 5, 6, 3], [3, 4, 3, 4, 4], [7, 7, 7, 7, 7]]
    ids, _ = made(rows, xp, stop_sequences=[[5, 6, 7], [4, 3], [8]])
    assert ids.tolist() == [[5, 6, 7, 0, 0], [5, 5, 6, 7, 0], [6, 7, 5, 6, 3], [3, 4, 3, 0, 0], [7, 7, 7, 7, 7]]


@BACKENDS
def test_no_row_ends_before_min_new_tokens(xp):
    ids, _ = made([[5, 6, 5, 6, 5, 6]], xp, stop_sequences=[[5, 6]], min_new_tokens=3)
    assert ids.tolist() == [[5, 6, 5, 6, 0, 0]]
    ids, _ = made([[2, 2, 2, 2]], xp, min_new_tokens=2)
    assert ids.tolist() == [[0, 0, 2, 0]], "the lowest of equal ids that are left"


# Arguments


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"top_p": 0}, r"`top_p` must be in \(0, 1\], or None. Received: top_p=0$"),
        ({"top_p": 1.5}, "`top_p`.*top_p=1.5"),
        ({"top_p": float("nan")}, "`top_p`.*top_p=nan"),
        ({"top_p": True}, "`top_p`.*top_p=True"),
        ({"top_p": "0.5"}, "`top_p`.*top_p='0.5'"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, or None. Received: top_k=0"),
        ({"top_k": -1}, "`top_k`.*top_k=-1"),
        ({"top_k": 5.0}, "`top_k`.*top_k=5.0"),
        ({"min_p": -0.1}, r"`min_p` must be in \[0, 1\], or None. Received: min_p=-0.1"),
        ({"min_p": 1.1}, "`min_p`.*min_p=1.1"),
        ({"temperature": -1}, "`temperature` must be a finite number of at least 0. Received: temperature=-1"),
        ({"temperature": float("nan")}, "`temperature`.*temperature=nan"),
        ({"temperature": float("inf")}, "`temperature`.*temperature=inf"),
        ({"temperature": None}, "`temperature`.*temperature=None"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be a finite number above 0. Received: rep.*=0"),
        ({"repetition_penalty": float("inf")}, "`repetition_penalty`.*=inf"),
        ({"min_new_tokens": 10}, "`min_new_tokens` must not exceed max_new_tokens=9. Received: min_new_tokens=10"),
        ({"min_new_tokens": -1}, "`min_new_tokens` must be an integer of at least 0.*min_new_tokens=-1"),
        ({"min_new_tokens": 1.0}, "`min_new_tokens`.*min_new_tokens=1.0"),
        ({"num_beams": 0}, "`num_beams` must be an integer of at least 1. Received: num_beams=0"),
        ({"length_penalty": float("nan")}, "`length_penalty` must be a finite number. Received: length_penalty=nan"),
        ({"num_beams": 2, "temperature": 0.5}, "`num_beams` above 1 needs temperature=0.*num_beams=2, temperature=0.5"),
        ({"stop_sequences": [3, 1]}, r"`stop_sequences` must be a list of lists.*Received: stop_sequences=\[3, 1\]"),
        ({"stop_sequences": [[3], []]}, "`stop_sequences` must be a list of lists of at least one id"),
        ({"stop_sequences": "end"}, "`stop_sequences`.*'end'"),
        (
            {"stop_sequences": [[3], [1, 4]]},
            "`stop_sequences` must be ids from 0 to 3. Received: 4 in row 1, position 1",
        ),
        ({"stop_sequences": [[1.5]]}, "`stop_sequences` must hold integers"),
        ({"seed": -1}, r"`seed` must be an integer from 0 to 2\*\*32 - 1, or None. Received: seed=-1"),
        ({"seed": 2**32}, "`seed`.*seed=4294967296"),
        ({"seed": 0.5}, "`seed`.*seed=0.5"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        request().asking(**arguments)
