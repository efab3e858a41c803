"""What one call of `generate` asks for, checked before any work: for Keras and the ONNX runner alike, so NumPy only."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_transformer._validation import check_ids, check_length, check_not_empty, id_batch, positive_integers
from keras_transformer.generation.beam import Beams
from keras_transformer.generation.rules import Rules, generated_length


@dataclasses.dataclass(frozen=True)
class Request:
    """A batch whose continuation is asked for.

    Attributes:
        inputs: what the model's `start_generation` takes, int32 arrays whose first axis is the batch.
        start: the tokens (B,) that the first step is given, int32.
        history: (B, P) int32, the ids that count as repeated when they come again; -1 counts as none.
        max_new_tokens: the largest number of tokens a row gets.
        vocabulary_size: the number of ids that may be made, V.
        limit: the longest sequence that the model takes; None for no limit.
        rules: when a row ends; with the settings once `asking` has been called.
        rows: the number of each row, int32 (B,), which its random draws depend on.
    """

    inputs: Mapping[str, np.ndarray]
    start: np.ndarray
    history: np.ndarray
    max_new_tokens: int
    vocabulary_size: int
    limit: int | None
    rules: Rules
    rows: np.ndarray | None = None

    def asking(
        self,
        *,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        stop_sequences: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> Request:
        """The same batch, its rules set up by the arguments of `GenerationMixin.generate`.

        Raises:
            ValueError: naming the argument that is wrong.
        """
        positive_integers(num_beams=num_beams)
        _number(min_new_tokens, "min_new_tokens", "an integer of at least 0", whole=True, least=0)
        if min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"`min_new_tokens` must not exceed max_new_tokens={self.max_new_tokens}. "
                f"Received: min_new_tokens={min_new_tokens}"
            )
        _number(temperature, "temperature", "a finite number of at least 0", least=0)
        if top_k is not None:
            _number(top_k, "top_k", "an integer of at least 1, or None", whole=True, least=1)
        if top_p is not None:
            _number(top_p, "top_p", "in (0, 1], or None", above=0, most=1)
        if min_p is not None:
            _number(min_p, "min_p", "in [0, 1], or None", least=0, most=1)
        _number(repetition_penalty, "repetition_penalty", "a finite number above 0", above=0)
        _number(length_penalty, "length_penalty", "a finite number")
        stop = _stop_rows(stop_sequences, self.vocabulary_size)
        if seed is not None:
            _number(seed, "seed", "an integer from 0 to 2**32 - 1, or None", whole=True, least=0, most=2**32 - 1)
        if num_beams > 1 and temperature > 0:
            raise ValueError(
                "`num_beams` above 1 needs temperature=0, as beam search does not draw. "
                f"Received: num_beams={num_beams}, temperature={temperature}"
            )

        settings: dict[str, Any] = {}
        if repetition_penalty != 1:
            settings["repetition_penalty"] = np.array(repetition_penalty, np.float32)
            settings["seen"] = _seen(self.history, self.vocabulary_size)
        if min_new_tokens > 0:
            settings["min_new_tokens"] = np.array(min_new_tokens, np.int32)
        if temperature > 0:
            settings["temperature"] = np.maximum(np.float32(temperature), np.finfo(np.float32).tiny)
            settings["seed"] = np.array([random.randrange(2**32) if seed is None else seed], np.uint32).view(np.int32)
            settings["rows"] = np.arange(len(self.start), dtype=np.int32) if self.rows is None else self.rows
            if top_k is not None and top_k < self.vocabulary_size:
                settings["top_k"] = np.array(top_k, np.int32)
            if top_p is not None and top_p < 1:
                settings["top_p"] = np.array(top_p, np.float32)
            if min_p:
                settings["min_p"] = np.array(min_p, np.float32)
        if stop is not None:
            settings["stop"] = stop
        rules = dataclasses.replace(self.rules, settings=settings)
        if num_beams > 1:
            settings["length_penalty"] = np.array(length_penalty, np.float32)
            settings["max_new_tokens"] = np.array(self.max_new_tokens, np.int32)
            rules = Beams(rules.end_id, rules.pad_id, settings, num_beams)
        return dataclasses.replace(self, rules=rules)


def source_request(
    source_ids: Any,
    max_new_tokens: int | None,
    source_vocabulary_size: int,
    vocabulary_size: int,
    limit: int | None,
    start_id: int,
    rules: Rules,
) -> Request:
    """What an encoder–decoder model is asked for with `source_ids`.

    Args:
        source_ids: integers (B, S), or B rows of unequal length.
        max_new_tokens: the largest number of tokens a row gets; see `generated_length` if None.
        source_vocabulary_size: the number of source ids.
        vocabulary_size: the number of target ids.
        limit: the longest source and target; None for no limit.
        start_id: what every target begins with.
        rules: the model's, without settings.

    Raises:
        ValueError: naming the argument that is wrong.
    """
    source = id_batch(source_ids, "inputs", rules.pad_id)
    check_ids(source, source_vocabulary_size, "inputs")
    check_not_empty(source, rules.pad_id, "inputs")
    check_length(source.shape[1], limit, "length of inputs")
    if max_new_tokens is None:
        max_new_tokens = generated_length(source.shape[1], limit)
    check_length(max_new_tokens, limit, "max_new_tokens")
    start = np.full(len(source), start_id, np.int32)
    return Request({"source": source}, start, start[:, None], max_new_tokens, vocabulary_size, limit, rules)


_LARGEST = float(np.finfo(np.float32).max)


def _number(value, name, expected, whole=False, least=None, above=None, most=None):
    """Refuses what is not a finite number of float32, or an integer if `whole`, within the bounds."""
    kinds = int | np.integer if whole else int | float | np.integer | np.floating
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not -_LARGEST <= value <= _LARGEST
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
    ):
        raise ValueError(f"`{name}` must be {expected}. Received: {name}={value!r}")


def _stop_rows(sequences, vocabulary_size):
    """Stop sequences as int32 (n, L), those shorter than L with -1 before them; None if there are none."""
    if sequences is None:
        return None
    is_list = isinstance(sequences, Sequence | np.ndarray) and not isinstance(sequences, str)
    if not is_list or any(np.ndim(row) != 1 or np.size(row) == 0 for row in sequences):
        raise ValueError(
            f"`stop_sequences` must be a list of lists of at least one id each. Received: stop_sequences={sequences!r}"
        )
    if not len(sequences):
        return None
    length = max(len(row) for row in sequences)
    rows = np.full((len(sequences), length), -1, np.int32)
    for index, row in enumerate(sequences):
        check_ids(np.asarray(row)[None], vocabulary_size, "stop_sequences", first_row=index)
        rows[index, length - len(row) :] = row
    return rows


def _seen(history, vocabulary_size):
    """(B, V), True where a row of `history` holds the id."""
    seen = np.zeros((len(history), vocabulary_size), bool)
    row, place = np.nonzero(history >= 0)
    seen[row, history[row, place]] = True
    return seen
