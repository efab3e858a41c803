"""Builds the ONNX graph: initializers, nodes, shape arithmetic, names and the final clean-up."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir
from onnx.reference import ReferenceEvaluator

from keras_transformer.export import ir
from keras_transformer.export.dims import Axis, Dim, Expr, Polynomial, Quotient, add, axes_of, multiply
from keras_transformer.export.origins import OPERATION, RULE

# The first with Attention; `opsets.lower_opset` writes what older ones lack in single steps.
OPSET = 23

# What ONNX Runtime 1.23 reads; opset 23 needs no more.
IR_VERSION = 10

# Constants are folded while the result stays small; beyond it ONNX Runtime folds when it loads the file.
_FOLD_LIMIT = 4096

# The domain of ONNX Runtime's own operators.
CONTRIB = "com.microsoft"

_RESHAPING = ("Reshape", "Unsqueeze", "Squeeze")


@dataclasses.dataclass(eq=False)
class Tensor:
    """A tensor in the graph that is being built.

    Attributes:
        value: the ONNX value.
        shape: one `int` or `dims.Expr` per axis.
        dtype: Keras dtype name.
        array: what it holds, for weights and constants; None for what is computed when the model runs.
    """

    value: onnx_ir.Value
    shape: tuple[Dim, ...]
    dtype: str
    array: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)


Operand = Tensor | Expr | int | float | bool | np.generic


class GraphBuilder:
    """An ONNX graph in the making, for one traced graph.

    Equal nodes are made once. Reshapes of reshapes and transposes of transposes are merged as they are made,
    and `finish` removes what nothing uses.

    Attributes:
        path: layer path of the traced node that is being lowered; new nodes are named after it.
        origin: operation and rule that are noted at new nodes; see `origins.Origin`.
        facts: what a rule knows about a result and later rules may use, by ONNX value.
    """

    def __init__(self, graph: ir.Graph):
        self.path = ""
        self.origin = ("", f"{__name__}.{type(self).__name__}")
        self.facts: dict[onnx_ir.Value, Any] = {}
        self._graph = graph
        self._tensors: dict[onnx_ir.Value, Tensor] = {}
        self._memo: dict[tuple, tuple[Tensor, ...]] = {}
        self._nodes: list[onnx_ir.Node] = []
        self._paths: dict[onnx_ir.Node, str] = {}
        self._weights: dict[ir.Weight, Tensor] = {}
        self._weight_values: set[onnx_ir.Value] = set()
        self._initializers: dict[str, Tensor] = {}
        self._inputs = [self._input(value) for value in graph.inputs]

    # Tensors that are there from the start.

    @property
    def inputs(self) -> list[Tensor]:
        """The graph's inputs."""
        return self._inputs

    def _input(self, value: ir.Value) -> Tensor:
        return self._register(onnx_ir.Value(name=value.name), value.shape, value.dtype)

    def weight(self, weight: ir.Weight) -> Tensor:
        """The initializer that holds `weight`."""
        if weight not in self._weights:
            # NumPy makes a contiguous scalar one of rank 1.
            array = np.ascontiguousarray(weight.array).reshape(weight.shape)
            array = array.astype(numpy_dtype(weight.dtype), copy=False)
            name, count = weight.name, 1
            while name in self._initializers and not _same(self._initializers[name].array, array):
                name, count = f"{weight.name}.{weight.dtype}" + (f".{count}" if count > 1 else ""), count + 1
            self._weights[weight] = self._initializer(name, array, weight.dtype)
            self._weight_values.add(self._weights[weight].value)
        return self._weights[weight]

    def constant(self, array: Any, dtype: str | None = None) -> Tensor:
        """A constant; equal ones are stored once, and a large one that equals a weight refers to it."""
        array = np.asarray(array, None if dtype is None else numpy_dtype(dtype))
        dtype = dtype or str(array.dtype)
        if array.size > (8 if array.ndim > 1 else 64):
            for weight in self._graph.weights:
                if weight.dtype == dtype and weight.array.size == array.size:
                    held = self.weight(weight)
                    if _same(held.array, array):
                        return held
                    if array.ndim == 2 and _same(held.array, array.T):
                        return self.transpose(held, (1, 0))
        return self._initializer(_constant_name(array, dtype), np.ascontiguousarray(array).reshape(array.shape), dtype)

    def scalar(self, number: Operand, dtype: str) -> Tensor:
        """A number, or an expression of the free axes, as a 0-D tensor of `dtype`."""
        if isinstance(number, Tensor):
            return self.cast(number, dtype)
        if isinstance(number, Expr):
            return self.cast(self.squeeze(self._dimension(number), (0,)), dtype)
        return self.constant(np.asarray(number).astype(numpy_dtype(dtype)), dtype)

    def shape_tensor(self, dims: Sequence[Dim | Tensor]) -> Tensor:
        """`dims` as a 1-D int64 tensor, constant where it can be; an entry may be a scalar tensor as well."""
        parts: list[Tensor] = []
        pending: list[int] = []
        index = 0
        while index < len(dims):
            dim = dims[index]
            if isinstance(dim, (Expr, Tensor)):
                if pending:
                    parts.append(self.constant(pending, "int64"))
                    pending = []
                run = self._shape_run(dims[index:])
                if run is not None:
                    parts.append(run)
                    index += run.shape[0]
                    continue
                parts.append(self._dimension(dim))
            else:
                pending.append(int(dim))
            index += 1
        if pending or not parts:
            parts.append(self.constant(np.asarray(pending, "int64"), "int64"))
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0, shape=(len(dims),))

    # Operations.

    def op(
        self,
        op_type: str,
        *inputs: Tensor | None,
        shape: Sequence[Dim] | None = None,
        dtype: str | None = None,
        outputs: Sequence[tuple[Sequence[Dim], str]] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> Tensor | Any:
        """Adds a node, or finds the equal one.

        Args:
            op_type: ONNX operator name.
            *inputs: its inputs; None for an optional input that is left out.
            shape: shape of the result; by default the inputs' shapes, broadcast.
            dtype: dtype of the result; by default that of the first input.
            outputs: shape and dtype of each result, where there are several.
            domain: the operator's; the standard one by default.
            **attributes: ONNX attributes; None leaves one out.

        Returns:
            The result, or a tuple of them if `outputs` is given.
        """
        attributes = {name: value for name, value in attributes.items() if value is not None}
        key = (op_type, *(tensor and tensor.value for tensor in inputs), repr(sorted(attributes.items())))
        if key not in self._memo:
            if outputs is None:
                given = [tensor for tensor in inputs if tensor is not None]
                shape = broadcast(*(tensor.shape for tensor in given)) if shape is None else shape
                specs = [(tuple(shape), dtype or given[0].dtype)]
            else:
                specs = [(tuple(shape), dtype) for shape, dtype in outputs]
            folded = None if domain else self._fold(op_type, inputs, attributes, specs)
            self._memo[key] = (folded,) if folded else self._add(op_type, inputs, attributes, specs, domain)
        results = self._memo[key]
        return results[0] if outputs is None else results

    def cast(self, x: Operand, dtype: str) -> Tensor:
        """`x` as `dtype`; a number or expression becomes a scalar."""
        if not isinstance(x, Tensor):
            return self.scalar(x, dtype)
        if x.dtype == dtype:
            return x
        return self.op("Cast", x, to=int(onnx_dtype(dtype)), shape=x.shape, dtype=dtype)

    def reshape(self, x: Tensor, shape: Sequence[Dim]) -> Tensor:
        """`x` in row-major order under another shape."""
        shape = tuple(shape)
        if shape == x.shape:
            return x
        sources = [x]
        while (node := sources[-1].value.producer()) is not None and node.op_type in _RESHAPING:
            sources.append(self._tensors[node.inputs[0]])
        for source in reversed(sources):
            if source.shape == shape:
                return source
            target = _reshape_target(source.shape, shape)
            if target is not None:
                return self.op("Reshape", source, self.constant(target, "int64"), shape=shape)
        # A size of 0 is meant as one here, not as a copy of the input's.
        return self.op("Reshape", x, self.shape_tensor(shape), allowzero=1, shape=shape)

    def unsqueeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`x` with axes of size 1 at the places `axes` of the result."""
        if not axes:
            return x
        rank = x.rank + len(axes)
        axes = sorted(axis % rank for axis in axes)
        shape = list(x.shape)
        for axis in axes:
            shape.insert(axis, 1)
        inner = self.producer(x, "Unsqueeze")
        if inner is not None:
            # The new axes of both, in terms of the result's.
            kept = [axis for axis in range(rank) if axis not in axes]
            axes = sorted(axes + [kept[axis] for axis in inner[1].array])
            x = inner[0]
        return self.op("Unsqueeze", x, self.constant(axes, "int64"), shape=shape)

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`x` without its axes `axes`, which have size 1."""
        if not axes:
            return x
        axes = sorted(axis % x.rank for axis in axes)
        shape = [dim for axis, dim in enumerate(x.shape) if axis not in axes]
        node = x.value.producer()
        if node is not None and node.op_type == "Unsqueeze":
            source = self._tensors[node.inputs[0]]
            if list(self._tensors[node.inputs[1]].array) == axes:
                return source
        return self.op("Squeeze", x, self.constant(axes, "int64"), shape=shape)

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`x` with its axes in the order `axes`."""
        axes = [axis % x.rank for axis in axes]
        node = x.value.producer()
        if node is not None and node.op_type == "Transpose":
            inner = node.attributes["perm"].as_ints()
            x, axes = self._tensors[node.inputs[0]], [inner[axis] for axis in axes]
        if axes == sorted(axes):
            return x
        return self.op("Transpose", x, perm=axes, shape=[x.shape[axis] for axis in axes])

    def expand(self, x: Tensor, shape: Sequence[Dim]) -> Tensor:
        """`x` broadcast to `shape`."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        missing = len(shape) - x.rank
        # Expand broadcasts both ways: only what grows has to be known.
        target = [dim if axis < missing or x.shape[axis - missing] != dim else 1 for axis, dim in enumerate(shape)]
        return self.op("Expand", x, self.shape_tensor(target), shape=shape)

    def slice(
        self, x: Tensor, axis: int, start: Dim | Tensor, stop: Dim | Tensor | None, size: Dim, step: int = 1
    ) -> Tensor:
        """`x[start:stop:step]` along `axis`, which leaves `size` entries; `stop=None` is the open end."""
        if stop is None:
            stop = np.iinfo("int64").max if step > 0 else np.iinfo("int64").min
        if start == 0 and step == 1 and size == x.shape[axis]:
            return x
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        bounds = [self.shape_tensor([start]), self.shape_tensor([stop]), self.constant([axis], "int64")]
        steps = [] if step == 1 else [self.constant([step], "int64")]
        return self.op("Slice", x, *bounds, *steps, shape=shape)

    def concat(self, tensors: Sequence[Tensor], axis: int) -> Tensor:
        """`tensors`, of one dtype, one after the other along `axis`."""
        if len(tensors) == 1:
            return tensors[0]
        first = tensors[0]
        axis %= first.rank
        length: Dim = 0
        for tensor in tensors:
            length = add(length, tensor.shape[axis])
        return self.op("Concat", *tensors, axis=axis, shape=(*first.shape[:axis], length, *first.shape[axis + 1 :]))

    def reduce(self, op_type: str, x: Tensor, axes: Sequence[int], keepdims: bool = False) -> Tensor:
        """`x` reduced by `op_type` over `axes`."""
        axes = sorted(axis % x.rank for axis in axes)
        if not axes:
            return x
        shape = [1 if axis in axes else dim for axis, dim in enumerate(x.shape) if keepdims or axis not in axes]
        return self.op(op_type, x, self.constant(axes, "int64"), keepdims=int(keepdims), shape=shape)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """NumPy's `a @ b`, for operands of one dtype."""
        shape = list(broadcast(a.shape[:-2], b.shape[:-2]))
        shape += [a.shape[-2]] if a.rank > 1 else []
        shape += [b.shape[-1]] if b.rank > 1 else []
        return self.op("MatMul", a, b, shape=shape)

    def producer(self, x: Tensor, *op_types: str) -> tuple[Tensor | None, ...] | None:
        """The inputs of the node that makes `x` if it is one of `op_types`; otherwise None."""
        node = x.value.producer()
        if node is None or node.op_type not in op_types:
            return None
        return tuple(None if value is None else self._tensors[value] for value in node.inputs)

    def is_output(self, value: ir.Value) -> bool:
        """Whether a traced value is a result of the graph."""
        return value in self._graph.outputs

    def readers(self, x: Tensor) -> int:
        """How many nodes read `x` so far."""
        return len({usage.node for usage in x.value.uses()})

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Lets every reader of `old`, whose own results are unread so far, read `new`."""
        for usage in old.value.uses():
            # They stood before the node that makes `new`.
            self._nodes.remove(usage.node)
            self._nodes.append(usage.node)
        self._tensors[new.value] = Tensor(new.value, old.shape, old.dtype)
        old.value.replace_all_uses_with(new.value)
        old.value = new.value

    # The end.

    def finish(self, outputs: Sequence[Tensor], names: Sequence[str]) -> onnx_ir.Model:
        """The model with `outputs` under `names`."""
        values = self._name_outputs(outputs, names)
        self._remove_unused(values)
        self._merge_residuals(values)
        self._fold_weights(values)
        self._remove_unused(values)
        self._name_nodes(values)
        used = {value for node in self._nodes for value in node.inputs} | set(values)
        initializers = [tensor.value for tensor in self._initializers.values() if tensor.value in used]
        for tensor in self._tensors.values():
            tensor.value.shape = onnx_ir.Shape([_dim_text(dim) for dim in tensor.shape])
            tensor.value.type = onnx_ir.TensorType(onnx_dtype(tensor.dtype))
        graph = onnx_ir.Graph(
            [tensor.value for tensor in self._inputs],
            values,
            nodes=self._nodes,
            initializers=initializers,
            opset_imports={"": OPSET} | {node.domain: 1 for node in self._nodes if node.domain},
            name="model",
        )
        return onnx_ir.Model(graph, ir_version=IR_VERSION, producer_name="keras_transformer")

    def _name_outputs(self, outputs, names) -> list[onnx_ir.Value]:
        values = []
        for tensor, name in zip(outputs, names, strict=True):
            if tensor.value.producer() is None or tensor.value in values:
                # An input, an initializer or an output a second time: a name of its own needs a node.
                tensor = self._add("Identity", [tensor], {}, [(tensor.shape, tensor.dtype)])[0]
            tensor.value.name = name
            values.append(tensor.value)
        return values

    def _remove_unused(self, outputs: list[onnx_ir.Value]) -> None:
        kept = []
        for node in reversed(self._nodes):
            if any(value.uses() or value in outputs for value in node.outputs):
                kept.append(node)
            else:
                for index in range(len(node.inputs)):
                    node.replace_input_with(index, None)
        self._nodes = kept[::-1]

    def _merge_residuals(self, outputs: list[onnx_ir.Value]) -> None:
        """Writes `x + (projection + bias)`, and each sum that a layer norm reads, as one `Sum`.

        ONNX Runtime makes an `Add` before a LayerNormalization into SkipLayerNormalization, which is several
        times slower on CPUs; `Sum` it leaves alone.
        """
        for node in self._nodes:
            dtype = self._tensors[node.outputs[0]].dtype
            if node.op_type != "Add" or dtype not in ("float16", "float32", "float64"):
                continue
            operands: list[onnx_ir.Value] = []
            for value in node.inputs:
                inner = value.producer()
                biased = inner is not None and len(value.uses()) == 1 and value not in outputs
                if biased and (inner.op_type == "Sum" or inner.op_type == "Add" and self._adds_bias(inner)):
                    operands.extend(inner.inputs)
                else:
                    operands.append(value)
            normed = any(user.op_type == "LayerNormalization" for user, _ in node.outputs[0].uses())
            if len(operands) > 2 or normed:
                node.op_type = "Sum"
                node.resize_inputs(len(operands))
                for index, value in enumerate(operands):
                    node.replace_input_with(index, value)
        self._remove_unused(outputs)

    def _adds_bias(self, node: onnx_ir.Node) -> bool:
        first, second = node.inputs
        projection, bias = first.producer(), self._tensors[second]
        is_projection = projection is not None and projection.op_type == "MatMul"
        return is_projection and bias.array is not None and bias.rank == 1

    def _fold_weights(self, outputs: list[onnx_ir.Value]) -> None:
        """Stores a weight the way its only reader wants it."""
        for name, tensor in self._initializers.items():
            while tensor.array.size > 1 and tensor.value not in outputs:
                uses = list(tensor.value.uses())
                if len(uses) != 1 or uses[0].idx != 0 or uses[0].node.op_type not in ("Transpose", *_RESHAPING):
                    break
                node = uses[0].node
                result = self._tensors[node.outputs[0]]
                if result.value in outputs or any(isinstance(dim, Expr) for dim in result.shape):
                    break
                array = tensor.array
                if node.op_type == "Transpose":
                    array = np.ascontiguousarray(array.transpose(node.attributes["perm"].as_ints()))
                array = array.reshape(result.shape)
                folded = self._register(onnx_ir.Value(name=name), array.shape, tensor.dtype, array)
                result.value.replace_all_uses_with(folded.value)
                tensor = self._initializers[name] = folded
                self._remove_unused(outputs)

    def _name_nodes(self, outputs: list[onnx_ir.Value]) -> None:
        counts: dict[str, int] = {}
        taken = {value.name for value in outputs} | {tensor.value.name for tensor in self._inputs}
        taken |= set(self._initializers)
        for node in self._nodes:
            stem = "/".join(part for part in (self._paths[node], node.op_type) if part)
            while True:
                count = counts[stem] = counts.get(stem, -1) + 1
                name = f"{stem}_{count}" if count else stem
                if name not in taken:
                    break
            node.name = name
            for index, value in enumerate(node.outputs):
                if index and node.op_type == "Attention" and not value.uses() and value not in outputs:
                    # A result may be left out; past inputs, the fifth and sixth, ask for the present ones.
                    value.name = f"{name}.{index}" if len(node.inputs) > 4 and index < 3 else ""
                elif value not in outputs:
                    value.name = f"{name}.{index}" if index else name
        for tensor in self._initializers.values():
            tensor.value.const_value = onnx_ir.tensor(
                tensor.array, dtype=onnx_dtype(tensor.dtype), name=tensor.value.name
            )

    # Below the operations.

    def _register(self, value, shape, dtype, array=None) -> Tensor:
        tensor = self._tensors[value] = Tensor(value, tuple(shape), dtype, array)
        return tensor

    def _initializer(self, name: str, array: np.ndarray, dtype: str) -> Tensor:
        if name not in self._initializers:
            self._initializers[name] = self._register(onnx_ir.Value(name=name), array.shape, dtype, array)
        return self._initializers[name]

    def _add(self, op_type, inputs, attributes, specs, domain="") -> tuple[Tensor, ...]:
        node = onnx_ir.Node(
            domain,
            op_type,
            [tensor and tensor.value for tensor in inputs],
            onnx_ir.convenience.convert_attributes(dict(sorted(attributes.items()))),
            num_outputs=len(specs),
            metadata_props=dict(zip((OPERATION, RULE), self.origin, strict=True)),
        )
        self._nodes.append(node)
        self._paths[node] = self.path
        return tuple(
            self._register(value, shape, dtype) for value, (shape, dtype) in zip(node.outputs, specs, strict=True)
        )

    def _fold(self, op_type, inputs, attributes, specs) -> Tensor | None:
        """The result as a constant, if it depends on small constants only."""
        given = [tensor for tensor in inputs if tensor is not None]
        if (
            len(specs) != 1
            or not given
            or any(t.array is None or t.value in self._weight_values or t.dtype == "bfloat16" for t in given)
            or any(isinstance(dim, Expr) for dim in specs[0][0])
            or math.prod(specs[0][0]) > max(_FOLD_LIMIT, *(tensor.array.size for tensor in given))
        ):
            return None
        names = ["" if tensor is None else f"x{index}" for index, tensor in enumerate(inputs)]
        node = onnx.helper.make_node(op_type, names, ["y"], **attributes)
        infos = [onnx.helper.make_tensor_value_info(name, 1, None) for name in names if name]
        graph = onnx.helper.make_graph([node], "g", infos, [onnx.helper.make_tensor_value_info("y", 1, None)])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
        feeds = {name: tensor.array for name, tensor in zip(names, inputs, strict=True) if name}
        (array,) = ReferenceEvaluator(model).run(None, feeds)
        return self.constant(np.asarray(array), specs[0][1])

    def _dimension(self, dim: Dim | Tensor) -> Tensor:
        """`dim` as a 1-D int64 tensor of one entry."""
        if isinstance(dim, Tensor):
            return self.reshape(self.cast(dim, "int64"), (1,))
        if isinstance(dim, Axis):
            return self._axis(dim)
        if isinstance(dim, Quotient):
            numerator, divisor = self._dimension(dim.numerator), self.constant([dim.divisor], "int64")
            remainder = self.op("Mod", numerator, divisor)
            if dim.remainder:
                return remainder
            # Div rounds towards zero, `//` down; Mod has the sign of the divisor.
            return self.op("Div", self.op("Sub", numerator, remainder), divisor)
        if isinstance(dim, Polynomial):
            total = None
            for atoms, coefficient in dim.terms:
                term = self._dimension(atoms[0])
                for atom in atoms[1:]:
                    term = self.op("Mul", term, self._dimension(atom))
                if total is None:
                    total = term if coefficient == 1 else self.op("Mul", term, self.constant([coefficient], "int64"))
                elif abs(coefficient) == 1:
                    total = self.op("Add" if coefficient > 0 else "Sub", total, term)
                else:
                    term = self.op("Mul", term, self.constant([coefficient], "int64"))
                    total = self.op("Add", total, term)
            return self.op("Add", total, self.constant([dim.constant], "int64")) if dim.constant else total
        return self.constant([dim], "int64")

    def _axis(self, axis: Axis) -> Tensor:
        for tensor in self._inputs:
            if axis in tensor.shape:
                return self._shape_of(tensor, tensor.shape.index(axis))
        # As in P = (P + T) - T.
        direct = {dim for tensor in self._inputs for dim in tensor.shape if isinstance(dim, Axis)}
        for tensor in self._inputs:
            for index, dim in enumerate(tensor.shape):
                rest = add(dim, multiply(axis, -1))
                if axes_of(rest) <= direct and axes_of(dim) > axes_of(rest):
                    return self.op("Sub", self._shape_of(tensor, index), self._dimension(rest))
        raise NotImplementedError(f"no input has an axis of size {axis}")

    def _shape_of(self, tensor: Tensor, start: int, length: int = 1) -> Tensor:
        return self.op("Shape", tensor, start=start, end=start + length, shape=(length,), dtype="int64")

    def _shape_run(self, dims: Sequence[Dim | Tensor]) -> Tensor | None:
        """The longest start of `dims`, two axes at least, that stands side by side in an input's shape."""
        for length in range(len(dims), 1, -1):
            wanted = tuple(dims[:length])
            if any(not isinstance(dim, Expr) for dim in (wanted[0], wanted[-1])):
                continue
            for tensor in self._inputs:
                for start in range(tensor.rank - length + 1):
                    if tensor.shape[start : start + length] == wanted:
                        return self._shape_of(tensor, start, length)
        return None


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype for a Keras dtype name."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def onnx_dtype(dtype: str) -> onnx_ir.DataType:
    """ONNX' dtype for a Keras dtype name."""
    return onnx_ir.DataType.from_numpy(numpy_dtype(dtype))


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...]:
    """The shape that `shapes` broadcast to."""
    result: list[Dim] = [1] * max((len(shape) for shape in shapes), default=0)
    for shape in shapes:
        for axis, dim in enumerate(shape, len(result) - len(shape)):
            if dim != 1:
                result[axis] = dim
    return tuple(result)


