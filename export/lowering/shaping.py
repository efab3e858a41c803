"""Rules for operations that move elements: shapes, slices, joins, gathers and repeats."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
from keras.src.ops import core
from keras.src.ops import numpy as knp

from keras_transformer.export.builder import GraphBuilder, Tensor, broadcast, product
from keras_transformer.export.dims import Axis, Dim, Expr, add, multiply
from keras_transformer.export.lowering.registry import register_lowering


def axes_tuple(axis: int | tuple[int, ...] | list[int] | None, rank: int) -> tuple[int, ...]:
    """`axis` as Keras takes it (None: every axis) as a tuple of axes counted from the front."""
    if axis is None:
        return tuple(range(rank))
    return tuple(a % rank for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))


def cast_all(g: GraphBuilder, tensors, dtype: str) -> list[Tensor]:
    """`tensors` as `dtype`."""
    return [g.cast(tensor, dtype) for tensor in tensors]


@register_lowering(knp.Reshape, knp.Ravel)
def _reshape(g, node, x):
    return g.reshape(x, node.outputs[0].shape)


@register_lowering(knp.Transpose)
def _transpose(g, node, x):
    return g.transpose(x, node.attributes["axes"] or range(x.rank)[::-1])


@register_lowering(knp.Swapaxes)
def _swapaxes(g, node, x):
    axes = list(range(x.rank))
    first, second = node.attributes["axis1"], node.attributes["axis2"]
    axes[first], axes[second] = axes[second], axes[first]
    return g.transpose(x, axes)


@register_lowering(knp.Moveaxis)
def _moveaxis(g, node, x):
    source = axes_tuple(node.attributes["source"], x.rank)
    destination = axes_tuple(node.attributes["destination"], x.rank)
    order = [axis for axis in range(x.rank) if axis not in source]
    for place, axis in sorted(zip(destination, source, strict=True)):
        order.insert(place, axis)
    return g.transpose(x, order)


@register_lowering(knp.ExpandDims)
def _expand_dims(g, node, x):
    axis = node.attributes["axis"]
    axes = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    return g.unsqueeze(x, axes)


@register_lowering(knp.Squeeze)
def _squeeze(g, node, x):
    axis = node.attributes["axis"]
    if axis is None:
        axis = [index for index, dim in enumerate(x.shape) if dim == 1]
    return g.squeeze(x, axes_tuple(axis, x.rank))


@register_lowering(knp.BroadcastTo)
def _broadcast_to(g, node, x):
    return g.expand(x, node.outputs[0].shape)


@register_lowering(knp.Concatenate)
def _concatenate(g, node, xs):
    return g.concat(cast_all(g, xs, node.outputs[0].dtype), node.attributes["axis"])


@register_lowering(knp.Append)
def _append(g, node, x1, x2):
    xs, axis = cast_all(g, (x1, x2), node.outputs[0].dtype), node.attributes["axis"]
    if axis is None:
        xs, axis = [g.reshape(x, (product(x.shape),)) for x in xs], 0
    return g.concat(xs, axis)


@register_lowering(knp.Hstack, knp.Vstack)
def _hstack(g, node, xs):
    xs = cast_all(g, xs, node.outputs[0].dtype)
    rank = node.outputs[0].shape
    if node.kind is knp.Hstack:
        return g.concat([g.reshape(x, (1,)) if x.rank == 0 else x for x in xs], 0 if len(rank) == 1 else 1)
    return g.concat([g.reshape(x, (1, *x.shape) if x.rank else (1, 1)) if x.rank < 2 else x for x in xs], 0)


@register_lowering(knp.Stack)
def _stack(g, node, x):
    xs = cast_all(g, x, node.outputs[0].dtype)
    axis = node.attributes["axis"] % (xs[0].rank + 1)
    return g.concat([g.unsqueeze(x, [axis]) for x in xs], axis)


@register_lowering(core.Unstack)
def _unstack(g, node, x):
    axis = node.attributes["axis"] % x.rank
    return [g.squeeze(piece, [axis]) for piece in split(g, x, axis, [1] * len(node.outputs))]


@register_lowering(knp.Split, knp.ArraySplit)
def _split(g, node, x):
    axis = node.attributes["axis"] % x.rank
    return split(g, x, axis, [output.shape[axis] for output in node.outputs])


def split(g: GraphBuilder, x: Tensor, axis: int, sizes: list[Dim]) -> tuple[Tensor, ...]:
    """`x` cut along `axis` into pieces of `sizes`."""
    shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in sizes]
    if len(sizes) == 1:
        return (x,)
    return g.op("Split", x, g.shape_tensor(sizes), axis=axis, outputs=[(shape, x.dtype) for shape in shapes])


@register_lowering(knp.GetItem)
def _get_item(g, node, x, key):
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    if any(isinstance(entry, Tensor) for entry in keys):
        raise NotImplementedError("a tensor is used as index: use keras.ops.take or take_along_axis")
    if not any(entry is Ellipsis for entry in keys):
        keys.append(Ellipsis)
    missing = x.rank - sum(entry is not None and entry is not Ellipsis for entry in keys)
    place = next(index for index, entry in enumerate(keys) if entry is Ellipsis)
    keys[place : place + 1] = [slice(None)] * missing
    sizes = iter(node.outputs[0].shape)
    axis, removed, added = 0, [], []
    for entry in keys:
        if entry is None:
            added.append(axis - len(removed) + len(added))
            next(sizes)
            continue
        if isinstance(entry, slice):
            size = next(sizes)
            step = 1 if entry.step is None else entry.step
            if isinstance(step, (Expr, Tensor)):
                raise NotImplementedError("the step of a slice depends on a size")
            start = (0 if step > 0 else np.iinfo("int64").max) if entry.start is None else entry.start
            stop = entry.stop
            if step < 0 and isinstance(start, int) and start < -1:
                x, start, stop = _without_end(g, x, axis, start, stop)
            if step != 1 or entry.start not in (None, 0) or stop is not None:
                x = g.slice(x, axis, start, stop, size, step)
        else:
            removed.append((axis, entry))
        axis += 1
    for axis, entry in reversed(removed):
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        x = g.op("Gather", x, g.scalar(entry, "int64"), axis=axis, shape=shape)
    return g.unsqueeze(x, added)


def _without_end(g, x, axis, start, stop):
    """`x` up to a place counted from its end, which a slice backwards then starts at, and the bounds of that slice.

    Of an axis that is too short for the place NumPy takes nothing, an ONNX slice backwards the first entry.
    """
    left = start + 1
    if isinstance(stop, int) and stop < 0:
        if stop >= start:
            raise NotImplementedError("the slice is empty")
        stop -= left
    length = x.shape[axis]
    kept = add(length, left) if isinstance(length, Expr) else max(length + left, 0)
    return g.slice(x, axis, 0, left, kept), np.iinfo("int64").max, stop


@register_lowering(core.Slice)
def _slice(g, node, inputs, start_indices):
    for axis, (start, size) in enumerate(zip(_starts(g, inputs, start_indices), node.outputs[0].shape, strict=True)):
        if size != inputs.shape[axis]:
            inputs = g.slice(inputs, axis, start, plus(g, start, size), size)
    return inputs


@register_lowering(core.SliceUpdate)
def _slice_update(g, node, inputs, start_indices, updates):
    updates = g.cast(updates, inputs.dtype)
    starts = _starts(g, inputs, start_indices)
    return slice_update(g, inputs, dict(enumerate(starts)), updates)


def slice_update(g: GraphBuilder, x: Tensor, starts: dict[int, Dim | Tensor], updates: Tensor) -> Tensor:
    """`x` with `updates` written over it from `starts` on, a start per axis that `updates` does not fill."""
    starts = {axis: start for axis, start in starts.items() if updates.shape[axis] != x.shape[axis]}
    if not starts:
        return updates
    axis, start = starts.popitem()
    size, length = updates.shape[axis], x.shape[axis]
    stop = plus(g, start, size)
    before, rest = (0, length) if isinstance(start, Tensor) else (start, add(length, multiply(stop, -1)))
    middle = slice_update(g, g.slice(x, axis, start, stop, size), starts, updates)
    parts = [g.slice(x, axis, 0, start, before), middle, g.slice(x, axis, stop, None, rest)]
    result = g.concat([part for part in parts if part.shape[axis] != 0 or isinstance(start, Tensor)], axis)
    result.shape = x.shape
    return result


@register_lowering(core.ScatterUpdate)
def _scatter_update(g, node, inputs, indices, updates):
    return scatter(g, inputs, indices, updates, node.attributes["reduction"])


@register_lowering(core.Scatter)
def _scatter(g, node, indices, values):
    output = node.outputs[0]
    return scatter(g, g.expand(g.scalar(0, output.dtype), output.shape), indices, values, "add")


def scatter(g: GraphBuilder, x: Tensor, indices: Tensor, updates: Tensor, reduction: str | None = None) -> Tensor:
    """`x` with `updates` at the places that the rows of `indices` name."""
    indices, updates = g.cast(indices, "int64"), g.cast(updates, x.dtype)
    return g.op("ScatterND", x, indices, updates, reduction=reduction, shape=x.shape)


def plus(g: GraphBuilder, start: Dim | Tensor, size: Dim) -> Dim | Tensor:
    """The sum start + size, where `start` may be a scalar tensor."""
    if isinstance(start, Tensor):
        return g.op("Add", g.reshape(g.cast(start, "int64"), (1,)), g.shape_tensor([size]))
    return add(start, size)


def _starts(g, x: Tensor, start_indices) -> list[Dim | Tensor]:
    if not isinstance(start_indices, Tensor):
        return list(start_indices)
    if start_indices.array is not None:
        return [int(start) for start in start_indices.array]
    return [g.slice(start_indices, 0, axis, axis + 1, 1) for axis in range(x.rank)]


@register_lowering(knp.Take)
def _take(g, node, x, indices):
    axis = node.attributes["axis"]
    indices = indices if isinstance(indices, Tensor) else g.constant(np.asarray(indices), "int64")
    if indices.dtype not in ("int32", "int64"):
        indices = g.cast(indices, "int32")
    counted = g.producer(indices, "Range")
    if counted is not None and not (_is_number(counted[0], 0) and _is_number(counted[2], 1)):
        # ONNX Runtime makes one slice of Range and Gather, in which a negative end counts from the back.
        indices = g.cast(indices, "int64" if indices.dtype == "int32" else "int32")
    if axis is None:
        x, axis = g.reshape(x, (product(x.shape),)), 0
    axis %= x.rank
    shape = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
    return g.op("Gather", x, indices, axis=axis, shape=shape)


def _is_number(x: Tensor, number: int) -> bool:
    return x.array is not None and x.array.size == 1 and x.array == number


@register_lowering(knp.TakeAlongAxis)
def _take_along_axis(g, node, x, indices):
    axis = node.attributes["axis"]
    if indices.dtype not in ("int32", "int64"):
        indices = g.cast(indices, "int32")
    if axis is None:
        x, indices, axis = g.reshape(x, (product(x.shape),)), g.reshape(indices, (product(indices.shape),)), 0
    axis %= x.rank
    lead = broadcast(
        *((*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :]) for tensor in (x, indices)),
    )
    x, indices = (g.expand(t, (*lead[:axis], t.shape[axis], *lead[axis + 1 :])) for t in (x, indices))
    return g.op("GatherElements", x, indices, axis=axis, shape=indices.shape)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """The tensor is `source` with each entry along `axis` repeated `repeats` times."""

    source: Tensor
    axis: int
    repeats: int


@register_lowering(knp.Repeat)
def _repeat(g, node, x):
    repeats, axis = node.attributes["repeats"], node.attributes["axis"]
    if axis is None:
        x, axis = g.reshape(x, (product(x.shape),)), 0
    axis %= x.rank
    if not isinstance(repeats, (int, Expr)):
        counts = np.asarray(getattr(repeats, "array", repeats)).reshape(-1)
        if counts.size > 1:
            indices = np.repeat(np.arange(counts.size), counts)
            shape = (*x.shape[:axis], indices.size, *x.shape[axis + 1 :])
            return g.op("Gather", x, g.constant(indices, "int64"), axis=axis, shape=shape)
        repeats = int(counts[0])
    wide = g.unsqueeze(x, [axis + 1])
    wide = g.expand(wide, (*x.shape[: axis + 1], repeats, *x.shape[axis + 1 :]))
    result = g.reshape(wide, (*x.shape[:axis], multiply(x.shape[axis], repeats), *x.shape[axis + 1 :]))
    g.facts[result.value] = Repeated(x, axis, repeats)
    return result


@register_lowering(knp.Tile)
def _tile(g, node, x):
    repeats = node.attributes["repeats"]
    repeats = list(repeats) if isinstance(repeats, (tuple, list)) else [repeats]
    shape = node.outputs[0].shape
    repeats = [1] * (len(shape) - len(repeats)) + repeats
    x = g.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
    return g.op("Tile", x, g.shape_tensor(repeats), shape=shape)


@register_lowering(knp.Pad)
def _pad(g, node, x, constant_values=None):
    widths, mode = list(node.attributes["pad_width"]), node.attributes["mode"]
    if mode not in ("constant", "reflect", "edge", "symmetric"):
        raise NotImplementedError(f"there is no padding mode {mode!r} in ONNX")
    if len(widths) == 1:
        if mode != "constant" and x.rank > 1 and keras.backend.backend() == "torch":
            raise NotImplementedError("on torch Keras pads the last axis alone where one width is given for all")
        widths *= x.rank
    mirrored = any(width not in (0, 1) for pair in widths for width in pair)
    if mode == "symmetric" and mirrored and keras.backend.backend() == "torch":
        raise NotImplementedError("on torch Keras' symmetric padding of more than one entry repeats the edge")
    if mode == "symmetric" or mode == "reflect" and not all(map(_is_longer, x.shape, widths)):
        for axis, (low, high) in enumerate(widths):
            if (low, high) != (0, 0):
                x = _mirrored(g, x, axis, low, high, edge_twice=mode == "symmetric")
        return x
    pads = g.shape_tensor([low for low, _ in widths] + [high for _, high in widths])
    fill = None if not constant_values else g.scalar(constant_values, x.dtype)
    return g.op("Pad", x, pads, fill, mode=mode, shape=node.outputs[0].shape)


def _is_longer(length: Dim, widths) -> bool:
    """Whether an axis has more entries than are mirrored at an end, as ONNX Runtime asks, at every size."""
    least = length.minimum if isinstance(length, Axis) else 0 if isinstance(length, Expr) else length
    return all(not isinstance(width, Expr) and width < max(least, 1) for width in widths)


def _mirrored(g: GraphBuilder, x: Tensor, axis: int, low: Dim, high: Dim, edge_twice: bool) -> Tensor:
    """`x` with `low` and `high` mirrored entries at the ends of `axis`, as often to and fro as its length asks for."""
    length = g.scalar(x.shape[axis], "int64")
    one, two = (g.scalar(number, "int64") for number in (1, 2))
    places = _places(g, multiply(low, -1), add(x.shape[axis], high))
    if edge_twice:
        place = g.op("Mod", places, g.op("Mul", length, two))
        back = g.op("Sub", g.op("Sub", g.op("Mul", length, two), one), place)
        return _gather(g, x, axis, g.op("Min", place, back))
    last = g.op("Sub", length, one)
    place = g.op("Mod", places, g.op("Max", g.op("Mul", last, two), one))
    return _gather(g, x, axis, g.op("Sub", last, g.op("Abs", g.op("Sub", last, place))))


def _places(g: GraphBuilder, start: Dim, stop: Dim) -> Tensor:
    """The integers from `start` to before `stop`."""
    bounds = [g.scalar(number, "int64") for number in (start, stop, 1)]
    return g.op("Range", *bounds, shape=(add(stop, multiply(start, -1)),))


def _gather(g: GraphBuilder, x: Tensor, axis: int, places: Tensor) -> Tensor:
    return g.op("Gather", x, places, axis=axis, shape=(*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))


@register_lowering(knp.Flip)
def _flip(g, node, x):
    for axis in axes_tuple(node.attributes["axis"], x.rank):
        x = g.slice(x, axis, np.iinfo("int64").max, None, x.shape[axis], -1)
    return x


@register_lowering(knp.Roll)
def _roll(g, node, x):
    shift, axis = node.attributes["shift"], node.attributes["axis"]
    shape = x.shape
    if axis is None:
        x, axis = g.reshape(x, (product(shape),)), 0
    shifts = shift if isinstance(shift, (tuple, list)) else [shift]
    axes = axis if isinstance(axis, (tuple, list)) else [axis]
    for shift, axis in zip(shifts, axes, strict=True):
        axis %= x.rank
        length = x.shape[axis]
        if isinstance(shift, Expr) or (isinstance(length, Expr) and abs(shift) > 1):
            # The shift may exceed the length.
            places = _places(g, multiply(shift, -1), add(length, multiply(shift, -1)))
            x = _gather(g, x, axis, g.op("Mod", places, g.scalar(length, "int64")))
            continue
        if not isinstance(length, Expr):
            shift %= length
        if shift:
            tail = g.slice(x, axis, -shift, None, shift if shift > 0 else add(length, shift))
            head = g.slice(x, axis, 0, -shift, add(length, -shift) if shift > 0 else -shift)
            x = g.concat([tail, head], axis)
    return g.reshape(x, shape)


@register_lowering(knp.Tril, knp.Triu)
def _trilu(g, node, x):
    k = g.scalar(node.attributes["k"], "int64")
    upper = int(node.kind is knp.Triu)
    if x.dtype == "bool":
        return g.cast(g.op("Trilu", g.cast(x, "int32"), k, upper=upper, shape=x.shape), "bool")
    return g.op("Trilu", x, k, upper=upper, shape=x.shape)


@register_lowering(knp.Meshgrid)
def _meshgrid(g, node, *xs):
    order = list(range(len(xs)))
    if node.attributes["indexing"] == "xy" and len(xs) > 1:
        order[0], order[1] = 1, 0
    results = []
    for place, output, x in zip(order, node.outputs, xs, strict=True):
        shape = [product(x.shape) if axis == place else 1 for axis in range(len(xs))]
        results.append(g.expand(g.reshape(x, shape), output.shape))
    return results
