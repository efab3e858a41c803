"""How each backend generates: a compiled loop on TensorFlow and JAX, a recorded step in the Python loop on torch."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_transformer.generation.loop import loop_tokens
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Engine
from keras_transformer.generation.stream import collect_tokens, stream_tokens

_CHECK_EVERY = 8


class Generator:
    """Generates with one model, and keeps the programs made for it.

    The model gives `start_generation(inputs, length) -> cache` and
    `generation_step(tokens, position, cache) -> (logits, cache)`. `inputs` are those of a `Request` as tensors (those
    of rank 2 padded on the right), `length` is the largest number of steps, and a cache is tensors in any nesting, of
    unchanging shapes, whose first axis is the batch.

    Weights are a program's arguments (JAX, torch), or variables that it reads (TensorFlow), never a part of it: what is
    trained between two calls is seen. Where layers get other variables (`enable_lora`, `quantize`), the programs are
    made anew.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._engine = Engine(model.generation_step, _take, ops)
        self._variables: list[keras.Variable] = []
        self._programs: dict[Any, Callable] = {}

    def generate(self, request: Request, compile: bool | None = None) -> np.ndarray:
        """The tokens (B, L) that `request` asks for; `compile` as in `GenerationMixin.generate`."""
        if compile is False or keras.config.backend() == "torch":
            steps, notes = self._steps(request, compile, _CHECK_EVERY)
            ids, finished, state = collect_tokens(steps, ops)
            ended = ops.convert_to_numpy(finished).all(axis=0)
            count, notes = min(1 + np.sum(~ended), len(ended)), notes(state)
        else:
            ids, count, notes = self._loop(request)
        ids = ops.convert_to_numpy(ids)[:, : int(count)]
        return request.rules.result(ids, tree.map_structure(ops.convert_to_numpy, notes))

    def stream(self, request: Request, compile: bool | None = None) -> Iterator[np.ndarray]:
        """Yields the tokens (B,) of one step after the other."""
        steps, _ = self._steps(request, compile, check_every=1)
        return (ops.convert_to_numpy(tokens) for tokens, _, _ in steps)

    def _loop(self, request):
        """The tokens of a compiled loop, how many columns of them were made, and the last notes."""
        inputs, start, settings, slots, kind, key = self._prepared(request)

        def run(inputs, start, settings, length):
            rules = dataclasses.replace(kind, settings=settings)
            begun = rules.begin(self._engine, self._model.start_generation(inputs, slots), start, slots)
            ids, count, (_, notes) = loop_tokens(rules.advance(self._engine), *begun, length, slots)
            return ids, count, notes

        program = self._program(("loop", *key), lambda: _compiled(run, self._variables))
        return program(inputs, start, settings, ops.convert_to_tensor(request.max_new_tokens, "int32"))

    def _steps(self, request, compile, check_every):
        """An iterator as `stream_tokens` gives it, and the function that finds the notes in its states."""
        inputs, start, settings, slots, kind, key = self._prepared(request)

        def begin(inputs, start, settings):
            rules = dataclasses.replace(kind, settings=settings)
            return rules.begin(self._engine, self._model.start_generation(inputs, slots), start, slots)

        def advance(tokens, position, finished, state, settings):
            rules = dataclasses.replace(kind, settings=settings)
            return rules.advance(self._engine)(tokens, position, finished, state)

        is_torch = keras.config.backend() == "torch"
        if is_torch:
            import torch

            # Each for itself: between two tokens of a stream the caller's code runs.
            begin, advance = torch.no_grad()(begin), torch.no_grad()(advance)
        elif compile is not False:
            begin = self._program(("begin", *key), lambda: _compiled(begin, self._variables))
            advance = self._program(("step", *key), lambda: _compiled(advance, self._variables))
        tokens, finished, state = begin(inputs, start, settings)
        if is_torch and compile is not False:
            program = self._program(
                ("step", *key, bool(compile)), lambda: _TorchStep(advance, self._variables, slots, bool(compile))
            )
            step, values = program.bind(settings, state)
            positions = program.positions[: request.max_new_tokens]
            steps = stream_tokens(step, tokens, finished, values, positions, ops, check_every)
            return steps, lambda values: tree.pack_sequence_as(state, values)[1]
        positions = (ops.convert_to_tensor(number, "int32") for number in range(request.max_new_tokens))

        def step(tokens, position, finished, state):
            return advance(tokens, position, finished, state, settings)

        return stream_tokens(step, tokens, finished, state, positions, ops, check_every), lambda state: state[1]

    def _prepared(self, request):
        """Inputs, first tokens and settings as tensors, slots, rules without settings, and the key of a program."""
        if hasattr(self._model, "jax_state_sync"):
            # Inside fit the newest weights are in JAX's training loop until they are asked for.
            self._model.jax_state_sync()
        variables = self._model.variables
        if list(map(id, variables)) != list(map(id, self._variables)):
            self._variables, self._programs = variables, {}
        # Few programs serve all lengths: a longer source is padded, and unused slots of a buffer are masked.
        slots = request.max_new_tokens + -request.max_new_tokens % 8
        inputs = {name: _padded(array, request.limit, request.rules.pad_id) for name, array in request.inputs.items()}
        settings = dict(request.rules.settings)
        shapes = [(name, array.shape) for part in (inputs, settings) for name, array in sorted(part.items())]
        kind = dataclasses.replace(request.rules, settings=())
        inputs, start, settings = tree.map_structure(ops.convert_to_tensor, (inputs, request.start, settings))
        return inputs, start, settings, slots, kind, (tuple(shapes), slots, kind)

    def _program(self, key, make):
        if key not in self._programs:
            self._programs[key] = make()
        return self._programs[key]


