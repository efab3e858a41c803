"""The decoder-only language model: GPT-2, Llama and their kin by its arguments."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_transformer._validation import check_ids, positive_integers, positive_numbers, rates
from keras_transformer.generation.backends import Generator
from keras_transformer.generation.mixin import GenerationMixin
from keras_transformer.generation.prompts import prompt_request, prompt_rules
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Rules
from keras_transformer.layers import TokenEmbedding, TransformerDecoder
from keras_transformer.layers.blocks import call_layer
from keras_transformer.losses import NO_LABEL, MaskedCrossentropy
from keras_transformer.metrics import MaskedAccuracy, Perplexity
from keras_transformer.models.base import (
    BaseModel,
    check_positions,
    keep_arguments,
    kept_arguments,
    position_layer,
    positions_of,
    seeded,
)
from keras_transformer.models.presets import CAUSAL_LM
from keras_transformer.ops import positions as token_positions
from keras_transformer.ops import rotary_encoding, rotary_frequencies


@keras.saving.register_keras_serializable(package="keras_transformer")
class CausalLM(GenerationMixin, BaseModel):
    """Decoder-only language model (GPT-2: Radford et al. 2019; Llama: https://arxiv.org/abs/2302.13971).

    Called with ids (B, T) it gives logits (B, T, V): those at position t are for the token after it, and depend on
    tokens up to t alone. Padding at a row's end needs no mask, as no earlier position sees it. The defaults are the
    smallest GPT-2; `CausalLM.from_preset("llama-3.2-1b")` is a Llama.

    Several texts may share a row: called with `{"token_ids", "segment_ids", "positions"}`, each (B, T), a token attends
    to those of its own segment only, and `positions` begin anew with each (`data.pack_texts` makes such rows).

    Args:
        vocabulary_size: number of ids, V.
        num_layers: number of blocks.
        d_model: width.
        num_heads: attention heads.
        d_ff: inner width of the feed-forward layers.
        head_dim: width of one head; `d_model / num_heads` if None.
        num_kv_heads: key and value heads; `num_heads` if None.
        dropout: rate, for attention weights, every sub-layer's output and the sums of embeddings and positions.
        activation: of the feed-forward layers; a name or a serializable function.
        gated: whether the feed-forward layers are gated linear units.
        norm_first: normalise each sub-layer's input (and the stack's output) in place of its output.
        norm: `"layer"` or `"rms"`.
        norm_epsilon: of the norms.
        use_bias: whether projections and feed-forward layers have biases.
        sliding_window: a token attends to itself and to the `sliding_window - 1` before it; to all if None.
        position_encoding: `"learned"`, `"sinusoidal"`, `"rotary"`, or None.
        rotary_base: base of the rotary frequencies.
        rotary_width: entries of each head that are rotated; all of them if None.
        rotary_scaling: see `ops.rotary_frequencies`.
        scale_embedding: whether token embeddings are multiplied by `sqrt(d_model)`.
        tie_output: the embedding, transposed, is the output projection. Otherwise a dense layer without bias.
        max_length: the longest text, prompt included; None for no limit (not with learned positions).
        end_id: the id, or ids, that end a text; None if there is none.
        pad_id: the id that stands for padding in prompts, and after the end; None if every id is a token.
        seed: of the initial weights. Dropout follows `keras.utils.set_random_seed`.
        **kwargs: `name`, `dtype` and `trainable`, as for any `keras.Model`.

    Raises:
        ValueError: an argument outside its range, or arguments that contradict each other.

    Example:
        ```python
        model = keras_transformer.models.CausalLM(256, num_layers=2, d_model=64, num_heads=4, d_ff=256, max_length=128)
        model.compile("adam")
        model.fit(ids[:, :-1], ids[:, 1:])
        model.generate(ids[:2, :8], max_new_tokens=20)
        ```
    """

    presets = CAUSAL_LM

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
        activation: Any = "gelu_tanh",
        gated: bool = False,
        norm_first: bool = True,
        norm: str = "layer",
        norm_epsilon: float = 1e-5,
        use_bias: bool = True,
        sliding_window: int | None = None,
        position_encoding: str | None = "learned",
        rotary_base: float = 10000,
        rotary_width: int | None = None,
        rotary_scaling: dict[str, Any] | None = None,
        scale_embedding: bool = False,
        tie_output: bool = True,
        max_length: int | None = 1024,
        end_id: int | tuple[int, ...] | None = None,
        pad_id: int | None = None,
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        positive_integers(vocabulary_size=vocabulary_size, d_model=d_model, num_heads=num_heads)
        if position_encoding == "rotary":
            _check_rotary(rotary_width, rotary_base, rotary_scaling, head_dim or d_model // num_heads)
        rates(dropout=dropout)
        check_positions(position_encoding, ("learned", "sinusoidal", "rotary", None), max_length)
        for name, given in (("end_id", end_id), ("pad_id", pad_id)):
            if given is not None:
                check_ids(np.atleast_1d(given), vocabulary_size, name)
        self.vocabulary_size = vocabulary_size
        self.d_model = d_model
        self.position_encoding = position_encoding
        self.rotary_base = rotary_base
        self.rotary_width = rotary_width
        self.rotary_scaling = rotary_scaling
        self.scale_embedding = scale_embedding
        self.tie_output = tie_output
        self.max_length = max_length
        self.end_id = tuple(end_id) if isinstance(end_id, list) else end_id
        self.pad_id = pad_id
        self.seed = seed
        self.supports_masking = True

        common = {"dtype": self.dtype_policy, "trainable": self.trainable}
        with seeded(seed):
            self.embedding = TokenEmbedding(
                vocabulary_size, d_model, scale=scale_embedding, mask_zero=False, name="embedding", **common
            )
            self.positions = position_layer(position_encoding, max_length, name="positions", **common)
            self.embedding_dropout = keras.layers.Dropout(dropout, name="embedding_dropout", **common)
            self.decoder = TransformerDecoder(
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
                name="decoder",
                **common,
            )
            keep_arguments(self, self.decoder)
            self.output_projection = None
            if not tie_output:
                self.output_projection = keras.layers.Dense(
                    vocabulary_size, use_bias=False, name="output_projection", **common
                )
            self.build()
        self._frequencies = None
        if position_encoding == "rotary":
            width = rotary_width or self.decoder.blocks[0].self_attention.kv_shape[1]
            self._frequencies = rotary_frequencies(width, rotary_base, rotary_scaling)
        self._generator = Generator(self)

    def build(self, input_shape=None):
        """Creates every weight; no shape has to be given."""
        if self.built:
            return
        states = (None, None, self.d_model)
        for layer in (self.positions, self.embedding_dropout, self.decoder, self.output_projection):
            if layer is not None:
                layer.build(states)
        self.embedding.build((None, None))

    @property
    def inputs(self):
        """What the model takes, where a row is one text."""
        return [keras.KerasTensor((None, None), "int32", name="token_ids")]

    def call(self, inputs, training=None):
        """Logits (B, T, V) of ids (B, T), or of `{"token_ids", "segment_ids", "positions"}`, each (B, T)."""
        given = self._checked(inputs)
        mask = None
        if "segment_ids" in given:
            segments = given["segment_ids"]
            mask = ops.equal(ops.expand_dims(segments, 2), ops.expand_dims(segments, 1))
        return self.decode(given["token_ids"], given.get("positions"), attention_mask=mask, training=training)[0]

    def compute_output_shape(self, input_shape):
        if isinstance(input_shape, dict):
            input_shape = input_shape["token_ids"]
        self._check_length(input_shape[1])
        return (*input_shape, self.vocabulary_size)

    def compute_mask(self, inputs, previous_mask=None):
        return None

    def decode(
        self,
        token_ids: Any,
        positions: Any = None,
        cache: tuple[tuple[Any, Any], ...] | None = None,
        start: Any = None,
        attention_mask: Any = None,
        last_only: bool = False,
        training: bool | None = None,
    ) -> tuple[Any, tuple[tuple[Any, Any], ...] | None]:
        """Decodes `token_ids` (B, T), in one of three forms.

        - No `cache`: whole texts, causal.
        - `cache` and `start`: the cache is a buffer of S slots, and the ids stand at `start … start+T-1`.
        - `cache` without `start`: the cache holds P positions and grows to P + T. `attention_mask` and `positions` are
          the caller's, so that rows may be padded on the left.

        Args:
            token_ids: (B, T).
            positions: (B|1, T); made from `start`, or from 0, if None.
            cache: for each layer (key, value).
            start: the first slot that is written: an integer, or one a row (B,).
            attention_mask: boolean (B|1, T, slots), True = may attend; with a cache it must be causal.
            last_only: logits of the last position only, (B, 1, V).
            training: whether dropout is active.

        Returns:
            The logits (B, T, V) and the new cache (None without one).

        Raises:
            ValueError: the growing form without its mask or positions, `start` without a cache, or a length over
                `max_length`.
        """
        x, cache = self._states(token_ids, positions, cache, start, attention_mask, training)
        if last_only:
            x = x[:, -1:]
        if self.tie_output:
            return self.embedding(x, reverse=True), cache
        return self.output_projection(x), cache

    def _states(self, token_ids, positions, cache, start, attention_mask, training):
        """What the decoder makes of `token_ids`, (B, T, d_model), and the new cache."""
        length = ops.shape(token_ids)[1]
        self._check_length(token_ids.shape[1])
        positions = positions_of(length, cache, start, positions, attention_mask)
        x = self.embedding(token_ids)
        if self.positions is not None:
            (x,) = call_layer(self.positions, x, training=None, positions=positions)
        (x,) = call_layer(self.embedding_dropout, x, training)
        rotary = None
        if self._frequencies is not None:
            rotary = rotary_encoding(token_positions(length) if positions is None else positions, self._frequencies)
        x, *rest = call_layer(
            self.decoder, x, training, attention_mask=attention_mask, cache=cache, start=start, rotary=rotary
        )
        return x, rest[0] if rest else None

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The prompts to continue, (B, P) or of unequal length, once they are checked; see `prompt_request`."""
        if not isinstance(inputs, dict | list | tuple | np.ndarray):
            inputs = ops.convert_to_numpy(inputs)
        return prompt_request(
            inputs, max_new_tokens, self.vocabulary_size, self.max_length, self.rules, pad_id=self.pad_id
        )

    @property
    def vocabulary_sizes(self) -> dict[str, int]:
        """The number of ids of the input and of the labels."""
        return {"token_ids": self.vocabulary_size, "labels": self.vocabulary_size}

    @property
    def rules(self) -> Rules:
        """What ends a text, and what follows the end."""
        return prompt_rules(self.end_id, self.pad_id)

    def start_generation(self, inputs: dict[str, Any], length: int) -> Any:
        """What `generation_step` needs: a cache that holds the prompts and has room for `length` tokens, and lengths.

        Args:
            inputs: `"prompt"`, ids (B, P) padded on the right, and `"lengths"`, the number of real ones (B,).
            length: the number of steps.
        """
        prompt = inputs["prompt"]
        # The last token of each prompt is written again by the first step, at its own slot.
        cache = self.decoder.init_cache(prompt.shape[0], prompt.shape[1] - 1 + length)
        _, cache = self._states(prompt, None, cache, 0, None, training=False)
        return cache, inputs["lengths"]

    def generation_step(self, tokens: Any, position: Any, state: Any) -> tuple[Any, Any]:
        """The logits (B, V) after `tokens` (B, 1), the step `position` of the generation, and the new state.

        The tokens of step 0 are the last ones of the prompts.
        """
        cache, lengths = state
        # What a shorter prompt has in the slots after its end is overwritten before anything attends to it.
        logits, cache = self.decode(tokens, cache=cache, start=lengths + (position - 1), last_only=True, training=False)
        return logits[:, 0], (cache, lengths)

    def default_loss(self) -> Any:
        """Cross-entropy of the next token; places whose label is -100 do not count."""
        return MaskedCrossentropy(label_smoothing=0.0, ignore_id=NO_LABEL)

    def default_metrics(self) -> Any:
        """Perplexity and accuracy."""
        return [Perplexity(ignore_id=NO_LABEL), MaskedAccuracy(ignore_id=NO_LABEL)]

    def get_config(self):
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "d_model": self.d_model,
            **kept_arguments(self.decoder),
            "position_encoding": self.position_encoding,
            "rotary_base": self.rotary_base,
            "rotary_width": self.rotary_width,
            "rotary_scaling": self.rotary_scaling,
            "scale_embedding": self.scale_embedding,
            "tie_output": self.tie_output,
            "max_length": self.max_length,
            "end_id": self.end_id,
            "pad_id": self.pad_id,
            "seed": self.seed,
        }

    def _checked(self, inputs):
        """The inputs by name, int32, whose ranks are right."""
        given = inputs if isinstance(inputs, dict) else {"token_ids": inputs}
        if set(given) not in ({"token_ids"}, {"token_ids", "segment_ids", "positions"}):
            raise ValueError(
                'Inputs must be ids, or a dict of "token_ids", "segment_ids" and "positions". '
                f"Received: {sorted(given)}"
            )
        return self._as_ids(given)


def _check_rotary(width, base, scaling, head_dim):
    """Raises ValueError on what no head of `head_dim` entries can be rotated by."""
    if width is None:
        positive_integers(head_dim=head_dim)
        if head_dim % 2:
            raise ValueError(
                "Rotary positions need an even `head_dim` (`d_model / num_heads`), or a `rotary_width`. "
                f"Received: head_dim={head_dim}"
            )
    else:
        positive_integers(rotary_width=width)
        if width % 2 or width > head_dim:
            raise ValueError(
                f"`rotary_width` must be even and at most head_dim={head_dim}. Received: rotary_width={width}"
            )
    positive_numbers(rotary_base=base)
    if scaling is None:
        return
    if not isinstance(scaling, dict):
        raise ValueError(f"`rotary_scaling` must be a dict or None. Received: rotary_scaling={scaling!r}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    positive_numbers(**{f"rotary_scaling[{name!r}]": scaling[name] for name in names if name in scaling})
