"""The encoder-only model, BERT and its kin, and the heads that are put on it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer._validation import check_ids, positive_integers, rates
from keras_transformer.layers import TokenEmbedding, TransformerEncoder
from keras_transformer.layers.blocks import NORMS, call_layer, check_norm
from keras_transformer.layers.feed_forward import activation_of
from keras_transformer.losses import NO_LABEL
from keras_transformer.metrics import MaskedAccuracy
from keras_transformer.models.base import (
    BaseModel,
    check_positions,
    class_accuracy,
    class_loss,
    keep_arguments,
    kept_arguments,
    position_layer,
    seeded,
)
from keras_transformer.models.presets import ENCODER


@keras.saving.register_keras_serializable(package="keras_transformer")
class Encoder(BaseModel):
    """Encoder-only Transformer (BERT: https://arxiv.org/abs/1810.04805).

    Called with ids (B, T), or with `{"token_ids", "token_types"}`, each (B, T), it gives a vector for each token,
    (B, T, d_model), which carries the implicit mask `token_ids != pad_id`. Padding is attended to by nobody, wherever
    it stands. The defaults are BERT's base model without token types; see also `presets`.

    Args:
        vocabulary_size: number of ids, V.
        num_layers: number of blocks.
        d_model: width.
        num_heads: attention heads.
        d_ff: inner width of the feed-forward layers.
        head_dim: width of one head; `d_model / num_heads` if None.
        num_kv_heads: key and value heads; `num_heads` if None.
        dropout: rate, for attention weights, every sub-layer's output and the embeddings.
        activation: of the feed-forward layers; a name or a serializable function.
        gated: whether the feed-forward layers are gated linear units.
        norm_first: normalise each sub-layer's input (and the stack's output) in place of its output.
        norm: `"layer"` or `"rms"`.
        norm_epsilon: of the norms.
        use_bias: whether projections and feed-forward layers have biases.
        sliding_window: tokens attend only to those less than so many places away; to all if None.
        position_encoding: `"learned"`, `"sinusoidal"`, or None.
        num_token_types: kinds of tokens (such as the first and the second of two sentences), each with an embedding of
            its own; 0 for none.
        embedding_norm: whether the sum of embeddings is normalised.
        max_length: the longest text; None for no limit (not with learned positions).
        pad_id: the id of padding; None if there is none.
        seed: of the initial weights. Dropout follows `keras.utils.set_random_seed`.
        **kwargs: `name`, `dtype` and `trainable`, as for any `keras.Model`.

    Raises:
        ValueError: an argument outside its range, or arguments that contradict each other.
    """

    presets = ENCODER

    def __init__(
        self,
        vocabulary_size: int,
        num_layers: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ff: int = 3072,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.1,
        activation: Any = "gelu",
        gated: bool = False,
        norm_first: bool = False,
        norm: str = "layer",
        norm_epsilon: float = 1e-12,
        use_bias: bool = True,
        sliding_window: int | None = None,
        position_encoding: str | None = "learned",
        num_token_types: int = 0,
        embedding_norm: bool = True,
        max_length: int | None = 512,
        pad_id: int | None = 0,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(vocabulary_size=vocabulary_size, d_model=d_model)
        rates(dropout=dropout)
        check_norm(norm, norm_epsilon)
        if num_token_types != 0:
            positive_integers(num_token_types=num_token_types)
        check_positions(position_encoding, ("learned", "sinusoidal", None), max_length)
        if pad_id is not None:
            check_ids(np.array([pad_id]), vocabulary_size, "pad_id")
        self.vocabulary_size = vocabulary_size
        self.d_model = d_model
        self.position_encoding = position_encoding
        self.num_token_types = num_token_types
        self.embedding_norm = embedding_norm
        self.max_length = max_length
        self.pad_id = pad_id
        self.seed = seed
        self.supports_masking = True

        common = {"dtype": self.dtype_policy, "trainable": self.trainable}
        with seeded(seed):
            self.embedding = TokenEmbedding(
                vocabulary_size, d_model, scale=False, mask_zero=False, name="embedding", **common
            )
            self.token_types = None
            if num_token_types:
                self.token_types = TokenEmbedding(
                    num_token_types, d_model, scale=False, mask_zero=False, name="token_types", **common
                )
            self.positions = position_layer(position_encoding, max_length, name="positions", **common)
            self.input_norm = None
            if embedding_norm:
                self.input_norm = NORMS[norm](epsilon=norm_epsilon, name="embedding_norm", **common)
            self.embedding_dropout = keras.layers.Dropout(dropout, name="embedding_dropout", **common)
            self.encoder = TransformerEncoder(
                num_layers,
                num_heads,
                d_ff,
                head_dim,
                num_kv_heads,
                dropout,
                activation,
                gated,
                norm_first,
                norm,
                norm_epsilon,
                use_bias,
                sliding_window,
                name="encoder",
                **common,
            )
            keep_arguments(self, self.encoder)
            self.build()

    def build(self, input_shape=None):
        """Creates every weight; no shape has to be given."""
        if self.built:
            return
        states = (None, None, self.d_model)
        for layer in (self.positions, self.input_norm, self.embedding_dropout, self.encoder):
            if layer is not None:
                layer.build(states)
        for layer in (self.embedding, self.token_types):
            if layer is not None:
                layer.build((None, None))

    @property
    def inputs(self):
        """What the model takes."""
        names = ["token_ids", "token_types"][: 1 + bool(self.num_token_types)]
        return [keras.KerasTensor((None, None), "int32", name=name) for name in names]

    def call(self, inputs, training=None):
        """Vectors (B, T, d_model) of ids (B, T), or of `{"token_ids", "token_types"}`, each (B, T)."""
        given = self._checked(inputs)
        token_ids = given["token_ids"]
        x = self.embedding(token_ids)
        if self.token_types is not None:
            x = ops.add(x, self.token_types(given.get("token_types", ops.zeros_like(token_ids))))
        if self.positions is not None:
            x = self.positions(x)
        if self.input_norm is not None:
            x = self.input_norm(x)
        (x,) = call_layer(self.embedding_dropout, x, training)
        return call_layer(self.encoder, x, training, padding_mask=self.mask(token_ids))[0]

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of each input."""
        sizes = {"token_ids": self.vocabulary_size}
        return {**sizes, "token_types": self.num_token_types} if self.num_token_types else sizes

    def mask(self, token_ids: Any) -> Any:
        """The padding mask (B, T) of ids (B, T), True for real tokens; None if there is no padding id."""
        return None if self.pad_id is None else ops.not_equal(token_ids, self.pad_id)

    def compute_mask(self, inputs, previous_mask=None):
        return self.mask(inputs["token_ids"] if isinstance(inputs, dict) else inputs)

    def compute_output_shape(self, input_shape):
        if isinstance(input_shape, dict):
            input_shape = input_shape["token_ids"]
        self._check_length(input_shape[1])
        return (*input_shape, self.d_model)

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "d_model": self.d_model,
            **kept_arguments(self.encoder),
            "position_encoding": self.position_encoding,
            "num_token_types": self.num_token_types,
            "embedding_norm": self.embedding_norm,
            "max_length": self.max_length,
            "pad_id": self.pad_id,
            "seed": self.seed,
        }

    def _checked(self, inputs):
        """The inputs by name, int32, whose ranks and (where known) lengths are right."""
        given = inputs if isinstance(inputs, dict) else {"token_ids": inputs}
        allowed = {"token_ids", "token_types"} if self.num_token_types else {"token_ids"}
        if "token_ids" not in given or not set(given) <= allowed:
            raise ValueError(f"Inputs must be ids, or a dict of {sorted(allowed)}. Received: {sorted(given)}")
        ids = self._as_ids(given)
        self._check_length(ids["token_ids"].shape[1])
        return ids


