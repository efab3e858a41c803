"""Lowering: one rule an operation, from a node of the traced graph to ONNX nodes."""

from keras_transformer.export.lowering import (  # noqa: F401
    attention,
    convolution,
    elementwise,
    linear,
    nn,
    shaping,
    sources,
)
from keras_transformer.export.lowering.registry import find_rule, lower, register_lowering

__all__ = ["find_rule", "lower", "register_lowering"]
