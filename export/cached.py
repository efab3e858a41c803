"""What the graphs of all models with a key/value cache share: its inputs and outputs, and the masks of its two forms.

The portable form is past and present, which grow, in standard operators; its rows may be padded on the left. The form
for ONNX Runtime is a buffer that the caller allocates and the graph writes where it lies, through
`GroupQueryAttention`; its rows are padded on the right. In both the caches are (batch, heads, slots, head width), as
attention kernels read them, and the names are those of Hugging Face and onnxruntime-genai.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_transformer.export.dims import Axis, add
from keras_transformer.export.errors import ExportError
from keras_transformer.export.trace import InputSpec
from keras_transformer.layers.attention import cached_mask

TARGETS = ("portable", "onnxruntime", "generator")
_HEADS_FIRST = (0, 2, 1, 3)


@dataclasses.dataclass(frozen=True)
class CachedDecoder:
    """The graph of a decoder with a cache.

    Args:
        decode: `(input_ids, extra inputs, keyword arguments of the models' decode) -> (logits, cache)`.
        kv_shape: the number of key and value heads, and the width of each.
        num_layers: how many caches there are.
        dtype: of the caches.
        max_length: the longest text; None for no limit.
        target: one of `TARGETS`.
        window: `sliding_window` of the attention; None for none.
    """

    decode: Callable
    kv_shape: tuple[int, int]
    num_layers: int
    dtype: str
    max_length: int | None
    target: str
    window: int | None = None

    def graph(self, extra: list[InputSpec], extra_axes: list[Axis]) -> tuple:
        """The function, its inputs, its free axes and its output names, for a graph with further inputs `extra`."""
        batch = Axis("batch")
        length = Axis("length", 1, self.max_length)
        heads, head_dim = self.kv_shape
        if self.target == "onnxruntime" and head_dim % 8:
            raise ExportError(
                "`target` must be 'portable' for this model: ONNX Runtime's GroupQueryAttention takes heads of a "
                f"width that is a multiple of 8. Received: target='onnxruntime', with heads of width {head_dim}"
            )
        if self.target == "portable":
            slots = Axis("past_length", 0, None if self.max_length is None else self.max_length - 1)
            total, axes, call = add(slots, length), [slots], self.grow
        else:
            slots, total = Axis("slots", 1), Axis("total_length", 1, self.max_length)
            axes, call = [total, slots], self._write
        specs = [
            InputSpec("input_ids", (batch, length), "int64"),
            InputSpec("attention_mask", (batch, total), "int64"),
            InputSpec("position_ids", (batch, length), "int64"),
            *extra,
            *(InputSpec(n, (batch, heads, slots, head_dim), self.dtype) for n in self._names("past_key_values")),
        ]

        def function(input_ids, attention_mask, position_ids, *rest):
            caches = [ops.transpose(cache, _HEADS_FIRST) for cache in rest[len(extra) :]]
            cache = tuple(zip(caches[::2], caches[1::2], strict=True))
            logits, present = call(input_ids, attention_mask, position_ids, rest[: len(extra)], cache)
            return logits, heads_first(present)

        return function, specs, [batch, length, *axes, *extra_axes], ["logits", *self._names("present")]

    def grow(self, input_ids: Any, attention_mask: Any, position_ids: Any, extra: Any, cache: Any) -> tuple[Any, Any]:
        """The logits of `input_ids` (B, T), and the cache (B, P, K, H) of each layer with their keys and values.

        Args:
            input_ids: (B, T).
            attention_mask: (B, P + T), 1 for real tokens; padding stands before a row's first one.
            position_ids: (B, T).
            extra: what `decode` takes besides.
            cache: for each layer (keys, values).
        """
        past, size = ops.shape(cache[0][0])[1], ops.shape(input_ids)[1]
        # In a row the distance of two slots is that of the positions in them, wherever its padding ends.
        mask = cached_mask(size, past + size, past, window=self.window)
        mask = ops.logical_and(mask, ops.expand_dims(ops.cast(attention_mask, "bool"), 1))
        return self.decode(input_ids, extra, positions=position_ids, cache=cache, attention_mask=mask)

    def _write(self, input_ids, attention_mask, position_ids, extra, cache):
        slots = ops.shape(cache[0][0])[1]
        mask = SlotMask(slots, self.window)(position_ids, attention_mask)
        start = position_ids[:, 0]
        return self.decode(input_ids, extra, positions=position_ids, cache=cache, start=start, attention_mask=mask)

    def _names(self, prefix):
        return cache_names(prefix, self.num_layers)


class SlotMask(keras.Operation):
    """The mask (B, T, S) of tokens at `position_ids` (B, T) over a buffer in which position p lies in slot p.

    Besides the positions it is given the `attention_mask` (B, total), from which the attention operator that stands for
    it in a graph reads how many tokens each row has.
    """

    def __init__(self, slots: int, window: int | None):
        super().__init__()
        self.slots = slots
        self.window = window

    def call(self, position_ids, attention_mask):
        return cached_mask(ops.shape(position_ids)[1], self.slots, position_ids[:, 0], window=self.window)

    def compute_output_spec(self, position_ids, attention_mask):
        return keras.KerasTensor((*position_ids.shape, self.slots), "bool")


def cache_names(prefix: str, num_layers: int) -> list[str]:
    """Names of the caches: keys and values of each layer."""
    return [f"{prefix}.{layer}.{part}" for layer in range(num_layers) for part in ("key", "value")]


def heads_first(cache: Any) -> list[Any]:
    """The tensors of a cache, (B, K, S, H), in the order of their names."""
    return [ops.transpose(tensor, _HEADS_FIRST) for pair in cache for tensor in pair]
