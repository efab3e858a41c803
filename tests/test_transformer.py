"""The encoder-decoder Transformer: truth, counts, laws, training; what is true of every model is in `test_layers`."""

import random
import weakref

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.losses import MaskedCrossentropy
from keras_transformer.metrics import MaskedAccuracy
from keras_transformer.models import Transformer
from tests import reference
from tests.checks import close, numpy, quick, randomize, weights_of

SIZES = {"source_vocabulary_size": 11, "target_vocabulary_size": 13, "num_layers": 1, "d_model": 6, "num_heads": 2}
SOURCE = np.array([[4, 9, 3, 5, 0, 0, 0], [1, 10, 2, 2, 7, 3, 8], [6, 0, 0, 0, 0, 0, 0]], "int32")
TARGET = np.array([[1, 5, 6, 7, 12], [1, 3, 0, 0, 0], [1, 8, 8, 0, 0]], "int32")
INPUTS = {"source": SOURCE, "target": TARGET}


def toy(**arguments):
    arguments = {**SIZES, "d_ff": 10, "dropout": 0.0, **arguments}
    return randomize(Transformer(**arguments))


_JITTED = weakref.WeakKeyDictionary()


def predict(model, inputs=INPUTS, training=False):
    """The logits as NumPy. On JAX compiled, since one program compiles faster than hundreds of single operations."""
    if keras.config.backend() != "jax":
        return numpy(model(inputs, training=training))
    import jax

    def run(trainable, rest, inputs, training):
        logits, rest = model_of().stateless_call(trainable, rest, inputs, training=training)
        return logits, rest

    model_of = weakref.ref(model)
    program = _JITTED.setdefault(model, jax.jit(run, static_argnums=3))
    rest = model.non_trainable_variables
    values = ([v.value for v in variables] for variables in (model.trainable_variables, rest))
    logits, states = program(*values, inputs, training)
    for variable, state in zip(rest, states, strict=True):
        variable.assign(state)  # the dropouts' seeds move on
    return numpy(logits)


def expected_logits(model, source, target):
    """The model's formula in NumPy float64."""
    weights = weights_of(model)
    padding = (source != 0)[:, None, :]
    options = {"num_heads": model.num_heads, "norm_first": model.norm_first}

    def embed(ids, name):
        table = weights[f"{name}/embeddings"]
        positions = reference.sinusoidal_encoding(np.arange(ids.shape[1]), model.d_model)
        return table[ids] * model.d_model**0.5 + positions

    def finish(x, name):
        return reference.layer_norm(x, weights, f"{name}/final_norm") if model.norm_first else x

    memory = embed(source, "source_embedding")
    for i in range(model.num_layers):
        block = reference.within(weights, f"encoder/block_{i}")
        memory = reference.encoder_block(memory, block, mask=padding, **options)
    memory = finish(memory, "encoder")
    target_embedding = "source_embedding" if model.share_embeddings else "target_embedding"
    x = embed(target, target_embedding)
    for i in range(model.num_layers):
        block = reference.within(weights, f"decoder/block_{i}")
        x = reference.decoder_block(x, memory, block, memory_mask=padding, **options)
    x = finish(x, "decoder")
    if model.tie_output:
        return x @ weights[f"{target_embedding}/embeddings"].T
    return reference.dense(x, weights, "output_projection")


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_layers": 2},
        {"norm_first": True, "tie_output": False},
        {"source_vocabulary_size": 13, "share_embeddings": True, "num_heads": 3},
    ],
    ids=["base", "pre-norm, untied", "shared"],
)
def test_equals_numpy(arguments):
    model = toy(**arguments)
    close(predict(model), expected_logits(model, SOURCE, TARGET))


def test_parameters_of_the_papers_base_model():
    model = Transformer(37_000, 37_000, share_embeddings=True)
    assert model.count_params() == 63_082_496


