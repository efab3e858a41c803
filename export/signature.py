"""What a model takes: the names, shapes and dtypes of its inputs, and which of their axes are free together."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_transformer.export.backends import run_once
from keras_transformer.export.dims import Axis, Dim
from keras_transformer.export.errors import ExportError
from keras_transformer.export.trace import InputSpec


@dataclasses.dataclass(frozen=True)
class Input:
    """An input as the model declares it: None stands for a free axis."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def model_inputs(model: Callable, input_signature: Mapping[str, Any] | None = None) -> list[Input]:
    """The inputs of `model`, in the order in which it takes them.

    Args:
        model: a Keras model, or a callable on tensors.
        input_signature: shapes (None for a free axis) and dtypes by input name, as `(shape, dtype)` pairs or as
            anything with `.shape` and `.dtype`. Needed where the model keeps none.

    Raises:
        ExportError: the model is not built, or does not know its inputs and none are given.
    """
    if isinstance(model, keras.Layer) and not model.built:
        raise ExportError(
            f"The model has no weights yet, as it is not built: call it once, or `model.build(...)`. Received: {model}"
        )
    if input_signature is not None:
        if not isinstance(input_signature, Mapping) or not input_signature:
            raise ExportError(
                "`input_signature` must be a dict from input name to (shape, dtype). "
                f"Received: input_signature={input_signature!r}"
            )
        return _in_order(model, [_input(name, spec) for name, spec in input_signature.items()])
    tensors = _declared_inputs(model)
    if tensors is None:
        raise ExportError(
            f"{type(model).__name__} does not say what it takes. Pass `input_signature`, such as "
            '{"token_ids": ((None, None), "int32")}.'
        )
    names = [tensor.name for tensor in tensors]
    if all(re.fullmatch(r"(input_layer|keras_tensor)(_\d+)?", name) for name in names):
        # Keras numbers these by what was built before; the file must not depend on it.
        names = ["input"] if len(names) == 1 else [f"input_{i}" for i in range(len(names))]
    return [Input(n, tuple(t.shape), t.dtype) for n, t in zip(names, tensors, strict=True)]


def _input(name: str, spec: Any) -> Input:
    try:
        shape, dtype = (spec.shape, spec.dtype) if hasattr(spec, "shape") else spec
        shape, dtype = tuple(shape), keras.backend.standardize_dtype(dtype)
    except (TypeError, ValueError):
        shape, dtype = (), None
    sizes = [size for size in shape if size is not None]
    if dtype is None or not isinstance(name, str) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ExportError(
            "`input_signature` must give (shape, dtype) by input name, such as "
            f'{{"token_ids": ((None, None), "int32")}}. Received: {name!r}: {spec!r}'
        )
    return Input(name, shape, dtype)


def _in_order(model, inputs: list[Input]) -> list[Input]:
    """The inputs of a functional model in its own order, whatever the order of the signature."""
    if getattr(model, "_inputs_struct", None) is None:
        return inputs
    own = [tensor.name for tensor in model.inputs]
    given = {entry.name: entry for entry in inputs}
    if len(inputs) != len(own) or len(own) > 1 and set(given) != set(own):
        raise ExportError(
            f"`input_signature` must name the model's inputs, {own}. Received: input_signature of {list(given)}"
        )
    return inputs if len(own) == 1 else [given[name] for name in own]


def _declared_inputs(model) -> list[keras.KerasTensor] | None:
    try:
        return list(model.inputs)
    except (AttributeError, ValueError):
        return None


def call_by_name(model: Callable, names: Sequence[str]) -> Callable[..., Any]:
    """`model` in inference as a function of its inputs, one argument each, in the order of `names`."""
    is_layer = isinstance(model, keras.Layer)
    parameters = inspect.signature(model.call if is_layer else model).parameters
    extra = {"training": False} if is_layer and "training" in parameters else {}
    struct = getattr(model, "_inputs_struct", None)

    def call(*tensors):
        if struct is not None:
            return model(keras.tree.pack_sequence_as(struct, list(tensors)), **extra)
        if isinstance(model, keras.Sequential):
            return model(*tensors, **extra)
        if set(names) <= set(parameters):
            return model(**dict(zip(names, tensors, strict=True)), **extra)
        if container is dict:
            return model(dict(zip(names, tensors, strict=True)), **extra)
        if container is not None:
            return model(container(tensors), **extra)
        return model(*tensors, **extra)

    container = _container(model)
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if container is None and len(names) > 1 and len(required) == 1:
        container = dict
    return call


def _container(model) -> type | None:
    """What the model takes its inputs in, by the shapes that it was built with."""
    shapes = getattr(model, "_build_shapes_dict", None) or {}
    for shape in shapes.values():
        if isinstance(shape, dict):
            return dict
        if isinstance(shape, list | tuple) and shape and all(isinstance(part, list | tuple) for part in shape):
            return list if isinstance(shape, list) else tuple
    return None


