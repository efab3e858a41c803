"""Checks of training data before the first step: inside a compiled step nothing can be raised."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer import _validation


def check_ids(
    data: Any,
    vocabulary_size: int | dict[str, int],
    batches: int = 2,
    ignore_id: int | None = None,
) -> None:
    """Looks at the first batches of training data and refuses ids outside the vocabulary.

    Args:
        data: what `fit` is given: a `keras.utils.PyDataset`, a `tf.data.Dataset`, a torch `DataLoader`, any other
            iterable of batches that can be iterated again, or a tuple of arrays `(x, y)` or `(x,)`, which is checked
            whole. A batch is `(inputs, labels, …)`; inputs are an array or a dict of arrays.
        vocabulary_size: number of ids; or a dict from input name (and `"labels"`) to it, for those to be checked.
        batches: how many batches to look at.
        ignore_id: a label that is allowed though it may be outside, such as -100.

    Raises:
        ValueError: naming the first wrong value, its row and its batch; data that can be read only once; or a name in
            `vocabulary_size` that is no input's.
    """
    _validation.positive_integers(batches=batches)
    sizes = vocabulary_size if isinstance(vocabulary_size, dict) else {"vocabulary_size": vocabulary_size}
    _validation.positive_integers(**sizes)
    for index, batch in enumerate(_first_batches(data, batches)):
        arrays, labels = _named(batch)
        if isinstance(vocabulary_size, dict) and (unknown := set(vocabulary_size) - {*arrays, "labels"}):
            raise ValueError(
                f"`vocabulary_size` must name inputs, {sorted(arrays)}, or 'labels'. Received: {sorted(unknown)}"
            )
        if labels is not None:
            arrays["labels"] = labels
        for name, array in arrays.items():
            size = vocabulary_size.get(name) if isinstance(vocabulary_size, dict) else vocabulary_size
            if size is None:
                continue
            array = array if isinstance(array, np.ndarray) else ops.convert_to_numpy(array)
            try:
                _validation.check_ids(array, size, name, ignore_id if name == "labels" else None)
            except ValueError as error:
                raise ValueError(f"{error} of batch {index}") from None


class CheckIds(keras.callbacks.Callback):
    """Runs `check_ids` on the training data when `fit` starts, with the vocabulary sizes that every model here knows.

    Keras does not show a callback the batches, so it is given the data that `fit` is given.

    Args:
        data: see `check_ids`.
        batches: how many batches to look at.
        vocabulary_size: see `check_ids`; the model's `vocabulary_sizes` if None, of the inputs and the integer labels
            that there are.

    Example:
        ```python
        model.fit(train, callbacks=[keras_transformer.callbacks.CheckIds(train)])
        ```
    """

    def __init__(self, data: Any, batches: int = 2, vocabulary_size: int | dict[str, int] | None = None):
        super().__init__()
        self.data = data
        self.batches = batches
        self.vocabulary_size = vocabulary_size

    def on_train_begin(self, logs=None):
        """Raises ValueError on ids outside the vocabulary."""
        size = self.vocabulary_size
        if size is None:
            arrays, labels = _named(next(iter(_first_batches(self.data, 1))))
            if labels is not None and "int" in keras.backend.standardize_dtype(labels.dtype):
                arrays["labels"] = labels
            sizes = self.model.vocabulary_sizes
            if "inputs" in arrays:  # one array without a name: the model's first input
                sizes = {"inputs" if name == "token_ids" else name: count for name, count in sizes.items()}
            size = {name: count for name, count in sizes.items() if name in arrays}
        check_ids(self.data, size, self.batches, getattr(self.model.loss, "ignore_id", None))


def _named(batch):
    """The inputs of a batch by name, and its labels or None."""
    inputs, labels, *_ = (*batch, None) if isinstance(batch, tuple | list) else (batch, None)
    return dict(inputs) if isinstance(inputs, dict) else {"inputs": inputs}, labels


def _first_batches(data, batches):
    if isinstance(data, tuple):
        return [data]
    if isinstance(data, keras.utils.PyDataset):
        # Not iterated: iterating starts the epoch that fit is about to start.
        count = batches if data.num_batches is None else min(batches, data.num_batches)
        return (data[index] for index in range(count))
    iterator = iter(data)
    if iterator is data:
        raise ValueError(
            "`data` can be read only once, so that looking at it would take batches away from fit. "
            f"Received: data={data!r}"
        )
    return itertools.islice(iterator, batches)
