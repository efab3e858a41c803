"""The operations that the layers are made of; each is one node in a symbolic graph."""

from keras_transformer.ops.attention import Attention, attention
from keras_transformer.ops.cache import WriteCache, write_cache
from keras_transformer.ops.masks import CausalMask, SquareCausalMask, causal_mask, square_causal_mask
from keras_transformer.ops.positions import (
    SinusoidalEncoding,
    positions,
    sinusoidal_encoding,
    sinusoidal_table,
)

__all__ = [
    "Attention",
    "CausalMask",
    "SinusoidalEncoding",
    "SquareCausalMask",
    "WriteCache",
    "attention",
    "causal_mask",
    "positions",
    "sinusoidal_encoding",
    "sinusoidal_table",
    "square_causal_mask",
    "write_cache",
]
