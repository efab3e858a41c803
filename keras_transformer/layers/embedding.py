"""Token embeddings, which also serve as tied output projection, and encodings of positions."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer._validation import check_length, positive_integers, positive_numbers, sequence_width
from keras_transformer.ops import positions as token_positions
from keras_transformer.ops import sinusoidal_encoding
from keras_transformer.ops.attention import agree


@keras.saving.register_keras_serializable(package="keras_transformer")
class TokenEmbedding(keras.layers.Layer):
    """Looks token ids up in a table, and turns vectors back into logits ("Attention Is All You Need", section 3.4).

    `embedding(token_ids)` maps (B, T) to (B, T, D), times `sqrt(d_model)` if `scale`. `embedding(x, reverse=True)`
    maps (…, D) to the logits (…, V) by the same table, unscaled.

    Args:
        vocabulary_size: number of token ids V.
        d_model: width D of the vectors.
        scale: whether to multiply the vectors by `sqrt(d_model)`.
        mask_zero: whether id 0 is padding: the output then carries the implicit mask `token_ids != 0`.
        embeddings_initializer: initializer of the table; normal with a deviation of `d_model ** -0.5` if None, so
            that scaled vectors and logits have unit variance.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        vocabulary_size: int,
        d_model: int,
        scale: bool = True,
        mask_zero: bool = True,
        embeddings_initializer: Any = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(vocabulary_size=vocabulary_size, d_model=d_model)
        self.supports_masking = True
        self.vocabulary_size = vocabulary_size
        self.d_model = d_model
        self.scale = scale
        self.mask_zero = mask_zero
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)

    def build(self, input_shape=None):
        self.embeddings = self.add_weight(
            shape=(self.vocabulary_size, self.d_model),
            initializer=self.embeddings_initializer or keras.initializers.RandomNormal(stddev=self.d_model**-0.5),
            name="embeddings",
        )

    def __call__(self, x: Any, reverse: bool = False, **kwargs) -> Any:
        """Calls the layer; ids that come as floats are cast to int32 first.

        Keras rebuilds a saved model by calling it on floats. They are cast here and not in `call`, because Keras rounds
        floats to the compute dtype in between, and makes the mask from what it was given.
        """
        if not reverse and "float" in keras.backend.standardize_dtype(getattr(x, "dtype", "int32")):
            x = ops.cast(x, "int32")
        return super().__call__(x, reverse=reverse, **kwargs)

    def call(self, x: Any, reverse: bool = False) -> Any:
        """Embeds token ids, or projects vectors to logits.

        Args:
            x: ids (B, T), integers, or floats that are cast to such; or with `reverse` vectors (…, D).
            reverse: whether to project.

        Raises:
            ValueError: if ids are booleans, or vectors are not of width D.
        """
        if reverse:
            if not agree(x.shape[-1], self.d_model):
                raise ValueError(
                    f"`x` must have the shape (…, {self.d_model}) to be projected. Received: x.shape={tuple(x.shape)}"
                )
            return ops.matmul(x, ops.transpose(self.embeddings))
        dtype = keras.backend.standardize_dtype(x.dtype)
        if "int" not in dtype:
            raise ValueError(f"Token ids must be integers. Received: dtype {dtype} of shape {tuple(x.shape)}")
        if dtype not in ("int32", "int64"):
            x = ops.cast(x, "int32")  # TensorFlow looks nothing up by narrower ones
        vectors = ops.take(self.embeddings, x, axis=0)
        return ops.multiply(vectors, self.d_model**0.5) if self.scale else vectors

    def compute_output_spec(self, x, reverse=False):
        shape = (*x.shape[:-1], self.vocabulary_size) if reverse else (*x.shape, self.d_model)
        return keras.KerasTensor(shape, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.d_model)

    def compute_mask(self, inputs, previous_mask=None):
        """`token_ids != 0` for ids, if `mask_zero`; logits keep the mask of the vectors."""
        if "int" not in keras.backend.standardize_dtype(inputs.dtype):
            return previous_mask
        return ops.not_equal(inputs, 0) if self.mask_zero else None

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "d_model": self.d_model,
            "scale": self.scale,
            "mask_zero": self.mask_zero,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer)
            if self.embeddings_initializer
            else None,
        }


