"""Wrong ids are found before training, whatever form the data takes."""

import keras
import numpy as np
import pytest

from keras_transformer import models
from keras_transformer.callbacks import CheckIds, check_ids

SIZES = {"source": 11, "target": 7, "labels": 7}


def batch(**wrong):
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, size, (3, 5)).astype("int32") for name, size in SIZES.items()}
    for name, value in wrong.items():
        arrays[name][2, 1] = value
    return {"source": arrays["source"], "target": arrays["target"]}, arrays["labels"]


class Batches(keras.utils.PyDataset):
    def __init__(self, *batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


@pytest.mark.parametrize("name, value", [("source", 11), ("target", -1), ("labels", 7), ("labels", -100)])
@pytest.mark.parametrize("kind", ["list", "PyDataset"])
def test_names_value_row_and_batch(kind, name, value):
    batches = [batch(), batch(**{name: value})]
    data = Batches(*batches) if kind == "PyDataset" else batches
    expected = f"`{name}` must be ids from 0 to {SIZES[name] - 1}. Received: {value} in row 2, position 1 of batch 1"
    with pytest.raises(ValueError, match=expected):
        check_ids(data, SIZES)
    check_ids(data, SIZES, batches=1)


def test_arrays_are_checked_whole():
    with pytest.raises(ValueError, match="Received: 99 in row 2, position 1 of batch 0"):
        check_ids(batch(source=99), SIZES)
    check_ids((batch()[0],), SIZES)


def test_one_size_for_all():
    ids = np.array([[1, 2], [3, 4]])
    check_ids([ids], 5)
    with pytest.raises(ValueError, match="`inputs` must be ids from 0 to 3. Received: 4 in row 1, position 1"):
        check_ids([ids], 4)


def test_ignored_labels_are_allowed():
    check_ids([batch(labels=-100)], SIZES, ignore_id=-100)


def test_a_name_that_is_no_inputs():
    with pytest.raises(ValueError, match=r"'source', 'target'\].*Received: \['sources'\]"):
        check_ids([batch()], {"sources": 9})


def test_floats_are_refused():
    inputs, labels = batch()
    with pytest.raises(ValueError, match="`source` must hold integers. Received: source.dtype=float32"):
        check_ids([({**inputs, "source": inputs["source"].astype("float32")}, labels)], SIZES)


def test_a_generator_is_refused():
    with pytest.raises(ValueError, match="read only once"):
        check_ids((b for b in [batch()]), SIZES)


@pytest.mark.backends("tensorflow")
def test_tf_data():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(batch(target=8)).batch(2)
    with pytest.raises(ValueError, match="`target`.*Received: 8 in row 0, position 1 of batch 1"):
        check_ids(data, SIZES)


@pytest.mark.backends("torch")
def test_data_loader():
    import torch

    inputs, labels = batch(target=8)
    rows = [({k: torch.as_tensor(v[i]) for k, v in inputs.items()}, torch.as_tensor(labels[i])) for i in range(3)]
    with pytest.raises(ValueError, match="`target`.*Received: 8 in row 0, position 1 of batch 1"):
        check_ids(torch.utils.data.DataLoader(rows, batch_size=2), SIZES)


@pytest.mark.parametrize("place", ["token_ids", "labels"])
def test_every_model_knows_its_sizes(place):
    """Ids of one array or of a dict, and classes, of models that are compiled as they come."""
    sizes = {"num_layers": 1, "d_model": 4, "num_heads": 2, "d_ff": 3, "dropout": 0.0}
    encoder = models.Encoder(7, **sizes, num_token_types=2)
    ids, images = np.full((3, 5), 6, "int32"), np.zeros((3, 2, 2, 1), "float32")
    cases = [
        (models.CausalLM(7, **sizes), ids, ids, 7),
        (models.CausalLM(7, **sizes), {"token_ids": ids, "segment_ids": ids, "positions": ids}, ids, 7),
        (models.MaskedLM(encoder), ids, np.where(ids > 9, ids, -100), 7),
        (models.TokenClassifier(encoder, 2), {"token_ids": ids, "token_types": ids % 2}, ids % 2, 2),
        (models.SequenceClassifier(encoder, 2), ids, ids[:, :1] % 2, 2),
        (models.VisionTransformer(2, 2, 1, 1, **sizes), images, ids[:, 0] % 2, 2),
    ]
    for model, inputs, labels, size in cases:
        model.compile()
        check = CheckIds((inputs, labels))
        check.set_model(model)
        check.on_train_begin()
        if place == "labels":
            labels = np.full_like(labels, size)
        elif model is cases[-1][0]:
            continue
        else:
            inputs = {**inputs, place: ids + 1} if isinstance(inputs, dict) else ids + 1
            size = 7
        check.data = (inputs, labels)
        with pytest.raises(ValueError, match=f"must be ids from 0 to {size - 1}. Received: {size} in row 0"):
            check.on_train_begin()


def test_callback_stops_fit():
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(5, 2)])
    model.compile("sgd", "mse")
    ids, labels = np.array([[1, 2, 5]], "int32"), np.zeros((1, 3, 2), "float32")
    sizes = {"inputs": 5}
    with pytest.raises(ValueError, match="`inputs` must be ids from 0 to 4. Received: 5 in row 0, position 2"):
        model.fit(ids, labels, callbacks=[CheckIds((ids, labels), vocabulary_size=sizes)], verbose=0)
    ids[:] = 4
    model.fit(ids, labels, callbacks=[CheckIds((ids, labels), vocabulary_size=sizes)], verbose=0)
