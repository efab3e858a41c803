"""Rules for convolutions and pooling; ONNX has the channels first, Keras mostly last."""

from __future__ import annotations

import keras
from keras.src.ops import image, nn

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


@register_lowering(nn.ConvTranspose)
def _conv_transpose(g, node, inputs, kernel):
    dtype = node.outputs[0].dtype
    x, kernel = _channels_first(g, node, g.cast(inputs, dtype)), g.cast(kernel, dtype)
    *sizes, filters, _ = kernel.shape
    rank = len(sizes)
    if node.attributes["output_padding"] is not None:
        raise NotImplementedError("output_padding is not covered")
    strides, dilations = (_each(node.attributes[name], rank) for name in ("strides", "dilation_rate"))
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True)]
    # By how much the result of all products is longer than `strides` times the input; below 0, zeros follow.
    surplus = [extent - stride for extent, stride in zip(extents, strides, strict=True)]
    cut = [max(n, 0) if node.attributes["padding"] == "same" else 0 for n in surplus]
    result = g.op(
        "ConvTranspose",
        x,
        g.transpose(kernel, (rank + 1, rank, *range(rank))),
        strides=strides,
        dilations=dilations,
        pads=[n // 2 for n in cut] + [n - n // 2 for n in cut],
        output_padding=[max(-n, 0) for n in surplus],
        shape=(x.shape[0], filters, *_spatial(node)),
    )
    return _channels_back(g, node, result)


@register_lowering(image.Resize)
def _resize(g, node, images):
    attributes = node.attributes
    if attributes["antialias"] or attributes["crop_to_aspect_ratio"] or attributes["pad_to_aspect_ratio"]:
        raise NotImplementedError("antialias, crop_to_aspect_ratio and pad_to_aspect_ratio are not covered")
    if attributes["interpolation"] not in _INTERPOLATIONS or not images.dtype.startswith("float"):
        raise NotImplementedError(f"{attributes['interpolation']} interpolation of {images.dtype} is not covered")
    x = g.unsqueeze(images, [0]) if images.rank == 3 else images
    x = _channels_first(g, node, x)
    shape = (*x.shape[:2], *attributes["size"])
    how = _INTERPOLATIONS[attributes["interpolation"]]
    sizes = g.shape_tensor(shape)
    x = g.op("Resize", x, None, None, sizes, coordinate_transformation_mode="half_pixel", **how, shape=shape)
    x = _channels_back(g, node, x)
    return g.squeeze(x, [0]) if images.rank == 3 else x


_INTERPOLATIONS = {
    "nearest": {"mode": "nearest", "nearest_mode": "round_prefer_ceil"},
    "bilinear": {"mode": "linear"},
}


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