class _PositionalEncoding(keras.layers.Layer):
    """Adds to each vector what stands for its position."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x: Any, positions: Any = None) -> Any:
        """Adds the encoding.

        Args:
            x: (B, T, D).
            positions: integers (B|1, T), not negative; 0 … T-1 if None.

        Raises:
            ValueError: if `x` or `positions` are of another rank, or `positions` are not integers or do not fit `x`.
        """
        self._check(x, positions)
        return ops.add(x, ops.cast(self._encoding(x, positions), x.dtype))

    def _encoding(self, x, positions):
        """The encoding (B|1, T, D) of `positions`, or of 0 … T-1, for `x` (B, T, D)."""
        raise NotImplementedError

    def compute_output_spec(self, x, positions=None):
        self._check(x, positions)
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def _check(self, x, positions):
        sequence_width(x.shape)
        if positions is None:
            return
        shape = tuple(positions.shape)
        if (
            len(shape) != 2
            or "int" not in keras.backend.standardize_dtype(positions.dtype)
            or not (agree(shape[0], x.shape[0]) or shape[0] == 1)
            or not agree(shape[1], x.shape[1])
        ):
            raise ValueError(
                f"`positions` must be integers of shape (B|1, T), for x.shape={tuple(x.shape)}. "
                f"Received: positions.shape={shape}, positions.dtype={positions.dtype}"
            )

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)


@keras.saving.register_keras_serializable(package="keras_transformer")
class SinusoidalPositionalEncoding(_PositionalEncoding):
    """Adds the sinusoidal encoding of positions ("Attention Is All You Need", section 3.5).

    There is no table and no longest length; the encoding is computed in float32 whatever the dtype policy, and cast
    once.

    Args:
        max_wavelength: the base of the geometric progression of wavelengths.
        interleaved: whether sines and cosines alternate, as in the paper; otherwise all sines come first, then the
            cosines, as in Marian's models.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(self, max_wavelength: float = 10000, interleaved: bool = True, **kwargs):
        super().__init__(**kwargs)
        positive_numbers(max_wavelength=max_wavelength)
        self.max_wavelength = max_wavelength
        self.interleaved = interleaved

    def _encoding(self, x, positions):
        if positions is None:
            positions = token_positions(ops.shape(x)[1])
        return sinusoidal_encoding(positions, x.shape[-1], self.max_wavelength, self.interleaved)

    def get_config(self):
        return {**super().get_config(), "max_wavelength": self.max_wavelength, "interleaved": self.interleaved}


@keras.saving.register_keras_serializable(package="keras_transformer")
class LearnedPositionalEncoding(_PositionalEncoding):
    """Adds a learned vector for each position, as BERT and GPT-2 do.

    Args:
        max_length: number of positions, the longest length.
        embeddings_initializer: initializer of the table (max_length, D).
        **kwargs: `name`, `dtype`, `trainable`.

    `call` raises ValueError on a length above `max_length`. What `positions` hold cannot be checked: those from
    `max_length` on give an error or NaN on most backends.
    """

    def __init__(self, max_length: int, embeddings_initializer: Any = None, **kwargs):
        super().__init__(**kwargs)
        positive_integers(max_length=max_length)
        self.max_length = max_length
        self.embeddings_initializer = keras.initializers.get(
            keras.initializers.RandomNormal(stddev=0.02) if embeddings_initializer is None else embeddings_initializer
        )

    def build(self, input_shape):
        self.embeddings = self.add_weight(
            shape=(self.max_length, sequence_width(input_shape)),
            initializer=self.embeddings_initializer,
            name="embeddings",
        )

    def _encoding(self, x, positions):
        if positions is None:
            return ops.expand_dims(self.embeddings[: ops.shape(x)[1]], 0)
        return ops.take(self.embeddings, positions, axis=0)

    def _check(self, x, positions):
        super()._check(x, positions)
        if positions is None and x.shape[1] is not None:
            check_length(x.shape[1], self.max_length, "length")

    def get_config(self):
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
        }
