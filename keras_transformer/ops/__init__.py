"""The operations that the layers are made of; each is one node in a symbolic graph."""

from keras_transformer.ops.attention import Attention, attention
from keras_transformer.ops.cache import WriteCache, write_cache
from keras_transformer.ops.masks import CausalMask, SquareCausalMask, causal_mask, square_causal_mask, window_mask
from keras_transformer.ops.positions import (
    SinusoidalEncoding,
    positions,
    sinusoidal_encoding,
    sinusoidal_table,
)
from keras_transformer.ops.rotary import RotaryEncoding, Rotate, rotary_encoding, rotary_frequencies, rotate

__all__ = [
    "Attention",
    "CausalMask",
    "RotaryEncoding",
    "Rotate",
    "SinusoidalEncoding",
    "SquareCausalMask",
    "WriteCache",
    "attention",
    "causal_mask",
    "positions",
    "rotary_encoding",
    "rotary_frequencies",
    "rotate",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "square_causal_mask",
    "window_mask",
    "write_cache",
]
