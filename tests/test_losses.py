"""MaskedCrossentropy against NumPy, and what padding, masks, weights and micro-batches may not change."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.losses import MaskedCrossentropy

LN4 = np.log(4.0)


def reference(labels, logits, smoothing=0.0, ignore_id=0, weights=None):
    """(sum of losses, number of tokens), in float64."""
    logits = np.asarray(logits, "float64")
    log_probability = logits - logits.max(-1, keepdims=True)
    log_probability -= np.log(np.exp(log_probability).sum(-1, keepdims=True))
    size = logits.shape[-1]
    real = labels != ignore_id
    target = np.eye(size)[np.where(real, labels, 0)] * (1 - smoothing) + smoothing / size
    counts = real * (1.0 if weights is None else weights)
    return (counts * -(target * log_probability).sum(-1)).sum(), counts.sum()


def batch(rows=3, length=5, size=7, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, size, (rows, length)).astype("int32")
    labels[0, 3:] = 0
    labels[2, 1:] = 0
    return labels, (4 * rng.normal(size=(rows, length, size))).astype("float32")


def loss_and_gradient(loss, labels, logits, sample_weight=None):
    """The loss and its gradient with respect to the logits, as NumPy, on any backend."""
    backend = keras.config.backend()
    if backend == "jax":
        import jax

        value, gradient = jax.value_and_grad(lambda x: loss(labels, x, sample_weight))(ops.convert_to_tensor(logits))
    elif backend == "torch":
        x = ops.convert_to_tensor(logits).detach().requires_grad_(True)
        value = loss(labels, x, sample_weight)
        value.backward()
        gradient = x.grad
    else:
        import tensorflow as tf

        x = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(labels, x, sample_weight)
        gradient = tape.gradient(value, x)
    return float(ops.convert_to_numpy(value)), ops.convert_to_numpy(gradient)


class Logits(keras.Model):
    """Gives its logits back, so that fit and evaluate can be asked about a loss."""

    def __init__(self):
        super().__init__()
        self.shift = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.shift


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_equals_numpy(smoothing):
    labels, logits = batch()
    total, count = reference(labels, logits, smoothing)
    value = MaskedCrossentropy(smoothing)(labels, logits)
    # float32 sums of 9 tokens
    np.testing.assert_allclose(float(value), total / count, rtol=1e-6)


def test_large_logits_cost_no_digits():
    labels, logits = batch()
    total, count = reference(labels, logits)
    shifted = (logits.astype("float64") + 4096).astype("float32")
    exact, _ = reference(labels, shifted)
    np.testing.assert_allclose(float(MaskedCrossentropy(0.0)(labels, shifted)), exact / count, rtol=1e-6)


def test_a_certain_prediction_costs_nothing():
    labels = np.array([[2, 4]], "int32")
    logits = 20 * np.eye(10, dtype="float32")[labels]
    assert float(MaskedCrossentropy(0.0)(labels, logits)) < 1e-6


@pytest.mark.parametrize("ignore_id", [0, -100])
@pytest.mark.parametrize("how", ["call", "evaluate", "fit"])
def test_padding_counts_nowhere(ignore_id, how):
    loss = MaskedCrossentropy(0.0, ignore_id=ignore_id)

    def measure(labels):
        logits = np.zeros((*labels.shape, 4), "float32")
        if how == "call":
            return float(loss(labels, logits))
        model = Logits()
        model.compile(keras.optimizers.SGD(0.0), loss)
        if how == "evaluate":
            return model.evaluate(logits, labels, verbose=0)
        return model.fit(logits, labels, verbose=0).history["loss"][0]

    labels = np.array([[3, 1, 0, 0], [2, 0, 0, 0]], "int32")
    labels[labels == 0] = ignore_id
    wider = np.pad(labels, ((0, 0), (0, 4)), constant_values=ignore_id)
    empty = np.full_like(labels, ignore_id)
    assert measure(labels) == pytest.approx(LN4, abs=1e-6)
    assert measure(wider) == pytest.approx(LN4, abs=1e-6)
    assert measure(empty) == 0.0


@pytest.mark.parametrize("ignore_id", [0, -100])
def test_gradients(ignore_id):
    labels, logits = batch()
    labels[labels == 0] = ignore_id
    _, gradient = loss_and_gradient(MaskedCrossentropy(ignore_id=ignore_id), labels, logits)
    assert (gradient[labels == ignore_id] == 0).all()
    probability = np.exp(logits.astype("float64"))
    probability /= probability.sum(-1, keepdims=True)
    real = labels != ignore_id
    target = np.eye(7)[np.where(real, labels, 0)] * 0.9 + 0.1 / 7
    expected = real[..., None] * (probability - target) / real.sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    value, gradient = loss_and_gradient(
        MaskedCrossentropy(ignore_id=ignore_id), np.full_like(labels, ignore_id), logits
    )
    assert value == 0.0
    assert (gradient == 0).all()


def test_an_implicit_mask_on_the_logits_changes_nothing():
    labels, logits = batch()
    # Through a model whose output carries a Keras mask, at positions that have a label too.
    ids = keras.Input((5,), dtype="int32")
    hidden = keras.layers.Embedding(7, 7, mask_zero=True)(ids)
    model = keras.Model(ids, keras.layers.Activation("linear")(hidden))
    model.compile("sgd", MaskedCrossentropy(0.0))
    model.layers[1].set_weights([logits[1, :1].repeat(7, axis=0) + np.eye(7)])
    inputs = np.array([[0, 2, 3, 0, 5]] * 3, "int32")
    total, count = reference(labels, model.predict(inputs, verbose=0))
    assert model.evaluate(inputs, labels, verbose=0) == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 5)])
def test_sample_weight(shape):
    labels, logits = batch()
    weights = np.random.default_rng(1).uniform(0, 1, shape).astype("float32")
    weights[1] = 0
    total, count = reference(labels, logits, 0.1, weights=weights.reshape(3, -1))
    value = MaskedCrossentropy()(labels, logits, sample_weight=weights)
    np.testing.assert_allclose(float(value), total / count, rtol=1e-6)


def test_two_micro_batches_equal_one_batch():
    labels, logits = batch(rows=4)  # 2 · 5 - 2 and 2 · 5 - 4 tokens
    whole_value, whole = loss_and_gradient(MaskedCrossentropy(normalizer="constant", token_count=14), labels, logits)
    micro = MaskedCrossentropy(normalizer="constant", token_count=7)
    parts = [loss_and_gradient(micro, labels[rows], logits[rows]) for rows in (slice(0, 2), slice(2, 4))]
    assert whole_value == pytest.approx(np.mean([value for value, _ in parts]), rel=1e-6)
    np.testing.assert_allclose(whole, np.concatenate([gradient for _, gradient in parts]) / 2, atol=1e-6)


def test_gradient_accumulation_equals_one_batch():
    """What the "constant" normalizer is for, through Keras' own accumulation; the "tokens" one differs."""
    labels, logits = batch(rows=4)
    kernels = {}
    for name, rows, steps, loss in [
        ("whole", 4, None, MaskedCrossentropy(normalizer="constant", token_count=14)),
        ("accumulated", 2, 2, MaskedCrossentropy(normalizer="constant", token_count=7)),
        ("tokens", 2, 2, MaskedCrossentropy()),
    ]:
        model = keras.Sequential([keras.Input((5, 7)), keras.layers.Dense(7, kernel_initializer="identity")])
        model.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps), loss)
        model.fit(logits, labels, batch_size=rows, shuffle=False, verbose=0)
        kernels[name] = model.get_weights()[0]
    np.testing.assert_allclose(kernels["whole"], kernels["accumulated"], atol=1e-6)
    assert np.abs(kernels["tokens"] - kernels["whole"]).max() > 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_widened(dtype):
    labels, logits = batch()
    half = ops.cast(logits, dtype)
    total, count = reference(labels, ops.convert_to_numpy(ops.cast(half, "float32")))
    value = MaskedCrossentropy(0.0)(labels, half)
    assert keras.backend.standardize_dtype(value.dtype) == "float32"
    np.testing.assert_allclose(float(value), total / count, rtol=1e-6)


