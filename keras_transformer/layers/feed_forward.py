"""The position-wise feed-forward network."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer._validation import positive_integers
from keras_transformer.layers.attention import fresh


@keras.saving.register_keras_serializable(package="keras_transformer")
def gelu_tanh(x: Any) -> Any:
    """GELU by a tanh, `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))` (https://arxiv.org/abs/1606.08415, section 2).

    It differs from the exact one, which is called `"gelu"`, by up to 4.7e-4; GPT-2 was trained with it.
    """
    return keras.activations.gelu(x, approximate=True)


def activation_of(identifier: Any) -> Any:
    """The activation of a name (`"gelu_tanh"`, or one of Keras'), a function or its config."""
    return gelu_tanh if identifier == "gelu_tanh" else keras.activations.get(identifier)


@keras.saving.register_keras_serializable(package="keras_transformer")
class FeedForward(keras.layers.Layer):
    """Two dense layers, applied to each position alike ("Attention Is All You Need", eq. 2).

    Input and output are (…, D). `gated` makes it the gated linear unit of https://arxiv.org/abs/2002.05202: the inner
    layer, which then is linear, is multiplied by the activation of a third one. With `activation="silu"` that is
    SwiGLU, with `"gelu"` GEGLU.

    Args:
        d_ff: width of the inner layer.
        activation: activation of the inner layer, or of its gate: a name, `"gelu_tanh"` among them, or a function.
        gated: whether there is a gate.
        use_bias: whether the dense layers have biases.
        kernel_initializer: initializer of all kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        d_ff: int,
        activation: Any = "relu",
        gated: bool = False,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(d_ff=d_ff)
        self.supports_masking = True
        self.d_ff = d_ff
        self.activation = activation_of(activation)
        self.gated = gated
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def build(self, input_shape):
        self.gate_dense = self._dense("gate", self.d_ff, self.activation, input_shape) if self.gated else None
        self.inner_dense = self._dense("inner", self.d_ff, None if self.gated else self.activation, input_shape)
        inner_shape = (*input_shape[:-1], self.d_ff)
        self.output_dense = self._dense("output", input_shape[-1], None, inner_shape)

    def _dense(self, name, units, activation, input_shape):
        dense = keras.layers.Dense(
            units,
            activation=activation,
            use_bias=self.use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
        )
        dense.build(input_shape)
        return dense

    def call(self, x: Any) -> Any:
        """Maps (…, D) to (…, D)."""
        inner = self.inner_dense(x)
        if self.gate_dense is not None:
            inner = ops.multiply(self.gate_dense(x), inner)
        return self.output_dense(inner)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return tuple(input_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "d_ff": self.d_ff,
            "activation": keras.activations.serialize(self.activation),
            "gated": self.gated,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
