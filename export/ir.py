"""The traced graph: what tracing hands to lowering, with no Keras symbol and no ONNX in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from keras_transformer.export.dims import Axis, Dim


@dataclasses.dataclass(eq=False)
class Value:
    """A tensor that exists only when the model runs: a graph input or a node's output.

    Attributes:
        shape: one `int` or `dims.Expr` (a function of the free axes) per axis.
        dtype: Keras dtype name, such as `"float32"`, `"int32"`, `"bool"`.
        name: the public name of a graph input or output; None elsewhere.
        maximum: of an integer input, the largest value that may stand there, if that is known and no node says it.
    """

    shape: tuple[Dim, ...]
    dtype: str
    name: str | None = None
    maximum: int | None = None


@dataclasses.dataclass(eq=False)
class Weight:
    """A variable of the model, read at export. `dtype` is what the layer saw (autocast included)."""

    name: str
    array: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@dataclasses.dataclass(eq=False)
class Constant:
    """A concrete array that layer code made while tracing and that is the same at every traced size."""

    array: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


@dataclasses.dataclass(eq=False)
class Node:
    """One recorded operation.

    Attributes:
        kind: the operation's class (`keras.src.ops.numpy.Add`, a `keras.layers.Layer` that is kept whole, …), or the
            name of a function that makes a tensor from numbers alone (`"arange"`, `"zeros"`, `"ones"`, `"full"`,
            `"eye"`, `"tri"`, `"linspace"`).
        operation: the operation's instance as recorded at the base size (for a whole layer: the layer); None for
            functions. Its integers are those of the base size: read `attributes` instead.
        attributes: the operation's public instance attributes, with every integer that depends on a size replaced
            by its `dims.Expr`. Empty for layers.
        args, kwargs: what it was called with: `Value`, `Weight`, `Constant`, Python numbers, `dims.Expr`, strings,
            None, slices, and lists, tuples and dicts of these.
        outputs: its results, flattened in `keras.tree` order.
        path: the attribute path of the innermost layer that called it, such as `"encoder/blocks.0/attention"`.
        source: `file:line` of that call, for messages.
    """

    kind: type | str
    operation: Any
    attributes: dict[str, Any]
    args: tuple
    kwargs: dict[str, Any]
    outputs: list[Value]
    path: str
    source: str

    @property
    def kind_name(self) -> str:
        return self.kind if isinstance(self.kind, str) else self.kind.__name__


@dataclasses.dataclass(eq=False)
class Graph:
    """A traced function. Nodes are in execution order and each is needed by an output."""

    axes: tuple[Axis, ...]
    inputs: list[Value]
    outputs: list[Value | Weight | Constant]
    output_names: list[str]
    nodes: list[Node]
    weights: list[Weight]
