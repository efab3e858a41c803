"""Self-attention with a single head and no output projection: the formula as a layer."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer._validation import positive_integers, sequence_width
from keras_transformer.layers.attention import fresh
from keras_transformer.layers.masks import check_attention_mask, check_padding_mask, combine_masks, padding_mask_of
from keras_transformer.ops import attention
from keras_transformer.ops.masks import as_causal


@keras.saving.register_keras_serializable(package="keras_transformer")
class SelfAttention(keras.layers.Layer):
    """Scaled dot-product attention of a sequence to itself ("Attention Is All You Need", section 3.2.1).

    `softmax(x W_q (x W_k)ᵀ / sqrt(d_k)) x W_v`, with the weights beside the output: for learning and for looking at.
    Models are made of `MultiHeadSelfAttention`.

    Args:
        d_k: width of the queries and keys.
        d_v: width of the values, and so of the output; `d_k` if None.
        causal: positions attend to themselves and to what came before only.
        use_bias: whether the three projections have biases.
        kernel_initializer: initializer of the projections' kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        d_k: int,
        d_v: int | None = None,
        causal: bool = False,
        use_bias: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(d_k=d_k, **({} if d_v is None else {"d_v": d_v}))
        self.supports_masking = True
        self.d_k = d_k
        self.d_v = d_v
        self.causal = causal
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, x_shape):
        sequence_width(x_shape)
        self.query_dense = self._dense("query", self.d_k, x_shape)
        self.key_dense = self._dense("key", self.d_k, x_shape)
        self.value_dense = self._dense("value", self.d_v or self.d_k, x_shape)

    def _dense(self, name, units, input_shape):
        initializer = fresh(self.kernel_initializer)
        dense = keras.layers.Dense(
            units,
            use_bias=self.use_bias,
            kernel_initializer=initializer,
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
        )
        dense.build(input_shape)
        return dense

    def call(self, x: Any, padding_mask: Any = None, attention_mask: Any = None, mask: Any = None, x_mask: Any = None):
        """Attends.

        Args:
            x: (B, T, D).
            padding_mask: boolean or integer (B, T), True for real tokens. It wins over the implicit mask of `x`.
            attention_mask: boolean or integer (B|1, T|1, T), True = may attend.
            mask: the implicit mask, filled in by Keras.
            x_mask: the implicit mask, filled in by Keras where more than one tensor is given.

        Returns:
            The pair (output (B, T, d_v), weights (B, T, T)); both are 0 for a position that may attend to none.

        Raises:
            ValueError: on masks of wrong rank or dtype, or shapes that do not fit.
        """
        self._check(x, padding_mask, attention_mask)
        attention_mask, square = as_causal(attention_mask)
        mask = combine_masks(padding_mask_of(padding_mask, mask, x_mask), attention_mask)
        query, key, value = (
            ops.expand_dims(dense(x), 2) for dense in (self.query_dense, self.key_dense, self.value_dense)
        )
        output, weights = attention(query, key, value, mask, self.causal or square, return_weights=True)
        return ops.squeeze(output, 2), ops.squeeze(weights, 1)

    def compute_output_spec(self, x, padding_mask=None, attention_mask=None, mask=None, x_mask=None):
        self._check(x, padding_mask, attention_mask)
        return tuple(keras.KerasTensor(shape, self.compute_dtype) for shape in self.compute_output_shape(x.shape))

    def compute_output_shape(self, x_shape):
        batch, length, _ = x_shape
        return (batch, length, self.d_v or self.d_k), (batch, length, length)

    def _check(self, x, padding_mask, attention_mask):
        sequence_width(x.shape)
        batch, length, _ = x.shape
        check_padding_mask(padding_mask, batch, length)
        check_attention_mask(attention_mask, (batch, 1, length, length))

    def get_config(self):
        return {
            **super().get_config(),
            "d_k": self.d_k,
            "d_v": self.d_v,
            "causal": self.causal,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
