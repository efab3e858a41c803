"""Token rules, written once over an array namespace `xp`: `numpy` or `keras.ops`. Imports nothing but NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_transformer.generation.noise import as_float, gumbel


class Engine(NamedTuple):
    """What runs a model step by step.

    Attributes:
        step: `(tokens (B, 1), position, cache) -> (logits (B, V), cache)`, called with positions 0, 1, 2, …
        take: `(cache, index) -> cache`, the rows of a cache that `index` names; only beams need it.
        xp: the array namespace of tokens and logits.
    """

    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    take: Callable[[Any, Any], Any] | None = None
    xp: Any = np


@dataclasses.dataclass(frozen=True)
class Rules:
    """How the next token follows from logits, and when a row ends.

    A row ends with an end id or with a stop sequence; after it come `pad_id`s. The rules hold no state: what
    must be remembered of each row (`notes`) they are handed and hand back, so that one object serves every backend and
    both loops.

    Attributes:
        end_id: the id, or ids, that end a row; None if there is none.
        pad_id: what follows the end.
        settings: arrays by name, from `Request.settings`; what is not there is not asked for and costs nothing. Which
            names are there is a part of a compiled program, their values are its arguments:

            - `repetition_penalty` (), `seen` (B, V): the penalty, and the ids that each row has met before the start;
            - `min_new_tokens` (): how many tokens are made before a row may end;
            - `temperature` (), `seed` (1,), `rows` (B,): draws instead of taking the best; see `noise.gumbel`;
            - `top_k` (), `top_p` (), `min_p` (): which ids may be drawn;
            - `stop` (n, L): sequences that end a row, -1 before the shorter ones;
            - `length_penalty` (), `max_new_tokens` (): of beam search.
    """

    end_id: int | tuple[int, ...] | None = 2
    pad_id: int = 0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def begin(self, engine: Engine, cache: Any, start: Any, slots: int) -> tuple[Any, Any, Any]:
        """What goes into the first step: tokens, which rows have ended (B,), and the state (cache, notes).

        Args:
            engine: what runs the model.
            cache: the model's state after its inputs.
            start: the tokens (B,) that the first step is given.
            slots: the largest number of tokens that can be made.
        """
        return start, engine.xp.zeros_like(start, dtype="bool"), (cache, self.first_notes(start.shape[0], engine.xp))

    def advance(self, engine: Engine) -> Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]:
        """One step of the model and of the rules, as both loops call it.

        Returns:
            `(tokens, position, finished, state) -> (tokens, finished, state)`, beginning with what `begin` gives.
        """

        def advance(tokens, position, finished, state):
            cache, notes = state
            logits, cache = engine.step(tokens[:, None], position, cache)
            tokens, finished, notes = self.next_tokens(logits, position, finished, notes, engine.xp)
            return tokens, finished, (cache, notes)

        return advance

    def result(self, ids: np.ndarray, notes: dict[str, Any]) -> np.ndarray:
        """What `generate` gives, from the tokens `ids` (B, L) of all steps and the last notes, all in NumPy."""
        return ids

    def first_notes(self, batch: int, xp: Any = np) -> dict[str, Any]:
        """What the rules know of each row before the first step."""
        notes = {}
        if "repetition_penalty" in self.settings:
            notes["seen"] = self.settings["seen"]
        if "stop" in self.settings:
            notes["tail"] = xp.full((batch, self.settings["stop"].shape[1]), -1, dtype="int32")
        return notes

    def next_tokens(
        self, logits: Any, position: Any, finished: Any, notes: dict[str, Any], xp: Any = np
    ) -> tuple[Any, Any, dict[str, Any]]:
        """One step.

        Args:
            logits: (B, V) of the position before.
            position: the number of tokens made before.
            finished: (B,) booleans, the rows that have ended.
            notes: what the rules remember of each row.
            xp: the array namespace of all of them.

        Returns:
            The next tokens (B,), int32, which rows have ended now (B,), and the new notes.
        """
        tokens = greedy(self.scores(logits, position, notes, xp), xp)
        tokens = xp.where(finished, xp.zeros_like(tokens) + self.pad_id, tokens)
        ended, notes = self.noted(tokens, position, notes, xp)
        return tokens, xp.logical_or(finished, ended), notes

    def scores(self, logits: Any, position: Any, notes: dict[str, Any], xp: Any = np) -> Any:
        """What the next token has the highest of, (B, V); arguments as in `next_tokens`."""
        scores = self.processed(logits, position, notes, xp)
        if "temperature" in self.settings:
            settings = self.settings
            scores = scores + gumbel(settings["seed"], settings["rows"], position, scores.shape[-1], xp)
        return scores

    def processed(self, logits: Any, position: Any, notes: dict[str, Any], xp: Any = np) -> Any:
        """The logits (B, V) that the choice is made from, in the order of Hugging Face's processors."""
        settings = self.settings
        if settings:
            logits = as_float(logits, xp)
        if "repetition_penalty" in settings:
            logits = xp.where(notes["seen"], penalised(logits, settings["repetition_penalty"], xp), logits)
        if "min_new_tokens" in settings and self._end_ids:
            allowed = xp.logical_or(position >= settings["min_new_tokens"], ~self._ends(_ids(logits, xp), xp))
            logits = _only(allowed, logits, xp)
        if "temperature" in settings:
            # The best is 0, so that no temperature, however low, makes infinities whose difference is no number.
            logits = (logits - xp.max(logits, axis=-1, keepdims=True)) / settings["temperature"]
        if "top_k" in settings or "top_p" in settings:
            logits = best_ranked(logits, settings.get("top_k"), settings.get("top_p"), xp)
        if "min_p" in settings:
            # Of probabilities only their ratio to the best one counts, which needs no sum.
            ratio = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
            logits = _only(ratio >= settings["min_p"], logits, xp)
        return logits

    def noted(self, tokens: Any, position: Any, notes: dict[str, Any], xp: Any = np) -> tuple[Any, dict[str, Any]]:
        """Which rows end with `tokens` (B,), made at `position`, and what is known of each row with them."""
        ended, notes = self._ends(tokens, xp), dict(notes)
        if "repetition_penalty" in self.settings:
            notes["seen"] = xp.logical_or(notes["seen"], xp.equal(tokens[:, None], _ids(notes["seen"], xp)))
        if "stop" in self.settings:
            notes["tail"] = xp.concatenate([notes["tail"][:, 1:], tokens[:, None]], axis=1)
            stop = self.settings["stop"]
            same = xp.all(xp.logical_or(xp.equal(notes["tail"][:, None], stop), stop < 0), axis=-1)
            stopped = xp.any(same, axis=-1)
            if "min_new_tokens" in self.settings:
                stopped = xp.logical_and(stopped, position + 1 >= self.settings["min_new_tokens"])
            ended = xp.logical_or(ended, stopped)
        return ended, notes

    @property
    def _end_ids(self):
        return () if self.end_id is None else tuple(np.atleast_1d(self.end_id).tolist())

    def _ends(self, tokens, xp):
        """Where `tokens` are end ids."""
        if not self._end_ids:
            return xp.zeros_like(tokens, dtype="bool")
        first, *others = (xp.equal(tokens, end_id) for end_id in self._end_ids)
        for other in others:
            first = xp.logical_or(first, other)
        return first


