"""The Python loop: token by token from any step function, with NumPy by default and no import of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np


def stream_tokens(
    advance: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]],
    tokens: Any,
    finished: Any,
    state: Any,
    positions: Iterable[Any],
    xp: Any = np,
    check_every: int = 1,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields tokens (B,), `finished` (B,) and state of one position after the other until every row has ended.

    Args:
        advance: a step, from `Rules.advance`.
        tokens: with `finished` and `state` what the first step is given, from `Rules.begin`.
        finished: see there.
        state: see there.
        positions: 0, 1, 2, … as `advance` takes them, as many as a row gets tokens at most.
        xp: the array namespace of tokens and logits.
        check_every: how often, in tokens, to look whether every row has ended. Looking makes a device wait: with a
            number above 1 up to `check_every - 1` columns of padding may follow the last end.
    """
    for number, position in enumerate(positions, 1):
        tokens, finished, state = advance(tokens, position, finished, state)
        yield tokens, finished, state
        if number % check_every == 0 and bool(xp.all(finished)):
            return


def collect_tokens(steps: Iterable[tuple[Any, Any, Any]], xp: Any = np) -> tuple[Any, Any, Any]:
    """What `stream_tokens` yields, as ids (B, L), `finished` (B, L), and the last state."""
    ids, ends = [], []
    for tokens, finished, state in steps:  # noqa: B007, the last one is wanted
        ids.append(tokens)
        ends.append(finished)
    return xp.stack(ids, axis=1), xp.stack(ends, axis=1), state