def _take(cache, index):
    return tree.map_structure(lambda tensor: ops.take(tensor, index, axis=0), cache)


def _padded(array, limit, pad_id):
    """Ids (B, S) with S rounded up to a multiple of 8, within the model's limit; other arrays as they are."""
    if array.ndim != 2:
        return array
    length = array.shape[1] + -array.shape[1] % 8
    length = length if limit is None else min(length, limit)
    return np.pad(array, ((0, 0), (0, length - array.shape[1])), constant_values=pad_id)


def _compiled(run, variables):
    return {"tensorflow": _compile_tensorflow, "jax": _compile_jax}[keras.config.backend()](run, variables)


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
    """A step of model and rules recorded once as a flat graph of torch's own operations, for one set of shapes.

    Keras' layers cost Python time at every step, several times that of the arithmetic at these sizes; the graph has
    none of them, and `torch.compile` takes it as it is.
    """

    _compiler_works = True
    # While torch records it patches itself, in all threads.
    _recording = threading.Lock()

    def __init__(self, advance, variables, slots, compile):
        self._advance = advance
        self._variables = variables
        # Tensors, because numbers would become a part of the graph; made at once, as each copy makes the device wait.
        self.positions = ops.unstack(ops.arange(slots, dtype="int32"))
        self._compile = compile
        self._graph = None

    def bind(self, settings, state):
        """The function `(tokens, position, finished, values) -> (tokens, finished, values)`, and the first values.

        They are the tensors of `state`: a nesting is taken apart once, not at each token.
        """
        import torch

        weights = [variable.value for variable in self._variables]
        fixed = (*weights, *tree.flatten(settings))

        @torch.no_grad()
        def step(tokens, position, finished, values):
            args = (*fixed, position, tokens, finished, *values)
            if self._graph is None:
                with self._recording:
                    if self._graph is None:
                        self._graph = self._recorded(args, settings, state)
            tokens, finished, *values = self._graph(*args)
            return tokens, finished, values

        return step, tree.flatten(state)

    def _recorded(self, args, settings, state):
        """The step's graph, for arguments like `args`."""
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        weights = len(self._variables)
        fixed = weights + len(tree.flatten(settings))

        def run(*args):
            position, tokens, finished, *values = args[fixed:]
            with _weights(self._variables, args[:weights]):
                tokens, finished, new_state = self._advance(
                    tokens,
                    position,
                    finished,
                    tree.pack_sequence_as(state, values),
                    tree.pack_sequence_as(settings, args[weights:fixed]),
                )
            return (tokens, finished, *tree.flatten(new_state))

        # A tensor that is there twice would be recorded as one argument, its last.
        places = {id(arg): place for place, arg in enumerate(args)}
        args = [arg if places[id(arg)] == place else arg.clone() for place, arg in enumerate(args)]
        graph = _cleaned(make_fx(run)(*args), first_state=fixed + 3)
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
        return _remembering(graph, position=fixed)


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
    for target, in_place in ((aten.index_copy, aten.index_copy_), (aten.index_put, aten.index_put_)):
        for node in graph.graph.find_nodes(op="call_function", target=target.default):
            if node.args[0] in state and len(node.args[0].users) == 1:
                node.target = in_place.default
    graph.recompile()
    return graph


def _remembering(graph, position):
    """A recorded graph that computes once what depends on nothing, and once for each position what depends on it alone.

    The latter, for which its argument number `position` stands, are the causal mask and the position's encoding: about
    a third of a step's operations.
    """
    from torch.fx.passes.split_module import split_module

    parts = ("constant", "position", "step")
    rank, arguments = {}, 0
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            rank[node] = 1 if arguments == position else 2
            arguments += 1
        else:
            rank[node] = max((rank[source] for source in node.all_input_nodes), default=0)
    split = split_module(graph, None, lambda node: parts[rank[node]])

    def remembering(compute):
        known = {}

        def remember(*args):
            # A position is always the same tensor; to read its number would make the device wait.
            key = tuple(map(id, args))
            if key not in known:
                known[key] = compute(*args)
            return known[key]

        return remember

    for name in ("submod_constant", "submod_position"):
        if hasattr(split, name):
            part = getattr(split, name)
            part.forward = remembering(part.forward)
    return split


def _weights(variables, values) -> contextlib.AbstractContextManager:
    """A scope in which `variables` have `values`."""
    return keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)))