def greedy(logits: Any, xp: Any = np) -> Any:
    """The id of the highest logit in each row of (B, V), as int32; of equal ones, the lowest id."""
    last = logits.shape[-1] - 1
    # Spelled out, because the backends' argmax do not all promise which of equal entries they return.
    highest = xp.equal(logits, xp.max(logits, axis=-1, keepdims=True))
    from_last = xp.arange(last, -1, -1, dtype="int32")
    return last - xp.max(xp.where(highest, from_last, xp.zeros_like(from_last)), axis=-1)


def penalised(logits: Any, penalty: Any, xp: Any = np) -> Any:
    """Logits made less likely by a `penalty` above 1 (Keskar et al. 2019, https://arxiv.org/abs/1909.05858, sec. 4.1).

    Dividing a negative one would make it more likely: it is multiplied.
    """
    return xp.where(logits < 0, logits * penalty, logits / penalty)


def best_ranked(logits: Any, top_k: Any = None, top_p: Any = None, xp: Any = np) -> Any:
    """Logits (B, V), of which all but the best are -inf.

    Args:
        logits: (B, V).
        top_k: how many may remain; all if None, or if it is above V.
        top_p: the least sum of probabilities, among those `top_k`, that the remaining ones reach, in (0, 1]: the id
            that crosses it remains, so there is always one (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
            None: no matter.
        xp: the array namespace of all of them.

    Whatever equals the last one that remains does so too: which of equal ids is drawn is left to the draw.
    """
    ranked = -xp.sort(-logits, axis=-1)
    remain = xp.isfinite(ranked)
    if top_k is not None:
        remain = xp.logical_and(remain, _ids(logits, xp) < top_k)
    if top_p is not None:
        weights = xp.where(remain, xp.exp(ranked - ranked[:, :1]), xp.zeros_like(ranked))
        probabilities = weights / xp.sum(weights, axis=-1, keepdims=True)
        before = xp.cumsum(probabilities, axis=-1) - probabilities
        remain = xp.logical_and(remain, before < top_p)
    border = xp.min(xp.where(remain, ranked, ranked[:, :1]), axis=-1, keepdims=True)
    return _only(logits >= border, logits, xp)


def generated_length(source_length: int, limit: int | None = None) -> int:
    """The default number of tokens to generate: the source's length + 50, within `limit`.

    The rule of "Attention Is All You Need", section 6.1.
    """
    length = source_length + 50
    return length if limit is None else min(length, limit)


def _ids(logits, xp):
    """The ids (V,) of `logits` (B, V)."""
    return xp.arange(logits.shape[-1], dtype="int32")


def _only(allowed, logits, xp):
    return xp.where(allowed, logits, xp.zeros_like(logits) - np.inf)
