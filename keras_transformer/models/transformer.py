"""The encoder-decoder Transformer of "Attention Is All You Need"."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer._validation import (
    check_ids,
    positive_integers,
    rates,
)
from keras_transformer.generation.backends import Generator
from keras_transformer.generation.mixin import GenerationMixin
from keras_transformer.generation.request import Request, source_request
from keras_transformer.generation.rules import Rules
from keras_transformer.layers import (
    TokenEmbedding,
    TransformerDecoder,
    TransformerEncoder,
)
from keras_transformer.layers.blocks import call_layer
from keras_transformer.layers.feed_forward import activation_of
from keras_transformer.losses import MaskedCrossentropy
from keras_transformer.metrics import MaskedAccuracy, Perplexity
from keras_transformer.models.base import BaseModel, check_positions, position_layer, positions_of, seeded
from keras_transformer.models.presets import TRANSFORMER
from keras_transformer.ops.attention import agree


@keras.saving.register_keras_serializable(package="keras_transformer")
class Transformer(GenerationMixin, BaseModel):
    """Encoder-decoder Transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762).

    Called with `{"source": ids (B, S), "target": ids (B, T)}` it gives logits (B, T, V): those at position t are for
    the token after `target[:, t]`, and depend on the target up to t and on the whole source. The defaults are the
    paper's base model: `Transformer(37000, 37000, share_embeddings=True)` has its 63,082,496 parameters. BART
    (https://arxiv.org/abs/1910.13461) and Marian's models are made by other arguments.

    Source padding is attended to by nobody. Target padding stands at the end of a row, where the causal mask hides it
    from every real position, so no other mask is made: attention runs in its causal form, and what stands at padded
    positions (finite, of no meaning) is the same with a cache and without. The logits carry the implicit mask
    `target != pad_id`.

    Every shape follows from the arguments, so all weights exist as soon as the model does: it can be counted, loaded,
    used and exported before any call.

    Args:
        source_vocabulary_size: number of source ids.
        target_vocabulary_size: number of target ids, V.
        num_layers: blocks in the encoder, and in the decoder if `num_decoder_layers` is None.
        d_model: width.
        num_heads: attention heads; must divide `d_model`.
        d_ff: inner width of the feed-forward layers.
        dropout: rate, for attention weights, every sub-layer's output and the sums of embeddings and positions.
        activation: of the feed-forward layers; a name or a serializable function.
        norm_first: normalise each sub-layer's input (and the stacks' outputs) in place of its output.
        share_embeddings: one table for source and target, which must then have equal vocabulary sizes.
        tie_output: the target embedding, transposed, is the output projection (section 3.4). Otherwise a dense layer
            of its own.
        max_length: longest source and target, and the limit of what `generate` makes; None for no limit.
        start_id: what every target begins with.
        end_id: what ends a target.
        pad_id: the id of padding, in source and target.
        num_decoder_layers: blocks in the decoder; `num_layers` if None.
        norm_epsilon: of the layer norms.
        position_encoding: `"sinusoidal"`, as in the paper; `"sinusoidal_halves"`, its columns in another order (see
            `SinusoidalPositionalEncoding`); or `"learned"`, one table for sources and one for targets.
        scale_embedding: whether token embeddings are multiplied by `sqrt(d_model)`.
        embedding_norm: whether the sums of embeddings and positions are normalised.
        output_bias: whether the logits have a bias.
        seed: of the initial weights. Dropout follows `keras.utils.set_random_seed`.
        **kwargs: `name`, `dtype` and `trainable`, as for any `keras.Model`.

    Raises:
        ValueError: an argument outside its range, or arguments that contradict each other.

    Example:
        ```python
        model = keras_transformer.models.Transformer(8000, 8000, num_layers=3, d_model=256, num_heads=4, d_ff=1024)
        model.compile("adam")
        model.fit({"source": source, "target": target}, labels)  # labels: target, one token ahead
        model.generate(source, max_new_tokens=40)
        ```
    """

    presets = TRANSFORMER

    def __init__(
        self,
        source_vocabulary_size: int,
        target_vocabulary_size: int,
        num_layers: int = 6,
        d_model: int = 512,
        num_heads: int = 8,
        d_ff: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        norm_first: bool = False,
        share_embeddings: bool = False,
        tie_output: bool = True,
        max_length: int | None = None,
        start_id: int = 1,
        end_id: int = 2,
        pad_id: int = 0,
        num_decoder_layers: int | None = None,
        norm_epsilon: float = 1e-6,
        position_encoding: str = "sinusoidal",
        scale_embedding: bool = True,
        embedding_norm: bool = False,
        output_bias: bool = False,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(source_vocabulary_size=source_vocabulary_size, target_vocabulary_size=target_vocabulary_size)
        if num_decoder_layers is not None:
            positive_integers(num_decoder_layers=num_decoder_layers)
        rates(dropout=dropout)
        if share_embeddings and source_vocabulary_size != target_vocabulary_size:
            raise ValueError(
                "`share_embeddings=True` needs equal vocabulary sizes. Received: "
                f"source_vocabulary_size={source_vocabulary_size}, target_vocabulary_size={target_vocabulary_size}"
            )
        check_ids(np.array([start_id]), target_vocabulary_size, "start_id")
        check_ids(np.array([end_id]), target_vocabulary_size, "end_id")
        check_ids(np.array([pad_id]), min(source_vocabulary_size, target_vocabulary_size), "pad_id")
        if end_id == pad_id:
            raise ValueError(f"`end_id` must differ from the padding id {pad_id}. Received: end_id={end_id}")
        check_positions(position_encoding, ("sinusoidal", "sinusoidal_halves", "learned"), max_length)
        self.source_vocabulary_size = source_vocabulary_size
        self.target_vocabulary_size = target_vocabulary_size
        self.num_layers = num_layers
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_ff = d_ff
        self.dropout = dropout
        self.activation = activation_of(activation)
        self.norm_first = norm_first
        self.share_embeddings = share_embeddings
        self.tie_output = tie_output
        self.max_length = max_length
        self.start_id = start_id
        self.end_id = end_id
        self.pad_id = pad_id
        self.num_decoder_layers = num_decoder_layers
        self.norm_epsilon = norm_epsilon
        self.position_encoding = position_encoding
        self.scale_embedding = scale_embedding
        self.embedding_norm = embedding_norm
        self.output_bias = output_bias
        self.seed = seed
        self.supports_masking = True

        with seeded(seed):
            self._make_layers()
            self.build()
        self._generator = Generator(self)

    def _make_layers(self):
        common = {"dtype": self.dtype_policy, "trainable": self.trainable}
        stack = {
            "num_heads": self.num_heads,
            "d_ff": self.d_ff,
            "dropout": self.dropout,
            "activation": self.activation,
            "norm_first": self.norm_first,
            "norm_epsilon": self.norm_epsilon,
            **common,
        }

        def embedding(size, name):
            # Masks are made from ids where they are needed, once for all layers: see the class docstring.
            return TokenEmbedding(size, self.d_model, self.scale_embedding, mask_zero=False, name=name, **common)

        self.source_embedding = embedding(self.source_vocabulary_size, "source_embedding")
        self.target_embedding = (
            self.source_embedding
            if self.share_embeddings
            else embedding(self.target_vocabulary_size, "target_embedding")
        )
        self.source_positions, self.target_positions = (
            position_layer(self.position_encoding, self.max_length, name=name, **common)
            for name in ("source_positions", "target_positions")
        )
        self.source_norm = self.target_norm = None
        if self.embedding_norm:
            self.source_norm = keras.layers.LayerNormalization(epsilon=self.norm_epsilon, name="source_norm", **common)
            self.target_norm = keras.layers.LayerNormalization(epsilon=self.norm_epsilon, name="target_norm", **common)
        self.source_dropout = keras.layers.Dropout(self.dropout, name="source_dropout", **common)
        self.target_dropout = keras.layers.Dropout(self.dropout, name="target_dropout", **common)
        self.encoder = TransformerEncoder(self.num_layers, name="encoder", **stack)
        self.decoder = TransformerDecoder(self.num_decoder_layers or self.num_layers, name="decoder", **stack)
        self.output_projection = (
            None
            if self.tie_output
            else keras.layers.Dense(self.target_vocabulary_size, use_bias=False, name="output_projection", **common)
        )

    def build(self, input_shape=None):
        """Creates every weight; no shape has to be given."""
        if self.built:
            return
        states = (None, None, self.d_model)
        self.source_embedding.build((None, None))
        if not self.share_embeddings:
            self.target_embedding.build((None, None))
        for side in ("source", "target"):
            for layer in (f"{side}_positions", f"{side}_norm", f"{side}_dropout"):
                layer = getattr(self, layer)
                if layer is not None and not layer.built:
                    layer.build(states)
        self.encoder.build(states)
        self.decoder.build(states, states)
        if self.output_projection is not None:
            self.output_projection.build(states)
        self.logits_bias = None
        if self.output_bias:
            self.logits_bias = self.add_weight(
                shape=(self.target_vocabulary_size,), initializer="zeros", name="logits_bias"
            )

    def call(self, inputs, training=None):
        """Logits (B, T, V) of `{"source": ids (B, S), "target": ids (B, T)}`."""
        source, target = self._checked(inputs)
        memory, source_mask = self.encode(source, training=training)
        return self.decode(target, self.project_memory(memory), source_mask, training=training)[0]

    def compute_mask(self, inputs, previous_mask=None):
        return ops.not_equal(inputs["target"], self.pad_id)

    def compute_output_shape(self, input_shape):
        return (*input_shape["target"], self.target_vocabulary_size)

    def encode(self, source_ids: Any, training: bool | None = None) -> tuple[Any, Any]:
        """Encodes `source_ids` (B, S).

        Returns:
            The memory (B, S, d_model) and its mask (B, S), True where a token is not padding.
        """
        source_mask = ops.not_equal(source_ids, self.pad_id)
        x = self.source_positions(self.source_embedding(source_ids))
        if self.source_norm is not None:
            x = self.source_norm(x)
        (x,) = call_layer(self.source_dropout, x, training)
        (x,) = call_layer(self.encoder, x, training, padding_mask=source_mask)
        return x, source_mask

    def project_memory(self, memory: Any) -> tuple[tuple[Any, Any], ...]:
        """For each layer the cross-attention's (key, value) of `memory` (B, S, d_model), each (B, S, N, H)."""
        return self.decoder.project_memory(memory)

    def decode(
        self,
        target_ids: Any,
        memory_cache: tuple[tuple[Any, Any], ...],
        source_mask: Any,
        positions: Any = None,
        cache: tuple[tuple[Any, Any], ...] | None = None,
        start: Any = None,
        attention_mask: Any = None,
        last_only: bool = False,
        training: bool | None = None,
    ) -> tuple[Any, tuple[tuple[Any, Any], ...] | None]:
        """Decodes `target_ids` (B, T), in one of three forms.

        - No `cache`: a whole target, causal.
        - `cache` and `start`: the cache is a buffer of S slots, and the ids stand at `start … start+T-1`.
        - `cache` without `start`: the cache holds P positions and grows to P + T. `attention_mask` and `positions` are
          the caller's, so that rows may be padded on the left.

        Args:
            target_ids: (B, T).
            memory_cache: from `project_memory`.
            source_mask: (B, S), from `encode`.
            positions: (B|1, T); made from `start`, or from 0, if None.
            cache: for each layer (key, value).
            start: the first slot that is written: an integer, or one a row (B,).
            attention_mask: boolean (B|1, T, slots), True = may attend; must be causal.
            last_only: logits of the last position only, (B, 1, V).
            training: whether dropout is active.

        Returns:
            The logits (B, T, V) and the new cache (None without one).

        Raises:
            ValueError: the growing form without its mask or positions, or `start` without a cache.
        """
        positions = positions_of(ops.shape(target_ids)[1], cache, start, positions, attention_mask)
        x = self.target_embedding(target_ids)
        (x,) = call_layer(self.target_positions, x, training=None, positions=positions)
        if self.target_norm is not None:
            x = self.target_norm(x)
        (x,) = call_layer(self.target_dropout, x, training)
        x, *rest = call_layer(
            self.decoder,
            x,
            training,
            memory_cache=memory_cache,
            memory_padding_mask=source_mask,
            attention_mask=attention_mask,
            cache=cache,
            start=start,
        )
        cache = rest[0] if rest else None
        if last_only:
            x = x[:, -1:]
        logits = self.target_embedding(x, reverse=True) if self.tie_output else self.output_projection(x)
        if self.logits_bias is not None:
            logits = ops.add(logits, ops.cast(self.logits_bias, logits.dtype))
        return logits, cache

    def default_loss(self) -> Any:
        """Cross-entropy of the next token, with label smoothing of 0.1 as in the paper; padding does not count."""
        return MaskedCrossentropy(ignore_id=self.pad_id)

    def default_metrics(self) -> Any:
        """Perplexity and accuracy."""
        return [Perplexity(ignore_id=self.pad_id), MaskedAccuracy(ignore_id=self.pad_id)]

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The sources (B, S) to translate, padded or of unequal length, once they are checked."""
        return source_request(
            _to_numpy(inputs),
            max_new_tokens,
            self.source_vocabulary_size,
            self.target_vocabulary_size,
            self.max_length,
            self.start_id,
            self.rules,
        )

    @property
    def rules(self) -> Rules:
        """What ends a row, and what follows the end."""
        return Rules(end_id=self.end_id, pad_id=self.pad_id)

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of each input, and of the labels."""
        target = self.target_vocabulary_size
        return {"source": self.source_vocabulary_size, "target": target, "labels": target}

    def start_generation(self, inputs: dict[str, Any], length: int) -> Any:
        """What `generation_step` needs before the first token: empty buffers of `length` slots, memory and its mask.

        Args:
            inputs: `"source"`, ids (B, S).
            length: the number of steps.
        """
        memory, source_mask = self.encode(inputs["source"], training=False)
        return (
            self.decoder.init_cache(memory.shape[0], length),
            self.project_memory(memory),
            source_mask,
        )

    def generation_step(self, tokens: Any, position: Any, state: Any) -> tuple[Any, Any]:
        """The logits (B, V) after `tokens` (B, 1) at `position`, and the new state."""
        cache, memory_cache, source_mask = state
        logits, cache = self.decode(
            tokens, memory_cache, source_mask, cache=cache, start=position, last_only=True, training=False
        )
        return logits[:, 0], (cache, memory_cache, source_mask)

    def get_config(self):
        return {
            **super().get_config(),
            "source_vocabulary_size": self.source_vocabulary_size,
            "target_vocabulary_size": self.target_vocabulary_size,
            "num_layers": self.num_layers,
            "d_model": self.d_model,
            "num_heads": self.num_heads,
            "d_ff": self.d_ff,
            "dropout": self.dropout,
            "activation": keras.activations.serialize(self.activation),
            "norm_first": self.norm_first,
            "share_embeddings": self.share_embeddings,
            "tie_output": self.tie_output,
            "max_length": self.max_length,
            "start_id": self.start_id,
            "end_id": self.end_id,
            "pad_id": self.pad_id,
            "num_decoder_layers": self.num_decoder_layers,
            "norm_epsilon": self.norm_epsilon,
            "position_encoding": self.position_encoding,
            "scale_embedding": self.scale_embedding,
            "embedding_norm": self.embedding_norm,
            "output_bias": self.output_bias,
            "seed": self.seed,
        }

    def _checked(self, inputs):
        """Source and target ids, int32, of `inputs`, whose structure, ranks and (where known) lengths are right."""
        if not isinstance(inputs, dict) or set(inputs) != {"source", "target"}:
            received = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(f'Inputs must be a dict of "source" and "target". Received: {received}')
        ids = self._as_ids(inputs, together=False)
        for name in ids:
            self._check_length(ids[name].shape[1], f"{name} length")
        if not agree(inputs["source"].shape[0], inputs["target"].shape[0]):
            shapes = {name: tuple(ids.shape) for name, ids in inputs.items()}
            raise ValueError(f'"source" and "target" must have the same number of rows. Received: shapes {shapes}')
        return ids["source"], ids["target"]


def _to_numpy(ids):
    return ids if isinstance(ids, list | tuple | np.ndarray) else ops.convert_to_numpy(ids)
