"""Makes one graph of several recordings: what changed with the sizes becomes an expression of the axes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_transformer.export.dims import (
    Axis,
    Comparison,
    Dim,
    Expr,
    SizedInt,
    Sizes,
    add,
    axes_of,
    counterexample,
    multiply,
    solve,
)
from keras_transformer.export.errors import TraceError
from keras_transformer.export.ir import Constant, Graph, Node, Value, Weight
from keras_transformer.export.trace import EXPAND, TAKE_PART, Array, Call, Recording, Symbol

_PRIMES = (3, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
# The longest size that is traced of an axis without a limit.
_LONG = 509
_SHORT_RANGE = 8


def trace_sizes(axes: Sequence[Axis]) -> list[Sizes]:
    """The sizes to trace at: a base, each axis alone changed, then those at which code often behaves otherwise.

    The last ones are the smallest, even sizes, multiples of 8, a middle and the longest of every axis, and all sizes
    of a short range. Within a range the sizes of an axis differ from each other as far as it allows.
    """
    count = len(axes)
    smallest = {axis.name: axis.minimum for axis in axes}
    beyond = 2 * max(smallest.values(), default=0)
    # In the other order than elsewhere, where the first axis is the smallest.
    longest = {axis.name: axis.maximum or max(_LONG, beyond) - 2 * i for i, axis in enumerate(axes)}
    base, changed, even, eights, middle = ({} for _ in range(5))
    for i, axis in enumerate(axes):
        low, high = smallest[axis.name], longest[axis.name]
        used = {low, high}
        base[axis.name] = _pick(_PRIMES[i], low, high, used | {*base.values()})
        for sizes, wanted, step in (
            (changed, _PRIMES[count + i] + 1 + i % 2, 1),
            (even, 2 * (i + 1), 2),
            (eights, 8 * (i + 1), 8),
            (middle, (low + high) // 2 + 2 * i, 1),
        ):
            used.add(base[axis.name])
            sizes[axis.name] = _pick(wanted, low, high, used, step)
            used.add(sizes[axis.name])
    sizes = [base]
    sizes += [base | {axis.name: changed[axis.name]} for axis in axes]
    sizes += [base | {axis.name: axis.minimum} for axis in axes]
    sizes += [base | {axis.name: longest[axis.name]} for axis in axes]
    sizes += [smallest, even, eights, middle, longest]
    for axis in axes:
        low, high = smallest[axis.name], longest[axis.name]
        sizes += [base | {axis.name: size} for size in range(low, high + 1) if high - low < _SHORT_RANGE]
    return [size for i, size in enumerate(sizes) if size not in sizes[:i]]


def _pick(wanted: int, low: int, high: int, used: set[int], step: int = 1) -> int:
    """A multiple of `step` near `wanted` (from `low` on, if that is larger) that is not used yet."""
    start = min(low + wanted if wanted < low else wanted, high)
    start -= start % step
    nearby = [*range(start, min(high, start + 99) + 1, step), *range(start, max(low, start - 99) - 1, -step)]
    fitting = [size for size in nearby if low <= size and size not in used]
    return fitting[0] if fitting else max(low, min(wanted, high))


def generalise(
    recordings: Sequence[Recording],
    axes: Sequence[Axis],
    input_names: Sequence[str],
    input_shapes: Sequence[tuple[Dim, ...]],
    output_names: Sequence[str] | None = None,
) -> Graph:
    """The graph that does at every size what the recordings did at theirs.

    Raises:
        TraceError: if the recordings are not of one and the same computation; the message names the layer
            and the line that differ.
    """
    for recording in recordings:
        recording.calls = _live(recording)
    return _Generaliser(recordings, axes).graph(input_names, input_shapes, output_names)


class _Generaliser:
    def __init__(self, recordings: Sequence[Recording], axes: Sequence[Axis]):
        self.recordings = recordings
        self.axes = axes
        self.traces = [recording.sizes for recording in recordings]
        self.values: list[dict[int, Value]] = [{} for _ in recordings]
        self.solved: dict[tuple, Dim | None] = {}
        self.weights: dict[int, Weight] = {}
        self.extra: list[Node] = []

    def graph(self, input_names, input_shapes, output_names) -> Graph:
        self._check_comparisons()
        inputs = []
        for i, (name, shape) in enumerate(zip(input_names, input_shapes, strict=True)):
            symbols = [recording.inputs[i] for recording in self.recordings]
            inputs.append(self._value(symbols, Value(tuple(shape), symbols[0].dtype, name)))
        nodes: list[Node] = []
        lengths = {len(recording.calls) for recording in self.recordings}
        for calls in zip(*(recording.calls for recording in self.recordings), strict=False):
            self._same_calls(calls)
            self.extra = []
            node = self._node(calls)
            nodes += [*self.extra, node]
        if len(lengths) > 1:
            raise self._different_lengths()
        self.extra = []
        outputs = [
            self._merge(list(items), "an output of the model")
            for items in zip(*(recording.outputs for recording in self.recordings), strict=True)
        ]
        nodes += self.extra
        names = list(output_names or [])
        if not names:
            names = ["output"] if len(outputs) == 1 else [f"output_{i}" for i in range(len(outputs))]
        if len(names) != len(outputs) or len({*names, *input_names}) != len(names) + len(input_names):
            raise TraceError(
                f"`output_names` must give each of the {len(outputs)} outputs a name that no other output and no input "
                f"has; the inputs are {list(input_names)}. Received: output_names={names}"
            )
        return Graph(tuple(self.axes), inputs, outputs, names, nodes, list(self.weights.values()))

    def _different_lengths(self) -> TraceError:
        shortest, longest = (f(self.recordings, key=lambda r: len(r.calls)) for f in (min, max))
        extra = longest.calls[len(shortest.calls)]
        return TraceError(
            f"The model does a different number of operations at different sizes: {len(shortest.calls)} at "
            f"{shortest.sizes}, {len(longest.calls)} at {longest.sizes}, such as {_kind(extra)} in layer "
            f"'{extra.path}' ({extra.source}). A loop or a condition in a layer depends on a size; narrow the range "
            "with `min_length` and `max_length`, or write it with keras.ops."
        )

    def _check_comparisons(self) -> None:
        noted: set[Comparison] = set().union(*(recording.comparisons for recording in self.recordings))
        for comparison in sorted(noted, key=lambda c: (c.source, str(c), c.outcome)):
            if not comparison.sure and self._is_coincidence(comparison):
                continue
            sizes = counterexample(comparison)
            if sizes is not None:
                raise TraceError(
                    f"A layer's code compares sizes ({comparison} at {comparison.source}): it was "
                    f"{comparison.outcome} where traced and would be {not comparison.outcome} at {sizes}. "
                    "Narrow the range with `min_length` and `max_length`, or write it without the condition."
                )

    def _is_coincidence(self, comparison: Comparison) -> bool:
        """Whether a number was taken for an axis at some sizes only, as a width of 7 is at length 7."""

        def what(c: Comparison):
            return c.operator, c.left, c.right, c.source

        return any(
            what(comparison) not in set(map(what, recording.comparisons))
            for recording in self.recordings
            if 1 not in recording.sizes.values() and len(set(recording.sizes.values())) == len(recording.sizes)
        )

    def _same_calls(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        for call, sizes in zip(calls, self.traces, strict=True):
            if call.kind != first.kind or call.path != first.path or len(call.outputs) != len(first.outputs):
                raise TraceError(
                    f"The model does different operations at different sizes: {_kind(first)} in layer "
                    f"'{first.path}' ({first.source}) at {self.traces[0]}, but {_kind(call)} in layer "
                    f"'{call.path}' ({call.source}) at {sizes}. Narrow the range with `min_length` and "
                    "`max_length`, or write it without a condition on a size."
                )

    def _node(self, calls: Sequence[Call]) -> Node:
        first = calls[0]
        where = f"{_kind(first)} in layer '{first.path}' ({first.source})"
        attributes = self._merge([call.attributes for call in calls], where)
        args = self._merge([call.args for call in calls], where)
        kwargs = self._merge([call.kwargs for call in calls], where)
        outputs = []
        for symbols in zip(*(call.outputs for call in calls), strict=True):
            if len({len(symbol.shape) for symbol in symbols}) > 1:
                raise TraceError(f"{where} gives a result whose rank depends on a size; name the axis.")
            if any(dim is None for symbol in symbols for dim in symbol.shape):
                raise TraceError(f"{where} gives a result whose shape is not known before the model runs.")
            shape = tuple(self._integer(list(dims), where) for dims in zip(*(s.shape for s in symbols), strict=True))
            outputs.append(self._value(symbols, Value(shape, symbols[0].dtype)))
        return Node(first.kind, first.operation, attributes, args, kwargs, outputs, first.path, first.source)

    def _value(self, symbols: Sequence[Symbol], value: Value) -> Value:
        for values, symbol in zip(self.values, symbols, strict=True):
            values[id(symbol)] = value
        return value

    def _merge(self, items: list, where: str) -> Any:
        """What `items`, one per recording, are at every size."""
        first = items[0]
        if isinstance(first, Symbol):
            found = [values.get(id(item)) for values, item in zip(self.values, items, strict=True)]
            if found[0] is None or any(value is not found[0] for value in found):
                raise TraceError(f"{where} takes different tensors at different sizes.")
            return found[0]
        if isinstance(first, Weight):
            if any(item is not first for item in items):
                raise TraceError(f"{where} uses different weights at different sizes.")
            self.weights[id(first)] = first
            return first
        if any(type(item) is not type(first) and not isinstance(item, int) for item in items):
            kinds = sorted({type(item).__name__ for item in items})
            raise TraceError(f"{where} takes arguments of different kinds at different sizes: {kinds}.")
        if isinstance(first, Array):
            return self._array(items, where)
        if isinstance(first, bool) or first is None:
            if any(item is not first for item in items):
                raise TraceError(f"{where} takes different flags at different sizes: {items}.")
            return first
        if isinstance(first, int):
            return self._integer(items, where)
        if isinstance(first, float):
            if any(item != first and not (item != item and first != first) for item in items):
                raise TraceError(
                    f"{where} takes a number that depends on a size: {self._seen(items)}. "
                    'Compute it in the graph: `ops.cast(ops.shape(x)[1], "float32")`.'
                )
            return first
        if isinstance(first, slice):
            parts = [self._merge([(s.start, s.stop, s.step) for s in items], where)]
            return slice(*parts[0])
        if isinstance(first, list | tuple):
            if len({len(item) for item in items}) > 1:
                raise TraceError(f"{where} takes argument lists of different lengths at different sizes.")
            merged = [self._merge(list(parts), where) for parts in zip(*items, strict=True)]
            return merged if isinstance(first, list) else tuple(merged)
        if isinstance(first, dict):
            return {key: self._merge([item[key] for item in items], where) for key in first}
        return first

    def _integer(self, items: list, where: str) -> Dim:
        carried = tuple(item.expr if isinstance(item, SizedInt) else None for item in items)
        key = (tuple(int(item) for item in items), carried)
        if key not in self.solved:
            self.solved[key] = solve(items, self.traces, self.axes)
        if self.solved[key] is None:
            seen = self._seen([int(item) for item in items])
            raise TraceError(
                f"{where} uses a number that is no known function of the sizes: {seen}. If it is one in a narrower "
                "range, pass `min_length` or `max_length`."
            )
        return self.solved[key]

    def _seen(self, items: list) -> dict[str, Any]:
        return {str(sizes): item for sizes, item in zip(self.traces, items, strict=True)}

    def _array(self, items: list[Array], where: str) -> Constant | Value:
        first = items[0]
        shapes = {item.array.shape for item in items}
        if len(shapes) == 1:
            digest = _digest(first.array)
            for item, sizes in zip(items, self.traces, strict=True):
                if _digest(item.array) != digest:
                    raise TraceError(
                        f"{where} uses an array whose values are not the same each time the layer runs "
                        f"(at sizes {sizes}): random numbers, or numbers that depend on a size."
                    )
            return Constant(first.array, first.dtype)
        if len({len(shape) for shape in shapes}) > 1:
            raise TraceError(f"{where} uses an array whose rank depends on a size.")
        return self._table(items, where)

    def _table(self, items: list[Array], where: str) -> Value:
        """An array with an axis that changes: equal slices along it, or a part of its longest form."""
        dims = [self._integer(list(sizes), where) for sizes in zip(*(i.array.shape for i in items), strict=True)]
        changing = [axis for axis, dim in enumerate(dims) if isinstance(dim, Expr)]
        array = max((item.array for item in items), key=lambda a: a.size)
        for axis in list(changing):
            slices = [item.array for item in items if item.array.shape[axis]]
            if all(np.array_equal(a, np.broadcast_to(a.take([0], axis), a.shape)) for a in slices):
                array = array.take([0], axis)
                items = [Array(item.array.take([0], axis), item.dtype) for item in items if item.array.shape[axis]]
                changing.remove(axis)
        value: Value | Constant
        if not changing:
            value = Constant(array, items[0].dtype)
        else:
            if len(changing) > 1:
                raise TraceError(
                    f"{where} uses an array that grows with several axes, {[str(d) for d in dims]}. "
                    "Compute it with keras.ops (`ops.arange`, comparisons), so that the graph can."
                )
            value = self._slice_of_longest(array, items, changing[0], dims, where)
        if value.shape == tuple(dims):
            return value
        return self._insert(EXPAND, {"shape": tuple(dims)}, (value,), tuple(dims), items[0].dtype)

    def _slice_of_longest(self, longest, items, axis, dims, where) -> Value:
        expr = dims[axis]
        limited = all(a.maximum is not None for a in axes_of(expr))

        def is_part(start_of):
            for item in items:
                start = start_of(item.array.shape[axis])
                part = longest.take(range(start, start + item.array.shape[axis]), axis)
                if not _close(item.array, part):
                    return False
            return True

        total = longest.shape[axis]
        prefix = (slice(None),) * axis
        if is_part(lambda size: 0):
            key = (*prefix, slice(None, expr))
        elif is_part(lambda size: total - size):
            key = (*prefix, slice(add(total, multiply(expr, -1)), None))
        else:
            raise TraceError(
                f"{where} uses an array of shape {[str(d) for d in dims]} whose values depend on a size. "
                "Compute it with keras.ops, so that the graph can."
            )
        if not limited:
            raise TraceError(
                f"{where} uses a table that grows with {expr}; give `max_length`, so that the longest can be stored."
            )
        shape = tuple(expr if i == axis else size for i, size in enumerate(longest.shape))
        return self._insert(TAKE_PART, {}, (Constant(longest, items[0].dtype), key), shape, items[0].dtype)

    def _insert(self, kind, attributes, args, shape, dtype) -> Value:
        value = Value(shape, dtype)
        self.extra.append(Node(kind, None, attributes, args, {}, [value], "", "a table"))
        return value


def _live(recording: Recording) -> list[Call]:
    """The calls that an output needs."""
    needed = {id(symbol) for symbol in _symbols(recording.outputs)}
    live = []
    for call in reversed(recording.calls):
        if any(id(output) in needed for output in call.outputs):
            live.append(call)
            needed |= {id(symbol) for symbol in _symbols((call.args, call.kwargs, call.attributes))}
    return live[::-1]


def _symbols(x):
    if isinstance(x, Symbol):
        yield x
    elif isinstance(x, list | tuple):
        for item in x:
            yield from _symbols(item)
    elif isinstance(x, dict):
        yield from _symbols(list(x.values()))
    elif isinstance(x, slice):
        yield from _symbols([x.start, x.stop, x.step])


def _kind(call: Call) -> str:
    return call.kind if isinstance(call.kind, str) else call.kind.__name__


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, or floats within 4 units in the last place, which backends' sine tables differ by."""
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=4 * np.finfo(a.dtype).eps, atol=0, equal_nan=True)
