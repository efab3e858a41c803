"""One graph that generates: prompts in, finished ids out; the loop over tokens is inside of it, an ONNX `Loop`.

What a step does is `CachedDecoder`, traced like any other function: the first step, which reads the whole prompt,
stands before the loop, and every later one is its body. How it chooses is the generation's own `Rules`, traced for a
drawn token and for the best one: the branches of an `If`. Tokens are drawn by the counter-based generator of
`generation.noise`, so that a seed gives what it gives in Keras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir
from keras import ops

from keras_transformer.export import ir
from keras_transformer.export.cached import CachedDecoder, cache_names, heads_first
from keras_transformer.export.dims import Axis, add
from keras_transformer.export.trace import InputSpec
from keras_transformer.generation.rules import Rules

# The arguments of `generate` that the graph has as inputs, each a number.
SETTINGS = {"temperature": "float32", "top_k": "int64", "top_p": "float32", "seed": "int64"}
# What an `If` gives of the chosen tokens.
_CHOSEN = ("next.going", "next.tokens", "next.finished")
# The names of the logits in the graph and in the loop's body, by which verification finds them.
LOGITS = ("next.logits", "step/next.logits")


@dataclasses.dataclass(frozen=True)
class GeneratorParts:
    """What a family of models says of its generator.

    Args:
        decoder: its cached decoder, in the portable form.
        inputs: the prompts' inputs.
        axes: their free axes, the batch first.
        begin: from these inputs to `(input_ids (B, T), attention_mask (B, T), position_ids (B, T), extra)` of the first
            step; the last of the ids are real.
        extra: shapes and dtypes of what `begin` gives as `extra`.
        rules: what ends a row.
        room: from these inputs to the largest number of tokens that the model's `max_length` leaves; None if it has
            none.
    """

    decoder: CachedDecoder
    inputs: list[InputSpec]
    axes: list[Axis]
    begin: Callable
    extra: list[InputSpec]
    rules: Rules
    room: Callable | None


def trace_generator(parts: GeneratorParts, trace: Callable, lower: Callable) -> tuple[ir.Graph, onnx_ir.Model]:
    """The graph: its interface and weights as a traced graph, and the ONNX model.

    Args:
        parts: the family's.
        trace: `(function, specs, axes, output names) -> ir.Graph`.
        lower: `ir.Graph -> onnx_ir.Model`.
    """
    settings = [InputSpec(name, (), dtype) for name, dtype in SETTINGS.items()]
    specs = [*parts.inputs, InputSpec("max_new_tokens", (), "int64"), *settings]
    caches = cache_names("past_key_values", parts.decoder.num_layers)
    extra = [spec.name for spec in parts.extra]
    made = [f"next.{name}" for name in ("logits", "number", "attention_mask", *caches)]
    first = trace(_first(parts), specs, parts.axes, ["remaining", "lengths", "draws", "finished", *extra, *made])
    past = Axis("past_length", 1)
    batch = parts.axes[0]
    heads, head_dim = parts.decoder.kv_shape
    step_specs = [
        InputSpec("iteration", (), "int64"),
        InputSpec("tokens", (batch,), "int32"),
        InputSpec("finished", (batch,), "bool"),
        InputSpec("attention_mask", (batch, add(past, 1)), "int64"),
        *(InputSpec(name, (batch, heads, past, head_dim), parts.decoder.dtype) for name in caches),
        InputSpec("lengths", (batch,), "int64"),
        *parts.extra,
    ]
    axes = [batch, past, *(axis for axis in parts.axes[1:] if any(axis in spec.shape for spec in parts.extra))]
    body = trace(_step(parts), step_specs, axes, made)
    logits = first.outputs[first.output_names.index(LOGITS[0])]
    choice_specs = [
        InputSpec("logits", logits.shape, logits.dtype),
        InputSpec("number", (), "int32"),
        InputSpec("finished", (batch,), "bool"),
        *settings,
    ]
    choices = [trace(_choice(parts.rules, draws), choice_specs, [batch], list(_CHOSEN)) for draws in (True, False)]
    weights = {id(weight): weight for graph in (first, body) for weight in graph.weights}
    model = lower(first)
    _with_loop(model.graph, lower(body).graph, lambda: [lower(choice).graph for choice in choices])
    return dataclasses.replace(first, weights=list(weights.values())), model


def _first(parts):
    def first(*inputs):
        prompts, (max_new_tokens, temperature, *_) = inputs[: len(parts.inputs)], inputs[len(parts.inputs) :]
        ids, mask, positions, extra = parts.begin(*prompts)
        batch = ops.shape(ids)[0]
        heads, head_dim = parts.decoder.kv_shape
        empty = ops.zeros((batch, 0, heads, head_dim), parts.decoder.dtype)
        cache = tuple((empty, empty) for _ in range(parts.decoder.num_layers))
        if parts.room is not None:
            max_new_tokens = ops.minimum(max_new_tokens, parts.room(*prompts))
        remaining, lengths = _int64(ops.subtract(max_new_tokens, 1)), _int64(ops.add(positions[:, -1], 1))
        made = _next(parts, ids, mask, positions, extra, cache, ops.zeros((), "int32"))
        return remaining, lengths, ops.greater(temperature, 0), ops.zeros((batch,), "bool"), *extra, *made

    return first


def _step(parts):
    count = 2 * parts.decoder.num_layers

    def step(iteration, tokens, finished, mask, *rest):
        caches, (lengths, *extra) = rest[:count], rest[count:]
        caches = [ops.transpose(cache, (0, 2, 1, 3)) for cache in caches]
        cache = tuple(zip(caches[::2], caches[1::2], strict=True))
        positions = ops.expand_dims(ops.add(lengths, iteration), 1)
        ids = ops.expand_dims(tokens, 1)
        number = ops.cast(ops.add(iteration, 1), "int32")
        return _next(parts, ids, mask, positions, extra, cache, number)

    return step


def _next(parts, ids, mask, positions, extra, cache, number):
    """What token `number`, which follows `ids`, is chosen by, and what is carried to the next step."""
    logits, cache = parts.decoder.grow(ops.cast(ids, "int64"), mask, positions, extra, cache)
    mask = ops.concatenate([mask, ops.ones_like(mask[:, :1])], axis=1)
    return logits[:, -1], number, _int64(mask), *heads_first(cache)


def _int64(x):
    """`x` as the loop declares it: Keras may make int32 of sums of int64."""
    return ops.cast(x, "int64")


def _choice(rules, draws):
    def choose(logits, number, finished, *settings):
        """Whether a row goes on, tokens (B,) and which rows have ended: drawn ones, or the best ones."""
        chosen = dataclasses.replace(rules, settings=_drawing(logits, *settings) if draws else {})
        tokens, finished, _ = chosen.next_tokens(logits, number, finished, {}, ops)
        return ops.logical_not(ops.all(finished)), tokens, finished

    return choose


def _drawing(logits, temperature, top_k, top_p, seed):
    """The rules' settings from the graph's numbers."""
    # The 32 bits of an unsigned number as a signed one.
    seed = ops.cast(ops.where(ops.less(seed, 2**31), seed, ops.subtract(seed, 2**32)), "int32")
    return {
        "temperature": temperature,
        # 0 and 1, which mean "no matter", must take nothing away.
        "top_k": ops.where(ops.greater(top_k, 0), top_k, logits.shape[-1]),
        "top_p": ops.where(ops.less(top_p, 1.0), top_p, 2.0),
        "seed": ops.reshape(seed, (1,)),
        "rows": ops.arange(ops.shape(logits)[0], dtype="int32"),
    }


def _with_loop(graph: onnx_ir.Graph, body: onnx_ir.Graph, branches: Callable) -> None:
    """Puts the first choice and the loop behind the first step.

    Args:
        graph: what `_first` became.
        body: what `_step` became.
        branches: gives what `_choice` became, for drawn tokens and for the best ones; anew at each call.
    """
    known = {value.name: value for value in [*graph.inputs, *graph.outputs]}
    settings = {name: known[name] for name in SETTINGS}

    def choose(place, logits, number, finished, prefix):
        outside = {"logits": logits, "number": number, "finished": finished} | settings
        drawn, best = branches()
        for name, branch in (("drawn", drawn), ("best", best)):
            _enter(graph, branch, outside, f"{prefix}/{name}")
        parts = [onnx_ir.AttrGraph("then_branch", drawn), onnx_ir.AttrGraph("else_branch", best)]
        node = onnx_ir.Node("", "If", [known["draws"]], parts, num_outputs=len(_CHOSEN), name=f"{prefix}/If")
        for name, value, made in zip(_CHOSEN, node.outputs, best.outputs, strict=True):
            value.name, value.type, value.shape = f"{prefix}/{name}", made.type, made.shape
        place.append(node)
        return node.outputs

    logits, number, *kept = list(graph.outputs)[-len(body.outputs) :]
    going, *chosen = choose(graph, logits, number, known["finished"], "choose")
    state = [*chosen, *kept]
    # What is not carried from step to step the body reads where it stands.
    _enter(graph, body, {value.name: known[value.name] for value in body.inputs[1 + len(state) :]}, "step")
    iteration, *inputs = body.inputs
    logits, number, *kept = body.outputs
    goes_on, *chosen = choose(body, logits, number, inputs[1], "step/choose")
    condition = onnx_ir.Value(name="step/going_in", type=goes_on.type, shape=goes_on.shape)
    body.inputs[:] = [iteration, condition, *inputs]
    body.outputs[:] = [goes_on, *chosen, *kept, _node(body, "Identity", [chosen[0]], "step/made", like=chosen[0])]
    parts = [onnx_ir.AttrGraph("body", body)]
    inputs = [known["remaining"], going, *state]
    loop = onnx_ir.Node("", "Loop", inputs, parts, num_outputs=len(state) + 1, name="generate/Loop")
    for index, (value, same) in enumerate(zip(loop.outputs, [*state, state[0]], strict=True)):
        value.name, value.type = f"generate/Loop.{index}", same.type
    graph.append(loop)
    # All tokens (B, L), from the first ones (B,) and those of the loop (L - 1, B).
    axes = _node(graph, "Constant", [], "generate/axes", value_ints=[1])
    first = _node(graph, "Unsqueeze", [state[0], axes], "generate/first")
    later = _node(graph, "Transpose", [loop.outputs[-1]], "generate/later", perm=[1, 0])
    columns = _node(graph, "Concat", [first, later], "generate/columns", axis=1)
    ids = _node(graph, "Cast", [columns], "ids", to=int(onnx_ir.DataType.INT64))
    ids.type, ids.shape = onnx_ir.TensorType(onnx_ir.DataType.INT64), onnx_ir.Shape(["batch", "new_length"])
    graph.outputs[:] = [ids]


def _node(graph, op_type, inputs, name, like=None, **attributes):
    """Appends a node; its result, of the type and shape of `like`."""
    made = onnx_ir.node(op_type, inputs, attributes, name=name)
    (result,) = made.outputs
    result.name = name
    if like is not None:
        result.type, result.shape = like.type, like.shape
    graph.append(made)
    return result


def _enter(graph, inner, outside, prefix):
    """Makes of `inner` a subgraph within `graph`, with `prefix` before the names of its nodes and values.

    Its weights lie in `graph`, and of its inputs those that `outside` has a value for are read from there.
    """
    for name, value in list(inner.initializers.items()):
        del inner.initializers[name]
        known = graph.initializers.get(name)
        if known is None:
            graph.register_initializer(value)
        else:
            value.replace_all_uses_with(known)
    inputs = []
    for value in inner.inputs:
        if value.name in outside:
            value.replace_all_uses_with(outside[value.name])
        else:
            value.name = f"{prefix}/{value.name}_in"
            inputs.append(value)
    inner.inputs[:] = inputs
    for node in inner:
        node.name = f"{prefix}/{node.name}"
        for value in node.outputs:
            value.name = value.name and f"{prefix}/{value.name}"
    inner.name = prefix