class _Head(BaseModel):
    """Something put on an `Encoder`, which it takes the inputs of."""

    def __init__(self, encoder: Encoder, **kwargs):
        super().__init__(**{"dtype": getattr(encoder, "dtype_policy", None), **kwargs})
        if not isinstance(encoder, Encoder):
            raise ValueError(f"`encoder` must be an `Encoder`. Received: encoder of type {type(encoder).__name__}")
        self.encoder = encoder
        self.supports_masking = True

    def _dense(self, units, name, activation=None):
        dense = keras.layers.Dense(
            units, activation=activation, dtype=self.dtype_policy, trainable=self.trainable, name=name
        )
        dense.build((None, self.encoder.d_model))
        return dense

    def build(self, input_shape=None):
        """Creates nothing: all weights exist."""

    @property
    def inputs(self):
        """What the model takes."""
        return self.encoder.inputs

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of each input, and of the labels where those are ids or classes."""
        labels = getattr(self, "num_classes", None)
        return self.encoder.vocabulary_sizes | ({} if labels is None else {"labels": labels})

    def enable_lora(self, rank: int, alpha: float | None = None) -> None:
        """As `BaseModel.enable_lora`, of the encoder; the weights that were put on it are trained as before."""
        self.encoder.enable_lora(rank, alpha)

    def get_config(self):
        return {**super().get_config(), "encoder": keras.saving.serialize_keras_object(self.encoder)}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "encoder": keras.saving.deserialize_keras_object(config["encoder"])})


class _TokenHead(_Head):
    """A head that says something of each token."""

    def compute_mask(self, inputs, previous_mask=None):
        return self.encoder.compute_mask(inputs)

    def default_loss(self) -> Any:
        """Cross-entropy over the places whose label is not -100."""
        return class_loss(self.vocabulary_sizes["labels"])

    def default_metrics(self) -> Any:
        """Accuracy over the same places."""
        return [MaskedAccuracy(ignore_id=NO_LABEL)]


@keras.saving.register_keras_serializable(package="keras_transformer")
class MaskedLM(_TokenHead):
    """Says which token stood at each place: what an encoder is pre-trained by (BERT, section 3.1).

    It gives logits (B, T, V) by a dense layer, an activation, a norm and the encoder's own embedding, transposed, with
    a bias. `data.MaskedTexts` makes inputs and labels; a label of -100 does not count.

    Args:
        encoder: an `Encoder`.
        activation: of the dense layer.
        **kwargs: `name`, `dtype` and `trainable`.
    """

    def __init__(self, encoder: Encoder, activation: Any = "gelu", **kwargs):
        super().__init__(encoder, **kwargs)
        self.activation = activation_of(activation)
        self.hidden_dense = self._dense(encoder.d_model, "hidden", self.activation)
        self.norm = keras.layers.LayerNormalization(
            epsilon=encoder.encoder.norm_epsilon, dtype=self.dtype_policy, trainable=self.trainable, name="norm"
        )
        self.norm.build((None, None, encoder.d_model))
        self.bias = self.add_weight(shape=(encoder.vocabulary_size,), initializer="zeros", name="bias")
        self.built = True

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of each input, and of the labels."""
        return super().vocabulary_sizes | {"labels": self.encoder.vocabulary_size}

    def call(self, inputs, training=None):
        """Logits (B, T, V)."""
        (x,) = call_layer(self.encoder, inputs, training)
        logits = self.encoder.embedding(self.norm(self.hidden_dense(x)), reverse=True)
        return ops.add(logits, ops.cast(self.bias, logits.dtype))

    def compute_output_shape(self, input_shape):
        return (*self.encoder.compute_output_shape(input_shape)[:-1], self.encoder.vocabulary_size)

    def get_config(self):
        return {**super().get_config(), "activation": keras.activations.serialize(self.activation)}


