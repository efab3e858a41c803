"""Whole models."""

from keras_transformer.models.causal_lm import CausalLM
from keras_transformer.models.encoder import (
    Encoder,
    MaskedLM,
    SentenceEncoder,
    SequenceClassifier,
    TokenClassifier,
)
from keras_transformer.models.transformer import Transformer
from keras_transformer.models.vision import VisionTransformer

__all__ = [
    "CausalLM",
    "Encoder",
    "MaskedLM",
    "SentenceEncoder",
    "SequenceClassifier",
    "TokenClassifier",
    "Transformer",
    "VisionTransformer",
]
