"""The encoder and the decoder: blocks in a row."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from keras_transformer._validation import positive_integers
from keras_transformer.layers.attention import cached_mask, results
from keras_transformer.layers.blocks import Configured, TransformerDecoderBlock, TransformerEncoderBlock, call_layer
from keras_transformer.layers.masks import padding_mask_of


class _Stack(Configured):
    """Blocks in a row, and with pre-norm a last norm."""

    def __init__(
        self,
        num_layers: int = 6,
        num_heads: int = 8,
        d_ff: int = 2048,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.1,
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
        positive_integers(num_layers=num_layers)
        self.num_layers = num_layers
        super().__init__(
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
            kernel_initializer,
            **kwargs,
        )

    def _make(self):
        self.blocks = [
            self._block(**self._arguments, dtype=self.dtype_policy, trainable=self.trainable, name=f"block_{i}")
            for i in range(self.num_layers)
        ]
        self.final_norm = None

    def _build(self, x_shape, *memory_shape):
        for block in self.blocks:
            block.build(x_shape, *memory_shape)
        if self.norm_first:
            self.final_norm = self._norm("final_norm", x_shape)

    def _finish(self, x):
        return x if self.final_norm is None else self.final_norm(x)

    def get_config(self):
        return {**super().get_config(), "num_layers": self.num_layers}


@keras.saving.register_keras_serializable(package="keras_transformer")
class TransformerEncoder(_Stack):
    """A stack of encoder blocks; the defaults are the paper's base model.

    Args:
        num_layers: number of blocks.
        num_heads: number of attention heads.
        d_ff: inner width of the feed-forward networks.
        head_dim: width of one head; the input's width / `num_heads` if None.
        num_kv_heads: number of key and value heads (grouped-query attention); `num_heads` if None.
        dropout: rate of the dropout of attention weights and of sub-layer outputs, in training.
        activation: activation of the feed-forward networks.
        gated: whether the feed-forward networks are gated linear units, such as SwiGLU with `activation="silu"`.
        norm_first: normalise what enters a sub-layer (pre-norm), with a last norm after the stack, instead of the
            paper's post-norm.
        norm: `"layer"` or `"rms"` normalisation.
        norm_epsilon: added to the variance (the mean square) in norms.
        use_bias: whether the projections and the feed-forward networks have biases.
        sliding_window: as in `MultiHeadSelfAttention`, for the self-attention.
        kernel_initializer: initializer of all kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    _block = TransformerEncoderBlock

    def build(self, x_shape):
        self._build(x_shape)

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
        """Maps (B, T, D) to (B, T, D), or to the pair (output, tuple of each block's weights (B, N, T, T)).

        See `MultiHeadSelfAttention` for the arguments.
        """
        padding_mask = padding_mask_of(padding_mask, mask, x_mask)
        weights = []
        for block in self.blocks:
            x, *rest = call_layer(
                block,
                x,
                training,
                padding_mask=padding_mask,
                attention_mask=attention_mask,
                rotary=rotary,
                return_weights=return_weights,
            )
            weights += rest
        return results(self._finish(x), tuple(weights) if return_weights else None, None)

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
        output = self.blocks[0].compute_output_spec(x, padding_mask, attention_mask, rotary)
        weights = tuple(block.weights_spec(x) for block in self.blocks) if return_weights else None
        return results(output, weights, None)


