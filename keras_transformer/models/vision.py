"""The Vision Transformer: an encoder over the patches of an image."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer._validation import positive_integers, rates
from keras_transformer.layers import LearnedPositionalEncoding, TransformerEncoder
from keras_transformer.layers.blocks import call_layer
from keras_transformer.models.base import (
    BaseModel,
    class_accuracy,
    class_loss,
    keep_arguments,
    kept_arguments,
    seeded,
)
from keras_transformer.models.encoder import check_pooling, pool
from keras_transformer.models.presets import VISION


@keras.saving.register_keras_serializable(package="keras_transformer")
class VisionTransformer(BaseModel):
    """Vision Transformer (https://arxiv.org/abs/2010.11929).

    Called with images (B, height, width, channels) it gives logits (B, num_classes), or with `num_classes=None` the
    vectors (B, patches, d_model), the class token's first if there is one. The defaults are the base model for images
    of 224 × 224 in patches of 16 × 16.

    Args:
        num_classes: number of classes; None for the vectors themselves.
        image_size: height and width of the images, in pixels, or one number for both.
        patch_size: height and width of a patch, or one number for both; must divide the image's.
        channels: of the images.
        num_layers: number of blocks.
        d_model: width.
        num_heads: attention heads.
        d_ff: inner width of the feed-forward layers.
        head_dim: width of one head; `d_model / num_heads` if None.
        num_kv_heads: key and value heads; `num_heads` if None.
        dropout: rate, for attention weights, every sub-layer's output and the embedded patches.
        activation: of the feed-forward layers; a name or a serializable function.
        gated: whether the feed-forward layers are gated linear units.
        norm_first: normalise each sub-layer's input (and the stack's output) in place of its output.
        norm: `"layer"` or `"rms"`.
        norm_epsilon: of the norms.
        use_bias: whether projections and feed-forward layers have biases.
        pooling: what stands for the image: `"cls"`, the vector of a class token that is put before the patches, or
            `"mean"` of the patches' vectors; there is no class token then.
        seed: of the initial weights. Dropout follows `keras.utils.set_random_seed`.
        **kwargs: `name`, `dtype` and `trainable`, as for any `keras.Model`.

    Raises:
        ValueError: an argument outside its range, or a patch that does not divide the image.
    """

    presets = VISION

    def __init__(
        self,
        num_classes: int | None = 1000,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        channels: int = 3,
        num_layers: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_ff: int = 3072,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.1,
        activation: Any = "gelu",
        gated: bool = False,
        norm_first: bool = True,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        use_bias: bool = True,
        pooling: str = "cls",
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if num_classes is not None:
            positive_integers(num_classes=num_classes)
        positive_integers(channels=channels, d_model=d_model)
        rates(dropout=dropout)
        check_pooling(pooling)
        self.num_classes = num_classes
        self.image_size = _pair("image_size", image_size)
        self.patch_size = _pair("patch_size", patch_size)
        self.grid = tuple(size // patch for size, patch in zip(self.image_size, self.patch_size, strict=True))
        if any(size % patch for size, patch in zip(self.image_size, self.patch_size, strict=True)):
            raise ValueError(
                "`patch_size` must divide `image_size`. "
                f"Received: image_size={self.image_size}, patch_size={self.patch_size}"
            )
        self.channels = channels
        self.d_model = d_model
        self.pooling = pooling
        self.seed = seed

        common = {"dtype": self.dtype_policy, "trainable": self.trainable}
        with seeded(seed):
            self.patch_embedding = keras.layers.Dense(d_model, name="patch_embedding", **common)
            self.class_token = None
            if pooling == "cls":
                self.class_token = self.add_weight(
                    shape=(1, 1, d_model), initializer=keras.initializers.RandomNormal(stddev=0.02), name="class_token"
                )
            length = self.grid[0] * self.grid[1] + (pooling == "cls")
            self.positions = LearnedPositionalEncoding(length, name="positions", **common)
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
                name="encoder",
                **common,
            )
            keep_arguments(self, self.encoder)
            self.output_dense = None
            if num_classes is not None:
                self.output_dense = keras.layers.Dense(num_classes, name="output", **common)
            self.build()

    def build(self, input_shape=None):
        """Creates every weight; no shape has to be given."""
        if self.built:
            return
        height, width = self.patch_size
        self.patch_embedding.build((None, None, height * width * self.channels))
        states = (None, self.positions.max_length, self.d_model)
        for layer in (self.positions, self.embedding_dropout, self.encoder):
            layer.build(states)
        if self.output_dense is not None:
            self.output_dense.build((None, self.d_model))

    @property
    def inputs(self):
        """What the model takes."""
        return [keras.KerasTensor((None, *self.image_size, self.channels), "float32", name="images")]

    def call(self, inputs, training=None):
        """Logits (B, num_classes), or vectors (B, patches, d_model), of images (B, height, width, channels)."""
        if isinstance(inputs, dict):
            if set(inputs) != {"images"}:
                raise ValueError(f'Inputs must be images, or a dict of "images". Received: {sorted(inputs)}')
            inputs = inputs["images"]
        expected = (*self.image_size, self.channels)
        if tuple(inputs.shape[1:]) != expected:
            raise ValueError(
                f"Images must have the shape (batch, {', '.join(map(str, expected))}). "
                f"Received: inputs.shape={tuple(inputs.shape)}"
            )
        x = self.patch_embedding(self._patches(inputs))
        if self.class_token is not None:
            token = ops.cast(self.class_token, x.dtype)
            x = ops.concatenate([ops.broadcast_to(token, (ops.shape(x)[0], 1, self.d_model)), x], axis=1)
        x = self.positions(x)
        (x,) = call_layer(self.embedding_dropout, x, training)
        (x,) = call_layer(self.encoder, x, training)
        return x if self.output_dense is None else self.output_dense(pool(x, None, self.pooling))

    def _patches(self, images):
        """The patches of images, row by row: (B, patches, pixels · channels)."""
        rows, columns = self.grid
        height, width = self.patch_size
        x = ops.reshape(images, (-1, rows, height, columns, width, self.channels))
        x = ops.transpose(x, (0, 1, 3, 2, 4, 5))
        return ops.reshape(x, (-1, rows * columns, height * width * self.channels))

    def compute_output_shape(self, input_shape):
        input_shape = input_shape["images"] if isinstance(input_shape, dict) else input_shape
        if self.num_classes is None:
            return (input_shape[0], self.positions.max_length, self.d_model)
        return (input_shape[0], self.num_classes)

    def default_loss(self) -> Any:
        """Cross-entropy; images whose label is -100 do not count."""
        return None if self.num_classes is None else class_loss(self.num_classes)

    def default_metrics(self) -> Any:
        """Accuracy over the same images."""
        return None if self.num_classes is None else class_accuracy()

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of labels."""
        return {} if self.num_classes is None else {"labels": self.num_classes}

    def enable_lora(self, rank: int, alpha: float | None = None) -> None:
        """As `BaseModel.enable_lora`; the output layer, whose classes may be new, is trained as before."""
        super().enable_lora(rank, alpha)
        if self.output_dense is not None:
            self.output_dense.trainable = True

    def get_config(self):
        stack = kept_arguments(self.encoder)
        del stack["sliding_window"]  # an image has no use for it
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "channels": self.channels,
            "d_model": self.d_model,
            **stack,
            "pooling": self.pooling,
            "seed": self.seed,
        }


def _pair(name, value):
    pair = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"`{name}` must be one number or two. Received: {name}={value!r}")
    positive_integers(**{name: min(pair)} if all(isinstance(size, int) for size in pair) else {name: value})
    return pair
