"""Texts in which a masked language model has to guess tokens (BERT, https://arxiv.org/abs/1810.04805, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_transformer import _validation
from keras_transformer.losses import NO_LABEL


def mask_tokens(
    token_ids: Any,
    mask_id: int,
    vocabulary_size: int,
    rate: float = 0.15,
    special_ids: Sequence[int] = (0,),
    seed: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses places to be guessed: 80% of them become `mask_id`, 10% a random token, and 10% stay as they are.

    Args:
        token_ids: integers (B, T).
        mask_id: the id of the mask token.
        vocabulary_size: number of ids.
        rate: the share of tokens that is chosen.
        special_ids: ids that are never chosen nor put in: padding, and what begins and ends a text.
        seed: an integer, or whatever `numpy.random.default_rng` takes.

    Returns:
        Inputs and labels, int32 (B, T) each; the labels are -100 where nothing is to be guessed.

    Raises:
        ValueError: ids outside the vocabulary, a rate outside [0, 1), or special ids that leave nothing to put in.
    """
    _validation.positive_integers(vocabulary_size=vocabulary_size)
    ids = _validation.id_batch(token_ids, "token_ids")
    _validation.check_ids(ids, vocabulary_size, "token_ids")
    _validation.check_ids(np.array([mask_id]), vocabulary_size, "mask_id")
    _validation.rates(rate=rate)
    _check_special_ids(special_ids, vocabulary_size)
    rng = np.random.default_rng(seed)
    never = {int(mask_id), *map(int, special_ids)}
    ordinary = np.array([i for i in range(vocabulary_size) if i not in never])
    if not len(ordinary):
        raise ValueError(f"`special_ids` must leave some tokens. Received: special_ids={special_ids!r}")
    chosen = (rng.random(ids.shape) < rate) & ~np.isin(ids, list(never))
    way = rng.random(ids.shape)
    replaced = np.where(way < 0.8, mask_id, rng.choice(ordinary, ids.shape))
    inputs = np.where(chosen & (way < 0.9), replaced, ids).astype(np.int32)
    return inputs, np.where(chosen, ids, NO_LABEL).astype(np.int32)


class MaskedTexts(keras.utils.PyDataset):
    """Batches of texts with tokens to guess, other ones in each epoch, for `models.MaskedLM`.

    Args:
        token_ids: integers (R, T), or rows of unequal length.
        mask_id: as in `mask_tokens`.
        vocabulary_size: as in `mask_tokens`.
        batch_size: rows of each batch; the last one may have fewer.
        rate: as in `mask_tokens`.
        special_ids: as in `mask_tokens`; the first one fills shorter rows.
        seed: of the choice of tokens and of the order of the rows, which depend on it and on the epoch alone.
        **kwargs: `workers`, `use_multiprocessing` and `max_queue_size` of `keras.utils.PyDataset`.

    Attributes:
        epoch: the number that tokens and order depend on. It grows by one whenever Keras says that an epoch is over,
            which it also does as `fit` begins.

    Raises:
        ValueError: as `mask_tokens`, or a batch size or a seed outside its range.
    """

    def __init__(
        self,
        token_ids: Any,
        mask_id: int,
        vocabulary_size: int,
        batch_size: int = 32,
        rate: float = 0.15,
        special_ids: Sequence[int] = (0,),
        seed: int = 0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        _validation.positive_integers(vocabulary_size=vocabulary_size, batch_size=batch_size)
        _check_special_ids(special_ids, vocabulary_size)
        _validation.not_negative(seed=seed)
        self._ids = _validation.id_batch(token_ids, "token_ids", special_ids[0] if len(special_ids) else 0)
        self._arguments = (mask_id, vocabulary_size, rate, tuple(special_ids))
        mask_tokens(self._ids, *self._arguments)  # refuses what is wrong now, not in the first epoch
        self._batch_size = batch_size
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self._ids) // self._batch_size)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of a batch, int32 (B, T) each."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be from 0 to {len(self) - 1}. Received: index={index}")
        order = np.random.default_rng((self._seed, self.epoch)).permutation(len(self._ids))
        rows = order[index * self._batch_size : (index + 1) * self._batch_size]
        return mask_tokens(self._ids[rows], *self._arguments, seed=(self._seed, self.epoch, index))

    def on_epoch_end(self) -> None:
        """Goes on to the next epoch."""
        self.epoch += 1


def _check_special_ids(special_ids, vocabulary_size):
    if np.ndim(special_ids) != 1:
        raise ValueError(f"`special_ids` must be a sequence of ids. Received: special_ids={special_ids!r}")
    _validation.check_ids(np.array(special_ids, None if len(special_ids) else int), vocabulary_size, "special_ids")
