"""Prompts of a decoder-only model: checked, and padded on the right whatever side they came padded on; NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_transformer._validation import check_ids, check_length, id_batch
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Rules

# The number of tokens to make where the caller names none.
DEFAULT_NEW_TOKENS = 50


def prompt_rules(end_id: Any, pad_id: int | None) -> Rules:
    """What ends a text of a decoder-only model, and what follows the end: padding, or the end id again."""
    following = next((int(np.ravel(given)[0]) for given in (pad_id, end_id) if given is not None), 0)
    return Rules(end_id=tuple(end_id) if isinstance(end_id, list) else end_id, pad_id=following)


def prompt_request(
    prompts: Any,
    max_new_tokens: int | None,
    vocabulary_size: int,
    limit: int | None,
    rules: Rules,
    pad_id: int | None,
) -> Request:
    """What a decoder-only model is asked for with `prompts`.

    Args:
        prompts: integers (B, P), or B rows of unequal length; or a dict of such `token_ids` and a `padding_mask`
            (B, P), True for real tokens. Padding may stand on either side of a row.
        max_new_tokens: the largest number of tokens a row gets; 50, within `limit`, if None.
        vocabulary_size: the number of ids.
        limit: the largest number of tokens of a prompt and what follows it; None for no limit.
        rules: the model's, without settings.
        pad_id: the id that is padding where there is no mask; None if all ids are tokens.

    Raises:
        ValueError: naming the argument, or the row, that is wrong.
    """
    mask = None
    if isinstance(prompts, Mapping):
        if set(prompts) != {"token_ids", "padding_mask"}:
            raise ValueError(
                f'`inputs` must be ids, or a dict of "token_ids" and "padding_mask". Received: {sorted(prompts)}'
            )
        prompts, mask = prompts["token_ids"], prompts["padding_mask"]
        if isinstance(mask, list | tuple):
            if any(np.ndim(row) != 1 or len(row) != len(mask[0]) for row in mask):
                raise ValueError("`padding_mask` must be a rectangle (B, P). Received: rows of unequal length")
        mask = np.asarray(mask)
    ids = id_batch(prompts, "inputs")
    if mask is None:
        mask = np.ones(ids.shape, bool) if pad_id is None else ids != pad_id
    elif mask.shape != ids.shape or not (mask.dtype == bool or np.issubdtype(mask.dtype, np.integer)):
        raise ValueError(
            f"`padding_mask` must be boolean or integer of the shape {ids.shape} of the ids. "
            f"Received: padding_mask.shape={mask.shape}, padding_mask.dtype={mask.dtype}"
        )
    mask = mask.astype(bool)
    if isinstance(prompts, list | tuple):
        # Rows of unequal length were padded by now.
        mask &= np.arange(ids.shape[1]) < np.array([len(row) for row in prompts])[:, None]
    lengths = mask.sum(1).astype(np.int32)
    for row in np.flatnonzero(lengths == 0):
        raise ValueError(f"`inputs` must have at least one token in each row. Received: row {row} has none")
    first = mask.argmax(1)
    places = np.arange(ids.shape[1])
    for row in np.flatnonzero((mask != ((places >= first[:, None]) & (places < (first + lengths)[:, None]))).any(1)):
        raise ValueError(f"`inputs` must have padding at the ends of rows only. Received: padding inside of row {row}")
    longest = int(lengths.max())
    check_length(longest, limit, "length of inputs")
    places = np.minimum(first[:, None] + np.arange(longest), ids.shape[1] - 1)
    real = np.arange(longest) < lengths[:, None]
    prompt = np.where(real, np.take_along_axis(ids, places, 1), 0).astype(np.int32)
    check_ids(prompt, vocabulary_size, "inputs")
    room = None if limit is None else limit - longest
    if max_new_tokens is None:
        max_new_tokens = DEFAULT_NEW_TOKENS if room is None else max(1, min(DEFAULT_NEW_TOKENS, room))
    check_length(max_new_tokens, None, "max_new_tokens")
    if room is not None and max_new_tokens > room:
        raise ValueError(
            f"The longest of `inputs` and `max_new_tokens` must together not exceed the model's max_length={limit}. "
            f"Received: a prompt of {longest} tokens, max_new_tokens={max_new_tokens}"
        )
    start = prompt[np.arange(len(prompt)), lengths - 1]
    history = np.where(real, prompt, -1)
    inputs = {"prompt": prompt, "lengths": lengths}
    return Request(inputs, start, history, int(max_new_tokens), vocabulary_size, limit, rules)
