"""Rules for convolutions and pooling; ONNX has the channels first, Keras mostly last."""

from __future__ import annotations

import keras
from keras.src.ops import nn

from keras_transformer.export.builder import GraphBuilder, Tensor
from keras_transformer.export.dims import Expr
from keras_transformer.export.lowering.registry import register_lowering


@register_lowering(nn.Conv)
def _conv(g, node, inputs, kernel):
    dtype = node.outputs[0].dtype
    return _convolve(g, node, g.cast(inputs, dtype), g.cast(kernel, dtype))


@register_lowering(nn.DepthwiseConv)
def _depthwise_conv(g, node, inputs, kernel):
    dtype = node.outputs[0].dtype
    return _convolve(g, node, g.cast(inputs, dtype), _per_channel(g, g.cast(kernel, dtype)))


@register_lowering(nn.SeparableConv)
def _separable_conv(g, node, inputs, depthwise_kernel, pointwise_kernel):
    dtype = node.outputs[0].dtype
    middle = _convolve(g, node, g.cast(inputs, dtype), _per_channel(g, g.cast(depthwise_kernel, dtype)))
    return _convolve(g, node, middle, g.cast(pointwise_kernel, dtype), pointwise=True)


def _per_channel(g, kernel: Tensor) -> Tensor:
    """A kernel (*sizes, channels, multiplier) as one of as many groups (*sizes, 1, channels · multiplier)."""
    *sizes, channels, multiplier = kernel.shape
    return g.reshape(kernel, (*sizes, 1, channels * multiplier))


def _convolve(g: GraphBuilder, node, x: Tensor, kernel: Tensor, pointwise: bool = False) -> Tensor:
    *sizes, width, filters = kernel.shape
    rank = len(sizes)
    x = _channels_first(g, node, x)
    strides = [1] * rank if pointwise else _each(node.attributes["strides"], rank)
    dilations = [1] * rank if pointwise else _each(node.attributes["dilation_rate"], rank)
    kernel = g.transpose(kernel, (rank + 1, rank, *range(rank)))
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True)]
    padding = "valid" if pointwise else node.attributes["padding"]
    result = g.op(
        "Conv",
        x,
        kernel,
        strides=strides,
        dilations=dilations,
        group=x.shape[1] // width,
        **_padding(padding, x.shape[2:], extents, strides, dilations),
        shape=(x.shape[0], filters, *_spatial(node)),
    )
    return _channels_back(g, node, result)


@register_lowering(nn.MaxPool, nn.AveragePool)
def _pool(g, node, inputs):
    x = _channels_first(g, node, inputs)
    rank = x.rank - 2
    sizes = _each(node.attributes["pool_size"], rank)
    strides = sizes if node.attributes["strides"] is None else _each(node.attributes["strides"], rank)
    padding = node.attributes["padding"]
    result = g.op(
        "MaxPool" if node.kind is nn.MaxPool else "AveragePool",
        x,
        kernel_shape=sizes,
        strides=strides,
        **_padding(padding, x.shape[2:], sizes, strides, [1] * rank),
        shape=(*x.shape[:2], *_spatial(node)),
    )
    return _channels_back(g, node, result)


def _channels_first(g, node, x):
    return g.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1))) if _channels_last(node) else x


def _channels_back(g, node, x):
    return g.transpose(x, (0, *range(2, x.rank), 1)) if _channels_last(node) else x


def _channels_last(node) -> bool:
    return (node.attributes["data_format"] or keras.config.image_data_format()) == "channels_last"


def _each(number, rank: int) -> list[int]:
    return [number] * rank if isinstance(number, int) else list(number)


def _padding(padding, lengths, extents, strides, dilations) -> dict:
    """ONNX attributes for Keras' "same", which puts the odd entry last."""
    if padding == "valid":
        return {}
    if padding != "same":
        raise NotImplementedError(f"padding={padding!r} is not covered")
    totals = []
    for length, extent, stride in zip(lengths, extents, strides, strict=True):
        if stride == 1:
            totals.append(extent - 1)
        elif not isinstance(length, Expr):
            totals.append(max((-(-length // stride) - 1) * stride + extent - length, 0))
        elif all(dilation == 1 for dilation in dilations):
            return {"auto_pad": "SAME_UPPER"}
        else:
            raise NotImplementedError("strides and dilation over an axis of free length are not covered")
    return {"pads": [total // 2 for total in totals] + [total - total // 2 for total in totals]}


def _spatial(node) -> tuple:
    """The lengths of the result, as traced."""
    shape = node.outputs[0].shape
    return shape[1:-1] if _channels_last(node) else shape[2:]
