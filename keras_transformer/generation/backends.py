"""How each backend generates: a compiled loop on TensorFlow and JAX, a traced step in the Python loop on torch."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_transformer.generation.loop import loop_tokens
from keras_transformer.generation.rules import Rules, trim
from keras_transformer.generation.stream import stream_tokens

_CHECK_EVERY = 8


class Generator:
    """Generates with one model, and keeps the programs made for it.

    The model gives `start_generation(source_ids, length) -> state` and
    `generation_step(tokens, position, state) -> (logits, state)`. Weights are a program's arguments (JAX, torch), or
    variables that it reads (TensorFlow), never a part of it: what is trained between two calls is seen. Where layers
    get other variables (`enable_lora`, `quantize`), the programs are made anew.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._variables: list[keras.Variable] = []
        self._programs: dict[Any, Callable] = {}

    def generate(
        self, source_ids: np.ndarray, start: np.ndarray, max_length: int, rules: Rules, compile: bool | None
    ) -> np.ndarray:
        """The tokens (B, L) after `start` (B,), for valid `source_ids` (B, S); see `Transformer.generate`."""
        backend = keras.config.backend()
        if hasattr(self._model, "jax_state_sync"):
            # Inside fit the newest weights are in JAX's training loop until they are asked for.
            self._model.jax_state_sync()
        variables = self._model.variables
        if list(map(id, variables)) != list(map(id, self._variables)):
            self._variables, self._programs = variables, {}
        # Few programs serve all lengths: a longer source is padded, and unused slots of a buffer are masked.
        padding = ((0, 0), (0, -source_ids.shape[1] % 8))
        source_ids = ops.convert_to_tensor(np.pad(source_ids, padding, constant_values=rules.pad_id))
        slots = max_length + -max_length % 8
        start = ops.convert_to_tensor(start)
        if backend == "torch":
            import torch

            with torch.no_grad():
                ids = self._stream(source_ids, start, max_length, slots, rules, compile)
        elif compile is False:
            ids = self._stream(source_ids, start, max_length, slots, rules, compile)
        else:
            ids = self._loop(source_ids, start, max_length, slots, rules)
        return trim(ops.convert_to_numpy(ids)[:, :max_length], rules.end_id)

    def _loop(self, source_ids, start, max_length, slots, rules):
        def run(source_ids, start, max_length):
            state = self._model.start_generation(source_ids, slots)
            return loop_tokens(self._model.generation_step, state, start, max_length, slots, rules)

        compile = {"tensorflow": _compile_tensorflow, "jax": _compile_jax}[keras.config.backend()]
        key = ("loop", tuple(source_ids.shape), slots, rules)
        program = self._program(key, lambda: compile(run, self._variables))
        return program(source_ids, start, ops.convert_to_tensor(max_length, "int32"))

    def _stream(self, source_ids, start, max_length, slots, rules, compile):
        state = self._model.start_generation(source_ids, slots)
        step = self._model.generation_step
        if keras.config.backend() == "torch" and compile is not False:
            key = ("step", tuple(source_ids.shape), slots, bool(compile))
            program = self._program(key, lambda: _TorchStep(step, self._variables, slots, bool(compile)))
            logits = program.begin(state)
        else:

            def logits(tokens, position):
                nonlocal state
                values, state = step(tokens, position, state)
                return values

        return ops.stack(list(stream_tokens(logits, start, max_length, rules, ops, _CHECK_EVERY)), axis=1)

    def _program(self, key, make):
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]


def _compile_tensorflow(run, variables):
    import tensorflow as tf

    return tf.function(run, jit_compile=True, autograph=False)


def _compile_jax(run, variables):
    import jax

    @jax.jit
    def program(values, *args):
        with _weights(variables, values):
            return run(*args)

    return lambda *args: program([variable.value for variable in variables], *args)


class _TorchStep:
    """A step recorded once as a flat graph of torch's own operations, for one set of shapes.

    Keras' layers cost Python time at every step, several times that of the arithmetic at these sizes; the graph has
    none of them, and `torch.compile` takes it as it is.
    """

    _compiler_works = True
    # While torch records it patches itself, in all threads.
    _recording = threading.Lock()

    def __init__(self, step, variables, slots, compile):
        self._step = step
        self._variables = variables
        # Tensors, because numbers would become a part of the graph; made at once, as each copy makes the device wait.
        self._positions = ops.unstack(ops.arange(slots, dtype="int32"))
        self._compile = compile
        self._graph = None

    def begin(self, state):
        """The function `(tokens, position) -> logits` of one generation."""
        # What stays the same is looked up once, not at each token.
        weights = [variable.value for variable in self._variables]
        values = tree.flatten(state)

        def logits(tokens, position):
            nonlocal values
            args = (*weights, tokens, self._positions[position], *values)
            if self._graph is None:
                with self._recording:
                    if self._graph is None:
                        self._graph = self._recorded(args, state)
            result, *values = self._graph(*args)
            return result

        return logits

    def _recorded(self, args, state):
        """The step's graph, for arguments like `args`."""
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        def run(*args):
            weights, (tokens, position, *values) = args[: len(self._variables)], args[len(self._variables) :]
            with _weights(self._variables, weights):
                logits, new_state = self._step(tokens, position, tree.pack_sequence_as(state, values))
            return (logits, *tree.flatten(new_state))

        graph = _cleaned(make_fx(run)(*args), first_state=len(self._variables) + 2)
        if self._compile and _TorchStep._compiler_works:
            compiled = torch.compile(graph, dynamic=False)
            try:
                compiled(*args)  # which compiles it
            except Exception as error:
                _TorchStep._compiler_works = False
                warnings.warn(
                    "torch.compile failed, so that generation runs uncompiled, which is slower and otherwise the "
                    f"same. It needs a C++ compiler. Received: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
            else:
                return compiled
        return _remembering(graph, position=len(self._variables) + 1)


def _cleaned(graph, first_state):
    """A recorded graph without what it does twice or for nobody, which writes a cache where it lies.

    Args:
        graph: the recorded graph.
        first_state: the number of the first argument that belongs to this generation alone.
    """
    import torch
    from torch.fx.passes.dialect.common.cse_pass import CSEPass

    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        node.replace_all_uses_with(node.args[0])  # a constant is copied in case it is written to: none is
    graph = CSEPass()(graph).graph_module
    state = graph.graph.find_nodes(op="placeholder")[first_state:]
    for node in graph.graph.find_nodes(op="call_function", target=aten.index_copy.default):
        if node.args[0] in state and len(node.args[0].users) == 1:
            node.target = aten.index_copy_.default
    graph.recompile()
    return graph


def _remembering(graph, position):
    """A recorded graph that computes what depends on its argument number `position` alone once for each position.

    That is the causal mask and the position's encoding: about a third of a step's operations.
    """
    from torch.fx.passes.split_module import split_module

    depends = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            depends[node] = len(depends) != position
        else:
            depends[node] = node.op != "get_attr" and any(depends[source] for source in node.all_input_nodes)
    parts = split_module(graph, None, lambda node: "step" if depends[node] else "position", keep_original_order=True)
    compute, known = parts.submod_position.forward, {}

    def remember(*args):
        # A position is always the same tensor; to read its number would make the device wait.
        key = tuple(map(id, args))
        if key not in known:
            known[key] = compute(*args)
        return known[key]

    parts.submod_position.forward = remember
    return parts


def _weights(variables, values) -> contextlib.AbstractContextManager:
    """A scope in which `variables` have `values`."""
    return keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)))