@keras.saving.register_keras_serializable(package="keras_transformer")
class TokenClassifier(_TokenHead):
    """Says of which class each token is: logits (B, T, num_classes); a label of -100 does not count.

    Args:
        encoder: an `Encoder`.
        num_classes: number of classes.
        dropout: rate, before the last layer.
        **kwargs: `name`, `dtype` and `trainable`.
    """

    def __init__(self, encoder: Encoder, num_classes: int, dropout: float = 0.1, **kwargs):
        super().__init__(encoder, **kwargs)
        positive_integers(num_classes=num_classes)
        rates(dropout=dropout)
        self.num_classes = num_classes
        self.dropout = dropout
        self.output_dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="output_dropout")
        self.output_dense = self._dense(num_classes, "output")
        self.built = True

    def call(self, inputs, training=None):
        """Logits (B, T, num_classes)."""
        (x,) = call_layer(self.encoder, inputs, training)
        (x,) = call_layer(self.output_dropout, x, training)
        return self.output_dense(x)

    def compute_output_shape(self, input_shape):
        return (*self.encoder.compute_output_shape(input_shape)[:-1], self.num_classes)

    def get_config(self):
        return {**super().get_config(), "num_classes": self.num_classes, "dropout": self.dropout}


@keras.saving.register_keras_serializable(package="keras_transformer")
class SequenceClassifier(_Head):
    """Says of which class a whole text is: logits (B, num_classes).

    Args:
        encoder: an `Encoder`.
        num_classes: number of classes.
        pooling: what stands for the text: `"cls"`, its first token's vector, or `"mean"`, that of its real tokens.
        hidden_activation: of a dense layer of width d_model before the last, such as BERT's pooler has; None for no
            such layer.
        dropout: rate, before each dense layer.
        **kwargs: `name`, `dtype` and `trainable`.
    """

    def __init__(
        self,
        encoder: Encoder,
        num_classes: int,
        pooling: str = "cls",
        hidden_activation: Any = "tanh",
        dropout: float = 0.1,
        **kwargs,
    ):
        super().__init__(encoder, **kwargs)
        positive_integers(num_classes=num_classes)
        rates(dropout=dropout)
        check_pooling(pooling)
        self.num_classes = num_classes
        self.pooling = pooling
        self.hidden_activation = None if hidden_activation is None else activation_of(hidden_activation)
        self.dropout = dropout
        self.output_dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy, name="output_dropout")
        self.hidden_dense = None
        if hidden_activation is not None:
            self.hidden_dense = self._dense(encoder.d_model, "hidden", self.hidden_activation)
        self.output_dense = self._dense(num_classes, "output")
        self.built = True

    def call(self, inputs, training=None):
        """Logits (B, num_classes)."""
        (x,) = call_layer(self.encoder, inputs, training)
        x = pool(x, self.encoder.compute_mask(inputs), self.pooling)
        if self.hidden_dense is not None:
            x = self.hidden_dense(x)
        (x,) = call_layer(self.output_dropout, x, training)
        return self.output_dense(x)

    def compute_mask(self, inputs, previous_mask=None):
        """The result is no sequence."""
        return None

    def compute_output_shape(self, input_shape):
        return (self.encoder.compute_output_shape(input_shape)[0], self.num_classes)

    def default_loss(self) -> Any:
        """Cross-entropy; texts whose label is -100 do not count."""
        return class_loss(self.num_classes)

    def default_metrics(self) -> Any:
        """Accuracy over the same texts."""
        return class_accuracy()

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "pooling": self.pooling,
            "hidden_activation": None
            if self.hidden_activation is None
            else keras.activations.serialize(self.hidden_activation),
            "dropout": self.dropout,
        }


