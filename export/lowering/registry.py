"""The rules' registry, and `lower`, which applies them to a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir

from keras_transformer.export import ir
from keras_transformer.export.builder import GraphBuilder, Tensor
from keras_transformer.export.dims import Expr
from keras_transformer.export.errors import ExportError, UnsupportedOperationError

Rule = Callable[..., Any]

_rules: dict[type | str, Rule] = {}


def register_lowering(*kinds: type | str) -> Callable[[Rule], Rule]:
    """Decorates the rule that writes an operation, a layer or a function as ONNX nodes.

    The rule is called as `rule(g, node, *args, **kwargs)`: `g` is the `GraphBuilder`, `node` the `ir.Node`, and the
    rest is what the operation was called with, with every tensor as a `Tensor` of the graph. Numbers, slices and
    expressions of the free axes stay as they are. It returns a `Tensor`, or several in the order of `node.outputs`;
    these are cast to the traced dtypes. A rule that cannot write a case raises `NotImplementedError` with the reason.

    Args:
        *kinds: `keras.Operation` or `keras.layers.Layer` classes (with their subclasses, unless these have a rule of
            their own), or names of functions that make tensors from numbers, such as `"arange"`.

    Example:
        >>> @register_lowering(MyShift)
        ... def lower_my_shift(g, node, x):
        ...     return g.op("Add", x, g.scalar(node.operation.amount, x.dtype))
    """

    def register(rule: Rule) -> Rule:
        for kind in kinds:
            _rules[kind] = rule
        return rule

    return register


def find_rule(kind: type | str) -> Rule | None:
    """The rule for an operation, layer or function; None if there is none."""
    for candidate in kind.__mro__ if isinstance(kind, type) else (kind,):
        if candidate in _rules:
            return _rules[candidate]
    return None


def lower(graph: ir.Graph) -> onnx_ir.Model:
    """Writes a traced graph as an ONNX model.

    Args:
        graph: the traced graph.

    Raises:
        UnsupportedOperationError: an operation has no rule, or its rule does not cover this use of it.
    """
    g = GraphBuilder(graph)
    tensors: dict[ir.Value, Tensor] = dict(zip(graph.inputs, g.inputs, strict=True))

    def resolve(item):
        if isinstance(item, ir.Value):
            return tensors[item]
        if isinstance(item, ir.Weight):
            return g.weight(item)
        if isinstance(item, ir.Constant):
            return g.constant(item.array, item.dtype)
        if isinstance(item, dict):
            return {name: resolve(value) for name, value in item.items()}
        if isinstance(item, (list, tuple)):
            values = [resolve(value) for value in item]
            return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
        if isinstance(item, slice):
            return slice(resolve(item.start), resolve(item.stop), resolve(item.step))
        return item

    for node in graph.nodes:
        g.path = node.path
        rule = find_rule(node.kind)
        if rule is None:
            raise UnsupportedOperationError(_describe(node, "no rule writes it as ONNX"))
        g.origin = (node.kind_name, f"{rule.__module__}.{rule.__qualname__}")
        try:
            results = rule(g, node, *resolve(node.args), **resolve(node.kwargs))
        except NotImplementedError as error:
            raise UnsupportedOperationError(_describe(node, str(error))) from error
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        if [result.rank for result in results] != [len(value.shape) for value in node.outputs]:
            made = ", ".join(map(_signature, results))
            traced = ", ".join(map(_signature, node.outputs))
            raise ExportError(f"The rule for {node.kind_name} makes {made} of what was traced as {traced}.")
        for value, result in zip(node.outputs, results, strict=True):
            tensors[value] = result = g.cast(result, value.dtype)
            # The trace knows the free axes best. Widths it has from Keras' shape inference, which errs in places.
            result.shape = tuple(
                traced if isinstance(traced, Expr) or isinstance(own, Expr) else own
                for own, traced in zip(result.shape, value.shape, strict=True)
            )
    g.path, g.origin = "", ("", f"{__name__}.{lower.__name__}")
    return g.finish([resolve(output) for output in graph.outputs], graph.output_names)


def _signature(tensor) -> str:
    return f"{tensor.dtype}({', '.join(map(str, tensor.shape))})"


def _describe(node: ir.Node, reason: str) -> str:
    shapes = []

    def collect(item):
        if isinstance(item, (ir.Value, ir.Weight, ir.Constant)):
            shapes.append(_signature(item))
        elif isinstance(item, dict):
            collect(list(item.values()))
        elif isinstance(item, (list, tuple)):
            for entry in item:
                collect(entry)

    collect([node.args, node.kwargs])
    kind = node.kind if isinstance(node.kind, str) else f"{node.kind.__module__}.{node.kind.__qualname__}"
    return (
        f"Cannot export the operation {node.kind_name}: {reason}.\n"
        f"  called by: {node.path or 'the model'} ({node.source})\n"
        f"  inputs:    {', '.join(shapes) or 'none'}\n"
        f"  kind:      {kind}\n"
        "To export it, register a rule before exporting:\n"
        "  from keras_transformer.export.lowering import register_lowering\n"
        f"  @register_lowering({node.kind_name if not isinstance(node.kind, str) else repr(node.kind)})\n"
        "  def rule(g, node, *args, **kwargs): ...  # returns g.op(...)"
    )
