"""Generation: the two loops, greedy decoding against a loop without a cache, sampling, streaming and beams."""

import concurrent.futures
import inspect
import os
import subprocess
import sys
import time
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer._validation import check_ids, check_length, check_not_empty, id_batch
from keras_transformer.generation.loop import loop_tokens
from keras_transformer.generation.mixin import GenerationMixin
from keras_transformer.generation.rules import Engine, Rules
from keras_transformer.generation.stream import collect_tokens, stream_tokens
from keras_transformer.losses import MaskedCrossentropy
from keras_transformer.models import Transformer
from tests.checks import compiled, numpy, randomize

SIZES = {"source_vocabulary_size": 11, "target_vocabulary_size": 23, "num_layers": 2, "d_model": 8, "num_heads": 2}
SOURCE = np.array([[4, 9, 3, 5, 0, 0, 0], [1, 10, 2, 2, 7, 3, 8], [6, 0, 0, 0, 0, 0, 0]], "int32")


def toy(seed=0, **arguments):
    return randomize(
        Transformer(**{**SIZES, "d_ff": 10, "dropout": 0.5, "start_id": 21, "end_id": 22, **arguments}), seed
    )


@pytest.fixture(scope="module")
def model():
    """One model for the tests that do not change it, so that its programs are compiled once."""
    return toy()


def jitted(function):
    """Compiled on JAX only: elsewhere single operations are faster than a compilation."""
    return compiled(function) if keras.config.backend() == "jax" else function


def uncached(model, source, max_length):
    """Greedy decoding that runs the whole target anew for each token, at one length; (ids, smallest top-2 gap)."""
    target = np.zeros((len(source), max_length), "int32")
    target[:, 0] = model.start_id
    ids, finished, gap = np.zeros_like(target), np.zeros(len(source), bool), np.inf
    call = jitted(lambda source, target: model({"source": source, "target": target}, training=False))
    for position in range(max_length):
        logits = numpy(call(ops.convert_to_tensor(source), ops.convert_to_tensor(target)))[:, position]
        best = np.sort(logits, axis=-1)
        gap = min(gap, (best[~finished, -1] - best[~finished, -2]).min(initial=np.inf))
        ids[:, position] = np.where(finished, 0, logits.argmax(axis=-1))
        finished |= ids[:, position] == model.end_id
        if position + 1 < max_length:
            target[:, position + 1] = ids[:, position]
    ended = np.cumsum(ids == model.end_id, axis=1).astype(bool).all(axis=0)
    return ids[:, : min(1 + np.sum(~ended), max_length)], gap


# Loops


@pytest.mark.parametrize("length", [1, 5, 13])
def test_both_loops_give_the_same_ids(length):
    """From the same table of logits, with ties, in which rows end at different positions."""
    rng = np.random.default_rng(0)
    table = rng.integers(-3, 3, (13, 4, 7)).astype("float32")
    table[:, :, 2] -= 2
    table[3, 1, 2] = table[6, 2, 2] = table[11, 0, 2] = 9
    rules = Rules(end_id=2)
    start = np.ones(4, "int32")
    engine = Engine(lambda tokens, position, calls: (table[position] + tokens, calls + 1))
    begun = rules.begin(engine, 0, start, 16)
    expected, finished, state = collect_tokens(stream_tokens(rules.advance(engine), *begun, range(length)))
    assert state == (length, {})
    assert (expected[finished & (np.cumsum(expected == 2, axis=1) - (expected == 2) > 0)] == 0).all()

    @compiled
    def run(table, start, length):
        def step(tokens, position, calls):
            return ops.take(table, position, axis=0) + ops.cast(tokens, "float32"), calls + 1

        engine = Engine(step, xp=ops)
        begun = rules.begin(engine, ops.convert_to_tensor(0), start, 16)
        return loop_tokens(rules.advance(engine), *begun, length, 16)

    ids, count, (calls, _) = numpy(run(*map(ops.convert_to_tensor, (table, start, length))))
    assert ids.shape == (4, 16) and count == calls == length
    np.testing.assert_array_equal(ids[:, :length], expected)