@keras.saving.register_keras_serializable(package="keras_transformer")
class SentenceEncoder(_Head):
    """A vector for a whole text, such that texts of like meaning are near (https://arxiv.org/abs/1908.10084).

    Args:
        encoder: an `Encoder`.
        pooling: `"mean"` of the real tokens' vectors, or `"cls"`, the first token's.
        normalize: whether vectors have length 1, so that their products are cosines.
        **kwargs: `name`, `dtype` and `trainable`.
    """

    def __init__(self, encoder: Encoder, pooling: str = "mean", normalize: bool = True, **kwargs):
        super().__init__(encoder, **kwargs)
        check_pooling(pooling)
        self.pooling = pooling
        self.normalize = normalize
        self.built = True

    def call(self, inputs, training=None):
        """Vectors (B, d_model)."""
        (x,) = call_layer(self.encoder, inputs, training)
        x = pool(x, self.encoder.compute_mask(inputs), self.pooling)
        if not self.normalize:
            return x
        # In float32, as squares of half precision overflow; bounded inside the root, whose gradient at 0 is infinite.
        wide = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        square = ops.sum(ops.square(wide), axis=-1, keepdims=True)
        return ops.cast(wide * ops.rsqrt(ops.maximum(square, 1e-24)), x.dtype)

    def compute_mask(self, inputs, previous_mask=None):
        """The result is no sequence."""
        return None

    def compute_output_shape(self, input_shape):
        return (self.encoder.compute_output_shape(input_shape)[0], self.encoder.d_model)

    def get_config(self):
        return {**super().get_config(), "pooling": self.pooling, "normalize": self.normalize}


def check_pooling(pooling: str) -> None:
    """Raises ValueError unless `pooling` is known."""
    if pooling not in ("cls", "mean"):
        raise ValueError(f"`pooling` must be 'cls' or 'mean'. Received: pooling={pooling!r}")


def pool(x: Any, mask: Any, pooling: str) -> Any:
    """One vector (B, D) of a sequence's (B, T, D).

    Args:
        x: (B, T, D).
        mask: boolean (B, T), True for those that count; None if all do. A row without any gives 0.
        pooling: `"cls"`, the first one, or `"mean"`.
    """
    if pooling == "cls":
        return x[:, 0]
    if mask is None:
        return ops.mean(x, axis=1)
    wide = keras.backend.result_type(x.dtype, "float32")
    weights = ops.expand_dims(ops.cast(mask, wide), -1)
    total = ops.sum(ops.cast(x, wide) * weights, axis=1)
    return ops.cast(total / ops.maximum(ops.sum(weights, axis=1), 1), x.dtype)
