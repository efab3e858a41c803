"""The Transformer's layers."""

from keras_transformer.layers.attention import CrossAttention, MultiHeadSelfAttention
from keras_transformer.layers.blocks import (
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from keras_transformer.layers.embedding import SinusoidalPositionalEncoding, TokenEmbedding
from keras_transformer.layers.feed_forward import FeedForward
from keras_transformer.layers.masks import CausalMask

__all__ = [
    "CausalMask",
    "CrossAttention",
    "FeedForward",
    "MultiHeadSelfAttention",
    "SinusoidalPositionalEncoding",
    "TokenEmbedding",
    "TransformerDecoder",
    "TransformerDecoderBlock",
    "TransformerEncoder",
    "TransformerEncoderBlock",
]
