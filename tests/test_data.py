"""Rows and labels for language models: every label is the next token, or the token that was hidden."""

import keras
import numpy as np
import pytest

from keras_transformer import data, losses, metrics, models
from tests.checks import numpy

IDS = np.array([[2, 4, 6, 8], [1, 3, 5, 7]], "int32")


class TestNextToken:
    def test_labels_are_shifted_once(self):
        labels = data.next_token_labels(IDS)
        np.testing.assert_array_equal(labels, [[4, 6, 8, -100], [3, 5, 7, -100]])
        rows = np.arange(2)[:, None]
        for shift, right in ((1, True), (2, False)):
            following = np.pad(IDS, ((0, 0), (0, 2)))[rows, np.arange(4) + shift]
            logits = 20.0 * np.eye(10, dtype="float32")[following]
            loss = losses.MaskedCrossentropy(label_smoothing=0.0, ignore_id=-100)(labels, logits)
            accuracy = metrics.MaskedAccuracy(ignore_id=-100)
            accuracy.update_state(labels, logits)
            assert (float(loss) < 1e-6) == right and float(accuracy.result()) == right
            assert float(accuracy.count.value) == 6

    def test_padding_has_no_label(self):
        mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
        np.testing.assert_array_equal(data.next_token_labels(IDS, mask), [[4, -100, -100, -100], [3, 5, 7, -100]])
        np.testing.assert_array_equal(data.next_token_labels(IDS, mask[:, ::-1])[0], [-100, -100, 8, -100])
        for wrong in (mask[:, :3], mask / 2):
            with pytest.raises(ValueError, match=r"`padding_mask` must be boolean or integer of the shape \(2, 4\)"):
                data.next_token_labels(IDS, wrong)

    def test_a_long_text_is_cut_so_that_every_token_is_asked_for_once(self):
        inputs, labels = data.cut_text(np.arange(3, 20), 5)
        np.testing.assert_array_equal(inputs, np.arange(3, 18).reshape(3, 5))
        np.testing.assert_array_equal(labels, inputs + 1)
        assert data.cut_text(np.arange(16), 5)[0].shape == (3, 5)
        assert data.cut_text(np.arange(15), 5)[0].shape == (2, 5)
        with pytest.raises(ValueError, match="more than length=5 ids. Received: 5"):
            data.cut_text(np.arange(5), 5)

    def test_packed_texts_are_trained_on_as_each_alone(self):
        texts = [[5, 6, 7], [8, 9], [1, 2, 3, 4], [5], [6, 5]]
        packed, labels = data.pack_texts(texts, 6, pad_id=0)
        np.testing.assert_array_equal(packed["token_ids"], [[5, 6, 7, 8, 9, 5], [1, 2, 3, 4, 6, 5]])
        np.testing.assert_array_equal(packed["segment_ids"], [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
        np.testing.assert_array_equal(packed["positions"], [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]])
        np.testing.assert_array_equal(labels, [[6, 7, -100, 9, -100, -100], [2, 3, 4, -100, 5, -100]])
        packed, labels = data.pack_texts(texts[:2], 7, pad_id=4)
        np.testing.assert_array_equal(packed["token_ids"], [[5, 6, 7, 8, 9, 4, 4]])
        np.testing.assert_array_equal(packed["segment_ids"][0, 5:], [-1, -1])
        model = models.CausalLM(11, num_layers=1, d_model=8, num_heads=2, d_ff=5, dropout=0.0, max_length=7, seed=0)
        logits = numpy(model(packed))
        np.testing.assert_allclose(logits[0, 3:5], numpy(model(np.array([[8, 9]])))[0], atol=1e-6)
        model.compile("sgd")
        assert np.isfinite(model.fit(packed, labels, verbose=0).history["loss"]).all()

    @pytest.mark.parametrize(
        "texts, message",
        [
            ([], "at least one text"),
            ([[1], []], "text 1 is"),
            ([[1.5]], "text 0 is"),
            ([[1] * 4], "length=3 ids. .*: 4 in"),
            ([[1], [2, -1]], "`texts` must be ids from 0 .*: -1 in row 1, position 1"),
        ],
    )
    def test_bad_texts_are_refused(self, texts, message):
        with pytest.raises(ValueError, match=message):
            data.pack_texts(texts, 3)
        with pytest.raises(ValueError, match="`pad_id` must be an integer of at least 0. Received: pad_id=-1"):
            data.pack_texts([[1]], 3, pad_id=-1)


class TestMaskedTokens:
    def test_the_shares(self):
        rng = np.random.default_rng(0)
        ids = rng.integers(5, 50, (400, 50)).astype("int32")
        ids[:, 0], ids[:, -3:] = 2, 0
        inputs, labels = data.mask_tokens(ids, 4, 50, special_ids=(0, 2), seed=1)
        chosen = labels != -100
        np.testing.assert_array_equal(labels[chosen], ids[chosen])
        np.testing.assert_array_equal(inputs[~chosen], ids[~chosen])
        assert not chosen[:, 0].any() and not chosen[:, -3:].any()
        # 18,400 places: three deviations of their shares are 0.008; of the 2,760 chosen ones 0.023 and 0.017.
        assert abs(chosen[:, 1:-3].mean() - 0.15) < 0.008
        assert abs((inputs[chosen] == 4).mean() - 0.8) < 0.023
        kept = (inputs[chosen] == ids[chosen]).mean()
        assert abs(kept - 0.1 - 0.1 / 45) < 0.017
        assert not np.isin(inputs[chosen], [0, 2]).any()

    def test_a_seed_gives_the_same_and_another_epoch_others(self):
        ids = np.random.default_rng(0).integers(5, 20, (7, 11)).astype("int32")
        dataset = data.MaskedTexts(ids, 4, 20, batch_size=3, rate=0.3, seed=5)
        again = data.MaskedTexts(ids, 4, 20, batch_size=3, rate=0.3, seed=5)
        assert len(dataset) == 3
        first = [dataset[i] for i in range(3)]
        for one, other in zip(first, (again[i] for i in range(3)), strict=True):
            np.testing.assert_array_equal(one, other)
        restored = np.concatenate([np.where(labels == -100, inputs, labels) for inputs, labels in first])
        np.testing.assert_array_equal(sorted(map(tuple, restored)), sorted(map(tuple, ids)))
        dataset.on_epoch_end()
        assert not np.array_equal(dataset[0][0], first[0][0])

    def test_is_learned_from(self):
        keras.utils.set_random_seed(0)
        ids = (np.arange(64)[:, None] + np.arange(9)) % 7 + 5  # a token follows from its neighbours
        dataset = data.MaskedTexts(ids, 4, 12, batch_size=16, rate=0.2, seed=0)
        encoder = models.Encoder(12, num_layers=1, d_model=16, num_heads=2, d_ff=32, dropout=0.0, max_length=9)
        model = models.MaskedLM(encoder)
        model.compile(keras.optimizers.Adam(0.02))
        history = model.fit(dataset, epochs=80, verbose=0).history
        # Chance is 1/7, and knowing no neighbour is worth little more.
        assert max(history["masked_accuracy"][-9:]) > 0.5 > 0.35 > history["masked_accuracy"][0]

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"rate": 1.0}, r"`rate` must be in \[0, 1\)"),
            ({"mask_id": 9}, "`mask_id` must be ids from 0 to 8. Received: 9"),
            ({"token_ids": [[9]]}, "`token_ids` must be ids from 0 to 8. Received: 9"),
            ({"special_ids": range(9)}, "`special_ids` must leave some tokens"),
            ({"special_ids": 5}, "`special_ids` must be a sequence of ids. Received: special_ids=5"),
            ({"special_ids": [9]}, "`special_ids` must be ids from 0 to 8. Received: 9"),
            ({"vocabulary_size": 0}, "`vocabulary_size` must be an integer of at least 1"),
            ({"seed": -1}, "`seed` must be an integer of at least 0. Received: seed=-1"),
        ],
    )
    def test_bad_arguments_are_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            data.MaskedTexts(**{"token_ids": [[5, 6]], "mask_id": 4, "vocabulary_size": 9, **arguments})
        with pytest.raises(IndexError, match="`index` must be from 0 to 0. Received: index=1"):
            data.MaskedTexts([[5, 6]], 4, 9)[1]