def test_loops_stop_when_all_rows_have_ended():
    calls = []

    def step(tokens, position, cache):
        calls.append(position)
        return np.eye(5)[[2 if position >= row + 2 else 4 for row in range(3)]], cache

    rules = Rules(end_id=2)
    engine = Engine(step)

    def steps(length, **options):
        return stream_tokens(
            rules.advance(engine), *rules.begin(engine, None, np.ones(3, "int32"), 9), length, **options
        )

    tokens, finished, _ = collect_tokens(steps(range(100)))
    assert tokens.tolist() == [[4, 4, 2, 0, 0], [4, 4, 4, 2, 0], [4, 4, 4, 4, 2]]
    assert finished.sum(axis=1).tolist() == [3, 2, 1]
    assert calls == [0, 1, 2, 3, 4]
    assert len(list(steps(range(100), check_every=4))) == 8
    assert len(list(steps(range(3), check_every=4))) == 3


def test_rules_and_streaming_need_no_keras():
    code = """
import sys
import keras_transformer._validation, keras_transformer.generation.rules, keras_transformer.generation.stream
from keras_transformer.generation import Rules, collect_tokens
loaded = {"keras", "tensorflow", "jax", "torch"} & set(sys.modules)
assert not loaded, loaded
"""
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


# generate


@pytest.mark.parametrize("compile", [None, False])
def test_equals_the_loop_without_a_cache(model, compile):
    expected, gap = uncached(model, SOURCE, 10)
    assert gap > 1e-4, "the example must not hang on rounding"
    ids = model.generate(SOURCE, max_new_tokens=10, compile=compile)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected)


def test_rows_end(model, monkeypatch):
    free = model.generate(SOURCE, max_new_tokens=10)
    # The token that row 0 makes at its third step, taken for the end.
    end_id = int(free[0, 2])
    monkeypatch.setattr(model, "end_id", end_id)
    ids = model.generate(SOURCE, max_new_tokens=10)
    lengths = [np.append(np.flatnonzero(row == end_id) + 1, 10)[0] for row in free]
    assert ids.shape[1] == max(lengths)
    for row, before, length in zip(ids, free, lengths, strict=True):
        np.testing.assert_array_equal(row[:length], before[:length])
        assert (row[length:] == 0).all()


def test_batch_and_padding_change_nothing(model):
    ids = model.generate(SOURCE, max_new_tokens=10)
    wide = np.pad(SOURCE, ((0, 0), (0, 1)))
    np.testing.assert_array_equal(model.generate(wide, max_new_tokens=10), ids)
    ragged = [[4, 9, 3, 5], [1, 10, 2, 2, 7, 3, 8], [6]]
    np.testing.assert_array_equal(model.generate(ragged, max_new_tokens=10), ids)
    np.testing.assert_array_equal(model.generate(SOURCE.astype("int64")[[2, 0, 1]], max_new_tokens=10), ids[[2, 0, 1]])
    np.testing.assert_array_equal(model.generate(ops.convert_to_tensor(SOURCE), max_new_tokens=9), ids[:, :9])


def test_a_second_source_does_not_see_the_first(model):
    other = np.array([[7, 7, 3, 2, 9, 9, 1], [2, 0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 10, 0]], "int32")
    first = model.generate(SOURCE, max_new_tokens=10)
    np.testing.assert_array_equal(model.generate(other, max_new_tokens=10), uncached(model, other, 10)[0])
    np.testing.assert_array_equal(model.generate(SOURCE, max_new_tokens=10), first)


def test_new_weights_are_seen_and_programs_kept():
    model = toy(num_layers=1)
    first = model.generate(SOURCE, max_new_tokens=10)
    programs = dict(model._generator._programs)
    randomize(model, seed=3)
    second = model.generate(SOURCE, max_new_tokens=9)
    np.testing.assert_array_equal(second, uncached(model, SOURCE, 9)[0])
    assert not np.array_equal(first[:, :9], second)
    assert model._generator._programs == programs
    assert len(programs) == 1


def test_variables_that_a_layer_gets_later_are_seen():
    """As low-rank adapters are: a program made before would not read them, or keep their first values."""
    model = toy(num_layers=1)
    model.generate(SOURCE, max_new_tokens=10)
    model.decoder.blocks[0].feed_forward.inner_dense.enable_lora(3)
    for seed in range(3):
        randomize(model, seed, scale=1.0)
        found = {compile: model.generate(SOURCE, max_new_tokens=10, compile=compile) for compile in (None, False)}
        np.testing.assert_array_equal(found[None], found[False])
    assert len(model._generator._programs) == 1


