"""Compares an exported encoder–decoder directory with its model: encoder, cached decoder, generated tokens."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

import numpy as np

from keras_transformer.export import runtime
from keras_transformer.export.report import TokenCheck
from keras_transformer.export.verify import (
    Check,
    FreeAxis,
    InputSpec,
    MadeSamples,
    checked_inputs,
    interface,
    numpy_function,
)
from keras_transformer.generation.rules import greedy

# Below this length of a target every split into a prefill and single steps is compared.
EVERY_SPLIT_BELOW = 8
# Generated tokens that are compared in each row.
GENERATED = 24
_HEADS_FIRST = (0, 2, 1, 3)


def verify_transformer(model, directory: pathlib.Path, check: Check, samples=None) -> None:
    """Compares `models.Transformer` and the directory exported from it, into `check.report`.

    The encoder's outputs are compared as such; the decoder gets targets in pieces, padded on the left, with the cache
    fed back, and is compared with the model's uncached forward pass over the whole target.
    """
    if not (hasattr(model, "encode") and hasattr(model, "project_memory")):
        raise ValueError(f"{directory} holds an encoder–decoder model. Received: model={model!r}")
    config = runtime.read_config(directory)
    encoder, decoder = (check.session(directory / name) for name in ("encoder.onnx", "decoder.onnx"))
    for session, output in ((encoder, "source_mask"), (decoder, "logits")):
        for name in interface(session)[2]:
            check.fail(output, {}, "signature", f"axis {name!r}, free in Keras, has a fixed size")
    specs, axes = _interface(config, encoder)
    forward = _forward(model)
    if isinstance(samples, Mapping) and "source" in samples and "target" not in samples:
        source = checked_inputs(specs[:1], {"source": samples["source"]})["source"]
        batch, length = source.shape
        samples = {**samples, **MadeSamples(specs[1:]).make({"batch": batch, "length": length}, "padded", 0)}
    sources = []
    for sizes, case, inputs in check.runs(directory, specs, axes, samples, config["num_heads"]):
        if samples is None:
            # Made samples have 0 for padding.
            inputs = {**inputs, "source": np.where(inputs["source"] == 0, config["pad_id"], inputs["source"])}
        logits, *encoded = forward(inputs)
        names = [output.name for output in encoder.get_outputs()]
        source = {"source": inputs["source"]}
        check.run(encoder, names, source, encoded, sizes, case)
        for pieces in splits(sizes["length"]):
            _compare_decoder(check, encoder, decoder, config, inputs, logits, pieces, sizes, case)
        sources.append(inputs["source"])
    if any(comparison.problem for comparison in check.report.comparisons):
        check.report.skipped.append("Generated tokens: the graphs do not run as they should")
    else:
        check.report.tokens = compare_tokens(model, directory, config, sources, forward)


def splits(length: int) -> list[list[int]]:
    """How a target of `length` is cut: in one piece, into a prefill and single steps, into unequal pieces."""
    if length < EVERY_SPLIT_BELOW:
        cuts = [[first, *[1] * (length - first)] for first in range(length, 0, -1)]
    else:
        cuts = [[length], [length - 3, 1, 1, 1]]
    if length > 4:
        cuts.append([2, length - 3, 1])
    return cuts


def _interface(config, encoder) -> tuple[list[InputSpec], list[FreeAxis]]:
    """Source and target of the whole model as inputs, and their free axes."""
    ids = [
        InputSpec(name, np.dtype("int32"), ("batch", axis), "ids", 0, config[f"{name}_vocabulary_size"] - 1)
        for name, axis in (("source", "source_length"), ("target", "length"))
    ]
    axes = {axis.name: axis for axis in interface(encoder)[1]}
    batch = axes.get("batch", FreeAxis("batch", True))
    source_length = axes.get("source_length", FreeAxis("source_length", False, 1, config["max_length"]))
    return ids, [batch, source_length, FreeAxis("length", False, 1, config["max_length"])]


def _forward(model):
    """From source and target to the logits and to what the encoder graph puts out."""
    from keras import ops

    def forward(source, target):
        memory, mask = model.encode(source, training=False)
        pairs = model.project_memory(memory)
        logits = model({"source": source, "target": target}, training=False)
        return logits, mask, *(ops.transpose(tensor, _HEADS_FIRST) for pair in pairs for tensor in pair)

    return numpy_function(forward, ["source", "target"], model.variables)


def _compare_decoder(check, encoder, decoder, config, inputs, expected, pieces, sizes, case):
    """Runs `pieces` of a target one after the other and compares the logits of its real tokens."""
    target = inputs["target"]
    batch, length = target.shape
    padded = length - _real_lengths(target)
    position = np.arange(length) - padded[:, None]
    real = position >= 0
    # Row b of the graph's input is row b of the target, moved to the right end: what the causal mask makes equal.
    moved = np.take_along_axis(target, np.maximum(position, 0), 1)
    case = f"{case}, {_pieces_in_words(pieces)}"
    seen, logits = 0, []
    try:
        decoding = runtime.Decoding(decoder, config, runtime.encode(encoder, inputs["source"]), batch)
        for piece in pieces:
            part = slice(seen, seen + piece)
            seen += piece
            logits.append(
                decoding.run(np.where(real, moved, 0)[:, part], real[:, :seen], np.maximum(position, 0)[:, part])
            )
    except Exception as error:  # onnxruntime raises many types, none of them documented
        check.fail("logits", sizes, case, f"ONNX Runtime cannot run: {str(error).strip()[:300]}")
        return
    wanted = np.arange(length)
    if config["logits"] == "last":
        wanted = np.cumsum(pieces) - 1
    rows = np.arange(batch)[:, None]
    expected = expected[rows, np.maximum(position, 0)[:, wanted]]
    actual = np.concatenate(logits, 1)
    if not np.isfinite(actual).all():
        check.fail("logits", sizes, case, "ONNX Runtime gives numbers that are not finite")
    else:
        check.compare("logits", expected, actual, sizes, case, real[:, wanted])


def _pieces_in_words(pieces):
    if len(pieces) == 1:
        return "whole target"
    if set(pieces[1:]) == {1}:
        return f"prefill {pieces[0]}, then single steps"
    return f"pieces of {', '.join(map(str, pieces))}"


def _real_lengths(target):
    """Tokens in each row up to the padding at its end; at least one."""
    last = target.shape[1] - (target[:, ::-1] != 0).argmax(1)
    return np.where((target != 0).any(1), last, 1)


def compare_tokens(model, directory, config, sources, forward) -> TokenCheck:
    """Compares generated tokens: ONNX Runtime's choices after Keras' own tokens, and its free-running ones."""
    source = max(sources, key=lambda ids: (len(ids), min(ids.shape[1], GENERATED)))
    source = source[~(source == config["pad_id"]).all(1)]
    result = TokenCheck()
    if not len(source):
        return result
    limit = config["max_length"]
    length = GENERATED if limit is None else min(GENERATED, limit)
    keras_ids = model.generate(source, length)
    runner = runtime.OnnxTransformer(directory)
    forced = _forced_choices(runner, source, keras_ids, config["start_id"])
    free = runner.generate(source, length)
    free = np.pad(free, ((0, 0), (0, length)), constant_values=config["pad_id"])[:, : keras_ids.shape[1]]
    ended = np.cumsum(keras_ids == config["end_id"], axis=1) - (keras_ids == config["end_id"]) > 0
    result.rows, result.tokens = len(source), int((~ended).sum())
    places = (forced != keras_ids) & ~ended
    # Where the forced choices agree so do the free ones, up to a row's first tie.
    first = np.cumsum(free != keras_ids, axis=1) == 1
    places |= first & (free != keras_ids) & ~(np.cumsum(places, axis=1) > 0)
    if places.any():
        starts = np.full((len(source), 1), config["start_id"], np.int32)
        logits = forward({"source": source, "target": np.concatenate([starts, keras_ids[:, :-1]], 1)})[0]
        top = np.sort(logits, axis=-1)[..., -2:]
        for row, position in np.argwhere(places):
            pair = keras_ids[row, position], (forced if forced[row, position] != keras_ids[row, position] else free)
            result.mismatches.append(
                {
                    "row": int(row),
                    "position": int(position),
                    "keras": int(pair[0]),
                    "onnx": int(pair[1][row, position]),
                    "gap": float(top[row, position, 1] - top[row, position, 0]),
                }
            )
    return result


def _forced_choices(runner, source, keras_ids, start_id):
    """ONNX Runtime's greedy choice at each position after the tokens that Keras generated."""
    decoding = runner._decoding(source)
    choices, tokens = [], np.full(len(source), start_id, np.int32)
    for position in range(keras_ids.shape[1]):
        choices.append(greedy(decoding.step(tokens[:, None], position)))
        tokens = keras_ids[:, position]
    return np.stack(choices, 1)
