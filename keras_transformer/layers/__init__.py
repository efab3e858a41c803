"""The Transformer's layers."""

from keras_transformer.layers.attention import CrossAttention, MultiHeadSelfAttention
from keras_transformer.layers.blocks import TransformerDecoderBlock, TransformerEncoderBlock
from keras_transformer.layers.embedding import (
    LearnedPositionalEncoding,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
)
from keras_transformer.layers.feed_forward import FeedForward
from keras_transformer.layers.masks import CausalMask
from keras_transformer.layers.self_attention import SelfAttention
from keras_transformer.layers.stacks import TransformerDecoder, TransformerEncoder

__all__ = [
    "CausalMask",
    "CrossAttention",
    "FeedForward",
    "LearnedPositionalEncoding",
    "MultiHeadSelfAttention",
    "SelfAttention",
    "SinusoidalPositionalEncoding",
    "TokenEmbedding",
    "TransformerDecoder",
    "TransformerDecoderBlock",
    "TransformerEncoder",
    "TransformerEncoderBlock",
]
