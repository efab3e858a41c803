"""Rules for products of matrices; every einsum becomes one MatMul or Mul, never an ONNX Einsum.

ONNX Runtime runs Einsum up to twice as slowly on CPUs, and no graph optimiser sees through it.
"""

from __future__ import annotations

import itertools

import numpy as np
from keras.src.ops import math as kmath
from keras.src.ops import numpy as knp

from keras_transformer.export.builder import GraphBuilder, Tensor, product
from keras_transformer.export.dims import Dim, Expr
from keras_transformer.export.lowering.attention import weighted_sum
from keras_transformer.export.lowering.elementwise import compute_dtype
from keras_transformer.export.lowering.registry import register_lowering
from keras_transformer.export.lowering.sources import steps


@register_lowering(knp.Matmul)
def _matmul(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    return _product(g, g.cast(x1, dtype), g.cast(x2, dtype))


def _product(g: GraphBuilder, left: Tensor, right: Tensor) -> Tensor:
    attended = weighted_sum(g, left, right)
    return g.matmul(left, right) if attended is None else attended


@register_lowering(knp.Einsum)
def _einsum(g, node, *operands, **kwargs):
    dtype = compute_dtype(node.outputs[0].dtype)
    return einsum(g, node.attributes["subscripts"], *(g.cast(operand, dtype) for operand in operands))


@register_lowering(knp.Dot)
def _dot(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    if 0 in (x1.rank, x2.rank):
        return g.op("Mul", x1, x2)
    return tensordot(g, x1, x2, [x1.rank - 1], [max(x2.rank - 2, 0)])


@register_lowering(knp.Inner)
def _inner(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    if 0 in (x1.rank, x2.rank):
        return g.op("Mul", x1, x2)
    return tensordot(g, x1, x2, [x1.rank - 1], [x2.rank - 1])


@register_lowering(knp.Vdot)
def _vdot(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    return g.matmul(*(g.reshape(g.cast(x, dtype), (product(x.shape),)) for x in (x1, x2)))


@register_lowering(knp.Outer)
def _outer(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    x1, x2 = g.cast(x1, dtype), g.cast(x2, dtype)
    return g.op("Mul", g.reshape(x1, (product(x1.shape), 1)), g.reshape(x2, (1, product(x2.shape))))


@register_lowering(knp.Tensordot)
def _tensordot(g, node, x1, x2):
    dtype = compute_dtype(node.outputs[0].dtype)
    axes = node.attributes["axes"]
    if isinstance(axes, int):
        first, second = list(range(x1.rank - axes, x1.rank)), list(range(axes))
    else:
        first, second = ([a] if isinstance(a, int) else list(a) for a in axes)
    return tensordot(g, g.cast(x1, dtype), g.cast(x2, dtype), first, second)


def tensordot(g: GraphBuilder, a: Tensor, b: Tensor, a_axes: list[int], b_axes: list[int]) -> Tensor:
    """The sum of products over pairs of axes."""
    labels = itertools.count()
    a_labels = [next(labels) for _ in a.shape]
    b_labels = [next(labels) for _ in b.shape]
    for a_axis, b_axis in zip(a_axes, b_axes, strict=True):
        b_labels[b_axis % b.rank] = a_labels[a_axis % a.rank]
    output = [label for label in (*a_labels, *b_labels) if (label in a_labels) != (label in b_labels)]
    return contract(g, a, a_labels, b, b_labels, output)


def einsum(g: GraphBuilder, subscripts: str, *operands: Tensor) -> Tensor:
    """Einstein summation of tensors of one dtype."""
    inputs, output = _labels(subscripts, [operand.rank for operand in operands])
    terms = list(zip(operands, inputs, strict=True))
    for _, labels in terms:
        if len(set(labels)) != len(labels):
            raise NotImplementedError(f"the einsum {subscripts!r} takes a diagonal")
    while len(terms) > 1:
        (a, a_labels), (b, b_labels), *rest = terms
        later = {label for _, labels in rest for label in labels} | set(output)
        kept = [label for label in dict.fromkeys((*a_labels, *b_labels)) if label in later]
        kept = output if not rest else kept
        terms = [(contract(g, a, a_labels, b, b_labels, kept), kept), *rest]
    ((result, labels),) = terms
    result, labels = _sum_out(g, result, labels, output)
    return _arrange(g, result, labels, output)


def contract(g: GraphBuilder, a: Tensor, a_labels: list, b: Tensor, b_labels: list, output: list) -> Tensor:
    """The two-operand einsum: axes with one label are multiplied, labels that `output` lacks are summed over."""
    a, a_labels = _sum_out(g, a, a_labels, {*b_labels, *output})
    b, b_labels = _sum_out(g, b, b_labels, {*a_labels, *output})
    summed = [label for label in a_labels if label in b_labels and label not in output]
    batch = [label for label in a_labels if label in b_labels and label in output]
    if not summed:
        labels = [label for label in output if label in a_labels or label in b_labels]
        return g.op("Mul", _spread(g, a, a_labels, labels), _spread(g, b, b_labels, labels))
    if a.array is not None and b.array is None:
        # The weight second: MatMul then takes all other axes of the data as they are.
        a, a_labels, b, b_labels = b, b_labels, a, a_labels
    a_free = [label for label in a_labels if label not in b_labels]
    b_free = [label for label in b_labels if label not in a_labels]
    batch = [label for label in output if label in batch]
    size: dict[object, Dim] = {}
    for label, dim in (*zip(a_labels, a.shape, strict=True), *zip(b_labels, b.shape, strict=True)):
        # Of broadcast axes the larger size counts.
        size[label] = dim if size.get(label, 1) == 1 else size[label]
    # What is summed over is as wide on both sides.
    a, b = (
        g.expand(x, [size[label] if label in summed else dim for label, dim in zip(labels, x.shape, strict=True)])
        for x, labels in ((a, a_labels), (b, b_labels))
    )
    # The order of the free axes in the output decides which side stands left, so that no transpose follows.
    a_free.sort(key=output.index)
    b_free.sort(key=output.index)
    if b.array is None and a_free and b_free and output.index(b_free[-1]) < output.index(a_free[0]):
        a, a_labels, a_free, b, b_labels, b_free = b, b_labels, b_free, a, a_labels, a_free
    left = _arrange(g, a, a_labels, [*batch, *a_free, *summed])
    right = _arrange(g, b, b_labels, [*batch, *summed, *b_free])
    lead = len(batch)
    width = product([size[label] for label in summed])
    # Without batch axes the left side may keep its free axes: the right side is a plain matrix.
    a_shape = [size[label] for label in a_free] if not batch else [product([size[label] for label in a_free])]
    left = g.reshape(left, [*left.shape[:lead], *a_shape, width])
    right = g.reshape(right, [*right.shape[:lead], width, product([size[label] for label in b_free])])
    result = _product(g, left, right)
    labels = [*batch, *a_free, *b_free]
    result = g.reshape(result, [size[label] for label in labels])
    return _arrange(g, result, labels, output)


_FOURIER = {kmath.FFT: 1, kmath.FFT2: 2, kmath.IFFT2: 2}


@register_lowering(*_FOURIER)
def _fourier(g, node, x):
    dtype = node.outputs[0].dtype
    real, imaginary = (g.cast(part, dtype) for part in x)
    for axis in range(real.rank - 1, real.rank - 1 - _FOURIER[node.kind], -1):
        real, imaginary = _fourier_along(g, real, imaginary, axis, node.kind is kmath.IFFT2)
    return real, imaginary


def _fourier_along(g, real: Tensor, imaginary: Tensor | None, axis: int, inverse: bool) -> tuple[Tensor, Tensor]:
    """The discrete Fourier transform along one axis, the last or the one before, as products of matrices.

    ONNX Runtime's `DFT` is off by 1e-5 to 2e-4 of the largest entry where the length is no power of 2.
    """
    waves = _waves(g, real.shape[axis], real.dtype)

    def times(x, matrix):
        return g.matmul(x, matrix) if axis == x.rank - 1 else g.matmul(matrix, x)

    cosines, sines = waves
    if inverse:
        factor = g.op("Reciprocal", g.scalar(real.shape[axis], real.dtype))
        cosines, sines = g.op("Mul", cosines, factor), g.op("Neg", g.op("Mul", sines, factor))
    if _is_zero(g, imaginary):
        return times(real, cosines), g.op("Neg", times(real, sines))
    return (
        g.op("Add", times(real, cosines), times(imaginary, sines)),
        g.op("Sub", times(imaginary, cosines), times(real, sines)),
    )


def _waves(g, size: Dim, dtype: str) -> tuple[Tensor, Tensor]:
    """The cosine and sine of 2π·i·j/size as matrices, the turns reduced in integers to less than half of one."""
    if not isinstance(size, Expr):
        turns = np.outer(np.arange(size), np.arange(size)) % size / size
        return g.constant(np.cos(2 * np.pi * turns), dtype), g.constant(np.sin(2 * np.pi * turns), dtype)
    count, index = g.scalar(size, "int64"), steps(g, size)
    turns = g.op("Mod", g.op("Mul", g.unsqueeze(index, [1]), g.unsqueeze(index, [0])), count)
    turns = g.op("Div", g.cast(turns, dtype), g.cast(count, dtype))
    angle = g.op("Mul", g.op("Sub", turns, g.op("Round", turns)), g.scalar(2 * np.pi, dtype))
    return g.op("Cos", angle), g.op("Sin", angle)


def _is_zero(g, x: Tensor) -> bool:
    filled = g.producer(x, "Expand")
    array = x.array if filled is None else filled[0].array
    return array is not None and not array.any()


def _labels(subscripts: str, ranks: list[int]) -> tuple[list[list], list]:
    """Subscripts as lists of labels; the axes of an ellipsis are numbered from the back."""
    text, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = []
    for term, rank in zip(text.split(","), ranks, strict=True):
        before, dots, after = term.partition("...")
        hidden = range(len(before) + len(after) - rank, 0) if dots else ()
        inputs.append([*before, *hidden, *after])
    everything = list(itertools.chain.from_iterable(inputs))
    hidden = sorted({label for label in everything if isinstance(label, int)})
    if arrow:
        before, dots, after = output.partition("...")
        return inputs, [*before, *(hidden if dots else ()), *after]
    once = sorted(label for label in set(everything) if isinstance(label, str) and everything.count(label) == 1)
    return inputs, [*hidden, *once]


def _sum_out(g, x, labels, kept):
    axes = [axis for axis, label in enumerate(labels) if label not in kept]
    return g.reduce("ReduceSum", x, axes), [label for label in labels if label in kept]


def _arrange(g, x, labels, order):
    """`x` with its axes as in `order`."""
    return g.transpose(x, [labels.index(label) for label in order])


def _spread(g, x, labels, order):
    """`x` with its axes as in `order`, and axes of size 1 for the labels that it lacks."""
    x = _arrange(g, x, labels, [label for label in order if label in labels])
    return g.unsqueeze(x, [axis for axis, label in enumerate(order) if label not in labels])