def free_axes(
    inputs: Sequence[Input],
    call: Callable[..., Any],
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
) -> tuple[list[InputSpec], list[Axis]]:
    """Gives every free axis a name and a range.

    Without `dynamic_axes`, axis 0 is the batch, and of the others those are taken as one that a real call needs equal:
    the finest grouping under which `call` works.

    Args:
        inputs: the model's inputs.
        call: the model as a function of them.
        dynamic_axes: axis names by input name and axis number; equal names are one axis. Axes of known size that
            are not named stay fixed.
        min_length: smallest size of every free axis but the batch; 1 if None.
        max_length: largest; no limit if None.

    Raises:
        ExportError: names or axes that the inputs do not have, or no grouping that works.
    """
    low = 1 if min_length is None else min_length
    if dynamic_axes is not None:
        names = _given_names(inputs, dynamic_axes)
    else:
        names = _default_names(inputs)
        unsure = list(dict.fromkeys(name for name in names.values() if name != "batch"))
        for grouping in _groupings(unsure) if unsure else []:
            renamed = {place: grouping.get(name, name) for place, name in names.items()}
            failure = _failure(inputs, call, renamed, low, max_length)
            if failure is None:
                names = renamed
                break
        else:
            if unsure:
                raise ExportError(
                    f"The model runs at no sizes of its free axes that were tried: {sorted(set(names.values()))}. If "
                    'some of several lengths are equal, name them: dynamic_axes={"input": {0: "batch", 1: "length"}}; '
                    f"if the smallest are too small, pass `min_length`. At {failure[0]}: {failure[1]}"
                ) from failure[1]
    # An axis that only ever stands first is a batch, by whatever name.
    later = {name for (_, axis), name in names.items() if axis}
    axes = {
        name: Axis(name) if name == "batch" or name not in later else Axis(name, low, max_length)
        for name in dict.fromkeys(names.values())
    }
    specs = []
    for number, entry in enumerate(inputs):
        shape: list[Dim] = []
        for axis, size in enumerate(entry.shape):
            shape.append(axes[names[number, axis]] if (number, axis) in names else size)
        specs.append(InputSpec(entry.name, tuple(shape), entry.dtype))
    return specs, list(axes.values())


def _given_names(inputs, dynamic_axes) -> dict[tuple[int, int], str]:
    known = {entry.name: number for number, entry in enumerate(inputs)}
    if not isinstance(dynamic_axes, Mapping) or not all(isinstance(axes, Mapping) for axes in dynamic_axes.values()):
        raise ExportError(
            '`dynamic_axes` must be like {"source": {0: "batch", 1: "source_length"}}. '
            f"Received: dynamic_axes={dynamic_axes!r}"
        )
    names = {}
    for name, axes in dynamic_axes.items():
        if name not in known:
            raise ExportError(
                "`dynamic_axes` names an input that the model does not have; it has "
                f"{sorted(known)}. Received: {name!r}"
            )
        rank = len(inputs[known[name]].shape)
        for axis, label in axes.items():
            if not isinstance(axis, int) or not -rank <= axis < rank:
                raise ExportError(f"`dynamic_axes` of {name!r}: it has {rank} axes. Received: axis {axis!r}")
            if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z_]\w*", label) or keyword.iskeyword(label):
                raise ExportError(f"`dynamic_axes` must give identifiers as names. Received: {label!r}")
            names[known[name], axis % rank] = label
    for number, entry in enumerate(inputs):
        for axis, size in enumerate(entry.shape):
            if size is None and (number, axis) not in names:
                raise ExportError(f"`dynamic_axes` leaves axis {axis} of input {entry.name!r} without a name or size.")
    return names


def _default_names(inputs) -> dict[tuple[int, int], str]:
    names = {}
    for number, entry in enumerate(inputs):
        free = [axis for axis, size in enumerate(entry.shape) if size is None]
        lengths = [axis for axis in free if axis != 0]
        for axis in free:
            if axis == 0:
                names[number, axis] = "batch"
            else:
                prefix = "" if len(inputs) == 1 else f"{_identifier(entry.name)}_"
                suffix = "" if len(lengths) == 1 else f"_{axis}"
                names[number, axis] = f"{prefix}length{suffix}"
    return names


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _groupings(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Ways to take some of `names` as one, those with most groups first; a group has its first name.

    All ways for up to five names; of more, whose ways are thousands, only none and all.
    """

    def partitions(items):
        if not items:
            yield []
            return
        first, *rest = items
        for smaller in partitions(rest):
            for i, group in enumerate(smaller):
                yield [*smaller[:i], [first, *group], *smaller[i + 1 :]]
            yield [[first], *smaller]

    names = list(names)
    several = list(partitions(names)) if len(names) <= 5 else [[[name] for name in names], [names]]
    for groups in sorted(several, key=len, reverse=True):
        # A group of all lengths is simply the length.
        joined = "length" if len(names) > 1 and len(groups) == 1 else None
        yield {name: joined or group[0] for group in groups for name in group}


def _failure(inputs, call, names, low, high) -> tuple[dict[str, int], Exception] | None:
    """The sizes and the error at which a call fails in which no two axes have one size; None if it works."""
    labels = [label for label in dict.fromkeys(names.values()) if label != "batch"]
    sizes = {label: max(low, 5) + 2 * i for i, label in enumerate(labels)}
    if high is not None and max(sizes.values(), default=0) > high:
        # Apart from one another where the range allows it.
        sizes = {label: max(low, high - i) for i, label in enumerate(labels)}
    sizes["batch"] = 2
    shapes = [
        [sizes[names[number, i]] if (number, i) in names else size for i, size in enumerate(entry.shape)]
        for number, entry in enumerate(inputs)
    ]
    try:
        run_once(call, shapes, [entry.dtype for entry in inputs])
    except Exception as error:  # whatever a model raises at sizes that do not fit together
        return sizes, error
    return None
