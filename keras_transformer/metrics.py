"""Metrics that count the real tokens of padded batches."""

from __future__ import annotations

import keras
from keras import ops

from keras_transformer.losses import check_ignore_id, labels_and_logits, token_crossentropy, token_weights


class _TokenMean(keras.metrics.Metric):
    """The mean, over all real tokens seen since the last reset, of what `token_values` gives for each."""

    def __init__(self, ignore_id: int = 0, name: str | None = None, dtype=None):
        super().__init__(name=name, dtype=dtype)
        check_ignore_id(ignore_id)
        self.ignore_id = ignore_id
        self.total = self.add_variable(shape=(), initializer="zeros", dtype=self.dtype, name="total")
        self.count = self.add_variable(shape=(), initializer="zeros", dtype=self.dtype, name="count")

    def token_values(self, labels, logits):
        """One value a token (B, T)."""
        raise NotImplementedError

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Counts labels `y_true` (B, T) under logits `y_pred` (B, T, V)."""
        labels, logits = labels_and_logits(y_true, y_pred)
        values = self.token_values(labels, logits)
        weights = token_weights(labels, self.ignore_id, values.dtype, sample_weight)
        self.total.assign_add(ops.cast(ops.sum(values * weights), self.total.dtype))
        self.count.assign_add(ops.cast(ops.sum(weights), self.count.dtype))

    def result(self):
        """The mean; 0 before any token."""
        return ops.divide_no_nan(self.total, self.count)

    def get_config(self):
        return {**super().get_config(), "ignore_id": self.ignore_id}


@keras.saving.register_keras_serializable(package="keras_transformer")
class MaskedAccuracy(_TokenMean):
    """The share of real tokens whose label has the highest logit.

    Args:
        ignore_id: the label that does not count: the padding id, or a negative number such as -100.
        name: the metric's name.
        dtype: the dtype of its state.
    """

    def __init__(self, ignore_id: int = 0, name: str = "masked_accuracy", dtype=None):
        super().__init__(ignore_id=ignore_id, name=name, dtype=dtype)

    def token_values(self, labels, logits):
        return ops.cast(ops.equal(ops.cast(ops.argmax(logits, axis=-1), "int32"), labels), logits.dtype)


@keras.saving.register_keras_serializable(package="keras_transformer")
class Perplexity(_TokenMean):
    """exp of the mean cross-entropy, without label smoothing, over all real tokens; 1 before any token.

    It weighs every token alike, whatever batch it came in, unlike the epoch loss that Keras prints.

    Args:
        ignore_id: the label that does not count: the padding id, or a negative number such as -100.
        name: the metric's name.
        dtype: the dtype of its state.
    """

    def __init__(self, ignore_id: int = 0, name: str = "perplexity", dtype=None):
        super().__init__(ignore_id=ignore_id, name=name, dtype=dtype)

    def token_values(self, labels, logits):
        return token_crossentropy(labels, logits, self.ignore_id)

    def result(self):
        """The perplexity, a scalar."""
        return ops.exp(super().result())
