"""The graph of a decoder-only model with a key/value cache, for prefill and single steps."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_transformer.export.cached import CachedDecoder
from keras_transformer.export.dims import Axis
from keras_transformer.export.errors import ExportError
from keras_transformer.export.generator import GeneratorParts
from keras_transformer.export.trace import InputSpec
from keras_transformer.models import CausalLM


def graphs(model: CausalLM, max_length: int | None, logits: str, target: str) -> dict[str, tuple]:
    """The graph's function, its inputs, its free axes and its output names."""
    return {"decoder": _decoder(model, max_length, logits, target).graph([], [])}


def generator(model: CausalLM, max_length: int | None) -> GeneratorParts:
    """What the graph that generates is made of."""
    if max_length == 1:
        raise ExportError("`max_length` must be at least 2 for target='generator': a prompt and a token. Received: 1")
    batch, length = Axis("batch"), Axis("length", 1, max_length)

    def begin(input_ids, attention_mask):
        # Rows end together, whatever side they are padded on.
        real = ops.cast(attention_mask, "int32")
        width, count = ops.shape(input_ids)[1], ops.sum(real, axis=1, keepdims=True)
        first = ops.expand_dims(ops.cast(ops.argmax(real, axis=1), "int32"), 1)
        place = ops.subtract(ops.expand_dims(ops.arange(width, dtype="int32"), 0), ops.subtract(width, count))
        positions = ops.maximum(place, 0)
        ids = ops.take_along_axis(input_ids, ops.add(positions, first), axis=1)
        return ids, ops.cast(ops.greater_equal(place, 0), "int64"), ops.cast(positions, "int64"), []

    def room(input_ids, attention_mask):
        return max_length - ops.shape(input_ids)[1]

    return GeneratorParts(
        _decoder(model, max_length, "last", "portable"),
        [InputSpec("input_ids", (batch, length), "int64"), InputSpec("attention_mask", (batch, length), "int64")],
        [batch, length],
        begin,
        [],
        model.rules,
        None if max_length is None else room,
    )


def _decoder(model, max_length, logits, target) -> CachedDecoder:
    def decode(input_ids, extra, **arguments):
        return model.decode(input_ids, last_only=logits == "last", training=False, **arguments)

    attention = model.decoder.blocks[0].self_attention
    return CachedDecoder(
        decode,
        attention.kv_shape,
        model.decoder.num_layers,
        model.compute_dtype,
        max_length,
        target,
        attention.sliding_window,
    )


def runner_config(model: CausalLM, max_length: int | None, logits: str, target: str) -> dict[str, Any]:
    """What the runner has to know of the model."""
    return {
        "kind": "decoder",
        "vocabulary_size": model.vocabulary_size,
        "end_id": model.end_id,
        "pad_id": model.pad_id,
        "max_length": max_length,
        "logits": logits,
        "target": target,
    }
