"""What values an input of a graph may have, as verification has to know to make some up."""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_transformer.export.ir import Graph, Value


def describe_input(graph: Graph, value: Value) -> dict[str, Any]:
    """What values `value` may have: ids are within the smallest table that they index."""
    entry: dict[str, Any] = {"name": value.name, "dtype": value.dtype}
    # What holds the input's entries as they are, and what is computed of them in any other way.
    same, derived, rows, free = {id(value)}, set(), [], True
    for node in graph.nodes:
        touched = [x for x in _values((node.args, node.kwargs)) if id(x) in same | derived]
        if not touched:
            continue
        arguments = [*node.args, *node.kwargs.values()]
        index = next(iter(arguments[_INDEX_PLACES.get(node.kind_name, len(arguments)) :]), None)
        if isinstance(index, Value) and id(index) in same and isinstance(size := _rows(node), int):
            rows.append(size)
        elif any(x in touched for x in _values(index)):
            free = False
        moved = node.kind_name in _MOVING and any(id(x) in same for x in touched)
        (same if moved else derived).update(map(id, node.outputs))
    if value.dtype == "bool" or not rows and value.name.endswith("mask"):
        return entry | {"kind": "mask"}
    if value.dtype.startswith(("float", "bfloat")):
        return entry | {"kind": "float"}
    if value.maximum is not None:
        return entry | {"kind": "ids", "minimum": 0, "maximum": value.maximum}
    if not graph.nodes:
        return entry | {"kind": "ids"}
    if rows:
        return entry | {"kind": "ids", "minimum": 0, "maximum": min(rows) - 1}
    # Numbers that are only computed with may be any.
    return entry | ({"kind": "ids", "minimum": 0, "maximum": 9} if free else {"kind": "ids"})


# Operations that fail where a number is out of range, with the argument that it must not be in.
_INDEX_PLACES = {"Take": 1, "TakeAlongAxis": 1, "OneHot": 0, "GetItem": 1, "Slice": 1, "SliceUpdate": 1}
_INDEX_PLACES |= {"Scatter": 0, "ScatterUpdate": 1, "WriteCache": 3}


_MOVING = (
    *("Cast", "ConvertToTensor", "Copy", "StopGradient", "Reshape", "Ravel", "ExpandDims", "Squeeze", "Transpose"),
    *("GetItem", "BroadcastTo", "Repeat", "Tile", "Flip", "Roll", "Swapaxes", "Moveaxis", "Concatenate", "Stack"),
    *("Pad", "Where", "Clip", "Maximum", "Minimum"),
)


def _values(x) -> list[Value]:
    if isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    return [
        part
        for item in keras.tree.flatten(x)
        for part in (_values(item) if isinstance(item, slice) else [item])
        if isinstance(part, Value)
    ]


def _rows(node) -> Any:
    """How many entries an index into the first operand may name."""
    if node.kind_name == "OneHot":
        return node.attributes["num_classes"]
    if node.kind_name not in ("Take", "TakeAlongAxis"):
        return None
    shape, axis = node.args[0].shape, node.attributes["axis"]
    return math.prod(shape) if axis is None and all(isinstance(n, int) for n in shape) else shape[axis or 0]
