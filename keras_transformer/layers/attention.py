"""Multi-head attention: of a sequence to itself, and to the memory of another sequence."""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import ops

from keras_transformer._validation import positive_integers, rates, sequence_width
from keras_transformer.layers.masks import check_attention_mask, check_padding_mask, combine_masks, padding_mask_of
from keras_transformer.layers.projection import Projection
from keras_transformer.ops import WriteCache, attention, causal_mask, positions, rotate, window_mask, write_cache
from keras_transformer.ops.attention import agree
from keras_transformer.ops.masks import as_causal


class _MultiHeadAttention(keras.layers.Layer):
    """What both attentions share: the four projections and their arguments."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        seed: int | None = None,
        num_kv_heads: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(num_heads=num_heads)
        optional = {"head_dim": head_dim, "num_kv_heads": num_kv_heads}
        positive_integers(**{name: value for name, value in optional.items() if value is not None})
        if num_kv_heads is not None and num_heads % num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide `num_heads`. Received: num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        rates(dropout=dropout)
        self.supports_masking = True
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.dropout = dropout
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.seed = seed
        if dropout:
            self.seed_generator = keras.random.SeedGenerator(seed)

    def _build(self, x_shape, memory_shape):
        d_model = sequence_width(x_shape)
        sequence_width(memory_shape, "memory")
        if self.head_dim is None and d_model % self.num_heads:
            raise ValueError(
                "`num_heads` must divide the width of the input, unless `head_dim` is given. "
                f"Received: num_heads={self.num_heads}, width {d_model}"
            )
        self.width = self.num_heads * (self.head_dim or d_model // self.num_heads)
        self.query_dense = self._dense("query", self.width, x_shape)
        kv_heads, head_dim = self.kv_shape
        self.key_dense = self._dense("key", kv_heads * head_dim, memory_shape)
        self.value_dense = self._dense("value", kv_heads * head_dim, memory_shape)
        self.output_dense = self._dense("output", d_model, (*x_shape[:-1], self.width))

    def _dense(self, name, units, input_shape):
        dense = Projection(
            units,
            use_bias=self.use_bias,
            kernel_initializer=fresh(self.kernel_initializer),
            bias_initializer=fresh(self.bias_initializer),
            dtype=self.dtype_policy,
            trainable=self.trainable,
            name=name,
        )
        dense.build(input_shape)
        return dense

    def _heads(self, dense, x):
        """What `dense` makes of `x` (B, T, D), by heads: (B, T, N, H), or (B, T, K, H) for keys and values."""
        head_dim = self.kv_shape[1]
        heads = (dense.units // head_dim, head_dim)
        if self._by_heads(dense, x):
            return self._einsum("btd,dnh->btnh", x, dense, (-1, *heads), heads)
        return ops.reshape(dense(x), (-1, ops.shape(x)[1], *heads))

    def _merged(self, x):
        """What the output projection makes of heads (B, T, N, H): (B, T, D)."""
        dense = self.output_dense
        if self._by_heads(dense, x):
            return self._einsum("btnh,nhd->btd", x, dense, (self.num_heads, self.kv_shape[1], -1), (-1,))
        return dense(ops.reshape(x, (-1, ops.shape(x)[1], self.width)))

    def _by_heads(self, dense, x):
        """Whether a projection is best taken as a product by heads, its kernel (D, N, H).

        On JAX: XLA then lays the result out as attention reads it (docs/benchmarks.md has the ratios). TensorFlow loses
        by it, torch neither gains nor loses. A trace is the same on every backend.
        """
        plain = dense.quantization_mode is not None or keras.utils.is_keras_tensor(x)
        return keras.config.backend() == "jax" and not plain

    def _einsum(self, equation, x, dense, kernel_shape, bias_shape):
        # The casts that Keras makes in a call of `dense`.
        kernel = ops.reshape(ops.cast(dense.kernel, self.compute_dtype), kernel_shape)
        x = ops.einsum(equation, ops.cast(x, self.compute_dtype), kernel)
        if not self.use_bias:
            return x
        return ops.add(x, ops.reshape(ops.cast(dense.bias, self.compute_dtype), bias_shape))

    def _attend(self, query, key, value, mask, causal, return_weights, training):
        """Attention and output projection: (output, weights or None)."""
        dropout = self.dropout if training else 0.0
        seed = self.seed_generator if dropout else None
        result = attention(query, key, value, mask, causal, None, dropout, seed, return_weights)
        output, weights = result if return_weights else (result, None)
        return self._merged(output), weights

    def _check_cache(self, cache, x):
        """Raises ValueError unless `cache` is None or a pair of (B, S, K, H) for `x` (B, T, D)."""
        if cache is None:
            return
        shapes = [tuple(getattr(part, "shape", ())) for part in cache] if isinstance(cache, tuple | list) else []
        wanted = (x.shape[0], shapes[0][1] if shapes and len(shapes[0]) > 1 else None, *self.kv_shape)
        if len(shapes) != 2 or not all(len(shape) == 4 and all(map(agree, shape, wanted)) for shape in shapes):
            raise ValueError(
                "`cache` must be a pair (keys, values), each of shape (batch, slots, heads, head width), here "
                f"{(x.shape[0], 'slots', *self.kv_shape)}. Received: "
                f"{f'shapes {shapes}' if shapes else type(cache).__name__}"
            )

    @property
    def kv_shape(self):
        """The number K of key and value heads, and the width H of each head, once built."""
        return self.num_kv_heads or self.num_heads, self.width // self.num_heads

    def _output_specs(self, x, slots, return_weights, cache):
        """The specs of what `call` returns; `cache` is None, or the specs of the pair."""
        output = keras.KerasTensor(x.shape, self.compute_dtype)
        weights_shape = (x.shape[0], self.num_heads, x.shape[1], slots)
        weights = keras.KerasTensor(weights_shape, self.compute_dtype) if return_weights else None
        return results(output, weights, cache)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "seed": self.seed,
        }


@keras.saving.register_keras_serializable(package="keras_transformer")
class MultiHeadSelfAttention(_MultiHeadAttention):
    """Multi-head attention of a sequence to itself ("Attention Is All You Need", section 3.2.2).

    Args:
        num_heads: number of heads N.
        head_dim: width H of one head; the input's width / `num_heads` if None.
        causal: positions attend to themselves and to what came before only.
        dropout: rate at which attention weights are dropped in training.
        use_bias: whether the four projections have biases.
        kernel_initializer: initializer of the projections' kernels.
        bias_initializer: initializer of the projections' biases.
        seed: seed of the dropout.
        num_kv_heads: number K of key and value heads, each of which serves N / K query heads in a row: grouped-query
            attention (https://arxiv.org/abs/2305.13245), or multi-query with 1; `num_heads` if None.
        sliding_window: positions attend only to those less than so many places away
            (https://arxiv.org/abs/2004.05150, section 3.1); to all if None.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        seed: int | None = None,
        num_kv_heads: int | None = None,
        sliding_window: int | None = None,
        **kwargs,
    ):
        super().__init__(
            num_heads, head_dim, dropout, use_bias, kernel_initializer, bias_initializer, seed, num_kv_heads, **kwargs
        )
        if sliding_window is not None:
            positive_integers(sliding_window=sliding_window)
        self.causal = causal
        self.sliding_window = sliding_window

    def build(self, x_shape):
        self._build(x_shape, x_shape)

    def call(
        self,
        x: Any,
        padding_mask: Any = None,
        attention_mask: Any = None,
        cache: tuple[Any, Any] | None = None,
        start: Any = None,
        rotary: Any = None,
        return_weights: bool = False,
        training: bool | None = None,
        mask: Any = None,
        x_mask: Any = None,
    ) -> Any:
        """Attends.

        Args:
            x: (B, T, D).
            padding_mask: boolean or integer (B, T), True for real tokens; with a cache (B, S), over all its slots. It
                wins over the implicit Keras mask of `x`, which counts without a cache only.
            attention_mask: boolean or integer, (B|1, T, S) or (B|1, N|1, T, S), True = may attend. With a cache it
                stands in for the causal mask and the window; a layer that is given none takes slots for positions.
            cache: the pair (keys, values) of earlier tokens, each (B, S, K, H); see `ops.write_cache`.
            start: with a cache, the slot of the first token of `x`: an integer or (B,). None: append to the cache.
            rotary: `ops.rotary_encoding` (B|1, T, 2R) of the positions of `x`, by which queries and keys are rotated.
            return_weights: also return the attention weights (B, N, T, S).
            training: whether to apply dropout.
            mask: the implicit mask, filled in by Keras.
            x_mask: the implicit mask, filled in by Keras where more than one tensor is given.

        Returns:
            The output (B, T, D), followed by the weights if `return_weights` and by the new cache if `cache` is given.

        Raises:
            ValueError: on masks of wrong rank or dtype, shapes that do not fit, or `start` without a cache.
        """
        self._check(x, padding_mask, attention_mask, cache, start)
        query, key, value = (self._heads(dense, x) for dense in (self.query_dense, self.key_dense, self.value_dense))
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        implicit = (mask, x_mask) if cache is None else ()
        padding_mask = padding_mask_of(padding_mask, *implicit)
        attention_mask, square = as_causal(attention_mask)
        causal, window = self.causal or square, None
        if cache is not None:
            key, value = cache = write_cache(cache, key, value, start)
            if attention_mask is None:
                length, slots = ops.shape(x)[1], ops.shape(key)[1]
                attention_mask = cached_mask(length, slots, start, causal, self.sliding_window)
            causal = False
        elif self.sliding_window is not None:
            window = cached_mask(ops.shape(x)[1], ops.shape(x)[1], 0, False, self.sliding_window)
        mask = combine_masks(padding_mask, attention_mask, window)
        output, weights = self._attend(query, key, value, mask, causal, return_weights, training)
        return results(output, weights, cache)

    def compute_output_spec(
        self,
        x,
        padding_mask=None,
        attention_mask=None,
        cache=None,
        start=None,
        rotary=None,
        return_weights=False,
        training=None,
        mask=None,
        x_mask=None,
    ):
        slots = self._check(x, padding_mask, attention_mask, cache, start)
        if rotary is not None:
            rotate(keras.KerasTensor((*x.shape[:2], *self.kv_shape)), rotary)  # raises on shapes that do not fit
        cache = None if cache is None else cache_specs(cache, x, start)
        return self._output_specs(x, slots, return_weights, cache)

    def _check(self, x, padding_mask, attention_mask, cache, start):
        """Raises ValueError on what does not fit `x`; returns the number of slots attended to, None if unknown."""
        sequence_width(x.shape)
        self._check_cache(cache, x)
        if cache is None:
            if start is not None:
                raise ValueError(f"`start` needs a `cache` to write to. Received: cache=None, start={start}")
            slots = x.shape[1]
        else:
            slots = cache_specs(cache, x, start)[0].shape[1]
        check_padding_mask(padding_mask, x.shape[0], slots)
        check_attention_mask(attention_mask, (x.shape[0], self.num_heads, x.shape[1], slots))
        return slots

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {**super().get_config(), "causal": self.causal, "sliding_window": self.sliding_window}


@keras.saving.register_keras_serializable(package="keras_transformer")
class CrossAttention(_MultiHeadAttention):
    """Multi-head attention of a sequence to the memory of another ("Attention Is All You Need", section 3.2.3).

    Args:
        num_heads: number of heads N.
        head_dim: width H of one head; the input's width / `num_heads` if None.
        dropout: rate at which attention weights are dropped in training.
        use_bias: whether the four projections have biases.
        kernel_initializer: initializer of the projections' kernels.
        bias_initializer: initializer of the projections' biases.
        seed: seed of the dropout.
        num_kv_heads: number K of key and value heads, each of which serves N / K query heads in a row: grouped-query
            attention (https://arxiv.org/abs/2305.13245), or multi-query with 1; `num_heads` if None.
        **kwargs: `name`, `dtype`, `trainable`.
    """

    def build(self, x_shape, memory_shape):
        self._build(x_shape, memory_shape)

    def call(
        self,
        x: Any,
        memory: Any = None,
        padding_mask: Any = None,
        attention_mask: Any = None,
        cache: tuple[Any, Any] | None = None,
        return_weights: bool = False,
        training: bool | None = None,
        memory_mask: Any = None,
    ) -> Any:
        """Attends.

        Args:
            x: (B, T, D).
            memory: (B, S, E), such as the encoder's output.
            padding_mask: boolean or integer (B, S), True for the memory's real tokens. It wins over the implicit
                Keras mask of `memory`; the implicit mask of `x` plays no part.
            attention_mask: boolean or integer, (B|1, T, S) or (B|1, N|1, T, S), True = may attend.
            cache: what `project_memory(memory)` gave, in place of `memory`.
            return_weights: also return the attention weights (B, N, T, S).
            training: whether to apply dropout.
            memory_mask: the implicit mask, filled in by Keras.

        Returns:
            The output (B, T, D), or the pair (output, weights).

        Raises:
            ValueError: on masks of wrong rank or dtype, shapes that do not fit, or if not exactly one of `memory` and
                `cache` is given.
        """
        self._check(x, memory, padding_mask, attention_mask, cache)
        key, value = self.project_memory(memory) if cache is None else cache
        mask = combine_masks(padding_mask_of(padding_mask, memory_mask), attention_mask)
        query = self._heads(self.query_dense, x)
        output, weights = self._attend(query, key, value, mask, False, return_weights, training)
        return results(output, weights, None)

    def project_memory(self, memory: Any) -> tuple[Any, Any]:
        """The memory's keys and values, each (B, S, K, H), to be reused as `cache`."""
        if not self.built:
            raise ValueError(f"{self.name} has no weights yet: call it once, or call `build(x_shape, memory_shape)`.")
        sequence_width(memory.shape, "memory")
        return self._heads(self.key_dense, memory), self._heads(self.value_dense, memory)

    def compute_output_spec(
        self,
        x,
        memory=None,
        padding_mask=None,
        attention_mask=None,
        cache=None,
        return_weights=False,
        training=None,
        memory_mask=None,
    ):
        slots = self._check(x, memory, padding_mask, attention_mask, cache)
        return self._output_specs(x, slots, return_weights, None)

    def _check(self, x, memory, padding_mask, attention_mask, cache):
        """Raises ValueError on what does not fit `x`; returns the number of slots attended to, None if unknown."""
        sequence_width(x.shape)
        one_of_memory_and("cache", memory, cache)
        self._check_cache(cache, x)
        if cache is None:
            sequence_width(memory.shape, "memory")
            if not agree(memory.shape[0], x.shape[0]):
                raise ValueError(
                    "`memory` must have as many rows as `x`. "
                    f"Received: x.shape={tuple(x.shape)}, memory.shape={tuple(memory.shape)}"
                )
        slots = (memory if cache is None else cache[0]).shape[1]
        check_padding_mask(padding_mask, x.shape[0], slots)
        check_attention_mask(attention_mask, (x.shape[0], self.num_heads, x.shape[1], slots))
        return slots

    def compute_output_shape(self, x_shape, memory_shape=None):
        return tuple(x_shape)


def results(output: Any, weights: Any, cache: Any) -> Any:
    """What a layer returns: the output, followed by the weights and the cache where there are such."""
    rest = tuple(item for item in (weights, cache) if item is not None)
    return (output, *rest) if rest else output


def cached_mask(length: Any, slots: Any, start: Any, causal: bool = True, window: int | None = None) -> Any:
    """The mask (1 or B, T, S) of `length` new tokens over a cache in which position p lies in slot p; None for no mask.

    Args:
        length: number of new tokens T.
        slots: number of the cache's slots S once written.
        start: position of the first new token, an integer or (B,); None if the tokens were appended.
        causal: whether tokens attend to what came before only.
        window: as `sliding_window` of `MultiHeadSelfAttention`.
    """
    queries, keys = positions(length, slots - length if start is None else start), positions(slots)
    masks = [causal_mask(queries, keys)] if causal else []
    masks += [] if window is None else [window_mask(queries, keys, window)]
    return functools.reduce(ops.logical_and, masks) if masks else None


def cache_specs(cache: Any, x: Any, start: Any) -> Any:
    """The specs of the pair (keys, values) after `x` (B, T, D) was written to it."""
    new = keras.KerasTensor((*x.shape[:2], *cache[0].shape[2:]), cache[0].dtype)
    return WriteCache().compute_output_spec(cache, new, new, start)


def one_of_memory_and(name: str, memory: Any, cache: Any) -> None:
    """Raises ValueError unless exactly one of `memory` and the argument called `name` is given."""
    if (memory is None) == (cache is None):
        received = "neither" if memory is None else "both"
        raise ValueError(f"Give one of `memory` and `{name}`. Received: {received}")


def fresh(initializer: Any) -> Any:
    """A copy of an initializer: one instance would give all the weights that it makes the same values."""
    return initializer.clone() if isinstance(initializer, keras.initializers.Initializer) else initializer