def test_inside_fit():
    """In the middle of an epoch, with the weights of that moment, and without disturbing the training."""
    ids = np.concatenate([SOURCE, SOURCE]) % 11
    data = {"source": ids, "target": ids}

    def train(callbacks):
        model = toy(seed=1, dropout=0.0, num_layers=1)
        model.compile(keras.optimizers.SGD(0.5), MaskedCrossentropy())
        history = model.fit(data, ids, batch_size=3, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return model, history.history["loss"]

    generated = []

    class Generate(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            generated.append(self.model.generate(SOURCE, max_new_tokens=6))

    model, losses = train([Generate()])
    assert losses == pytest.approx(train([])[1], rel=1e-6)
    assert len(generated) == 4
    np.testing.assert_array_equal(generated[-1], model.generate(SOURCE, max_new_tokens=6))
    assert any(not np.array_equal(a, b) for a, b in zip(generated, generated[1:], strict=False))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision(policy):
    model = toy(dtype=policy, num_layers=1)
    ids = model.generate(SOURCE, max_new_tokens=5)
    assert ids.shape == (3, 5)
    assert (ids >= 0).all()
    assert (ids < 23).all()


# Sampling, streaming, beams

OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 2**32 - 1},
    {"temperature": 0.8, "seed": 3, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3},
    {"min_new_tokens": 7, "repetition_penalty": 5.0, "stop_sequences": [[3, 8], [20]]},
]
BEAMS = [
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 0.0, "min_new_tokens": 4, "repetition_penalty": 1.5, "stop_sequences": [[9]]},
]


# The rules are one code, tried with NumPy and on each backend: programs of few of them are compiled everywhere.
SOME = [pytest.param(options, marks=pytest.mark.once) for options in (OPTIONS[1], OPTIONS[3], BEAMS[0])]


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], BEAMS[1], *SOME])
def test_programs_equal_steps_through_the_layers(model, options):
    ids = model.generate(SOURCE, 9, **options)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(model.generate(SOURCE, 9, compile=False, **options), ids)


@pytest.mark.parametrize("options", [OPTIONS[2], pytest.param(OPTIONS[3], marks=pytest.mark.once)])
@pytest.mark.parametrize("compile", [None, False])
def test_streams_what_it_generates(model, options, compile):
    ids = model.generate(SOURCE, 9, **options)
    tokens = list(model.stream(SOURCE, 9, compile=compile, **options))
    assert all(isinstance(column, np.ndarray) and column.dtype == np.int32 for column in tokens)
    np.testing.assert_array_equal(np.stack(tokens, axis=1), ids)
    told = []
    np.testing.assert_array_equal(model.generate(SOURCE, 9, on_tokens=told.append, compile=compile, **options), ids)
    np.testing.assert_array_equal(told, tokens)


def test_streams_stay_apart(model):
    """Two streams of one program do not meet, and between their tokens torch records gradients as before."""
    stream = model.stream(SOURCE, 9)
    other = model.stream(SOURCE[::-1].copy(), 9)
    first = [next(stream), next(other), next(stream)]
    ids = model.generate(SOURCE, 9)
    np.testing.assert_array_equal(first[::2], ids.T[:2])
    np.testing.assert_array_equal(np.stack([*first[::2], *stream], axis=1), ids)
    if keras.config.backend() == "torch":
        import torch

        stream = model.stream(SOURCE, 9, compile=False)
        next(stream)
        assert torch.is_grad_enabled()


