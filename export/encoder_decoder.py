"""The two graphs of an encoder–decoder model: the encoder, and one decoder for prefill and single steps."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_transformer.export.cached import CachedDecoder, cache_names, heads_first
from keras_transformer.export.dims import Axis
from keras_transformer.export.trace import InputSpec
from keras_transformer.models import Transformer


def graphs(
    model: Transformer, min_length: int | None, max_length: int | None, logits: str, target: str
) -> dict[str, tuple]:
    """For each graph its function, its inputs, its free axes and its output names."""
    batch = Axis("batch")
    source_length = Axis("source_length", 1 if min_length is None else min_length, max_length)
    heads, head_dim = kv_shape = model.decoder.blocks[0].self_attention.kv_shape
    num_layers = model.decoder.num_layers
    crossing = cache_names("cross_key_values", num_layers)

    def encode(source):
        memory, source_mask = model.encode(source, training=False)
        return source_mask, heads_first(model.project_memory(memory))

    def decode(input_ids, extra, **arguments):
        source_mask, *crossed = extra
        crossed = [ops.transpose(tensor, (0, 2, 1, 3)) for tensor in crossed]
        memory = tuple(zip(crossed[::2], crossed[1::2], strict=True))
        return model.decode(input_ids, memory, source_mask, last_only=logits == "last", training=False, **arguments)

    decoder = CachedDecoder(decode, kv_shape, num_layers, model.compute_dtype, max_length, target)
    extra = [
        InputSpec("source_mask", (batch, source_length), "bool"),
        *(InputSpec(name, (batch, heads, source_length, head_dim), model.compute_dtype) for name in crossing),
    ]
    return {
        "encoder": (
            encode,
            [InputSpec("source", (batch, source_length), "int32")],
            [batch, source_length],
            ["source_mask", *crossing],
        ),
        "decoder": decoder.graph(extra, [source_length]),
    }


def runner_config(model: Transformer, max_length: int | None, logits: str, target: str) -> dict[str, Any]:
    """What the runner has to know of the model."""
    return {
        "kind": "encoder-decoder",
        "source_vocabulary_size": model.source_vocabulary_size,
        "target_vocabulary_size": model.target_vocabulary_size,
        "start_id": model.start_id,
        "end_id": model.end_id,
        "pad_id": model.pad_id,
        "max_length": max_length,
        "logits": logits,
        "target": target,
    }