def test_round_trip():
    loss = MaskedCrossentropy(0.3, -1, "constant", 17, name="nll")
    copy = keras.losses.deserialize(keras.losses.serialize(loss))
    assert copy.get_config() == loss.get_config()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"label_smoothing": 1.0}, "`label_smoothing`.*label_smoothing=1.0"),
        ({"normalizer": "rows"}, "`normalizer`.*normalizer='rows'"),
        ({"normalizer": "constant"}, "`token_count`.*token_count=None"),
        ({"normalizer": "constant", "token_count": 0}, "`token_count`.*token_count=0"),
        ({"token_count": 3}, "`token_count`.*token_count=3"),
        ({"label_smoothing": "a"}, "`label_smoothing`.*label_smoothing='a'"),
        ({"ignore_id": 1.5}, "`ignore_id`.*ignore_id=1.5"),
        ({"ignore_id": None}, "`ignore_id`.*ignore_id=None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MaskedCrossentropy(**arguments)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 5, 7)])
def test_shapes_that_do_not_belong_together(shape):
    with pytest.raises(ValueError, match=r"\(3, 5\).*y_true.shape="):
        MaskedCrossentropy()(np.ones(shape, "int32"), np.zeros((3, 5, 7), "float32"))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (3, 5, 1), (3, 1, 1), (3, 5, 7)])
def test_sample_weights_that_do_not_belong(shape):
    """Some of them would broadcast: to weights of another meaning."""
    with pytest.raises(ValueError, match="sample_weight.shape="):
        MaskedCrossentropy()(np.ones((3, 5), "int32"), np.zeros((3, 5, 7), "float32"), np.ones(shape))


@pytest.mark.parametrize("label", [7, -1, -100])
def test_a_label_outside_the_vocabulary_is_nan_on_every_backend(label):
    labels = np.array([[1, label, 0]])
    logits = np.zeros((1, 3, 7), "float32")
    assert np.isnan(float(MaskedCrossentropy()(labels, logits)))
    assert np.isfinite(float(MaskedCrossentropy(ignore_id=label)(labels, logits)))