@pytest.mark.parametrize("tie_output", [True, False])
@pytest.mark.parametrize("share_embeddings", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_weight_exists_before_any_call(tie_output, share_embeddings, norm_first):
    model = Transformer(
        13, 13, 1, 16, 2, 32, norm_first=norm_first, tie_output=tie_output, share_embeddings=share_embeddings
    )
    tables = (1 if share_embeddings else 2) + (0 if tie_output else 1)
    # An encoder block has 2224 parameters and a decoder block 3344; pre-norm adds a last norm to each stack.
    assert model.count_params() == 2224 + 3344 + 13 * 16 * tables + (64 if norm_first else 0)
    names = [(weight.path, tuple(weight.shape)) for weight in model.weights]
    assert len({path for path, _ in names}) == len(names)
    if share_embeddings:
        predict(model)
    elif norm_first:
        model.compile("sgd", MaskedCrossentropy())
        model.fit(INPUTS, TARGET, verbose=0)
    assert [(weight.path, tuple(weight.shape)) for weight in model.weights] == names


def test_a_later_target_changes_nothing_before_it():
    model = toy()
    changed = TARGET.copy()
    changed[:, 3:] = 9
    before, after = predict(model), predict(model, {"source": SOURCE, "target": changed})
    close(after[:, :3], before[:, :3], 1e-6)
    assert np.abs(after[:, 3:] - before[:, 3:]).max() > 1e-2


def test_source_padding_changes_nothing():
    model = toy()
    logits = predict(model)
    wider = np.pad(SOURCE, ((0, 0), (0, 4)))
    close(predict(model, {"source": wider, "target": TARGET}), logits, 1e-5)
    for row, length in enumerate([4, 7, 1]):
        alone = predict(model, {"source": SOURCE[row : row + 1, :length], "target": TARGET[row : row + 1]})
        close(alone, logits[row : row + 1], 1e-5)


def test_the_source_is_seen_from_every_target_position():
    model = toy()
    changed = SOURCE.copy()
    changed[0, 3] = 8
    difference = np.abs(predict(model, {"source": changed, "target": TARGET}) - predict(model))
    assert (difference[0].max(axis=-1) > 1e-3).all()
    assert difference[1:].max() < 1e-6


def test_a_wholly_padded_source_row_is_finite():
    model = toy()
    source = SOURCE.copy()
    source[1] = 0
    logits = predict(model, {"source": source, "target": TARGET})
    assert np.isfinite(logits).all()
    close(logits[[0, 2]], predict(model)[[0, 2]], 1e-6)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("form", ["buffer", "row starts", "growing"])
def test_cached_decoding_equals_one_pass(form, split):
    """A prefill of `split` tokens, then one token at a time; padded target positions included."""
    model = toy(num_layers=2)
    memory, source_mask = model.encode(ops.convert_to_tensor(SOURCE))
    memory_cache = model.project_memory(memory)
    target = ops.convert_to_tensor(TARGET)
    expected, none = model.decode(target, memory_cache, source_mask)
    assert none is None
    cache = model.decoder.init_cache(3, 0 if form == "growing" else 8)
    decode = quick(lambda ids, cache, given: model.decode(ids, memory_cache, source_mask, cache=cache, **given))
    bounds = [0, split, *range(split + 1, 6)]
    logits = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        positions = np.arange(start, stop)[None]
        arguments = {
            "buffer": {"start": start},
            "row starts": {"start": ops.convert_to_tensor(np.full(3, start, "int32"))},
            "growing": {
                "positions": ops.convert_to_tensor(positions),
                "attention_mask": ops.convert_to_tensor(np.arange(stop)[None, None] <= positions[..., None]),
            },
        }[form]
        part, cache = decode(target[:, start:stop], cache, arguments)
        logits.append(numpy(part))
    close(np.concatenate(logits, axis=1), numpy(expected), 1e-5)


def test_growing_cache_with_left_padding():
    """Rows that are padded on the left, by the mask and positions that the ONNX decoder is given."""
    model = toy()
    memory, source_mask = model.encode(ops.convert_to_tensor(SOURCE))
    memory_cache = model.project_memory(memory)
    lengths = [5, 2, 3]
    target, real = np.zeros((3, 5), "int32"), np.zeros((3, 5), bool)
    for row, length in enumerate(lengths):
        target[row, 5 - length :] = TARGET[row, :length]
        real[row, 5 - length :] = True
    positions = np.maximum(real.cumsum(axis=1) - 1, 0).astype("int32")
    causal = np.tril(np.ones((5, 5), bool))
    cache = model.decoder.init_cache(3, 0)
    for start, stop in ((0, 3), (3, 4), (4, 5)):
        logits, cache = model.decode(
            ops.convert_to_tensor(target[:, start:stop]),
            memory_cache,
            source_mask,
            positions=ops.convert_to_tensor(positions[:, start:stop]),
            cache=cache,
            attention_mask=ops.convert_to_tensor(causal[None, start:stop, :stop] & real[:, None, :stop]),
            last_only=True,
        )
        assert tuple(logits.shape) == (3, 1, 13)
    expected = predict(model)
    close(numpy(logits)[:, 0], expected[np.arange(3), np.array(lengths) - 1], 1e-5)


def test_decode_says_what_is_missing():
    model = toy()
    memory, source_mask = model.encode(ops.convert_to_tensor(SOURCE))
    arguments = (ops.convert_to_tensor(TARGET), model.project_memory(memory), source_mask)
    with pytest.raises(ValueError, match="`attention_mask` and `positions`.*attention_mask=None"):
        model.decode(*arguments, cache=model.decoder.init_cache(3, 0))
    with pytest.raises(ValueError, match="`start` needs a `cache`"):
        model.decode(*arguments, start=0)


def test_pure_methods_are_symbolic():
    """What is exported is recorded from these calls."""
    model = toy(num_layers=2)
    memory, source_mask = model.encode(keras.KerasTensor((3, 7), "int32"))
    assert memory.shape == (3, 7, 6)
    assert (source_mask.shape, source_mask.dtype) == ((3, 7), "bool")
    memory_cache = model.project_memory(memory)
    assert [pair.shape for pair in keras.tree.flatten(memory_cache)] == [(3, 7, 2, 3)] * 4
    past = keras.KerasTensor((3, 4, 2, 3), "float32")
    logits, cache = model.decode(
        keras.KerasTensor((3, 5), "int32"),
        memory_cache,
        source_mask,
        positions=keras.KerasTensor((3, 5), "int32"),
        cache=((past, past), (past, past)),
        attention_mask=keras.KerasTensor((3, 5, 9), "bool"),
    )
    assert logits.shape == (3, 5, 13)
    assert [pair.shape for pair in keras.tree.flatten(cache)] == [(3, 9, 2, 3)] * 4


def test_inside_a_functional_model():
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in ("source", "target")}
    inner = toy()
    logits = inner(inputs)
    assert logits.shape == (None, None, 13)
    model = keras.Model(inputs, keras.layers.Activation("softmax")(logits))
    expected = np.exp(expected_logits(inner, SOURCE, TARGET))
    close(predict(model), expected / expected.sum(axis=-1, keepdims=True))


