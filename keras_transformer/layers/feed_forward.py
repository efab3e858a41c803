"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Any

import keras

from keras_transformer._validation import positive_integers
from keras_transformer.layers.attention import fresh


@keras.saving.register_keras_serializable(package="keras_transformer")
class FeedForward(keras.layers.Layer):
    """Two dense layers, applied to each position alike ("Attention Is All You Need", eq. 2).

    Input and output are (…, D).

    Args:
        d_ff: width of the inner layer.
        activation: activation of the inner layer.
        kernel_initializer: initializer of both kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        d_ff: int,
        activation: Any = "relu",
        kernel_initializer: Any = "glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(d_ff=d_ff)
        self.supports_masking = True
        self.d_ff = d_ff
        self.activation = keras.activations.get(activation)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape):
        self.inner_dense = self._dense("inner", self.d_ff, self.activation, input_shape)
        inner_shape = (*input_shape[:-1], self.d_ff)
        self.output_dense = self._dense("output", input_shape[-1], None, inner_shape)

    def _dense(self, name, units, activation, input_shape):
        dense = keras.layers.Dense(
            units,
            activation=activation,
            kernel_initializer=fresh(self.kernel_initializer),
            dtype=self.dtype_policy,
            name=name,
        )
        dense.build(input_shape)
        return dense

    def call(self, x: Any) -> Any:
        """Maps (…, D) to (…, D)."""
        return self.output_dense(self.inner_dense(x))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "d_ff": self.d_ff,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