def test_values_do_not_make_new_programs(model, monkeypatch):
    """But for which arguments are in use, and for the shape of the stop sequences."""
    options = {"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 0}
    options |= {"min_new_tokens": 1, "stop_sequences": [[5, 6]]}
    first = model.generate(SOURCE, 12, **options)
    calls, decode = [], model.decode
    monkeypatch.setattr(model, "decode", lambda *args, **kwargs: calls.append(1) or decode(*args, **kwargs))
    other = {"temperature": 9.0, "top_k": 20, "top_p": 0.99, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 9}
    other |= {"min_new_tokens": 2, "stop_sequences": [[7, 6]]}
    assert not np.array_equal(model.generate(SOURCE, 12, **other), first)
    model.generate(SOURCE, 11, **other)
    assert not calls
    model.generate(SOURCE, 12, **{**other, "top_k": None})
    assert calls


def test_rows_of_a_batch_draw_alike_in_any_batch(model):
    options = {"temperature": 1.0, "seed": 4}
    ids = model.generate(SOURCE, 9, **options)
    alone = model.generate(SOURCE[:1], 9, **options)
    np.testing.assert_array_equal(alone[0], ids[0, : alone.shape[1]])
    same = model.generate(SOURCE[[1, 1, 1]], 9, **options)
    assert not np.array_equal(same[0], same[1])
    np.testing.assert_array_equal(same[1], model.generate(SOURCE, 9, **options)[1, : same.shape[1]])
    assert not np.array_equal(model.generate(SOURCE, 9, temperature=1.0, seed=5), ids)


def test_without_a_seed_draws_follow_keras(model):
    def generated():
        keras.utils.set_random_seed(3)
        return [model.generate(SOURCE, 9, temperature=2.0) for _ in range(2)]

    first, second = generated()
    again = generated()
    np.testing.assert_array_equal(again[0], first)
    np.testing.assert_array_equal(again[1], second)
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("num_beams", [2, 5])
def test_caches_follow_the_beams(num_beams):
    """The same search with the whole target run anew for each token has no cache that could be another beam's."""
    model = randomize(toy(num_layers=1, tie_output=False), seed=4, scale=0.5)
    call = jitted(lambda source, target: model({"source": source, "target": target}, training=False))

    def step(tokens, position, made):
        made = np.concatenate([made, tokens], axis=1)
        target = np.pad(made, ((0, 0), (0, 9 - made.shape[1])))
        source = np.repeat(SOURCE, num_beams, axis=0)
        return numpy(call(ops.convert_to_tensor(source), ops.convert_to_tensor(target)))[:, position], made

    rules = model.generation_request(SOURCE, 9).asking(num_beams=num_beams).rules
    engine = Engine(step, lambda made, index: made[index])
    begun = rules.begin(engine, np.zeros((3, 0), "int32"), np.full(3, model.start_id, "int32"), 9)
    ids, _, (made, notes) = collect_tokens(stream_tokens(rules.advance(engine), *begun, range(9)))
    found = model.generate(SOURCE, 9, num_beams=num_beams)
    np.testing.assert_array_equal(found, rules.result(ids, notes))
    assert (found != model.generate(SOURCE, 9)).any(axis=1).all(), "beams must find something else"


def test_generate_and_stream_take_the_same_arguments():
    generate, stream = (
        inspect.signature(method).parameters for method in (GenerationMixin.generate, GenerationMixin.stream)
    )
    only_one = {"num_beams", "length_penalty", "on_tokens"}
    assert list(stream.items()) == [item for item in generate.items() if item[0] not in only_one]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": 0.0}, "`top_p` must be in"),
        ({"num_beams": 2, "on_tokens": print}, "`on_tokens` needs num_beams=1.*Received: num_beams=2"),
        ({"on_tokens": 3}, "`on_tokens` must be callable. Received: on_tokens=3"),
        ({"seed": 10**30}, "`seed` must be an integer from 0 to"),
        ({"temperature": 10**400}, "`temperature` must be a finite number"),
        ({"repetition_penalty": 1e39}, "`repetition_penalty` must be a finite number"),
        ({"compile": "yes"}, "`compile` must be True, False or None. Received: compile='yes'"),
    ],
)
def test_bad_options_are_refused_before_any_work(model, monkeypatch, options, message):
    monkeypatch.setattr(model, "encode", None)
    with pytest.raises(ValueError, match=message):
        model.generate(SOURCE, 9, **options)
    with pytest.raises(ValueError, match="`top_k` must be"):
        model.stream(SOURCE, 9, top_k=0)  # not only with its first token
    with pytest.raises(TypeError, match="num_beams"):
        model.stream(SOURCE, 9, num_beams=2)


# Inputs


def test_lengths(model):
    limited = toy(max_length=7, num_layers=1)
    assert limited.generate(SOURCE).shape[1] <= 7
    assert limited.generate(SOURCE, max_new_tokens=1).shape == (3, 1)
    with pytest.raises(ValueError, match="`max_new_tokens` must not exceed.*max_length=7. Received: max_new_tokens=8"):
        limited.generate(SOURCE, max_new_tokens=8)
    with pytest.raises(ValueError, match="`length of inputs` must not exceed.*Received: length of inputs=8"):
        limited.generate(np.ones((1, 8), "int32"))
    with pytest.raises(ValueError, match="`max_new_tokens` must be an integer of at least 1.*max_new_tokens=0"):
        limited.generate(SOURCE, max_new_tokens=0)


