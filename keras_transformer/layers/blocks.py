"""Encoder and decoder blocks."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from keras.src.backend.common import global_state

from keras_transformer._validation import positive_numbers
from keras_transformer.layers.attention import (
    CrossAttention,
    MultiHeadSelfAttention,
    cache_specs,
    fresh,
    one_of_memory_and,
    results,
)
from keras_transformer.layers.feed_forward import FeedForward, activation_of
from keras_transformer.layers.masks import padding_mask_of

NORMS = {"layer": keras.layers.LayerNormalization, "rms": keras.layers.RMSNormalization}


def check_norm(norm: str, norm_epsilon: float) -> None:
    """Raises ValueError unless the kind of norm is known and the epsilon positive."""
    positive_numbers(norm_epsilon=norm_epsilon)
    if norm not in NORMS:
        raise ValueError(f"`norm` must be one of {sorted(NORMS)}. Received: norm={norm!r}")


class Configured(keras.layers.Layer):
    """The arguments that blocks and stacks share."""

    def __init__(
        self,
        num_heads: int,
        d_ff: int,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        activation: Any = "relu",
        gated: bool = False,
        norm_first: bool = False,
        norm: str = "layer",
        norm_epsilon: float = 1e-6,
        use_bias: bool = True,
        sliding_window: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_norm(norm, norm_epsilon)
        self.supports_masking = True
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.dropout = dropout
        self.activation = activation_of(activation)
        self.gated = gated
        self.norm_first = norm_first
        self.norm = norm
        self.norm_epsilon = norm_epsilon
        self.use_bias = use_bias
        self.sliding_window = sliding_window
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self._make()

    def _make(self):
        """Makes what is inside."""
        raise NotImplementedError

    @property
    def _arguments(self):
        """The arguments by name, for a block of the same kind."""
        return {
            "num_heads": self.num_heads,
            "d_ff": self.d_ff,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "dropout": self.dropout,
            "activation": self.activation,
            "gated": self.gated,
            "norm_first": self.norm_first,
            "norm": self.norm,
            "norm_epsilon": self.norm_epsilon,
            "use_bias": self.use_bias,
            "sliding_window": self.sliding_window,
            "kernel_initializer": fresh(self.kernel_initializer),
        }

    def get_config(self):
        return {
            **super().get_config(),
            **self._arguments,
            "activation": keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }

    def compute_output_shape(self, x_shape, memory_shape=None):
        return tuple(x_shape)

    def _norm(self, name, shape):
        norm = NORMS[self.norm](epsilon=self.norm_epsilon, dtype=self.dtype_policy, trainable=self.trainable, name=name)
        norm.supports_masking = True  # of Keras' two norms one forgets to say so, and would lose the mask
        norm.build(shape)
        return norm


class _Block(Configured):
    """A block: sub-layers, each with a residual connection, a norm and a dropout of its own."""

    _causal = False

    def _make(self):
        self.self_attention = self._attention(
            MultiHeadSelfAttention, "self_attention", causal=self._causal, sliding_window=self.sliding_window
        )
        self.self_attention_dropout = self._dropout("self_attention_dropout")
        self.cross_attention = None  # a decoder's `build` makes it, where there is a memory
        self.feed_forward = FeedForward(
            self.d_ff,
            activation=self.activation,
            gated=self.gated,
            use_bias=self.use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name="feed_forward",
        )
        self.feed_forward_dropout = self._dropout("feed_forward_dropout")

    def _attention(self, cls, name, **kwargs):
        return cls(
            self.num_heads,
            self.head_dim,
            dropout=self.dropout,
            use_bias=self.use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            num_kv_heads=self.num_kv_heads,
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
            **kwargs,
        )

    def _dropout(self, name):
        return keras.layers.Dropout(self.dropout, dtype=self.dtype_policy, name=name)

    def _residual(self, x, sublayer, norm, dropout, training, **options):
        """`x` with a sub-layer applied, and whatever else than its output the sub-layer gives."""
        output, *rest = call_layer(sublayer, norm(x) if self.norm_first else x, training, **options)
        x = ops.add(x, *call_layer(dropout, output, training))
        return x if self.norm_first else norm(x), rest


@keras.saving.register_keras_serializable(package="keras_transformer")
class TransformerEncoderBlock(_Block):
    """Self-attention, then feed-forward, each with a residual ("Attention Is All You Need", section 3.1).

    Args:
        num_heads: number of attention heads.
        d_ff: inner width of the feed-forward network.
        head_dim: width of one head; the input's width / `num_heads` if None.
        num_kv_heads: number of key and value heads (grouped-query attention); `num_heads` if None.
        dropout: rate of the dropout of attention weights and of sub-layer outputs, in training.
        activation: activation of the feed-forward network.
        gated: whether the feed-forward network is a gated linear unit, such as SwiGLU with `activation="silu"`.
        norm_first: normalise what enters a sub-layer (pre-norm) instead of the sum after it (post-norm, the paper).
        norm: `"layer"` or `"rms"` normalisation.
        norm_epsilon: added to the variance (the mean square) in norms.
        use_bias: whether the projections and the feed-forward network have biases.
        sliding_window: as in `MultiHeadSelfAttention`, for the self-attention.
        kernel_initializer: initializer of all kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def build(self, x_shape):
        self.self_attention.build(x_shape)
        self.self_attention_norm = self._norm("self_attention_norm", x_shape)
        self.feed_forward.build(x_shape)
        self.feed_forward_norm = self._norm("feed_forward_norm", x_shape)

    def call(
        self,
        x: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        rotary: Any = None,
        return_weights: bool = False,
        training: bool | None = None,
        mask: Any = None,
        x_mask: Any = None,
    ) -> Any:
        """Maps (B, T, D) to (B, T, D), or to the pair (output, attention weights (B, N, T, T)).

        See `MultiHeadSelfAttention` for the arguments.
        """
        padding_mask = padding_mask_of(padding_mask, mask, x_mask)

        x, rest = self._residual(
            x,
            self.self_attention,
            self.self_attention_norm,
            self.self_attention_dropout,
            training,
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            rotary=rotary,
            return_weights=return_weights,
        )
        x, _ = self._residual(x, self.feed_forward, self.feed_forward_norm, self.feed_forward_dropout, training)
        return results(x, rest[0] if return_weights else None, None)

    def compute_output_spec(
        self,
        x,
        padding_mask=None,
        attention_mask=None,
        rotary=None,
        return_weights=False,
        training=None,
        mask=None,
        x_mask=None,
    ):
        output = self.self_attention.compute_output_spec(x, padding_mask, attention_mask, rotary=rotary)
        return results(output, self.weights_spec(x) if return_weights else None, None)

    def weights_spec(self, x: Any) -> Any:
        """The spec of the attention weights for an input with the spec `x`."""
        return keras.KerasTensor((x.shape[0], self.num_heads, x.shape[1], x.shape[1]), self.compute_dtype)


