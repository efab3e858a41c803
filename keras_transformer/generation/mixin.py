"""`generate` and `stream`: the same for every model in Keras and for the ONNX runner, so free of Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from keras_transformer.generation.request import Request


class GenerationMixin:
    """Gives a model `generate` and `stream`.

    The model offers `generation_request(inputs, max_new_tokens) -> Request`, which refuses bad inputs, and in
    `_generator` what runs it: `generate(request, compile) -> ids` and `stream(request, compile) -> iterator`.
    """

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
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
        on_tokens: Callable[[np.ndarray], Any] | None = None,
        compile: bool | None = None,
    ) -> np.ndarray:
        """Generates token by token, with a key/value cache, until every row has ended.

        By default each token is the one of the highest logit. With a `temperature` it is drawn, and with `num_beams`
        the best of several sequences is searched for. Logits are changed in the order of the arguments:
        `repetition_penalty`, `min_new_tokens`, `temperature`, `top_k`, `top_p`, `min_p`.

        In Keras compiled programs are kept for each batch size, each length of the inputs and each number of tokens,
        both rounded up to multiples of 8, and each set of arguments that are in use, whatever their values.

        Args:
            inputs: integers (B, S), padded; or rows of unequal length.
            max_new_tokens: the largest number of tokens a row gets; the model's own rule if None.
            min_new_tokens: the least number of tokens a row gets: before, end ids are not chosen, and stop sequences
                do not end it.
            temperature: logits are divided by it before the draw; 0 takes the best and leaves `top_k`, `top_p`,
                `min_p` and `seed` without effect.
            top_k: draw from this number of ids of the highest logits; more than there are means all. Ids that equal
                the last of them may be drawn too.
            top_p: draw from the fewest ids, the most probable ones, whose probabilities reach this sum, in (0, 1]; ids
                that equal the last of them may be drawn too.
            min_p: draw from ids of at least this fraction of the highest probability.
            repetition_penalty: above 1, makes less likely what the row holds already: in an encoder–decoder model its
                target, otherwise its prompt too.
            num_beams: above 1, beam search with this many beams; without `temperature`, and `on_tokens`.
            length_penalty: of beam search: the score of a sequence is the sum of its log-probabilities divided by its
                length to this power.
            stop_sequences: lists of ids. A row ends when the tokens made end with one of them, which stays.
            seed: of the draws, from 0 to 2**32 - 1. Equal seeds give equal tokens, on every backend and in ONNX
                Runtime, but for near-ties; what a row draws depends on the seed and its number in the batch, not on
                other rows. If None, it is drawn from Python's `random`, which `keras.utils.set_random_seed` sets.
            on_tokens: called with int32 (B,) as soon as the tokens of a step are known.
            compile: of no use in ONNX Runtime. In Keras, None does what suits most: on TensorFlow and JAX one compiled
                program (XLA) for the whole loop, on torch a step recorded as a flat graph. True: on torch, compile that
                graph with `torch.compile`, which takes a C++ compiler and some time at first. False: step by step
                through the layers.

        Returns:
            int32 (B, L), L at most `max_new_tokens`: the new tokens, with what ended a row, and padding after it.

        Raises:
            ValueError: an argument outside its range, ids outside the vocabulary (naming value and row), a row without
                tokens, or a length over the model's limit.
        """
        _check_compile(compile)
        request = self.generation_request(inputs, max_new_tokens).asking(
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            num_beams=num_beams,
            length_penalty=length_penalty,
            stop_sequences=stop_sequences,
            seed=seed,
        )
        if on_tokens is None:
            return self._generator.generate(request, compile)
        if not callable(on_tokens):
            raise ValueError(f"`on_tokens` must be callable. Received: on_tokens={on_tokens!r}")
        if num_beams > 1:
            raise ValueError(
                "`on_tokens` needs num_beams=1: beam search knows no token before the last step. "
                f"Received: num_beams={num_beams}"
            )
        columns = []
        for tokens in self._generator.stream(request, compile):
            on_tokens(tokens)
            columns.append(tokens)
        return np.stack(columns, axis=1)

    def stream(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_sequences: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
        compile: bool | None = None,
    ) -> Iterator[np.ndarray]:
        """Like `generate`, token by token: yields int32 (B,) as soon as they are known.

        On TensorFlow and JAX one step is compiled. The arguments are checked at once, not with the first token.
        """
        _check_compile(compile)
        request = self.generation_request(inputs, max_new_tokens).asking(
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop_sequences=stop_sequences,
            seed=seed,
        )
        return self._generator.stream(request, compile)

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The checked `inputs`, and how many tokens a row gets at most."""
        raise NotImplementedError


def _check_compile(compile):
    if compile not in (None, True, False):
        raise ValueError(f"`compile` must be True, False or None. Received: compile={compile!r}")
