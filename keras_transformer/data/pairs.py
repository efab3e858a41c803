"""Batches of sentence pairs for `model.fit`, in a few fixed shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_transformer import _validation


class SentencePairs(keras.utils.PyDataset):
    """Pairs of token ids as batches `({"source", "target"}, labels)`, bucketed by length.

    A pair goes to the first of a few fixed lengths L that holds both its sides and is padded to it, so that a
    compiled step (XLA) is compiled once a length rather than once a batch. Every batch of a length has the
    same number of rows B: the last one is filled with rows of padding, which `losses.MaskedCrossentropy` and
    the metrics leave out. No pair is dropped or cut.

    A batch holds three int32 arrays (B, L): `source`; `target`, which is what the decoder reads, the start id
    and the labels moved one place to the right; and the labels. So `targets` come without a start id and with
    an end id, as `text.Tokenizer.encode` gives them.

    Each epoch's order depends on `seed` and `epoch` alone, whatever the backend and the number of workers.
    The first batch is one of the longest and the second one of the shortest, because Keras on TensorFlow
    takes these two as examples of all shapes. (`fit(shuffle=True)` shuffles the batches once more, from
    Python's own random state; with `shuffle=False` there, equal epochs have equal batches.)

    With several workers on JAX and PyTorch, Keras 3.15 looks at a batch before it builds the loss and then fills
    the first epoch with what its queue held, so that some pairs come twice and others not at all. After
    `model.test_on_batch(*dataset[0])` there is nothing left to build, and the first epoch is right too.

    Args:
        sources: one sequence of ids a pair.
        targets: likewise, of the same number.
        batch_size: rows of each batch. Give either this or `batch_tokens`.
        batch_tokens: the most places B · L of `source`, and so of `target`: short batches have more rows.
        lengths: the lengths L. By default 8, 12, 16, 24, 32, 48, … up to the longest pair, without those
            that would not fill a batch.
        source_vocabulary_size: if given, ids of `sources` are checked against it.
        target_vocabulary_size: likewise for `targets`.
        start_id: the id that the decoder reads first.
        pad_id: the id that fills rows.
        shuffle: whether each epoch has its own order.
        seed: of these orders.
        **kwargs: `workers`, `use_multiprocessing` and `max_queue_size` of `keras.utils.PyDataset`.

    Attributes:
        epoch: the number that the order depends on. It grows by one whenever Keras says that an epoch is
            over, which it also does as `fit` begins; to keep it equal to fit's own count, as for going on
            after an interruption, set it in a callback's `on_epoch_begin`.

    Raises:
        ValueError: unequal numbers of sources and targets, an empty one, ids outside the vocabulary, a pair
            longer than every given length, a target with padding before its end, or not exactly one of
            `batch_size` and `batch_tokens`.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        lengths: Sequence[int] | None = None,
        source_vocabulary_size: int | None = None,
        target_vocabulary_size: int | None = None,
        start_id: int = 1,
        pad_id: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if (batch_size is None) == (batch_tokens is None):
            raise ValueError(
                "Give exactly one of `batch_size` and `batch_tokens`. "
                f"Received: batch_size={batch_size}, batch_tokens={batch_tokens}"
            )
        size = {"batch_size": batch_size} if batch_tokens is None else {"batch_tokens": batch_tokens}
        _validation.positive_integers(**size)
        given = {
            "source_vocabulary_size": source_vocabulary_size,
            "target_vocabulary_size": target_vocabulary_size,
        }
        _validation.positive_integers(**{name: value for name, value in given.items() if value is not None})
        _validation.not_negative(seed=seed, start_id=start_id)
        if target_vocabulary_size is not None:
            _validation.check_ids(np.array([start_id]), target_vocabulary_size, "start_id")
        if lengths is not None:
            _validation.positive_integers(**{f"lengths[{i}]": length for i, length in enumerate(lengths)})
            if len(lengths) == 0:
                raise ValueError("`lengths` must hold at least one length. Received: lengths=()")
        if len(sources) != len(targets):
            raise ValueError(
                "`sources` and `targets` must be of the same number. "
                f"Received: {len(sources)} sources, {len(targets)} targets"
            )
        self._sources = _ids(sources, source_vocabulary_size, pad_id, "sources")
        self._targets = _ids(targets, target_vocabulary_size, pad_id, "targets")
        _check_padding_at_the_end(self._targets, pad_id)
        self.start_id = start_id
        self.pad_id = pad_id
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        pair_lengths = np.maximum(_lengths(self._sources, pad_id), _lengths(self._targets, pad_id))

        def rows(length: int) -> int:
            return batch_size if batch_tokens is None else max(1, batch_tokens // length)

        if lengths is None:
            lengths = _default_lengths(pair_lengths, rows)
        lengths = np.unique(lengths)
        if pair_lengths.max() > lengths[-1]:
            row = int(pair_lengths.argmax())
            raise ValueError(
                f"Every pair must fit the longest of `lengths`, {lengths[-1]}. "
                f"Received: pair {row} of length {pair_lengths[row]}"
            )
        bucket = np.searchsorted(lengths, pair_lengths)
        # (length, rows of a batch, pairs) of each length that has any, the shortest first
        self._buckets = [
            (int(length), rows(int(length)), np.flatnonzero(bucket == i))
            for i, length in enumerate(lengths)
            if (bucket == i).any()
        ]
        self._plan: tuple[int, list[tuple[int, int, np.ndarray]]] = (-1, [])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes (B, L) that batches have."""
        return [(rows, length) for length, rows, _ in self._buckets]

    def __len__(self) -> int:
        return sum(-(-len(pairs) // rows) for _, rows, pairs in self._buckets)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be from 0 to {len(self) - 1}. Received: index={index}")
        length, rows, pairs = self._batches()[index]
        source = np.full((rows, length), self.pad_id, np.int32)
        labels = np.full((rows, length), self.pad_id, np.int32)
        for array, table in ((source, self._sources), (labels, self._targets)):
            width = min(length, table.shape[1])
            array[: len(pairs), :width] = table[pairs, :width]
        target = np.roll(labels, 1, axis=1)
        target[:, 0] = self.start_id
        target[labels == self.pad_id] = self.pad_id
        return {"source": source, "target": target}, labels

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch's order."""
        self.epoch += 1

    def _batches(self) -> list[tuple[int, int, np.ndarray]]:
        # Worked out where it is first asked for, from the epoch alone: other processes come to the same.
        epoch, plan = self._plan
        if epoch != self.epoch:
            epoch = self.epoch
            rng = np.random.default_rng((self.seed, epoch))
            buckets = []
            for length, rows, pairs in self._buckets:
                pairs = rng.permutation(pairs) if self.shuffle else pairs
                buckets.append([(length, rows, pairs[i : i + rows]) for i in range(0, len(pairs), rows)])
            plan = [buckets[-1].pop(0), buckets[0].pop(0)] if len(buckets) > 1 else []
            rest = [batch for bucket in buckets for batch in bucket]
            plan += [rest[i] for i in rng.permutation(len(rest))] if self.shuffle else rest
            self._plan = (epoch, plan)  # at once: threads of a pool share it
        return plan


def _ids(rows: Sequence[Sequence[int]], vocabulary_size: int | None, pad_id: int, name: str) -> np.ndarray:
    ids = _validation.id_batch(rows, name, pad_id)
    limit = np.iinfo(np.int32).max if vocabulary_size is None else vocabulary_size
    _validation.check_ids(ids, limit, name, ignore_id=pad_id)
    _validation.check_not_empty(ids, pad_id, name)
    return ids


def _check_padding_at_the_end(targets: np.ndarray, pad_id: int) -> None:
    """Padding inside a target would hide the token before it from the decoder, and is most likely a token itself."""
    early = (targets == pad_id) & (np.arange(targets.shape[1]) < _lengths(targets, pad_id)[:, None])
    if early.any():
        row, position = np.argwhere(early)[0]
        raise ValueError(
            f"`targets` may hold padding (id {pad_id}) after their last token only. "
            f"Received: {pad_id} in row {row}, position {position}"
        )


def _lengths(ids: np.ndarray, pad_id: int) -> np.ndarray:
    return ids.shape[1] - np.argmax(ids[:, ::-1] != pad_id, axis=1)


def _default_lengths(pair_lengths: np.ndarray, rows: Callable[[int], int]) -> list[int]:
    """8, 12, 16, 24, 32, 48, … as far as needed; all but the longest fill at least one batch."""
    lengths: list[int] = []
    length, placed = 8, 0
    while length < pair_lengths.max():
        fitting = int((pair_lengths <= length).sum())
        if fitting - placed >= rows(length):
            lengths.append(length)
            placed = fitting
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return [*lengths, length]
