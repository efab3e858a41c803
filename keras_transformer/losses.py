"""Cross-entropy over the real tokens of a padded batch."""

from __future__ import annotations

import keras
from keras import ops

from keras_transformer._validation import positive_integers, rates
from keras_transformer.ops.attention import agree

# The label of a place that is not asked for, in language modelling, where every id may be a token.
NO_LABEL = -100


@keras.saving.register_keras_serializable(package="keras_transformer")
class MaskedCrossentropy(keras.losses.Loss):
    """Cross-entropy from logits, averaged over the tokens whose label is not `ignore_id`.

    Label smoothing is that of Szegedy et al. 2016 (https://arxiv.org/abs/1512.00567), section 7, as used by "Attention
    Is All You Need", section 5.4: the target puts 1 - ε on the label and spreads ε evenly over all V entries, so that

        loss(token) = logsumexp(z) - (1 - ε) · z[label] - ε · mean(z)        for logits z of shape (V,)

    The result is a scalar, and an implicit Keras mask on the logits does not change it: only the labels say which
    tokens count. Without a real token it is 0, with gradients of 0. Under mixed precision it is computed in float32.
    With a label outside the vocabulary it is NaN (inside a compiled step nothing can be raised); `callbacks.CheckIds`
    says which label that is.

    `sample_weight`, (B,), (B, 1) or (B, T), weighs tokens; a weight of 0 leaves a token out as `ignore_id` does.

    What Keras prints as `loss` over an epoch is the mean over batches, weighted by their number of rows, not of
    tokens. `metrics.Perplexity` counts tokens itself: use it to compare runs.

    Args:
        label_smoothing: ε, from 0 to below 1.
        ignore_id: the label that does not count: the padding id, or a negative number such as -100.
        normalizer: `"tokens"` divides a batch's sum by its own number of real tokens (by the sum of their weights).
            `"constant"` divides by `token_count` instead. Batches of unequal numbers of tokens then weigh each token
            the same: gradients of k accumulated micro-batches, or of k data-parallel replicas, whose mean is taken,
            equal those of the whole batch with a k times larger `token_count`.
        token_count: the constant: about the number of real tokens in a (micro-)batch.
        name: the loss' name.

    Raises:
        ValueError: an argument outside its range, or `token_count` without `normalizer="constant"` or the reverse.
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        ignore_id: int = 0,
        normalizer: str = "tokens",
        token_count: int | None = None,
        name: str = "masked_crossentropy",
    ):
        # `__call__` reduces; Keras' own reduction, which divides by all positions, never runs.
        super().__init__(name=name, reduction="sum")
        rates(label_smoothing=label_smoothing)
        check_ignore_id(ignore_id)
        if normalizer not in ("tokens", "constant"):
            raise ValueError(f'`normalizer` must be "tokens" or "constant". Received: normalizer={normalizer!r}')
        if normalizer == "constant":
            positive_integers(token_count=token_count)
        elif token_count is not None:
            raise ValueError(
                f'`token_count` needs `normalizer="constant"`. Received: token_count={token_count}, '
                f"normalizer={normalizer!r}"
            )
        self.label_smoothing = label_smoothing
        self.ignore_id = ignore_id
        self.normalizer = normalizer
        self.token_count = token_count

    def __call__(self, y_true, y_pred, sample_weight=None):
        """The loss, a scalar, of labels `y_true` (B, T) under logits `y_pred` (B, T, V)."""
        labels, logits = labels_and_logits(y_true, y_pred)
        values = self.call(labels, logits)
        weights = token_weights(labels, self.ignore_id, values.dtype, sample_weight)
        if self.normalizer == "constant":
            return ops.sum(values * weights) / self.token_count
        total = ops.sum(weights)
        return ops.sum(values * weights) / ops.where(ops.equal(total, 0), ops.ones_like(total), total)

    def call(self, y_true, y_pred):
        """The loss of each token (B, T); 0 where the label is `ignore_id`."""
        labels, logits = labels_and_logits(y_true, y_pred)
        return token_crossentropy(labels, logits, self.ignore_id, self.label_smoothing)

    def get_config(self):
        return {
            "label_smoothing": self.label_smoothing,
            "ignore_id": self.ignore_id,
            "normalizer": self.normalizer,
            "token_count": self.token_count,
            "name": self.name,
        }


def token_crossentropy(labels, logits, ignore_id: int, label_smoothing: float = 0.0):
    """The cross-entropy of each token (B, T), in float32 or wider; 0 where the label is `ignore_id`.

    NaN where another label is outside the vocabulary: as an index it would be an error on one backend, and the loss of
    some other label on the next.
    """
    # Relative to the largest logit, so that large logits cost no digits.
    logits = logits - ops.stop_gradient(ops.max(logits, axis=-1, keepdims=True))
    real = ops.not_equal(labels, ignore_id)
    inside = ops.logical_and(ops.greater_equal(labels, 0), ops.less(labels, logits.shape[-1]))
    # An ignored label may be outside the vocabulary (-100): it must never be an index.
    index = ops.where(ops.logical_and(real, inside), labels, ops.zeros_like(labels))
    target = ops.squeeze(ops.take_along_axis(logits, ops.expand_dims(index, -1), axis=-1), -1)
    if label_smoothing:
        target = (1 - label_smoothing) * target + label_smoothing * ops.mean(logits, axis=-1)
    values = ops.log(ops.sum(ops.exp(logits), axis=-1)) - target
    values = ops.where(inside, values, ops.full_like(values, float("nan")))
    return ops.where(real, values, ops.zeros_like(values))


def labels_and_logits(y_true, y_pred):
    """`y_true`, (…,) or (…, 1), as int32 labels (…,) and `y_pred` as logits (…, V), in float32 or wider.

    Raises:
        ValueError: the shapes do not belong together.
    """
    logits = ops.convert_to_tensor(y_pred)
    logits = ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))
    labels = ops.cast(ops.convert_to_tensor(y_true), "int32")
    if len(labels.shape) == len(logits.shape) and labels.shape[-1] == 1:
        labels = ops.squeeze(labels, -1)  # a column of labels, as files give them
    # Python sizes, where known: `None` on a free axis.
    expected, received = tuple(logits.shape[:-1]), tuple(labels.shape)
    matches = len(expected) == len(received) and all(
        a == b for a, b in zip(expected, received, strict=True) if a is not None and b is not None
    )
    if not matches:
        raise ValueError(
            f"Labels must have the shape of the logits without the last axis, {expected}. "
            f"Received: y_true.shape={received}, y_pred.shape={tuple(logits.shape)}"
        )
    return labels, logits


def token_weights(labels, ignore_id: int, dtype: str, sample_weight=None):
    """What each token counts, (B, T): 0 where the label is `ignore_id`, else 1 or its `sample_weight`.

    Raises:
        ValueError: `sample_weight` is not of shape (B,), (B, 1) or (B, T).
    """
    weights = ops.cast(ops.not_equal(labels, ignore_id), dtype)
    if sample_weight is None:
        return weights
    sample_weight = ops.cast(ops.convert_to_tensor(sample_weight), dtype)
    received = tuple(sample_weight.shape)
    while len(sample_weight.shape) < len(labels.shape):
        sample_weight = ops.expand_dims(sample_weight, -1)
    sizes = tuple(sample_weight.shape)
    if len(sizes) != len(labels.shape) or not all(
        size == 1 or agree(size, wanted) for size, wanted in zip(sizes, labels.shape, strict=True)
    ):
        raise ValueError(
            f"`sample_weight` must have the shape (B,), (B, 1) or (B, T), here with (B, T) = {tuple(labels.shape)}. "
            f"Received: sample_weight.shape={received}"
        )
    return weights * sample_weight


def check_ignore_id(ignore_id: int) -> None:
    """Refuses an `ignore_id` that is no integer.

    Raises:
        ValueError: naming it.
    """
    if isinstance(ignore_id, bool) or not isinstance(ignore_id, int):
        raise ValueError(f"`ignore_id` must be an integer. Received: ignore_id={ignore_id!r}")
