"""The graph of a decoder-only model with a key/value cache, for prefill and single steps."""

from __future__ import annotations

from typing import Any

from keras_transformer.export.cached import CachedDecoder
from keras_transformer.models import CausalLM


def graphs(
    model: CausalLM, min_length: int | None, max_length: int | None, logits: str, target: str
) -> dict[str, tuple]:
    """The graph's function, its inputs, its free axes and its output names."""

    def decode(input_ids, extra, **arguments):
        return model.decode(input_ids, last_only=logits == "last", training=False, **arguments)

    attention = model.decoder.blocks[0].self_attention
    decoder = CachedDecoder(
        decode,
        attention.kv_shape,
        model.decoder.num_layers,
        model.compute_dtype,
        max_length,
        target,
        attention.sliding_window,
    )
    return {"decoder": decoder.graph([], [])}


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
