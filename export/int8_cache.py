"""A key/value cache of int8 for `GroupQueryAttention`: a graph's float cache is measured, then the graph rewritten."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir

from keras_transformer.export.errors import ExportError
from keras_transformer.export.report import Report
from keras_transformer.export.rewriting import add_initializer
from keras_transformer.export.verify import Check
from keras_transformer.export.verify_cached import KINDS, real_lengths

# Scales reach this multiple of the largest value seen. A model of Shakespeare's characters gives on text up to 1.4
# times what it gives on random ids; and what is clipped costs far more than a wide step: at 0.8 of the largest value
# the logits' 1 - cosine is 5e-4, at 1.25 4e-6, at 1.5 7e-6, at 4 5e-5.
MARGIN = 1.5


def measure_cache(model: Any, directory: pathlib.Path, config: Mapping[str, Any], samples: Any = None) -> dict:
    """The largest absolute values (K, H) of each channel of the keys and values, by the cache's name in the graph.

    The decoder runs once over each of the inputs that verification uses; padding does not count.

    Args:
        model: the Keras model.
        directory: where its graphs lie, with a float cache.
        config: the runner's.
        samples: as for `verify_onnx`.

    Raises:
        ExportError: there is nothing but padding.
    """
    check = Check(Report(str(directory), (0.0, 0.0)), progress=False)
    kind = KINDS[config["kind"]](model, directory, config, check)
    largest: dict[str, np.ndarray] = {}
    tokens = 0
    for _, _, inputs in check.runs(directory, kind.specs, kind.axes, kind.samples(samples), kind.heads):
        inputs = kind.padded(inputs, made=samples is None)
        ids = inputs[kind.decoded]
        real = np.arange(ids.shape[1]) < real_lengths(ids)[:, None]
        tokens += (ids[real] != (0 if kind.config["pad_id"] is None else kind.config["pad_id"])).sum()
        decoding = kind.decoding(inputs, *ids.shape)
        decoding.extend(ids, real)
        for name, cache in decoding.cache.items():
            found = np.abs(cache.astype(np.float32)).max((0, 2), where=real[:, None, :, None], initial=0)
            largest[name] = np.maximum(largest.get(name, 0), found)
    if tokens < 2:
        raise ExportError(f"`samples` must hold texts for a cache of int8 to be measured on. Received: {tokens} tokens")
    return largest


def quantize_cache(model: onnx_ir.Model, largest: Mapping[str, np.ndarray]) -> None:
    """Lets a decoder keep its cache as int8, x = int8 · scale, with one scale for each channel of each head.

    Args:
        model: a decoder with a buffer for a cache; changed in place.
        largest: from `measure_cache`.

    Raises:
        ExportError: something other than one `GroupQueryAttention` reads a cache.
    """
    for value in model.graph.inputs:
        if value.name not in largest:
            continue
        uses = list(value.uses())
        node, place = uses[0]
        if len(uses) > 1 or node.op_type != "GroupQueryAttention":
            raise ExportError(
                "`cache` must be None for this model: only GroupQueryAttention reads a cache of int8, and "
                f"'{value.name}' is read by {', '.join(f'{user.name!r} ({user.op_type})' for user, _ in uses)}. "
                "Received: cache='int8'"
            )
        side = place - _PAST
        if len(node.inputs) < _SCALE + 2:
            node.resize_inputs(_SCALE + 2)
        node.replace_input_with(_SCALE + side, _scale(model.graph, value.name, largest[value.name]))
        node.attributes["kv_cache_bit_width"] = onnx_ir.AttrInt64("kv_cache_bit_width", 8)
        name = ("k_quant_type", "v_quant_type")[side]
        node.attributes[name] = onnx_ir.AttrString(name, "PER_CHANNEL")
        value.type = node.outputs[1 + side].type = onnx_ir.TensorType(onnx_ir.DataType.INT8)


# Where GroupQueryAttention has the past keys and the keys' scale; values follow.
_PAST, _SCALE = 3, 12


def _scale(graph, name, largest):
    # A channel that is always 0 may have any scale but 0.
    array = np.where(largest > 0, MARGIN * largest / 127, 1).astype(np.float32)[None, :, None]
    return add_initializer(graph, f"{name}.scale", array)
