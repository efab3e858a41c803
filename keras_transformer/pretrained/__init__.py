"""Weights of published models, from a local folder in Hugging Face's layout."""

from keras_transformer.pretrained.checkpoint import Checkpoint
from keras_transformer.pretrained.loading import load, load_tokenizer, read_tokenizer

__all__ = ["Checkpoint", "load", "load_tokenizer", "read_tokenizer"]
