"""What all models share: named configurations, the loss that suits them, fine-tuning with few weights."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer._validation import check_length, positive_integers, positive_numbers
from keras_transformer.layers import (
    CrossAttention,
    LearnedPositionalEncoding,
    MultiHeadSelfAttention,
    SinusoidalPositionalEncoding,
)
from keras_transformer.losses import NO_LABEL, MaskedCrossentropy
from keras_transformer.metrics import MaskedAccuracy
from keras_transformer.ops import positions as token_positions
from keras_transformer.ops.attention import agree


class BaseModel(keras.Model):
    """A model whose weights all exist as soon as it does.

    Attributes:
        presets: arguments by the name of a published configuration.
        max_length: the longest text; None for no limit.
    """

    presets: dict[str, dict[str, Any]] = {}
    max_length: int | None = None
    _lora: tuple[int, float | None] | None = None

    @classmethod
    def from_preset(cls, name: str, **arguments: Any) -> BaseModel:
        """A model of a published configuration, with new weights.

        Args:
            name: one of `presets`.
            **arguments: further arguments, which win over those of the configuration.

        Raises:
            ValueError: an unknown name.
        """
        if name not in cls.presets:
            raise ValueError(f"`name` must be one of {sorted(cls.presets)}. Received: name={name!r}")
        return cls(**{**cls.presets[name], **arguments})

    def compile(self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any) -> None:
        """As `keras.Model.compile`; without a `loss`, the model's own loss and metrics are used.

        Args:
            optimizer: an optimizer, or its name.
            loss: a loss, or its name.
            metrics: list of metrics.
            **kwargs: the other arguments of `keras.Model.compile`.
        """
        if loss is None:
            loss = self.default_loss()
            metrics = self.default_metrics() if metrics is None else metrics
        super().compile(optimizer, loss=loss, metrics=metrics, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as a saved model was compiled; Keras leaves that to classes with a `compile` of their own."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of each input that holds such, and of the labels, as `callbacks.CheckIds` asks for them."""
        return {}

    def default_loss(self) -> Any:
        """The loss that `compile` takes if it is given none."""
        return None

    def default_metrics(self) -> Any:
        """The metrics that `compile` takes if it is given no loss."""
        return None

    def enable_lora(self, rank: int, alpha: float | None = None) -> None:
        """Freezes all weights, and adds low-rank ones to the query and value projections (LoRA, arXiv:2106.09685).

        Comes before `compile`, and once. The model's config holds it: a model that is saved and loaded has LoRA again,
        its low-rank weights and their optimizer's state among what is restored.

        Args:
            rank: of the added matrices.
            alpha: scale, of which alpha / rank multiplies what they add; `rank` if None.

        Raises:
            ValueError: `rank` is no positive integer, `alpha` no positive number, or LoRA is enabled already.
        """
        positive_integers(rank=rank)
        if alpha is not None:
            positive_numbers(alpha=alpha)
        if self._lora is not None:
            raise ValueError(
                f"LoRA can be enabled once only. Received: rank={rank}, where it is {self._lora[0]} already"
            )
        for variable in self._trainable_variables:  # its own, beside its layers'
            variable.trainable = False
        for layer in self._flatten_layers(include_self=False):
            if not layer._layers and not isinstance(layer, keras.Model):
                layer.trainable = False
        for layer in self._flatten_layers():
            if isinstance(layer, MultiHeadSelfAttention | CrossAttention):
                for dense in (layer.query_dense, layer.value_dense):
                    dense.trainable = True
                    dense.enable_lora(rank, lora_alpha=alpha)
                    if dense.bias is not None:
                        dense.bias.trainable = False
        self._lora = rank, alpha

    def get_config(self):
        config = super().get_config()
        return config if self._lora is None else {**config, "lora": list(self._lora)}

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        lora = config.pop("lora", None)
        model = super().from_config(config)
        if lora is not None:
            model.enable_lora(*lora)
        return model

    def _check_length(self, length, name="length"):
        """Raises ValueError on a length, if it is known, above `max_length`."""
        if self.max_length is not None and length is not None:
            check_length(length, self.max_length, name)

    def _as_ids(self, inputs, together=True):
        """Ids by name, each (B, T), as int32; all of one shape, where they belong together (`together`).

        Cast, not refused, as Keras' own Embedding does: Keras builds a loaded model by calling it on floats.
        """
        for name, ids in inputs.items():
            if len(ids.shape) != 2:
                raise ValueError(
                    f"`{name}` must be ids of shape (batch, length). Received: {name}.shape={tuple(ids.shape)}"
                )
        shapes = {name: tuple(ids.shape) for name, ids in inputs.items()}
        first = next(iter(shapes.values()))
        if together and not all(all(map(agree, shape, first)) for shape in shapes.values()):
            raise ValueError(f"Inputs must be of one shape (batch, length). Received: shapes {shapes}")
        return {name: ops.cast(ids, "int32") for name, ids in inputs.items()}


