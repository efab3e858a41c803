"""The two graphs of an encoder–decoder model: the encoder, and one decoder for prefill and single steps."""

from __future__ import annotations

from typing import Any

from keras import ops

from keras_transformer.export.cached import CachedDecoder, cache_names, heads_first
from keras_transformer.export.dims import Axis
from keras_transformer.export.generator import GeneratorParts
from keras_transformer.export.trace import InputSpec
from keras_transformer.generation.rules import Rules
from keras_transformer.models import Transformer


def graphs(model: Transformer, max_length: int | None, logits: str, target: str) -> dict[str, tuple]:
    """For each graph its function, its inputs, its free axes and its output names."""
    batch = Axis("batch")
    source_length = Axis("source_length", 1, max_length)
    encode, decoder, extra = _parts(model, source_length, max_length, logits, target)
    return {
        "encoder": (
            encode,
            [InputSpec("source", (batch, source_length), "int32")],
            [batch, source_length],
            [spec.name for spec in extra],
        ),
        "decoder": decoder.graph(extra, [source_length]),
    }


def generator(model: Transformer, max_length: int | None) -> GeneratorParts:
    """What the graph that generates is made of."""
    batch = Axis("batch")
    source_length = Axis("source_length", 1, max_length)
    encode, decoder, extra = _parts(model, source_length, max_length, "last", "portable")

    def begin(source):
        rows = ops.shape(source)[0]
        start = ops.cast(ops.full((rows, 1), model.start_id, "int32"), "int64")
        source_mask, crossed = encode(source)
        return start, ops.ones_like(start), ops.zeros_like(start), [source_mask, *crossed]

    return GeneratorParts(
        decoder,
        [InputSpec("source", (batch, source_length), "int32")],
        [batch, source_length],
        begin,
        extra,
        Rules(end_id=model.end_id, pad_id=model.pad_id),
        None if max_length is None else lambda source: max_length,
    )


def _parts(model, source_length, max_length, logits, target):
    """The encoder's function, the decoder, and what the latter takes of the former."""
    heads, head_dim = kv_shape = model.decoder.blocks[0].self_attention.kv_shape
    num_layers, dtype = model.decoder.num_layers, model.compute_dtype

    def encode(source):
        memory, source_mask = model.encode(source, training=False)
        return source_mask, heads_first(model.project_memory(memory))

    def decode(input_ids, extra, **arguments):
        source_mask, *crossed = extra
        crossed = [ops.transpose(tensor, (0, 2, 1, 3)) for tensor in crossed]
        memory = tuple(zip(crossed[::2], crossed[1::2], strict=True))
        return model.decode(input_ids, memory, source_mask, last_only=logits == "last", training=False, **arguments)

    batch = Axis("batch")
    extra = [
        InputSpec("source_mask", (batch, source_length), "bool"),
        *(
            InputSpec(name, (batch, heads, source_length, head_dim), dtype)
            for name in cache_names("cross_key_values", num_layers)
        ),
    ]
    return encode, CachedDecoder(decode, kv_shape, num_layers, dtype, max_length, target), extra


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
