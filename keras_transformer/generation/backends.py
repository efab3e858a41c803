"""How each backend runs generation: the compiled loop on TensorFlow and JAX, the Python loop on torch."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer.generation.loop import loop_tokens
from keras_transformer.generation.rules import Rules, trim
from keras_transformer.generation.stream import stream_tokens

_CHECK_EVERY = 8


class Generator:
    """Generates with one model, and keeps the programs compiled for it.

    The model gives `start_generation(source_ids, length) -> state` and `generation_step(tokens, position, state) ->
    (logits, state)`. Weights are arguments of a program (JAX, torch) or read by it (TensorFlow), never part of it, so
    training between two calls is seen.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._programs: dict[Any, Any] = {}

    def generate(
        self, source_ids: np.ndarray, start: np.ndarray, max_length: int, rules: Rules, compile: bool | None
    ) -> np.ndarray:
        """The tokens (B, L) after `start` (B,), for valid `source_ids` (B, S); see `Transformer.generate`."""
        backend = keras.config.backend()
        if hasattr(self._model, "jax_state_sync"):
            # Inside fit, JAX's newest weights are the trainer's until asked for.
            self._model.jax_state_sync()
        if compile is None:
            compile = backend in ("tensorflow", "jax")
        # Few programs serve all lengths: a longer source is padded, and unused slots of a buffer are masked.
        source_ids = np.pad(source_ids, ((0, 0), (0, -source_ids.shape[1] % 8)))
        slots = max_length + -max_length % 8
        source_ids, start = ops.convert_to_tensor(source_ids), ops.convert_to_tensor(start)
        if compile and backend in ("tensorflow", "jax"):
            program = self._program(
                ("loop", tuple(source_ids.shape), slots, rules),
                lambda: _COMPILE[backend](functools.partial(self._loop, slots, rules), self._model.variables),
            )
            ids = program(source_ids, start, ops.convert_to_tensor(max_length, "int32"))
        else:
            with _no_gradients(backend):
                ids = self._stream(source_ids, start, max_length, slots, rules, compile)
        return trim(ops.convert_to_numpy(ids)[:, :max_length], rules.end_id)

    def _program(self, key, make):
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]

    def _loop(self, slots, rules, source_ids, start, max_length):
        state = self._model.start_generation(source_ids, slots)
        return loop_tokens(self._model.generation_step, state, start, max_length, slots, rules)

    def _stream(self, source_ids, start, max_length, slots, rules, compile):
        state = self._model.start_generation(source_ids, slots)
        step = self._model.generation_step

        def logits(tokens, position):
            nonlocal state
            values, state = step(tokens, position, state)
            return values

        tokens = stream_tokens(logits, start, max_length, rules, ops, _CHECK_EVERY)
        return ops.stack(list(tokens), axis=1)


def _compile_tensorflow(run, variables):
    import tensorflow as tf

    return tf.function(run, jit_compile=True, autograph=False)


def _compile_jax(run, variables):
    import jax

    @jax.jit
    def program(values, *args):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return run(*args)

    return lambda *args: program([variable.value for variable in variables], *args)


_COMPILE = {"tensorflow": _compile_tensorflow, "jax": _compile_jax}


def _no_gradients(backend):
    import contextlib

    if backend != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
