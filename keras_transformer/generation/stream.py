"""The Python loop: token by token from any step function, with NumPy by default and no import of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_transformer.generation.rules import Rules, trim


def stream_tokens(
    step: Callable[[Any, int], Any],
    start: Any,
    max_length: int,
    rules: Rules,
    xp: Any = np,
    check_every: int = 1,
) -> Iterator[Any]:
    """Yields the tokens (B,) of one position after the other until every row has ended.

    Args:
        step: `(tokens (B, 1), position) -> logits (B, V)`, called with positions 0, 1, 2, …; it keeps its own cache.
        start: the tokens (B,) at position 0, int32.
        max_length: the largest number of tokens a row gets.
        rules: the token rules.
        xp: the array namespace of tokens and logits.
        check_every: how often, in tokens, to look whether every row has ended. Looking makes a device wait: with a
            number above 1 up to `check_every - 1` columns of padding may follow the last end.
    """
    tokens = start
    finished = xp.zeros_like(start, dtype="bool")
    for position in range(max_length):
        tokens, finished = rules.next_tokens(step(tokens[:, None], position), finished, xp)
        yield tokens
        if (position + 1) % check_every == 0 and bool(xp.all(finished)):
            return


def collect_tokens(step: Callable[[Any, int], Any], start: np.ndarray, max_length: int, rules: Rules) -> np.ndarray:
    """What `stream_tokens` yields, as one array (B, L), L at most `max_length`."""
    return trim(np.stack(list(stream_tokens(step, start, max_length, rules)), axis=1), rules.end_id)
