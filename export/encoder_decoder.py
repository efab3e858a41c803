"""The two graphs of an encoder–decoder model: the encoder, and one decoder for prefill and single steps."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_transformer.export.dims import Axis, add
from keras_transformer.export.trace import InputSpec
from keras_transformer.models import Transformer
from keras_transformer.ops import causal_mask, positions

_HEADS_FIRST = (0, 2, 1, 3)


def graphs(model: Transformer, min_length: int | None, max_length: int | None, logits: str) -> dict[str, tuple]:
    """For each graph its function, its inputs, its free axes and its output names.

    The names are those that Hugging Face and onnxruntime-genai use. A cache is laid out (batch, heads, length,
    head width), as attention kernels read it.
    """
    low = 1 if min_length is None else min_length
    batch = Axis("batch")
    source_length = Axis("source_length", low, max_length)
    length = Axis("length", 1, max_length)
    past_length = Axis("past_length", 0, None if max_length is None else max_length - 1)
    heads, head_dim = model.num_heads, model.d_model // model.num_heads
    layers = range(model.decoder.num_layers)
    dtype = model.compute_dtype

    def encode(source):
        memory, source_mask = model.encode(source, training=False)
        return source_mask, _heads_first(model.project_memory(memory))

    def decode(input_ids, attention_mask, position_ids, source_mask, *caches):
        pairs = [
            tuple(ops.transpose(cache, _HEADS_FIRST) for cache in caches[i : i + 2]) for i in range(0, len(caches), 2)
        ]
        past, memory_cache = pairs[: len(layers)], pairs[len(layers) :]
        past_size, size = ops.shape(caches[0])[2], ops.shape(input_ids)[1]
        mask = ops.logical_and(
            causal_mask(positions(size, past_size), positions(past_size + size)),
            ops.expand_dims(ops.cast(attention_mask, "bool"), 1),
        )
        result, present = model.decode(
            input_ids,
            tuple(memory_cache),
            source_mask,
            positions=position_ids,
            cache=tuple(past),
            attention_mask=mask,
            last_only=logits == "last",
            training=False,
        )
        return result, _heads_first(present)

    def pairs_named(prefix):
        return [f"{prefix}.{i}.{part}" for i in layers for part in ("key", "value")]

    total = add(past_length, length)
    decoder_inputs = [
        InputSpec("input_ids", (batch, length), "int64"),
        InputSpec("attention_mask", (batch, total), "int64"),
        InputSpec("position_ids", (batch, length), "int64"),
        InputSpec("source_mask", (batch, source_length), "bool"),
        *(InputSpec(n, (batch, heads, past_length, head_dim), dtype) for n in pairs_named("past_key_values")),
        *(InputSpec(n, (batch, heads, source_length, head_dim), dtype) for n in pairs_named("cross_key_values")),
    ]
    return {
        "encoder": (
            encode,
            [InputSpec("source", (batch, source_length), "int32")],
            [batch, source_length],
            ["source_mask", *pairs_named("cross_key_values")],
        ),
        "decoder": (
            decode,
            decoder_inputs,
            [batch, length, past_length, source_length],
            ["logits", *pairs_named("present")],
        ),
    }


def runner_config(model: Transformer, max_length: int | None, logits: str) -> dict[str, Any]:
    """What the runner has to know of the model."""
    return {
        "kind": "encoder-decoder",
        "num_layers": model.decoder.num_layers,
        "num_heads": model.num_heads,
        "head_dim": model.d_model // model.num_heads,
        "d_model": model.d_model,
        "source_vocabulary_size": model.source_vocabulary_size,
        "target_vocabulary_size": model.target_vocabulary_size,
        "start_id": model.start_id,
        "end_id": model.end_id,
        "pad_id": model.pad_id,
        "max_length": max_length,
        "logits": logits,
    }


def _heads_first(cache) -> list[Any]:
    return [ops.transpose(tensor, _HEADS_FIRST) for pair in cache for tensor in pair]
