"""Token rules, written once over an array namespace `xp`: `numpy` or `keras.ops`. Imports nothing but NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the next token follows from logits, and when a row ends.

    A row ends with `end_id`; after it come `pad_id`s. The rules hold no state, so one object serves every backend and
    both loops; whatever a rule needs is handed to `next_tokens`.

    Attributes:
        end_id: the id that ends a row.
        pad_id: what follows the end.
        filters: functions `(logits (B, V), xp) -> logits (B, V)`, applied in this order before the choice.
        choose: the choice `(logits (B, V), xp) -> ids (B,)`.
    """

    end_id: int = 2
    pad_id: int = 0
    filters: tuple[Callable[[Any, Any], Any], ...] = ()
    choose: Callable[[Any, Any], Any] = dataclasses.field(default_factory=lambda: greedy)

    def next_tokens(self, logits: Any, finished: Any, xp: Any = np) -> tuple[Any, Any]:
        """One step.

        Args:
            logits: (B, V) of the position before.
            finished: (B,) booleans, the rows that have ended.
            xp: the array namespace of both.

        Returns:
            The next tokens (B,), int32, and which rows have ended now (B,).
        """
        for function in self.filters:
            logits = function(logits, xp)
        tokens = self.choose(logits, xp)
        # Numbers stand beside operators: as an argument of `xp` torch copies one to the device, and waits for it.
        tokens = xp.where(finished, xp.zeros_like(tokens) + self.pad_id, tokens)
        return tokens, xp.logical_or(finished, tokens == self.end_id)


def greedy(logits: Any, xp: Any = np) -> Any:
    """The id of the highest logit in each row of (B, V), as int32; of equal ones, the lowest id."""
    last = logits.shape[-1] - 1
    # Spelled out, because the backends' argmax do not all promise which of equal entries they return.
    highest = xp.equal(logits, xp.max(logits, axis=-1, keepdims=True))
    from_last = xp.arange(last, -1, -1, dtype="int32")
    return last - xp.max(xp.where(highest, from_last, xp.zeros_like(from_last)), axis=-1)


def generated_length(source_length: int, limit: int | None = None) -> int:
    """The default number of tokens to generate: the source's length + 50, within `limit`.

    The rule of "Attention Is All You Need", section 6.1.
    """
    length = source_length + 50
    return length if limit is None else min(length, limit)


def trim(ids: np.ndarray, end_id: int) -> np.ndarray:
    """`ids` (B, L) without the columns that come after every row's end."""
    ended = ids == end_id
    lengths = np.where(ended.any(axis=-1), ended.argmax(axis=-1) + 1, ids.shape[1])
    return ids[:, : lengths.max()]