def test_logits_carry_the_targets_mask():
    model = toy()
    np.testing.assert_array_equal(numpy(model(INPUTS)._keras_mask), TARGET != 0)
    # So Keras' own losses leave padding out too: one whose label is wrong only there is not made worse by it.
    labels = np.where(TARGET == 0, 12, TARGET)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    log_probability = keras.ops.log_softmax(expected_logits(model, SOURCE, TARGET).astype("float32"))
    values = -np.take_along_axis(numpy(log_probability), labels[..., None], -1)[..., 0]
    assert float(numpy(loss(labels, model(INPUTS)))) == pytest.approx(values[TARGET != 0].mean(), rel=1e-4)


def test_dropout_is_for_training_only():
    model = toy(dropout=0.5)
    still, training = predict(model), predict(model, training=True)
    close(predict(model), still, 0.0)
    assert np.abs(training - still).max() > 1e-2
    assert np.abs(predict(model, training=True) - training).max() > 1e-2


def test_seed():
    arguments = {**SIZES, "d_ff": 10, "seed": 7}
    state = random.getstate()
    first, second = Transformer(**arguments), Transformer(**arguments)
    assert random.getstate() == state, "the global random state is left alone"
    for one, other in zip(first.weights, second.weights, strict=True):
        np.testing.assert_array_equal(numpy(one.value), numpy(other.value))
    kernels = [numpy(w.value).ravel()[:8] for w in first.weights if w.name == "kernel"]
    assert len({kernel.tobytes() for kernel in kernels}) == len(kernels), "no two weights are alike"
    other = Transformer(**{**arguments, "seed": 8})
    assert np.abs(numpy(other.weights[0].value) - numpy(first.weights[0].value)).max() > 1e-2


