"""From a folder to a model: which family it is of, and every tensor to its place."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import keras
import numpy as np

from keras_transformer.pretrained.checkpoint import Checkpoint
from keras_transformer.pretrained.decoders import bart, gpt2, llama, marian, qwen2
from keras_transformer.pretrained.encoders import bert, distilbert, roberta, vit
from keras_transformer.pretrained.parts import Part

# By `model_type`: a function from a `Checkpoint` and arguments to the model, its parts, and the names to be ignored.
FAMILIES = {
    "bart": bart,
    "bert": bert,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "llama": llama,
    "marian": marian,
    "mistral": llama,
    "qwen2": qwen2,
    "roberta": roberta,
    "vit": vit,
}


def load(directory: str | os.PathLike, dtype: Any = None, **arguments: Any) -> keras.Model:
    """A model with the weights of a local folder in Hugging Face's layout: `config.json` and safetensors.

    The class follows from the folder: `models.Encoder` and its heads (BERT, RoBERTa, DistilBERT, and what has their
    shape), `models.SentenceEncoder` if the folder is one of sentence-transformers, `models.CausalLM` (GPT-2, Llama,
    Mistral, Qwen2), `models.Transformer` (BART, Marian), `models.VisionTransformer` (ViT). Every tensor of the folder
    has to find its place, and every weight of the model its tensor.

    Args:
        directory: the folder. Nothing is downloaded, nothing is unpickled.
        dtype: dtype policy of the model; Keras' own if None. The weights' dtype in the file plays no part.
        **arguments: constructor arguments that win over what the configuration says, such as `dropout=0.0`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a family, an activation or a setting that is not supported; a tensor that is missing, is left over,
            or has another shape (the message names it).
    """
    checkpoint = Checkpoint(directory)
    kind = checkpoint.setting("model_type", kind=str)
    if kind not in FAMILIES:
        raise ValueError(
            f"{checkpoint.directory / 'config.json'} must be of a `model_type` of {sorted(FAMILIES)}. "
            f"Received: model_type={kind!r}"
        )
    model, parts, ignored = FAMILIES[kind](checkpoint, {"dtype": dtype, **arguments})
    _fill(model, parts, checkpoint)
    checkpoint.check_all_used(ignored)
    return model


def load_tokenizer(directory: str | os.PathLike) -> Any:
    """The `tokenizers.Tokenizer` of the folder's `tokenizer.json`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no tokenizer.
    """
    path = pathlib.Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} holds no tokenizer.json.")
    return read_tokenizer(path)


def read_tokenizer(path: str | os.PathLike) -> Any:
    """The `tokenizers.Tokenizer` of a file; raises as `load_tokenizer`."""
    import tokenizers

    path = pathlib.Path(path)
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises bare Exception for a malformed file
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _fill(model, parts: list[Part], checkpoint):
    """Assigns every weight of the model."""
    missing = {id(weight): weight for weight in model.weights if weight.name != "seed_generator_state"}
    for part in parts:
        for weight, key, read in part.weights():
            array = read(checkpoint)
            if tuple(array.shape) != tuple(weight.shape):
                raise ValueError(
                    f"Tensor {key!r} of {checkpoint.directory} does not fit {weight.path}, of shape "
                    f"{tuple(weight.shape)}. Received: shape {tuple(array.shape)} (as stored: "
                    f"{tuple(checkpoint.take(key).shape)})"
                )
            weight.assign(np.asarray(array, "float32"))
            missing.pop(id(weight), None)
    if missing:
        raise ValueError(
            f"Nothing in {checkpoint.directory} is loaded into {[weight.path for weight in missing.values()]}."
        )