def check_positions(position_encoding: str | None, allowed: tuple[str | None, ...], max_length: int | None) -> None:
    """Raises ValueError unless the encoding is one of `allowed`, and has the table's length if it needs one."""
    if max_length is not None:
        positive_integers(max_length=max_length)
    if position_encoding not in allowed:
        raise ValueError(
            f"`position_encoding` must be one of {allowed}. Received: position_encoding={position_encoding!r}"
        )
    if position_encoding == "learned" and max_length is None:
        raise ValueError("`position_encoding='learned'` needs a `max_length`. Received: max_length=None")


def position_layer(position_encoding: str | None, max_length: int | None, **kwargs: Any) -> keras.Layer | None:
    """The layer that adds what stands for positions; None where nothing is added to the embeddings."""
    if position_encoding == "learned":
        return LearnedPositionalEncoding(max_length, **kwargs)
    if position_encoding in ("sinusoidal", "sinusoidal_halves"):
        return SinusoidalPositionalEncoding(interleaved=position_encoding == "sinusoidal", **kwargs)
    return None


def positions_of(length: Any, cache: Any, start: Any, positions: Any, attention_mask: Any) -> Any:
    """The positions of ids that are decoded: those that are given, or `start …` in a cache that is a buffer.

    Raises:
        ValueError: a cache that grows (no `start`) without positions or mask of its own, or `start` without a cache.
    """
    if cache is None and start is not None:
        raise ValueError("`start` needs a `cache` to write to. Received: cache=None")
    if cache is not None and start is None and (attention_mask is None or positions is None):
        raise ValueError(
            "A growing `cache` (no `start`) needs `attention_mask` and `positions`. Received: "
            f"attention_mask={attention_mask}, positions={positions}"
        )
    return token_positions(length, start) if positions is None and start is not None else positions


def class_loss(num_classes: int) -> keras.Loss:
    """Cross-entropy of classes; one that is -100 does not count, and another that there is not makes NaN, everywhere.

    Raises:
        ValueError: one class, of which the cross-entropy is 0 whatever the model says.
    """
    if num_classes == 1:
        raise ValueError(
            "`compile` without a `loss` needs 2 classes or more; give a loss, such as 'mse'. Received: num_classes=1"
        )
    return MaskedCrossentropy(label_smoothing=0.0, ignore_id=NO_LABEL)


def class_accuracy() -> list[keras.Metric]:
    """The share of right classes among those that count."""
    return [MaskedAccuracy(ignore_id=NO_LABEL, name="accuracy")]


@contextlib.contextmanager
def seeded(seed: int | None):
    """Makes initializers that have no seed of their own follow from `seed`, and leaves the global state alone.

    Raises:
        ValueError: a `seed` that is no integer.
    """
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
        raise ValueError(f"`seed` must be an integer or None. Received: seed={seed!r}")
    if seed is None:
        yield
        return
    # Where Keras takes a seed from, when none is given: what `keras.utils.set_random_seed` sets.
    state = random.getstate()
    random.seed(int(seed))
    try:
        yield
    finally:
        random.setstate(state)


def keep_arguments(model: BaseModel, stack: keras.Layer) -> None:
    """Makes the arguments that went to a model's stack as they are attributes of the model."""
    for name in _STACK_ARGUMENTS:
        setattr(model, name, getattr(stack, name))


def kept_arguments(stack: keras.Layer) -> dict[str, Any]:
    """The same arguments for the model's config."""
    config = stack.get_config()
    return {name: config[name] for name in _STACK_ARGUMENTS}


_STACK_ARGUMENTS = (
    "num_layers",
    "num_heads",
    "d_ff",
    "head_dim",
    "num_kv_heads",
    "dropout",
    "activation",
    "gated",
    "norm_first",
    "norm",
    "norm_epsilon",
    "use_bias",
    "sliding_window",
)