@keras.saving.register_keras_serializable(package="keras_transformer")
class TransformerDecoder(_Stack):
    """A stack of decoder blocks; the defaults are the paper's base model.

    It attends to a memory if it was built for one: `build(x_shape, memory_shape)`, or a first call with `memory`.
    Without, it is the stack of a decoder-only model.

    Args:
        num_layers: number of blocks.
        num_heads: number of attention heads.
        d_ff: inner width of the feed-forward networks.
        head_dim: width of one head; the input's width / `num_heads` if None.
        num_kv_heads: number of key and value heads (grouped-query attention); `num_heads` if None.
        dropout: rate of the dropout of attention weights and of sub-layer outputs, in training.
        activation: activation of the feed-forward networks.
        gated: whether the feed-forward networks are gated linear units, such as SwiGLU with `activation="silu"`.
        norm_first: normalise what enters a sub-layer (pre-norm), with a last norm after the stack, instead of the
            paper's post-norm.
        norm: `"layer"` or `"rms"` normalisation.
        norm_epsilon: added to the variance (the mean square) in norms.
        use_bias: whether the projections and the feed-forward networks have biases.
        sliding_window: as in `MultiHeadSelfAttention`, for the self-attention.
        kernel_initializer: initializer of all kernels.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    _block = TransformerDecoderBlock

    def build(self, x_shape, memory_shape=None):
        self._build(x_shape, memory_shape)

    def call(
        self,
        x: Any,
        memory: Any = None,
        padding_mask: Any = None,
        memory_padding_mask: Any = None,
        attention_mask: Any = None,
        cache: tuple[Any, ...] | None = None,
        memory_cache: tuple[Any, ...] | None = None,
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
            cache: a pair (keys, values) for each block, such as `init_cache` gives.
            memory_cache: what `project_memory(memory)` gave, in place of `memory`.
            start: with a cache, the slot of the first token of `x`: an integer or (B,). None: append.
            rotary: as in `MultiHeadSelfAttention`, for the self-attention.
            return_weights: also return the attention weights.
            training: whether to apply dropout.
            mask: implicit mask, filled in by Keras.
            x_mask: implicit mask, filled in by Keras.
            memory_mask: implicit mask, filled in by Keras.

        Returns:
            The output (B, T, D), followed, if `return_weights`, by a tuple of each block's weights (see
            `TransformerDecoderBlock`) and, if `cache` is given, by the new cache.

        Raises:
            ValueError: if a memory or its mask is given to a stack built without, or a memory is missing in one built
                with; on caches that are not one for each block; and as `MultiHeadSelfAttention` does.
        """
        self._check_caches(cache, memory_cache)
        implicit = (mask, x_mask) if cache is None else ()
        padding_mask = padding_mask_of(padding_mask, *implicit)
        memory_padding_mask = padding_mask_of(memory_padding_mask, memory_mask, name="memory_padding_mask")
        if cache is not None and attention_mask is None:
            length, slots = ops.shape(x)[1], ops.shape(cache[0][0])[1]
            attention_mask = cached_mask(
                length, slots + length if start is None else slots, start, window=self.sliding_window
            )
        weights, caches = [], []
        for i, block in enumerate(self.blocks):
            x, *rest = call_layer(
                block,
                x,
                training,
                memory=memory,
                padding_mask=padding_mask,
                memory_padding_mask=memory_padding_mask,
                attention_mask=attention_mask,
                cache=None if cache is None else cache[i],
                memory_cache=None if memory_cache is None else memory_cache[i],
                start=start,
                rotary=rotary,
                return_weights=return_weights,
            )
            if return_weights:
                weights.append(rest[0])
            if cache is not None:
                caches.append(rest[-1])
        return results(
            self._finish(x),
            tuple(weights) if return_weights else None,
            None if cache is None else tuple(caches),
        )

    def init_cache(self, batch_size: int, length: int, dtype: str | None = None) -> tuple[Any, ...]:
        """An empty cache: for each block a pair of zeros (batch_size, length, N, H).

        Args:
            batch_size: number of rows.
            length: number of slots; 0 for a cache that is appended to.
            dtype: the compute dtype if None.

        Raises:
            ValueError: the stack is not built, so that the width of its heads is not known.
        """
        if not self.built:
            raise ValueError(f"{self.name} is not built: call it once, or call `build(x_shape, memory_shape)`.")
        shape = (batch_size, length, *self.blocks[0].self_attention.kv_shape)
        dtype = dtype or self.compute_dtype
        return tuple((ops.zeros(shape, dtype), ops.zeros(shape, dtype)) for _ in self.blocks)

    def project_memory(self, memory: Any) -> tuple[Any, ...]:
        """For each block the memory's keys and values, each (B, S, N, H), to be reused as `memory_cache`."""
        return tuple(block.project_memory(memory) for block in self.blocks)

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
        self._check_caches(cache, memory_cache)
        specs = [
            block.compute_output_spec(
                x,
                memory=memory,
                padding_mask=padding_mask,
                memory_padding_mask=memory_padding_mask,
                attention_mask=attention_mask,
                cache=None if cache is None else cache[i],
                memory_cache=None if memory_cache is None else memory_cache[i],
                start=start,
                rotary=rotary,
                return_weights=return_weights,
            )
            for i, block in enumerate(self.blocks)
        ]
        if not return_weights and cache is None:
            return specs[0]
        return (specs[0][0], *(tuple(items) for items in zip(*(spec[1:] for spec in specs), strict=True)))

    def _check_caches(self, cache, memory_cache):
        for name, pairs in (("cache", cache), ("memory_cache", memory_cache)):
            if pairs is not None and not (isinstance(pairs, tuple | list) and len(pairs) == self.num_layers):
                received = f"{len(pairs)} entries" if isinstance(pairs, tuple | list) else type(pairs).__name__
                raise ValueError(
                    f"`{name}` must hold a pair (keys, values) for each of the {self.num_layers} blocks. "
                    f"Received: {received}"
                )
