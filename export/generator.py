"""One graph that generates: prompts in, finished ids out; the loop over tokens is inside of it, an ONNX `Loop`.

Three functions are traced and joined. The first makes of the prompts what the first step is given. The second is the
step, the graph of `CachedDecoder`: it takes the whole prompt the first time and one token each time after, so that the
decoder stands in the graph once. The third is the choice of the next token by the generation's own `Rules`, traced for
a drawn token and for the best one, which are the branches of an `If`. Tokens are drawn by the counter-based generator
of `generation.noise`, so that a seed gives what it gives in Keras.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import onnx_ir
from keras import ops

from keras_transformer.export import ir
from keras_transformer.export.cached import CachedDecoder
from keras_transformer.export.dims import Axis
from keras_transformer.export.input_values import describe_input
from keras_transformer.export.trace import InputSpec
from keras_transformer.generation.rules import Rules

# The arguments of `generate` that the graph has as inputs, each a number.
SETTINGS = {"temperature": "float32", "top_k": "int64", "top_p": "float32", "seed": "int64"}
# The name of a step's logits (B, V), by which verification finds them.
LOGITS = "step/next.logits"
# What is chosen: whether a row goes on, the next step's ids (B, 1), and which rows have ended (B,).
_CHOSEN = ["next.going", "next.input_ids", "next.finished"]


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
    batch, *others = parts.axes
    extra_axes = [axis for axis in others if any(axis in spec.shape for spec in parts.extra)]
    function, step_specs, step_axes, _ = parts.decoder.graph(parts.extra, extra_axes)
    caches = [spec.name for spec in step_specs if spec.name.startswith("past_key_values")]
    begun = ["input_ids", "attention_mask", "position_ids", "finished", "cache"]
    begin = trace(
        _begin(parts),
        [*parts.inputs, InputSpec("max_new_tokens", (), "int64"), *settings],
        parts.axes,
        ["room", "going", "draws", *(spec.name for spec in parts.extra), *(f"first.{name}" for name in begun)],
    )
    step = trace(
        _step(function),
        [InputSpec("iteration", (), "int64"), *step_specs],
        step_axes,
        [f"next.{name}" for name in ("logits", "number", "attention_mask", "position_ids", *caches)],
    )
    logits = step.outputs[0]
    choice_specs = [
        InputSpec("logits", logits.shape, logits.dtype),
        InputSpec("number", (), "int32"),
        InputSpec("finished", (batch,), "bool"),
        # Sums of int64 are int32 on some backends: these are made int32 before, by `_narrow`.
        *(InputSpec(name, (), dtype.replace("int64", "int32")) for name, dtype in SETTINGS.items()),
    ]
    drawn, best = (lower(trace(_choice(parts.rules, draws), choice_specs, [batch], _CHOSEN)) for draws in (True, False))
    model = lower(begin)
    _join(model.graph, lower(step).graph, drawn.graph, best.graph)
    known = {value.name: describe_input(step, value).get("maximum") for value in step.inputs}
    for value in begin.inputs:
        # The step looks the ids up.
        value.maximum = known.get(value.name)
    weights = {id(weight): weight for graph in (begin, step) for weight in graph.weights}
    return dataclasses.replace(begin, weights=list(weights.values())), model


def _begin(parts):
    def begin(*inputs):
        prompts, (_, temperature, *_) = inputs[: len(parts.inputs)], inputs[len(parts.inputs) :]
        *first, extra = parts.begin(*prompts)
        batch = ops.shape(first[0])[0]
        heads, head_dim = parts.decoder.kv_shape
        room = ops.full((), 2**31 - 1 if parts.room is None else parts.room(*prompts), "int32")
        going, draws = ops.ones((), "bool"), ops.greater(temperature, 0)
        finished, cache = ops.zeros((batch,), "bool"), ops.zeros((batch, heads, 0, head_dim), parts.decoder.dtype)
        return _int64(room), going, draws, *extra, *map(_int64, first), finished, cache

    return begin


def _step(function):
    def step(iteration, ids, mask, positions, *rest):
        logits, cache = function(ids, mask, positions, *rest)
        mask = ops.concatenate([ops.cast(mask, "int32"), ops.ones_like(mask[:, :1], dtype="int32")], axis=1)
        positions = ops.add(ops.cast(positions[:, -1:], "int32"), 1)
        return logits[:, -1], ops.cast(iteration, "int32"), _int64(mask), _int64(positions), *cache

    return step


def _int64(x):
    return ops.cast(x, "int64")


def _choice(rules, draws):
    def choose(logits, number, finished, *settings):
        chosen = dataclasses.replace(rules, settings=_drawing(logits, *settings) if draws else {})
        tokens, finished, _ = chosen.next_tokens(logits, number, finished, {}, ops)
        return ops.logical_not(ops.all(finished)), _int64(ops.expand_dims(tokens, 1)), finished

    return choose


def _drawing(logits, temperature, top_k, top_p, seed):
    """The rules' settings from the graph's numbers."""
    return {
        "temperature": temperature,
        # 0 and 1, which mean "no matter", must take nothing away.
        "top_k": ops.where(ops.greater(top_k, 0), top_k, logits.shape[-1]),
        "top_p": ops.where(ops.less(top_p, 1.0), top_p, 2.0),
        "seed": ops.reshape(seed, (1,)),
        "rows": ops.arange(ops.shape(logits)[0], dtype="int32"),
    }


def _join(graph: onnx_ir.Graph, step: onnx_ir.Graph, drawn: onnx_ir.Graph, best: onnx_ir.Graph) -> None:
    """Puts the loop behind what `_begin` became: in its body stands what `_step` became, and a choice behind it."""
    known = {value.name: value for value in graph.outputs}
    *begun, finished, cache = list(graph.outputs)[-5:]
    # What is not carried from step to step is read where it stands.
    _enter(graph, step, known, "step")
    iteration, *carried = step.inputs
    going, over = (
        onnx_ir.Value(name=f"step/{name}_in", type=value.type, shape=value.shape)
        for name, value in (("going", known["going"]), ("finished", finished))
    )
    logits, number, *kept = step.outputs
    numbers = {value.name: value for value in graph.inputs}
    outside = numbers | _narrow(graph, numbers) | {"logits": logits, "number": number, "finished": over}
    for name, branch in (("drawn", drawn), ("best", best)):
        _enter(graph, branch, outside, f"step/{name}")
    branches = {"then_branch": drawn, "else_branch": best}
    still_going, ids, ended = _add(step, "If", [known["draws"]], "step/choose", best.outputs, **branches)
    (made,) = _add(step, "Identity", [ids], "step/made", [ids])
    step.inputs[:] = [iteration, going, over, *carried]
    step.outputs[:] = [still_going, ended, ids, *kept, made]
    (limit,) = _add(graph, "Min", [numbers["max_new_tokens"], known["room"]], "limit", [known["room"]])
    state = [finished, *begun, *[cache] * (len(carried) - len(begun))]
    *_, made = _add(graph, "Loop", [limit, known["going"], *state], "loop", [None] * len(step.outputs[1:]), body=step)
    # From (L, B, 1) to (B, L).
    (last,) = _add(graph, "Constant", [], "ids/last", [None], value_ints=[2])
    (rows,) = _add(graph, "Squeeze", [made, last], "ids/rows", [None])
    (ids,) = _add(graph, "Transpose", [rows], "ids", [None], perm=[1, 0])
    ids.type, ids.shape = onnx_ir.TensorType(onnx_ir.DataType.INT64), onnx_ir.Shape(["batch", "new_length"])
    graph.outputs[:] = [ids]


def _narrow(graph, numbers):
    """`top_k` and `seed`, int64, as int32: what is larger than any number of ids, and the lowest bits, as signed."""

    def then(op_type, value, *others, **attributes):
        others = [
            _add(graph, "Constant", [], f"{value.name}/{other}", [value], value=onnx_ir.tensor(np.int64(other)))[0]
            for other in others
        ]
        return _add(graph, op_type, [value, *others], f"{value.name}/{op_type}", [value], **attributes)[0]

    narrow = {
        "top_k": then("Min", numbers["top_k"], 2**31 - 1),
        "seed": then("Sub", then("Mod", then("Add", numbers["seed"], 2**31), 2**32), 2**31),
    }
    narrow = {name: then("Cast", value, to=int(onnx_ir.DataType.INT32)) for name, value in narrow.items()}
    for value in narrow.values():
        value.type = onnx_ir.TensorType(onnx_ir.DataType.INT32)
    return narrow


def _add(graph, op_type, inputs, name, like, **attributes):
    """Appends a node; its results have the types and shapes of `like`, or none that are known."""
    node = onnx_ir.node(op_type, inputs, attributes, num_outputs=len(like), name=name)
    for index, (value, same) in enumerate(zip(node.outputs, like, strict=True)):
        value.name = f"{name}.{index}" if index else name
        if same is not None:
            value.type, value.shape = same.type, same.shape
    graph.append(node)
    return node.outputs


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
