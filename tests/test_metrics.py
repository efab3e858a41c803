"""MaskedAccuracy and Perplexity against NumPy, over batches of unequal numbers of tokens."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.metrics import MaskedAccuracy, Perplexity


def batches(ignore_id=0):
    rng = np.random.default_rng(0)
    for rows, length in ((3, 5), (2, 11)):
        labels = rng.integers(1, 7, (rows, length)).astype("int32")
        labels[0, 2:] = ignore_id
        yield (
            labels,
            rng.normal(size=(rows, length, 7)).astype("float32"),
            rng.uniform(size=rows).astype("float32"),
        )


def expected(metric, ignore_id, weighted):
    total = count = 0.0
    for labels, logits, weights in batches(ignore_id):
        weights = (labels != ignore_id) * (weights[:, None] if weighted else 1.0)
        if metric is MaskedAccuracy:
            values = logits.argmax(-1) == labels
        else:
            log_probability = logits - np.log(np.exp(logits.astype("float64")).sum(-1, keepdims=True))
            index = np.where(labels == ignore_id, 0, labels)[..., None]
            values = -np.take_along_axis(log_probability, index, axis=-1)[..., 0]
        total, count = total + (values * weights).sum(), count + weights.sum()
    return np.exp(total / count) if metric is Perplexity else total / count


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignore_id", [0, -100])
@pytest.mark.parametrize("metric", [MaskedAccuracy, Perplexity])
def test_equals_numpy(metric, ignore_id, weighted):
    instance = metric(ignore_id=ignore_id)
    for labels, logits, weights in batches(ignore_id):
        instance.update_state(labels, logits, sample_weight=weights if weighted else None)
    # float32 sums over 37 tokens
    np.testing.assert_allclose(float(instance.result()), expected(metric, ignore_id, weighted), rtol=1e-6)
    instance.reset_state()
    assert float(instance.result()) == (1.0 if metric is Perplexity else 0.0)


@pytest.mark.parametrize("metric", [MaskedAccuracy, Perplexity])
def test_all_padding_is_no_data(metric):
    instance = metric()
    instance.update_state(np.zeros((2, 3), "int32"), np.ones((2, 3, 5), "float32"))
    assert float(instance.result()) == (1.0 if metric is Perplexity else 0.0)


@pytest.mark.parametrize("metric", [MaskedAccuracy, Perplexity])
def test_round_trip(metric):
    instance = metric(ignore_id=-1, name="m")
    copy = keras.metrics.deserialize(keras.metrics.serialize(instance))
    assert copy.get_config() == instance.get_config()


def test_in_fit_and_evaluate():
    """An implicit mask on the logits changes nothing, and batches are weighed by tokens."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, (5, 3)).astype("int32")
    ids = rng.integers(0, 7, (5, 3)).astype("int32")
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Embedding(7, 7, mask_zero=True)(inputs))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True), metrics=[MaskedAccuracy(), Perplexity()])
    results = model.evaluate(ids, labels, batch_size=2, return_dict=True, verbose=0)
    logits = ops.convert_to_numpy(model(ids)).astype("float64")
    real = labels != 0
    assert results["masked_accuracy"] == pytest.approx((logits.argmax(-1) == labels)[real].mean(), rel=1e-6)
    log_probability = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_probability, labels[..., None], -1)[..., 0][real].mean()
    assert results["perplexity"] == pytest.approx(np.exp(nll), rel=1e-6)


@pytest.mark.parametrize("metric", [MaskedAccuracy, Perplexity])
def test_refuses(metric):
    with pytest.raises(ValueError, match="ignore_id='a'"):
        metric(ignore_id="a")
    with pytest.raises(ValueError, match="y_true.shape=\\(2, 4\\)"):
        metric().update_state(np.ones((2, 4), "int32"), np.zeros((2, 3, 5), "float32"))
    with pytest.raises(ValueError, match="sample_weight.shape=\\(2, 3, 1\\)"):
        metric().update_state(np.ones((2, 3), "int32"), np.zeros((2, 3, 5), "float32"), np.ones((2, 3, 1)))
