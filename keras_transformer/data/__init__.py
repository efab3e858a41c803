"""Batches for `model.fit`: sentence pairs, texts to continue, texts with tokens to guess."""

from keras_transformer.data.masked import MaskedTexts, mask_tokens
from keras_transformer.data.next_token import cut_text, next_token_labels, pack_texts
from keras_transformer.data.pairs import SentencePairs

__all__ = [
    "MaskedTexts",
    "SentencePairs",
    "cut_text",
    "mask_tokens",
    "next_token_labels",
    "pack_texts",
]
