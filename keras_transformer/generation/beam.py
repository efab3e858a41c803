"""Beam search over an array namespace `xp` (`numpy` or `keras.ops`): several sequences a row, the best of them kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_transformer.generation.noise import as_float
from keras_transformer.generation.rules import Engine, Rules


@dataclasses.dataclass(frozen=True)
class Beams(Rules):
    """Keeps for each row the `num_beams` unfinished sequences of the highest sum of log-probabilities.

    The score of a finished sequence is that sum divided by its length to the power `length_penalty`. The procedure is
    that of Hugging Face's `generate` with `early_stopping=False`: a row is done once its best unfinished sequence, at
    the length it has, would not be better than the worst of `num_beams` finished ones.

    The model sees B * K rows, the K beams of a row beside each other. Notes, by name: of the unfinished sequences
    `ids` (B, K, L), `scores` (B, K), and what the rules note of each, `rows`; of the finished ones, the best first,
    `best_ids` (B, K, L), `best_scores` (B, K) and `best_lengths` (B, K), -inf where there is none yet.

    Attributes:
        num_beams: sequences that are kept for each row, K.
    """

    num_beams: int = 4

    def begin(self, engine: Engine, cache: Any, start: Any, slots: int) -> tuple[Any, Any, Any]:
        """As `Rules.begin`; tokens are (B * K,), and so are the rows of the cache."""
        xp, batch, beams = engine.xp, start.shape[0], self.num_beams
        source = xp.repeat(xp.arange(batch, dtype="int32"), beams, axis=0)
        cache = engine.take(cache, source)
        rows = _take(self.first_notes(batch, xp), source, xp)
        nothing = xp.full((batch, beams), -np.inf, dtype="float32")
        empty = xp.full((batch, beams, slots), self.pad_id, dtype="int32")
        # All beams of a row are the same at first: the second and later ones wait.
        first = xp.zeros_like(nothing) + xp.where(xp.arange(beams) > 0, nothing[0], xp.zeros_like(nothing[0]))
        notes = {
            "ids": empty,
            "scores": first,
            "rows": rows,
            "best_ids": empty,
            "best_scores": nothing,
            "best_lengths": xp.zeros((batch, beams), dtype="int32"),
        }
        return _take(start, source, xp), xp.zeros((batch,), dtype="bool"), (cache, notes)

    def advance(self, engine: Engine) -> Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]:
        """As `Rules.advance`; the rows of the cache follow the beams."""

        def advance(tokens, position, finished, state):
            cache, notes = state
            logits, cache = engine.step(tokens[:, None], position, cache)
            tokens, source, finished, notes = self.next_beams(logits, position, finished, notes, engine.xp)
            return tokens, finished, (engine.take(cache, source), notes)

        return advance

    def result(self, ids: np.ndarray, notes: dict[str, Any]) -> np.ndarray:
        """The best sequence of each row, (B, L)."""
        length = notes["best_lengths"][:, 0].max()
        return notes["best_ids"][:, 0, :length]

    def next_beams(
        self, logits: Any, position: Any, finished: Any, notes: dict[str, Any], xp: Any = np
    ) -> tuple[Any, Any, Any, dict[str, Any]]:
        """One step.

        Args:
            logits: (B * K, V) of the position before.
            position: the number of tokens made before.
            finished: (B,) booleans, the rows that are done.
            notes: see the class.
            xp: the array namespace of all of them.

        Returns:
            The next tokens (B * K,), the rows (B * K,) of the step before that they follow, which rows are done now
            (B,), and the new notes.
        """
        batch, beams, vocabulary = finished.shape[0], self.num_beams, logits.shape[-1]
        log_probabilities = self.processed(log_softmax(as_float(logits, xp), xp), position, notes["rows"], xp)
        sums = notes["scores"][..., None] + xp.reshape(log_probabilities, (batch, beams, vocabulary))

        # Of each beam's continuations as many may end as there are ways to: one more leaves K that do not.
        endings = len(self._end_ids) + (self.settings["stop"].shape[0] if "stop" in self.settings else 0)
        count = beams * min(vocabulary, max(2, 1 + endings))
        sums, place = _highest(xp.reshape(sums, (batch, beams * vocabulary)), count, xp)
        tokens = place % vocabulary
        source = place // vocabulary + beams * xp.arange(batch, dtype="int32")[:, None]
        ids = _take(xp.reshape(notes["ids"], (batch * beams, -1)), source, xp)
        ids = xp.where(xp.arange(ids.shape[-1], dtype="int32") == position, tokens[..., None], ids)
        rows = _take(notes["rows"], xp.reshape(source, (-1,)), xp)
        ended, rows = self.noted(xp.reshape(tokens, (-1,)), position, rows, xp)
        last = position + 1 >= self.settings["max_new_tokens"]
        ended = xp.logical_or(xp.reshape(ended, (batch, count)), last)

        # What ends joins the finished ones, if no K unfinished ones are better.
        lengths = xp.zeros_like(tokens) + position + 1
        penalty = as_float(position + 1, xp) ** self.settings["length_penalty"]
        nothing = xp.zeros_like(sums) - np.inf
        joins = xp.logical_and(ended, xp.arange(count) < beams)
        joins = xp.logical_and(joins, ~finished[:, None])
        best = xp.concatenate([notes["best_scores"], xp.where(joins, sums / penalty, nothing)], axis=1)
        best, index = _highest(best, beams, xp)
        best_ids = _pick(xp.concatenate([notes["best_ids"], ids], axis=1), index, xp)
        best_lengths = _pick(xp.concatenate([notes["best_lengths"], lengths], axis=1), index, xp)

        # The others go on.
        sums, index = _highest(xp.where(ended, nothing, sums), beams, xp)
        finished = xp.logical_or(finished, sums[:, 0] / penalty <= best[:, -1])
        tokens, source, place = (
            xp.reshape(_pick(values, index, xp), (-1,))
            for values in (tokens, source, xp.reshape(xp.arange(batch * count, dtype="int32"), (batch, count)))
        )
        notes = {
            "ids": _pick(ids, index, xp),
            "scores": sums,
            "rows": _take(rows, place, xp),
            "best_ids": best_ids,
            "best_scores": best,
            "best_lengths": best_lengths,
        }
        return tokens, source, finished, notes


def log_softmax(logits: Any, xp: Any = np) -> Any:
    """Log-probabilities of `logits` (…, V)."""
    logits = logits - xp.max(logits, axis=-1, keepdims=True)
    return logits - xp.log(xp.sum(xp.exp(logits), axis=-1, keepdims=True))


def _highest(scores, count, xp):
    """The `count` highest of each row of (B, M), the highest first, and their places (B, count), int32."""
    if xp is np:
        place = np.sort(np.argpartition(-scores, count - 1, axis=-1)[:, :count], axis=-1)
        order = np.argsort(-np.take_along_axis(scores, place, axis=-1), axis=-1, kind="stable")
        place = np.take_along_axis(place, order, axis=-1)
        return np.take_along_axis(scores, place, axis=-1), place.astype("int32")
    scores, place = xp.top_k(scores, count)
    return scores, xp.cast(place, "int32")


def _pick(values, index, xp):
    """Of `values` (B, M, …) those that `index` (B, n) names in each row, (B, n, …)."""
    batch, size, *rest = values.shape
    index = index + size * xp.arange(batch, dtype="int32")[:, None]
    return _take(xp.reshape(values, (batch * size, *rest)), index, xp)


def _take(value, index, xp):
    """The rows `index` of an array, or of each array of a dict."""
    if isinstance(value, dict):
        return {name: _take(part, index, xp) for name, part in value.items()}
    return xp.take(value, index, axis=0)
