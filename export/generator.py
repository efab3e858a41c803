"""One graph that generates: prompts in, finished ids out; the loop over tokens is inside of it, an ONNX `Loop`.

What a step does is `CachedDecoder` and the generation's own `Rules`, traced like any other function: the first step,
which reads the whole prompt, stands before the loop, and every later one is its body. Tokens are drawn by the
counter-based generator of `generation.noise`, so that a seed gives what it gives in Keras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir
from keras import ops

from keras_transformer.export import ir
from keras_transformer.export.cached import CachedDecoder, cache_names, heads_first
from keras_transformer.export.dims import Axis, add
from keras_transformer.export.trace import InputSpec
from keras_transformer.generation.rules import Rules

# The arguments of `generate` that the graph has as inputs, each a number.
SETTINGS = {"temperature": "float32", "top_k": "int64", "top_p": "float32", "seed": "int64"}
_PREFIX = "step"


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
    carried = [f"next.{name}" for name in ("going", "tokens", "finished", "attention_mask", *caches)]
    first = trace(_first(parts), specs, parts.axes, ["remaining", "lengths", *extra, *carried])
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
        *settings,
    ]
    axes = [batch, past, *(axis for axis in parts.axes[1:] if any(axis in spec.shape for spec in parts.extra))]
    body = trace(_step(parts), step_specs, axes, carried)
    weights = {id(weight): weight for graph in (first, body) for weight in graph.weights}
    model = _joined(lower(first), lower(body), 3 + len(caches))
    return dataclasses.replace(first, weights=list(weights.values())), model


def _first(parts):
    def first(*inputs):
        prompts, (max_new_tokens, *settings) = inputs[: len(parts.inputs)], inputs[len(parts.inputs) :]
        ids, mask, positions, extra = parts.begin(*prompts)
        batch = ops.shape(ids)[0]
        heads, head_dim = parts.decoder.kv_shape
        empty = ops.zeros((batch, 0, heads, head_dim), parts.decoder.dtype)
        cache = tuple((empty, empty) for _ in range(parts.decoder.num_layers))
        finished = ops.zeros((batch,), "bool")
        if parts.room is not None:
            max_new_tokens = ops.minimum(max_new_tokens, parts.room(*prompts))
        state = _next(parts, ids, mask, positions, extra, cache, ops.zeros((), "int32"), finished, settings)
        return _int64(ops.subtract(max_new_tokens, 1)), _int64(ops.add(positions[:, -1], 1)), *extra, *state

    return first


def _step(parts):
    count = 2 * parts.decoder.num_layers

    def step(iteration, tokens, finished, mask, *rest):
        caches, (lengths, *rest) = rest[:count], rest[count:]
        extra, settings = rest[: len(parts.extra)], rest[len(parts.extra) :]
        caches = [ops.transpose(cache, (0, 2, 1, 3)) for cache in caches]
        cache = tuple(zip(caches[::2], caches[1::2], strict=True))
        positions = ops.expand_dims(ops.add(lengths, iteration), 1)
        ids = ops.expand_dims(tokens, 1)
        number = ops.cast(ops.add(iteration, 1), "int32")
        return _next(parts, ids, mask, positions, extra, cache, number, finished, settings)

    return step


def _next(parts, ids, mask, positions, extra, cache, number, finished, settings):
    """What is carried to the next step, after the model has seen `ids`, of which token `number` follows."""
    logits, cache = parts.decoder.grow(ops.cast(ids, "int64"), mask, positions, extra, cache)
    tokens, finished = _chosen(parts.rules, logits[:, -1], number, finished, *settings)
    going = ops.logical_not(ops.all(finished))
    mask = ops.concatenate([mask, ops.ones_like(mask[:, :1])], axis=1)
    return going, tokens, finished, _int64(mask), *heads_first(cache)


def _int64(x):
    """`x` as the loop declares it: Keras may make int32 of sums of int64."""
    return ops.cast(x, "int64")


def _chosen(rules, logits, number, finished, temperature, top_k, top_p, seed):
    """Tokens (B,) and which rows have ended: the best ones at temperature 0, otherwise drawn ones."""
    vocabulary = logits.shape[-1]
    drawing = {
        "temperature": ops.maximum(temperature, float(np.finfo("float32").tiny)),
        # 0 and 1, which mean "no matter", must take nothing away.
        "top_k": ops.where(ops.greater(top_k, 0), top_k, vocabulary),
        "top_p": ops.where(ops.less(top_p, 1.0), top_p, 2.0),
        # The 32 bits of an unsigned number as a signed one.
        "seed": ops.reshape(ops.cast(ops.where(ops.less(seed, 2**31), seed, ops.subtract(seed, 2**32)), "int32"), (1,)),
        "rows": ops.arange(ops.shape(finished)[0], dtype="int32"),
    }
    drawn, best = (
        dataclasses.replace(rules, settings=settings).next_tokens(logits, number, finished, {}, ops)[:2]
        for settings in (drawing, {})
    )
    draws = ops.greater(temperature, 0)
    return tuple(ops.where(draws, one, other) for one, other in zip(drawn, best, strict=True))


def _joined(model: onnx_ir.Model, body: onnx_ir.Model, carried: int) -> onnx_ir.Model:
    """The first step's model with the loop behind it; the body's first `carried` inputs after the iteration change."""
    graph, inner = model.graph, body.graph
    outputs = list(graph.outputs)
    remaining, lengths, *values = outputs
    state = values[len(values) - carried - 1 :]
    known = {value.name: value for value in [*graph.inputs, lengths, *values[: len(values) - carried - 1]]}
    _adopt_initializers(graph, inner)
    iteration, *inputs = inner.inputs
    for value in inputs[carried:]:
        # The body reads what does not change where it stands.
        value.replace_all_uses_with(known[value.name])
    for node in inner:
        node.name = f"{_PREFIX}/{node.name}"
        for value in node.outputs:
            value.name = value.name and f"{_PREFIX}/{value.name}"
    condition = onnx_ir.Value(
        name=f"{_PREFIX}/going_in", type=onnx_ir.TensorType(onnx_ir.DataType.BOOL), shape=onnx_ir.Shape([])
    )
    inputs = inputs[:carried]
    for value in (iteration, *inputs):
        value.name = f"{_PREFIX}/{value.name}_in"
    tokens = onnx_ir.Node("", "Identity", [inner.outputs[1]], name=f"{_PREFIX}/made")
    made = tokens.outputs[0]
    made.name, made.type, made.shape = f"{_PREFIX}/made", inner.outputs[1].type, inner.outputs[1].shape
    inner.append(tokens)
    inner.outputs.append(made)
    inner.inputs.clear()
    inner.inputs.extend([iteration, condition, *inputs])
    inner.name = _PREFIX
    loop = onnx_ir.Node(
        "",
        "Loop",
        [remaining, *state],
        [onnx_ir.AttrGraph("body", inner)],
        num_outputs=carried + 1,
        name="generate/Loop",
    )
    for index, value in enumerate(loop.outputs):
        value.name = f"generate/Loop.{index}"
    graph.append(loop)
    ids = _ids(graph, state[1], loop.outputs[-1])
    graph.outputs.clear()
    graph.outputs.append(ids)
    return model


def _ids(graph, first, later):
    """All tokens (B, L) int64, from the first ones (B,) and those of the loop (L - 1, B)."""
    axes = onnx_ir.tensor(np.array([1], np.int64), name="generate/axes")
    axes = onnx_ir.Value(
        name="generate/axes",
        const_value=axes,
        type=onnx_ir.TensorType(onnx_ir.DataType.INT64),
        shape=onnx_ir.Shape([1]),
    )
    graph.register_initializer(axes)

    def node(op_type, *inputs, **attributes):
        made = onnx_ir.node(op_type, list(inputs), attributes, name=f"generate/{op_type}")
        made.outputs[0].name = f"generate/{op_type}"
        graph.append(made)
        return made.outputs[0]

    columns = node("Concat", node("Unsqueeze", first, axes), node("Transpose", later, perm=[1, 0]), axis=1)
    ids = node("Cast", columns, to=int(onnx_ir.DataType.INT64))
    ids.name, ids.type = "ids", onnx_ir.TensorType(onnx_ir.DataType.INT64)
    ids.shape = onnx_ir.Shape(["batch", "new_length"])
    return ids


def _adopt_initializers(graph, inner):
    """Lets `inner` read its initializers from `graph`, which gets those that it has not."""
    for name, value in list(inner.initializers.items()):
        if name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[name])
            del inner.initializers[name]
        else:
            del inner.initializers[name]
            graph.register_initializer(value)