@pytest.mark.parametrize(
    "source, message",
    [
        ([[3, 4], [5, 11]], "from 0 to 10. Received: 11 in row 1, position 1"),
        ([[3, 4], [5, 6], [-1, 6]], "from 0 to 10. Received: -1 in row 2, position 0"),
        ([[3, 4], [0, 0]], r"wholly padding \(id 0\). Received: row 1"),
        ([3, 4], "must have rank 2"),
        (np.ones((1, 2, 3), "int32"), r"must have rank 2.*inputs.shape=\(1, 2, 3\)"),
        (np.ones((1, 2)), "must hold integers.*inputs.dtype=float64"),
        ([[1.5, 2]], "must hold integers.*float64 in row 0"),
        ([], "at least one row"),
        (np.ones((2, 0), "int32"), r"at least one row.*\(2, 0\)"),
        (np.array([[3, 2**40]]), "must fit 32 bits.*row 0"),
    ],
)
def test_bad_sources_are_refused_before_any_work(model, source, message):
    with pytest.raises(ValueError, match=f"`inputs`.*{message}"):
        model.generate(source, max_new_tokens=3)


def test_checks_of_ids():
    np.testing.assert_array_equal(id_batch([[1], [2, 3]], pad_id=9), [[1, 9], [2, 3]])
    with pytest.raises(ValueError, match="`labels`.*Received: 5 in row 13, position 0"):
        check_ids(np.array([[5]]), 5, "labels", first_row=13)
    check_ids(np.array([[-100, 4]]), 5, ignore_id=-100)
    check_ids(np.zeros((0, 3), "int32"), 5)
    check_not_empty(np.array([[0, 1]]))
    check_length(5, 5)
    with pytest.raises(ValueError, match="`length` must be an integer of at least 1. Received: length=True"):
        check_length(True, 5)


# torch


@pytest.mark.backends("torch")
def test_compiled_step(monkeypatch):
    """Dynamo takes the recorded step whole and once (with its own reference backend, which needs no C++)."""
    import torch

    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, fullgraph=True, **options))
    model = toy(num_layers=1)
    ids = model.generate(SOURCE, max_new_tokens=10, compile=True)
    np.testing.assert_array_equal(ids, model.generate(SOURCE, max_new_tokens=10, compile=False))
    randomize(model, seed=5)
    ids = model.generate(SOURCE, max_new_tokens=9, compile=True)
    np.testing.assert_array_equal(ids, model.generate(SOURCE, max_new_tokens=9, compile=False))
    assert len(compilations) == 1


@pytest.mark.backends("torch")
def test_threads_record_one_after_the_other(monkeypatch):
    """While torch records it patches itself for all threads, and a second recording beside it fails."""
    from torch.fx.experimental import proxy_tensor

    make_fx, beside = proxy_tensor.make_fx, []

    def slow(function):
        def recorded(*args):
            beside.append(1)
            time.sleep(0.05)
            assert len(beside) == 1, "two recordings at once"
            graph = make_fx(function)(*args)
            beside.pop()
            return graph

        return recorded

    monkeypatch.setattr(proxy_tensor, "make_fx", slow)
    models = [toy(seed, num_layers=1) for seed in (5, 6)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(models[i % 2].generate, SOURCE, max_new_tokens=6) for i in range(4)]
        found = [future.result() for future in futures]
    for i, ids in enumerate(found):
        np.testing.assert_array_equal(ids, models[i % 2].generate(SOURCE, max_new_tokens=6, compile=False))


@pytest.mark.backends("torch")
def test_one_warning_without_a_compiler(monkeypatch):
    import torch

    from keras_transformer.generation import backends

    def no_compiler(function, **options):
        def call(*args):
            raise RuntimeError("no working C++ compiler found")

        return call

    monkeypatch.setattr(torch, "compile", no_compiler)
    monkeypatch.setattr(backends._TorchStep, "_compiler_works", True)
    model = toy(num_layers=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        ids = model.generate(SOURCE, max_new_tokens=10, compile=True)
        model.generate(SOURCE[:2], max_new_tokens=10, compile=True)
    assert ["no working C++ compiler found" in str(warning.message) for warning in caught] == [True]
    np.testing.assert_array_equal(ids, model.generate(SOURCE, max_new_tokens=10, compile=False))


@pytest.mark.backends("torch")
@pytest.mark.parametrize("options", [*OPTIONS, *BEAMS])
def test_the_device_is_seldom_waited_for(model, options):
    """Once in eight tokens it is asked whether all rows have ended; nothing else leaves the device, or comes to it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    waiting = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "lift_fresh"}
    waits = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
            waits.extend([name] * (moved or name in waiting))
            return function(*args, **(kwargs or {}))

    counts = []
    for length in (8, 24):
        options = {**options, "min_new_tokens": length}
        model.generate(SOURCE, length, **options)  # records the step
        waits.clear()
        with Watch():
            ids = model.generate(SOURCE, length, **options)
        assert ids.shape[1] == length, "no row ends early"
        counts.append(len(waits))
    assert counts[1] - counts[0] == 2, waits
