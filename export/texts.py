"""What the runners that take text share: limits, and batches of texts of similar length; imports no Keras."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_transformer import _validation


def in_batches(rows: Sequence[Sequence[int]], batch_size: int, limit: int | None) -> Iterator[list[int]]:
    """The places in `rows`, the ids of texts, batch by batch; those of similar length share one.

    Args:
        rows: the ids of each text.
        batch_size: how many share a batch.
        limit: the most ids that a text may have; None for no limit.

    Raises:
        ValueError: `batch_size` is below 1, or a text is too long; at once, not with the first batch.
    """
    _validation.positive_integers(batch_size=batch_size)
    for index, row in enumerate(rows):
        if limit is not None and len(row) > limit:
            raise ValueError(
                f"`texts` must have at most the model's max_length={limit} tokens each. "
                f"Received: {len(row)} tokens in text {index}"
            )
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))