def product(dims: Sequence[Dim]) -> Dim:
    """The product of `dims`."""
    result: Dim = 1
    for dim in dims:
        result = multiply(result, dim)
    return result


def _reshape_target(source: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[int] | None:
    """A constant for Reshape: 0 copies an axis, one axis may be -1; None where that cannot say it."""
    target = []
    for axis, dim in enumerate(shape):
        if not isinstance(dim, Expr):
            if dim == 0:
                return None
            target.append(dim)
        elif axis < len(source) and source[axis] == dim:
            target.append(0)
        else:
            target.append(-1)
    if target.count(-1) > 1:
        return None
    # -1 cannot be found where another axis is empty.
    if -1 in target and not all(_positive(dim) for dim, size in zip(shape, target, strict=True) if size != -1):
        return None
    return target


def _positive(dim: Dim) -> bool:
    """Whether `dim` is above 0 at all allowed sizes, as far as is easily seen."""
    if isinstance(dim, Axis):
        return dim.minimum > 0
    if isinstance(dim, Polynomial):
        if dim.constant < 0 or any(coefficient < 0 for _, coefficient in dim.terms):
            return False
        return dim.constant > 0 or any(all(_positive(atom) for atom in atoms) for atoms, _ in dim.terms)
    if isinstance(dim, Quotient):
        return False
    return dim > 0


def _dim_text(dim: Dim) -> int | str:
    return str(dim) if isinstance(dim, Expr) else int(dim)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _constant_name(array: np.ndarray, dtype: str) -> str:
    """A name that says what is held, so that equal graphs have equal names."""
    if array.size == 1:
        text = str(array.reshape(()).item())
    elif array.size <= 8 and array.dtype.kind in "iu":
        text = "_".join(str(number) for number in array.ravel())
    else:
        text = hashlib.sha256(array.tobytes()).hexdigest()[:12]
    return ".".join(["constant", dtype, "x".join(map(str, array.shape)) or "scalar", text])