def test_training_in_half_precision_is_finite():
    """In float16, which is the one that overflows."""
    model = randomize(Transformer(**SIZES, d_ff=10, dropout=0.1, dtype="mixed_float16"))
    model.compile("adam", MaskedCrossentropy())
    history = model.fit(INPUTS, TARGET, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    assert all(np.isfinite(numpy(w.value)).all() for w in model.weights)


def test_learns_to_reverse():
    rng = np.random.default_rng(0)
    source = rng.integers(3, 8, (256, 4)).astype("int32")
    labels = np.concatenate([source[:, ::-1], np.full((256, 1), 2)], axis=1).astype("int32")
    target = np.concatenate([np.ones((256, 1)), labels[:, :-1]], axis=1).astype("int32")
    model = Transformer(
        8, 8, num_layers=1, d_model=32, num_heads=4, d_ff=64, dropout=0.0, share_embeddings=True, seed=1
    )
    model.compile(keras.optimizers.Adam(0.005), MaskedCrossentropy(), metrics=[MaskedAccuracy()])
    history = model.fit({"source": source, "target": target}, labels, epochs=25, batch_size=64, verbose=0).history
    assert history["masked_accuracy"][-1] > 0.97
    unseen = np.array([[3, 4, 5, 6], [7, 7, 3, 4], [6, 3, 6, 0]], "int32")
    generated = model.generate(unseen, max_new_tokens=9)
    assert generated[:2].tolist() == [
        [6, 5, 4, 3, 2] + [0] * (generated.shape[1] - 5),
        [4, 3, 7, 7, 2] + [0] * (generated.shape[1] - 5),
    ]


@keras.saving.register_keras_serializable(package="tests")
class Twins(keras.Model):
    """A user's model with two Transformers in it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = Transformer(**SIZES, d_ff=10, dropout=0.0)
        self.second = Transformer(**SIZES, d_ff=10, dropout=0.0)

    def call(self, inputs):
        return self.first(inputs) + 2 * self.second(inputs)


def test_as_a_part_of_a_users_model(tmp_path):
    model = Twins()
    model(INPUTS)
    randomize(model)
    model.save(tmp_path / "twins.keras")
    model.save_weights(tmp_path / "twins.weights.h5")
    from_weights = Twins()
    with pytest.raises(ValueError, match="not yet been built"):
        from_weights.load_weights(tmp_path / "twins.weights.h5")
    from_weights(INPUTS)
    from_weights.load_weights(tmp_path / "twins.weights.h5")
    for loaded in (keras.saving.load_model(tmp_path / "twins.keras"), from_weights):
        assert len(loaded.weights) == len(model.weights)
        for one, other in zip(loaded.weights, model.weights, strict=True):
            np.testing.assert_array_equal(numpy(one.value), numpy(other.value))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"source_vocabulary_size": 0}, "`source_vocabulary_size`.*source_vocabulary_size=0"),
        ({"target_vocabulary_size": 2.5}, "`target_vocabulary_size`.*target_vocabulary_size=2.5"),
        ({"num_heads": 4}, "num_heads=4.*6"),
        ({"num_layers": 0}, "`num_layers`.*num_layers=0"),
        ({"max_length": 0}, "`max_length`.*max_length=0"),
        ({"dropout": -0.1}, "`dropout`.*dropout=-0.1"),
        ({"share_embeddings": True}, "source_vocabulary_size=11, target_vocabulary_size=13"),
        ({"start_id": 13}, "`start_id` must be ids from 0 to 12. Received: 13"),
        ({"end_id": -1}, "`end_id` must be ids from 0 to 12. Received: -1"),
        ({"end_id": 0}, "`end_id` must differ.*end_id=0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Transformer(**{**SIZES, "d_ff": 10, **arguments})


def test_bad_inputs():
    model = toy(max_length=7)
    model(INPUTS)
    with pytest.raises(ValueError, match=r"source length.*max_length=7.*source length=8"):
        model({"source": np.ones((1, 8), "int32"), "target": TARGET[:1]})
    with pytest.raises(ValueError, match=r"`target` must be ids.*target.shape=\(5,\)"):
        model({"source": SOURCE, "target": TARGET[0]})
    with pytest.raises(ValueError, match="same number of rows"):
        model({"source": SOURCE, "target": TARGET[:1]})
    with pytest.raises(ValueError, match=r'dict of "source" and "target".*\[\'source\'\]'):
        model({"source": SOURCE})
