"""Which tensor of a folder is which weight of a model, whatever the family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

# What published configurations call their activations.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer, or a weight, and where its tensors are.

    Attributes:
        target: a dense layer, a norm, an embedding, or a single weight.
        key: the name of its tensors up to `.weight` and `.bias`; of a single weight the whole name.
        stored: how a kernel is stored: `"out_in"`, as torch's Linear has it, or `"in_out"`.
        share: (i, n): the i-th of n equal parts of what is stored, along the outputs.
        change: applied to a stored weight (not to a bias).
        biased: whether there has to be a bias where the layer has one; otherwise one that is not there is zero.
    """

    target: Any
    key: str
    stored: str = "out_in"
    share: tuple[int, int] = (0, 1)
    change: Callable[[np.ndarray], np.ndarray] | None = None
    biased: bool = True

    def weights(self) -> Iterator[tuple[Any, str, Callable]]:
        """Each weight with its tensor's name and a function that reads it from a `Checkpoint`."""
        if not isinstance(self.target, keras.Layer):
            yield self.target, self.key, lambda checkpoint: self._changed(checkpoint.take(self.key))
            return
        for weight in self.target.weights:
            key = f"{self.key}.{'bias' if weight.name in ('bias', 'beta') else 'weight'}"
            yield weight, key, lambda checkpoint, key=key: self._read(checkpoint, key)

    def _read(self, checkpoint, key):
        if key.endswith(".bias") and not self.biased and key not in checkpoint:
            return np.zeros(self.target.units, "float32")
        array = checkpoint.take(key)
        if key.endswith(".bias"):
            return np.split(array, self.share[1])[self.share[0]]
        array = self._changed(array)
        if isinstance(self.target, keras.layers.Dense):
            array = array.T if self.stored == "out_in" else array
            array = np.split(array, self.share[1], axis=1)[self.share[0]]
        return array

    def _changed(self, array):
        return array if self.change is None else self.change(array)


def activation(checkpoint, *names: str) -> str:
    """The activation that the configuration names.

    Raises:
        ValueError: an unknown one.
    """
    name = checkpoint.setting(*names, kind=str)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{names[0]!r} must be one of {sorted(ACTIVATIONS)}. "
            f"Received: {names[0]}={name!r} in {checkpoint.directory / 'config.json'}"
        )
    return ACTIVATIONS[name]


def architecture(checkpoint) -> str:
    """What the weights were saved with: `"ForMaskedLM"` and the like; an empty string for the base model."""
    names = checkpoint.setting("architectures", default=[], kind=list)
    found = re.search(r"For[A-Z].*", str(names[0])) if names else None
    return found[0] if found else ""


def block_parts(block, base: str, names: dict[str, str], **options: Any) -> list[Part]:
    """The parts of an encoder's or decoder's block, by the names of a family."""
    attention, feed_forward = block.self_attention, block.feed_forward
    layers = {
        "query": attention.query_dense,
        "key": attention.key_dense,
        "value": attention.value_dense,
        "output": attention.output_dense,
        "attention_norm": block.self_attention_norm,
        "gate": feed_forward.gate_dense,
        "inner": feed_forward.inner_dense,
        "outer": feed_forward.output_dense,
        "norm": block.feed_forward_norm,
    }
    if block.cross_attention is not None:
        cross = block.cross_attention
        layers |= {
            "cross_query": cross.query_dense,
            "cross_key": cross.key_dense,
            "cross_value": cross.value_dense,
            "cross_output": cross.output_dense,
            "cross_norm": block.cross_attention_norm,
        }
    return [Part(layer, f"{base}.{names[name]}", **options) for name, layer in layers.items() if layer is not None]


def prefix(checkpoint, name, key):
    """What stands before the names of the base model's tensors: nothing, where it was saved by itself."""
    return "" if key in checkpoint else f"{name}."


def output_parts(model) -> list[Part]:
    """The output projection of a language model, where it has one of its own."""
    return [] if model.output_projection is None else [Part(model.output_projection, "lm_head")]
