"""Checks of token ids and lengths that run before any work; NumPy only, so that the ONNX runner shares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def id_batch(ids: Any, name: str = "ids", pad_id: int = 0) -> np.ndarray:
    """`ids` as one int32 array of rank 2; rows of unequal length are padded on the right with `pad_id`.

    Args:
        ids: an integer array (B, S), or a sequence of B sequences of ids.
        name: the argument's name, for messages.
        pad_id: what shorter rows are filled with.

    Raises:
        ValueError: wrong rank, no row, no column, or a dtype that is not integer.
    """
    if isinstance(ids, Sequence) and not isinstance(ids, str):
        rows = [np.asarray(row) for row in ids]
        if any(row.ndim != 1 for row in rows):
            shapes = sorted({row.shape for row in rows})
            raise ValueError(f"`{name}` must have rank 2: a batch of rows of ids. Received: rows of shape {shapes}")
        for index, row in enumerate(rows):
            if row.size and not np.issubdtype(row.dtype, np.integer):
                raise ValueError(f"`{name}` must hold integers. Received: dtype {row.dtype} in row {index}")
        array = np.full((len(rows), max((len(row) for row in rows), default=0)), pad_id, np.int64)
        for index, row in enumerate(rows):
            array[index, : len(row)] = row
    else:
        array = np.asarray(ids)
    if array.ndim != 2:
        raise ValueError(f"`{name}` must have rank 2 (batch, length). Received: {name}.shape={array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must hold integers. Received: {name}.dtype={array.dtype}")
    if 0 in array.shape:
        raise ValueError(f"`{name}` must hold at least one row and one column. Received: {name}.shape={array.shape}")
    info = np.iinfo(np.int32)
    if array.min() < info.min or array.max() > info.max:
        row = int(np.argmax(((array < info.min) | (array > info.max)).any(axis=-1)))
        raise ValueError(f"`{name}` must fit 32 bits. Received: row {row} of {name} holds {array[row].tolist()}")
    return array.astype(np.int32)


def check_ids(
    ids: Any, vocabulary_size: int, name: str = "ids", ignore_id: int | None = None, first_row: int = 0
) -> None:
    """Refuses ids outside 0 … `vocabulary_size` - 1.

    Args:
        ids: an integer array whose first axis counts rows.
        vocabulary_size: the number of ids.
        name: the argument's name, for messages.
        ignore_id: one further value that is allowed, such as the -100 of labels.
        first_row: the number of `ids`' first row, for messages.

    Raises:
        ValueError: naming the first wrong value, its row and its position.
    """
    array = np.asarray(ids)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must hold integers. Received: {name}.dtype={array.dtype}")
    wrong = (array < 0) | (array >= vocabulary_size)
    if ignore_id is not None:
        wrong &= array != ignore_id
    if wrong.any():
        row, *position = (int(i) for i in np.argwhere(wrong)[0])
        value = int(array[(row, *position)])
        place = f"row {first_row + row}" + "".join(f", position {p}" for p in position)
        raise ValueError(f"`{name}` must be ids from 0 to {vocabulary_size - 1}. Received: {value} in {place}")


def check_not_empty(ids: np.ndarray, pad_id: int = 0, name: str = "ids") -> None:
    """Refuses a row of `ids` (B, S) that is nothing but padding.

    Raises:
        ValueError: naming the row.
    """
    empty = (ids == pad_id).all(axis=-1)
    if empty.any():
        row = int(np.argmax(empty))
        raise ValueError(f"`{name}` has a row that is wholly padding (id {pad_id}). Received: row {row} of {name}")


def check_length(length: int, limit: int | None, name: str = "length") -> None:
    """Refuses a `length` below 1 or above `limit` (None: no limit).

    Raises:
        ValueError: naming both.
    """
    if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1. Received: {name}={length!r}")
    if limit is not None and length > limit:
        raise ValueError(f"`{name}` must not exceed the model's max_length={limit}. Received: {name}={length}")


def sequence_width(shape: Sequence[int | None], name: str = "x") -> int:
    """The width D of a tensor of `shape` (batch, length, D).

    Raises:
        ValueError: another rank, or an unknown width.
    """
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"`{name}` must have the shape (batch, length, width), its width known. "
            f"Received: {name}.shape={tuple(shape)}"
        )
    return shape[-1]


def rates(**arguments: Any) -> None:
    """Refuses constructor arguments that are not numbers from 0 to below 1.

    Raises:
        ValueError: naming the argument.
    """
    for name, value in arguments.items():
        if not _is_number(value) or not 0 <= value < 1:
            raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={value!r}")


def positive_numbers(**arguments: Any) -> None:
    """Refuses constructor arguments that are not numbers above 0.

    Raises:
        ValueError: naming the argument.
    """
    for name, value in arguments.items():
        if not _is_number(value) or not value > 0:
            raise ValueError(f"`{name}` must be a positive number. Received: {name}={value!r}")


def not_negative(**arguments: Any) -> None:
    """Refuses arguments that are not integers of at least 0.

    Raises:
        ValueError: naming the argument.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"`{name}` must be an integer of at least 0. Received: {name}={value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def positive_integers(**arguments: Any) -> None:
    """Refuses constructor arguments that are not integers of at least 1.

    Raises:
        ValueError: naming the argument.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"`{name}` must be an integer of at least 1. Received: {name}={value!r}")


def refuse_one_text(texts: object) -> None:
    """Raises TypeError for one text where several are expected: its characters would each be taken for one."""
    if isinstance(texts, str | bytes):
        raise TypeError(f"`texts` must be a sequence of strings, such as [text]. Received: texts={texts!r}")