@keras.saving.register_keras_serializable(package="keras_transformer")
class TransformerDecoderBlock(_Block):
    """Causal self-attention, attention to a memory, feed-forward ("Attention Is All You Need", section 3.1).

    The block attends to a memory if it was built for one: `build(x_shape, memory_shape)`, or a first call with
    `memory`. Without, it is the block of a decoder-only model.

    Args:
        num_heads: number of attention heads.
        d_ff: inner width of the feed-forward network.
        head_dim: width of one head; the input's width / `num_heads` if None.
        num_kv_heads: number of key and value heads (grouped-query attention); `num_heads` if None.
        dropout: rate of the dropout of attention weights and of sub-layer outputs, in training.
        activation: activation of the feed-forward network.
        gated: whether the feed-forward network is a gated linear unit, such as SwiGLU with `activation="silu"`.
        norm_first: normalise what enters a sub-layer (pre-norm) instead of the sum after it (post-norm, the paper).
        norm: `"layer"` or `"rms"` normalisation.
        norm_epsilon: added to the variance (the mean square) in norms.
        use_bias: whether the projections and the feed-forward network have biases.
        sliding_window: as in `MultiHeadSelfAttention`, for the self-attention.
        kernel_initializer: initializer of all kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    _causal = True

    def build(self, x_shape, memory_shape=None):
        self.self_attention.build(x_shape)
        self.self_attention_norm = self._norm("self_attention_norm", x_shape)
        if memory_shape is not None:
            self.cross_attention = self._attention(CrossAttention, "cross_attention")
            self.cross_attention.build(x_shape, memory_shape)
            self.cross_attention_norm = self._norm("cross_attention_norm", x_shape)
            self.cross_attention_dropout = self._dropout("cross_attention_dropout")
        self.feed_forward.build(x_shape)
        self.feed_forward_norm = self._norm("feed_forward_norm", x_shape)

    def call(
        self,
        x: Any,
        memory: Any = None,
        padding_mask: Any = None,
        memory_padding_mask: Any = None,
        attention_mask: Any = None,
        cache: tuple[Any, Any] | None = None,
        memory_cache: tuple[Any, Any] | None = None,
        start: Any = None,
        rotary: Any = None,
        return_weights: bool = False,
        training: bool | None = None,
        mask: Any = None,
        x_mask: Any = None,
        memory_mask: Any = None,
    ) -> Any:
        """Decodes.

        Args:
            x: (B, T, D).
            memory: (B, S, E), such as the encoder's output.
            padding_mask: boolean or integer (B, T) of `x`, with a cache (B, slots); wins over its implicit mask.
            memory_padding_mask: boolean or integer (B, S) of `memory`; wins over its implicit mask.
            attention_mask: mask of the self-attention, as in `MultiHeadSelfAttention`.
            cache: the pair (keys, values) of the self-attention, as in `MultiHeadSelfAttention`.
            memory_cache: what `project_memory(memory)` gave, in place of `memory`.
            start: with a cache, the slot of the first token of `x`: an integer or (B,). None: append.
            rotary: as in `MultiHeadSelfAttention`, for the self-attention.
            return_weights: also return the attention weights.
            training: whether to apply dropout.
            mask: implicit mask, filled in by Keras.
            x_mask: implicit mask, filled in by Keras.
            memory_mask: implicit mask, filled in by Keras.

        Returns:
            The output (B, T, D), followed, if `return_weights`, by the weights of the self-attention, or by the pair
            (self-attention's, cross-attention's) in a block with a memory, and by the new cache if `cache` is given.

        Raises:
            ValueError: if a memory or its mask is given to a block built without, or a memory is missing in one built
                with.
        """
        self._check_memory(memory, memory_cache, memory_padding_mask)
        implicit = (mask, x_mask) if cache is None else ()
        padding_mask = padding_mask_of(padding_mask, *implicit)
        memory_padding_mask = padding_mask_of(memory_padding_mask, memory_mask, name="memory_padding_mask")

        x, rest = self._residual(
            x,
            self.self_attention,
            self.self_attention_norm,
            self.self_attention_dropout,
            training,
            padding_mask=padding_mask,
            attention_mask=attention_mask,
            cache=cache,
            start=start,
            rotary=rotary,
            return_weights=return_weights,
        )
        weights = rest[0] if return_weights else None
        cache = None if cache is None else rest[-1]
        if self.cross_attention is not None:
            x, rest = self._residual(
                x,
                self.cross_attention,
                self.cross_attention_norm,
                self.cross_attention_dropout,
                training,
                memory=memory,
                padding_mask=memory_padding_mask,
                cache=memory_cache,
                return_weights=return_weights,
            )
            weights = (weights, *rest) if return_weights else None
        x, _ = self._residual(x, self.feed_forward, self.feed_forward_norm, self.feed_forward_dropout, training)
        return results(x, weights, cache)

    def project_memory(self, memory: Any) -> tuple[Any, Any]:
        """The memory's keys and values, each (B, S, N, H), to be reused as `memory_cache`."""
        self._check_memory(memory, None)
        return self.cross_attention.project_memory(memory)

    def compute_output_spec(
        self,
        x,
        memory=None,
        padding_mask=None,
        memory_padding_mask=None,
        attention_mask=None,
        cache=None,
        memory_cache=None,
        start=None,
        rotary=None,
        return_weights=False,
        training=None,
        mask=None,
        x_mask=None,
        memory_mask=None,
    ):
        self._check_memory(memory, memory_cache, memory_padding_mask)
        output = keras.KerasTensor(x.shape, self.compute_dtype)
        self.self_attention.compute_output_spec(x, padding_mask, attention_mask, cache, start, rotary)
        if self.cross_attention is not None:
            self.cross_attention.compute_output_spec(x, memory, memory_padding_mask, cache=memory_cache)
        cache = None if cache is None else cache_specs(cache, x, start)
        weights = self.weights_spec(x, memory, cache, memory_cache) if return_weights else None
        return results(output, weights, cache)

    def weights_spec(self, x: Any, memory: Any, cache: Any, memory_cache: Any) -> Any:
        """The specs of the attention weights, given those of the inputs and of the written cache."""

        def spec(slots):
            return keras.KerasTensor((x.shape[0], self.num_heads, x.shape[1], slots), self.compute_dtype)

        weights = spec((x if cache is None else cache[0]).shape[1])
        if self.cross_attention is None:
            return weights
        return weights, spec((memory if memory_cache is None else memory_cache[0]).shape[1])

    def _check_memory(self, memory, memory_cache, memory_padding_mask=None):
        if self.cross_attention is not None:
            one_of_memory_and("memory_cache", memory, memory_cache)
        elif any(given is not None for given in (memory, memory_cache, memory_padding_mask)):
            received = "a mask of a memory" if memory is None and memory_cache is None else "a memory"
            raise ValueError(
                f"{self.name} was built without a memory and has no cross-attention: call it with `memory` the first "
                f"time, or call `build(x_shape, memory_shape)`. Received: {received}"
            )


def call_layer(layer: Any, x: Any, training: bool | None, **options: Any) -> tuple[Any, ...]:
    """What `layer` gives for `x`, as a tuple. Options that are None or False are not handed on.

    Nor is `training`, where the layer has it from Keras' call context. (`stateless_call` has no context.) A layer that
    is called with one tensor alone takes Keras' short way, and `torch.compile` follows it without breaking its graph.
    """
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    context = global_state.get_global_attribute("current_call_ctx")
    if training is not None and (context is None or context.get_value("training") != training):
        options["training"] = training
    result = layer(x, **options)
    return result if isinstance(result, tuple) else (result,)
