"""Rows of token ids for a causal language model, and the labels of their places: always the token after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_transformer import _validation
from keras_transformer.losses import NO_LABEL


def next_token_labels(token_ids: Any, padding_mask: Any = None) -> np.ndarray:
    """The labels of rows of ids: at each place the next id of its row, shifted here and nowhere else.

    Args:
        token_ids: integers (B, T).
        padding_mask: boolean (B, T), True for real tokens, to tell padding from tokens; all are real if None.

    Returns:
        int32 (B, T): -100 where there is no next token, such as at a row's last place.

    Raises:
        ValueError: ids of another rank, or a mask of another shape.
    """
    ids = _validation.id_batch(token_ids, "token_ids")
    mask = np.ones(ids.shape, bool) if padding_mask is None else np.asarray(padding_mask)
    if mask.shape != ids.shape or not (mask.dtype == bool or np.issubdtype(mask.dtype, np.integer)):
        raise ValueError(
            f"`padding_mask` must be boolean or integer of the shape {ids.shape} of `token_ids`. "
            f"Received: padding_mask.shape={mask.shape}, padding_mask.dtype={mask.dtype}"
        )
    mask = mask.astype(bool)
    labels = np.full(ids.shape, NO_LABEL, np.int32)
    labels[:, :-1] = np.where(mask[:, :-1] & mask[:, 1:], ids[:, 1:], NO_LABEL)
    return labels


def cut_text(token_ids: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
    """One long text as rows of inputs and labels, in which every token but the first is asked for once.

    Args:
        token_ids: the ids of the text, more than `length` of them.
        length: of a row, T. A rest of less than that at the end is left out.

    Returns:
        Inputs and labels, int32 (B, T) each.

    Raises:
        ValueError: a text that makes no row.
    """
    _validation.positive_integers(length=length)
    ids = _validation.id_batch(np.asarray(token_ids)[None], "token_ids")[0]
    count = (len(ids) - 1) // length
    if count < 1:
        raise ValueError(f"`token_ids` must hold more than length={length} ids. Received: {len(ids)}")
    rows = ids[: count * length].reshape(count, length)
    return rows, ids[1 : count * length + 1].reshape(count, length)


def pack_texts(
    texts: Sequence[Sequence[int]], length: int, pad_id: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Short texts side by side in full rows, for `models.CausalLM`: a token attends to its own text only.

    A text goes to the first row that has room for it, so that few places are wasted.

    Args:
        texts: the ids of each.
        length: of a row, T.
        pad_id: what fills the rest of a row.

    Returns:
        A dict of `token_ids`, `segment_ids` (which text of the row, -1 for padding) and `positions` (which begin anew
        with each text), and the labels; int32 (B, T) each.

    Raises:
        ValueError: no text, an empty one, one that is longer than `length`, or ids below 0.
    """
    _validation.positive_integers(length=length)
    _validation.not_negative(pad_id=pad_id)
    rows: list[list[np.ndarray]] = []
    room: list[int] = []
    for number, text in enumerate(texts):
        ids = np.asarray(text)
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"`texts` must be rows of at least one id. Received: text {number} is {text!r:.80}")
        if len(ids) > length:
            raise ValueError(f"`texts` must have at most length={length} ids. Received: {len(ids)} in text {number}")
        _validation.check_ids(ids[None], np.iinfo(np.int32).max, "texts", first_row=number)
        row = next((row for row, left in enumerate(room) if left >= len(ids)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(ids)
        room[row] -= len(ids)
    if not rows:
        raise ValueError("`texts` must hold at least one text. Received: none")
    names = {"token_ids": pad_id, "segment_ids": -1, "positions": 0}
    packed = {name: np.full((len(rows), length), value, np.int32) for name, value in names.items()}
    labels = np.full((len(rows), length), NO_LABEL, np.int32)
    for row, parts in enumerate(rows):
        start = 0
        for segment, ids in enumerate(parts):
            place = slice(start, start := start + len(ids))
            packed["token_ids"][row, place] = ids
            packed["segment_ids"][row, place] = segment
            packed["positions"][row, place] = np.arange(len(ids))
            labels[row, place] = next_token_labels(ids[None])[0]
    return packed, labels
