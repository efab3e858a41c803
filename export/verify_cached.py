"""Compares an exported directory whose decoder has a cache with its model: graphs in pieces, and generated tokens."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import numpy as np

from keras_transformer.export import runtime
from keras_transformer.export.decoding import Decoding, empty_cache
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
from keras_transformer.generation.request import Request
from keras_transformer.generation.rules import Rules, greedy

# Below this length every split into a prefill and single steps is compared.
EVERY_SPLIT_BELOW = 8
# Generated tokens that are compared in each row.
GENERATED = 24
# The least cosine of Keras' logits and those of a decoder with a cache of int8; a form's distance from 1 adds to it.
# A trained model of three layers is 5e-5 from 1 on random ids, one of random weights 5e-4.
INT8_CACHE_COSINE = 0.995
_HEADS_FIRST = (0, 2, 1, 3)


def verify_cached(model, directory: pathlib.Path, check: Check, samples=None) -> None:
    """Compares a model with a cache and the directory exported from it, into `check.report`.

    An encoder's outputs are compared as such. The decoder gets ids in pieces, with the cache fed back, and is compared
    with the model's uncached forward pass over the whole of them.
    """
    config = runtime.read_config(directory)
    kind = KINDS[config["kind"]](model, directory, config, check)
    decoder = copy.copy(check)  # with the same report
    if config.get("cache") == "int8":
        decoder.least_cosine = (check.least_cosine or 1) - (1 - INT8_CACHE_COSINE)
        check.report.notes.append(
            f"Keys and values are int8: 1 - cosine of the logits may be {1 - decoder.least_cosine:.2g}, and tokens are "
            "counted."
        )
    _refuse_fixed_axes(check, kind.decoder, "logits", ("batch", "length"))
    seen = []
    for sizes, case, inputs in check.runs(directory, kind.specs, kind.axes, kind.samples(samples), kind.heads):
        inputs = kind.padded(inputs, made=samples is None)
        logits, *encoded = kind.forward(inputs)
        kind.compare_encoder(inputs, encoded, sizes, case)
        for pieces in splits(sizes["length"], config["target"]):
            _compare_decoder(decoder, kind, inputs, logits, pieces, sizes, case)
        seen.append(inputs)
    if any(comparison.problem for comparison in check.report.comparisons):
        check.report.skipped.append("Generated tokens: the graphs do not run as they should")
    else:
        check.report.tokens = _compare_generated(kind, seen, decoder.least_cosine is None)


class _Kind:
    """What the two kinds of models differ in."""

    prompt = decoded = ""

    def __init__(self, model, directory, config, check):
        self.model, self.directory, self.config, self.check = model, directory, config, check
        self.decoder = check.session(directory / "decoder.onnx")
        self.forward = keras_forward(model)

    @property
    def heads(self):
        return next(node.shape[1] for node in self.decoder.get_inputs() if node.name.startswith("past_key_values"))

    def samples(self, samples):
        return samples

    def padded(self, inputs, made):
        return inputs

    def compare_encoder(self, inputs, encoded, sizes, case):
        pass

    def decoding(self, inputs, batch, slots) -> Decoding:
        """An empty cache, for rows of `inputs`."""
        return self._empty(batch, slots, None)

    def _empty(self, batch, slots, encoded):
        return empty_cache(self.decoder, self.config["target"], batch, slots, encoded)


class _EncoderDecoder(_Kind):
    prompt, decoded = "source", "target"

    def __init__(self, model, directory, config, check):
        if not (hasattr(model, "encode") and hasattr(model, "project_memory")):
            raise ValueError(f"{directory} holds an encoder–decoder model. Received: model={model!r}")
        super().__init__(model, directory, config, check)
        self.encoder = check.session(directory / "encoder.onnx")
        _refuse_fixed_axes(check, self.encoder, "source_mask", ("batch", "source_length"))
        self.specs = [
            InputSpec(name, np.dtype("int32"), ("batch", axis), "ids", 0, config[f"{name}_vocabulary_size"] - 1)
            for name, axis in (("source", "source_length"), ("target", "length"))
        ]
        axes = {axis.name: axis for axis in interface(self.encoder)[1]}
        batch = axes.get("batch", FreeAxis("batch", True))
        source_length = axes.get("source_length", FreeAxis("source_length", False, 1, config["max_length"]))
        self.axes = [batch, source_length, FreeAxis("length", False, 1, config["max_length"])]

    def samples(self, samples):
        if isinstance(samples, Mapping) and "source" in samples and "target" not in samples:
            source = checked_inputs(self.specs[:1], {"source": samples["source"]})["source"]
            batch, length = source.shape
            samples = {**samples, **MadeSamples(self.specs[1:]).make({"batch": batch, "length": length}, "padded", 0)}
        return samples

    def padded(self, inputs, made):
        if not made:
            return inputs
        # Made samples have 0 for padding.
        return {**inputs, "source": np.where(inputs["source"] == 0, self.config["pad_id"], inputs["source"])}

    def compare_encoder(self, inputs, encoded, sizes, case):
        names = [output.name for output in self.encoder.get_outputs()]
        self.check.run(self.encoder, names, {"source": inputs["source"]}, encoded, sizes, case)

    def decoding(self, inputs, batch, slots):
        return self._empty(batch, slots, runtime.encode(self.encoder, inputs["source"]))

    def prompts(self, inputs):
        source = inputs["source"]
        return source[~(source == self.config["pad_id"]).all(1)]

    def limit(self, prompts):
        return self.config["max_length"]


class _DecoderOnly(_Kind):
    prompt = decoded = "token_ids"

    def __init__(self, model, directory, config, check):
        if not hasattr(model, "start_generation") or hasattr(model, "encode"):
            raise ValueError(f"{directory} holds a decoder-only model. Received: model={model!r}")
        super().__init__(model, directory, config, check)
        last = config["vocabulary_size"] - 1
        self.specs = [InputSpec("token_ids", np.dtype("int32"), ("batch", "length"), "ids", 0, last)]
        self.axes = [FreeAxis("batch", True), FreeAxis("length", False, 1, config["max_length"])]

    def prompts(self, inputs):
        # A half at most, so that there is room to go on; an id of 0 may well be a token.
        ids = inputs["token_ids"][:, : max(1, inputs["token_ids"].shape[1] // 2)]
        real = np.arange(ids.shape[1]) < real_lengths(ids)[:, None]
        return {"token_ids": ids, "padding_mask": real}

    def limit(self, prompts):
        limit = self.config["max_length"]
        return None if limit is None else limit - prompts["token_ids"].shape[1]


KINDS = {"encoder-decoder": _EncoderDecoder, "decoder": _DecoderOnly}


def logits_of_choices(forward: Callable, request: Request, ids: np.ndarray) -> np.ndarray:
    """Keras' logits (B, L, V), by which each of the generated `ids` (B, L) is chosen.

    Args:
        forward: from a model's inputs to what it gives, the logits first; see `keras_forward`.
        request: what was asked for.
        ids: what was generated.
    """
    count = ids.shape[1]
    if "source" in request.inputs:
        target = _padded(np.concatenate([request.start[:, None], ids[:, :-1]], 1), request.limit)
        return forward({"source": request.inputs["source"], "target": target})[0][:, :count]
    prompt, lengths = request.inputs["prompt"], request.inputs["lengths"]
    whole = np.concatenate([prompt, ids[:, :-1]], 1)
    np.put_along_axis(whole, lengths[:, None] + np.arange(count - 1), ids[:, :-1], 1)
    logits = forward({"token_ids": _padded(whole, request.limit)})[0]
    return np.take_along_axis(logits, (lengths[:, None] - 1 + np.arange(count))[..., None], 1)


def _padded(ids, limit):
    """Ids with further columns, which no earlier position sees: every new length is compiled on some backends."""
    width = ids.shape[1] + -ids.shape[1] % 16
    width = width if limit is None else min(width, limit)
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])))


def splits(length: int, target: str = "portable") -> list[list[int]]:
    """How `length` ids are cut: in one piece, into a prefill and single steps, into unequal pieces."""
    if length < EVERY_SPLIT_BELOW:
        cuts = [[first, *[1] * (length - first)] for first in range(length, 0, -1)]
    else:
        cuts = [[length], [length - 3, 1, 1, 1]]
    if length > 4 and target == "portable":
        cuts.append([2, length - 3, 1])
    return cuts


def _refuse_fixed_axes(check, session, output, names):
    for name in interface(session)[2]:
        if name in names:
            check.fail(output, {}, "signature", f"axis {name!r}, free in Keras, has a fixed size")


def keras_forward(model) -> Callable:
    """The function from a model's inputs to the logits and to what the encoder graph puts out."""
    from keras import ops

    def decoder_only(token_ids):
        return (model(token_ids, training=False),)

    def encoder_decoder(source, target):
        memory, mask = model.encode(source, training=False)
        pairs = model.project_memory(memory)
        logits = model({"source": source, "target": target}, training=False)
        return logits, mask, *(ops.transpose(tensor, _HEADS_FIRST) for pair in pairs for tensor in pair)

    if hasattr(model, "encode"):
        return numpy_function(encoder_decoder, ["source", "target"], model.variables)
    return numpy_function(decoder_only, ["token_ids"], model.variables)


@dataclasses.dataclass
class _Feed:
    """Ids (B, T) of one piece, which of them are real, and which of the whole row's positions they are."""

    ids: np.ndarray
    real: np.ndarray
    positions: np.ndarray


def _compare_decoder(check, kind, inputs, expected, pieces, sizes, case):
    """Runs `pieces` of the ids one after the other and compares the logits of the real ones."""
    ids = inputs[kind.decoded]
    case = f"{case}, {_pieces_in_words(pieces)}"
    cut = _on_the_right if kind.config["target"] == "onnxruntime" else _on_the_left
    feeds = cut(ids, real_lengths(ids), pieces)
    try:
        decoding = kind.decoding(inputs, len(ids), ids.shape[1])
        logits = [decoding.extend(feed.ids, feed.real) for feed in feeds]
    except Exception as error:  # onnxruntime raises many types, none of them documented
        check.fail("logits", sizes, case, f"ONNX Runtime cannot run: {str(error).strip()[:300]}")
        return
    rows = np.arange(len(ids))[:, None]
    real, positions = (np.concatenate([getattr(feed, name) for feed in feeds], 1) for name in ("real", "positions"))
    if kind.config["logits"] == "last":
        wanted = np.cumsum([feed.ids.shape[1] for feed in feeds]) - 1
        real, positions = real[:, wanted], positions[:, wanted]
    actual = np.concatenate(logits, 1)
    if not np.isfinite(actual).all():
        check.fail("logits", sizes, case, "ONNX Runtime gives numbers that are not finite")
    else:
        check.compare("logits", expected[rows, positions], actual, sizes, case, real)


def _on_the_left(ids, lengths, pieces) -> list[_Feed]:
    """Rows that end together: row b of the graph's input is row b of the ids, moved to the right end."""
    positions = np.arange(ids.shape[1]) - (ids.shape[1] - lengths[:, None])
    real, positions = positions >= 0, np.maximum(positions, 0)
    moved = np.where(real, np.take_along_axis(ids, positions, 1), 0)
    parts = [slice(end - piece, end) for piece, end in zip(pieces, np.cumsum(pieces), strict=True)]
    return [_Feed(*(array[:, part] for array in (moved, real, positions))) for part in parts]


def _on_the_right(ids, lengths, pieces) -> list[_Feed]:
    """Rows that begin together: a shorter row has less of its ids, one at least, in the first piece."""
    prefill, steps = pieces[0], len(pieces) - 1
    first = np.minimum(np.maximum(lengths - steps, 1), prefill)
    places = np.broadcast_to(np.arange(prefill), (len(ids), prefill))
    feeds = [_Feed(ids[:, :prefill], places < first[:, None], places)]
    for step in range(steps):
        place = np.minimum(first + step, ids.shape[1] - 1)[:, None]
        # A row that has come to its end goes on with anything.
        inside = (first + step < lengths)[:, None]
        feeds.append(_Feed(np.take_along_axis(ids, place, 1), inside, place))
    return feeds


def _pieces_in_words(pieces):
    if len(pieces) == 1:
        return "in one piece"
    if set(pieces[1:]) == {1}:
        return f"prefill {pieces[0]}, then single steps"
    return f"pieces of {', '.join(map(str, pieces))}"


def real_lengths(ids):
    """Tokens in each row up to the padding at its end; at least one."""
    last = ids.shape[1] - (ids[:, ::-1] != 0).argmax(1)
    return np.where((ids != 0).any(1), last, 1)


def _compare_generated(kind, seen, exact) -> TokenCheck:
    """Compares generated tokens: ONNX Runtime's choices after Keras' own tokens, and its free-running ones."""
    inputs = max(seen, key=lambda inputs: (len(inputs[kind.prompt]), min(inputs[kind.prompt].shape[1], GENERATED)))
    prompts = kind.prompts(inputs)
    limit = kind.limit(prompts)
    length = GENERATED if limit is None else min(GENERATED, limit)
    if length < 1 or not len(prompts):
        return TokenCheck()
    runner = _runner(kind)
    request = runner.generation_request(prompts, length)
    keras_ids = kind.model.generate(prompts, length)
    forced, free = _forced_choices(runner, request, keras_ids), runner.generate(prompts, length)
    return compare_tokens(
        keras_ids,
        forced,
        free if exact else forced,
        request.rules,
        lambda: logits_of_choices(kind.forward, request, keras_ids),
        exact,
    )


def compare_tokens(
    keras_ids: np.ndarray,
    forced: np.ndarray,
    free: np.ndarray,
    rules: Rules,
    logits: Callable[[], np.ndarray],
    exact: bool = True,
) -> TokenCheck:
    """Compares generated ids.

    Args:
        keras_ids: what Keras generates, (B, L).
        forced: ONNX Runtime's choices after Keras' own ids, (B, L).
        free: what ONNX Runtime generates by itself, (B, L or another length).
        rules: what ends a row.
        logits: gives Keras' logits (B, L, V), by which each of its ids is chosen.
        exact: False counts what differs, and lets it pass.
    """
    result = TokenCheck() if exact else TokenCheck(excused_below=float("inf"))
    length = keras_ids.shape[1]
    free = np.pad(free, ((0, 0), (0, length)), constant_values=rules.pad_id)[:, :length]
    ends = np.isin(keras_ids, [] if rules.end_id is None else rules.end_id)
    ended = np.cumsum(ends, axis=1) - ends > 0
    result.rows, result.tokens = len(keras_ids), int((~ended).sum())
    places = (forced != keras_ids) & ~ended
    # Where the forced choices agree so do the free ones, up to a row's first tie.
    first = np.cumsum(free != keras_ids, axis=1) == 1
    places |= first & (free != keras_ids) & ~(np.cumsum(places, axis=1) > 0)
    if places.any():
        top = np.sort(logits(), axis=-1)[..., -2:]
        for row, position in np.argwhere(places):
            other = forced if forced[row, position] != keras_ids[row, position] else free
            result.mismatches.append(
                {
                    "row": int(row),
                    "position": int(position),
                    "keras": int(keras_ids[row, position]),
                    "onnx": int(other[row, position]),
                    "gap": float(top[row, position, 1] - top[row, position, 0]),
                }
            )
    return result


def _runner(kind) -> Callable:
    runners = {"encoder-decoder": runtime.OnnxTransformer, "decoder": runtime.OnnxCausalLM}
    return runners[kind.config["kind"]](kind.directory)


def _forced_choices(runner, request, keras_ids):
    """ONNX Runtime's greedy choice at each position after the tokens that Keras generated."""
    decoding = runner._begun(request)
    choices, tokens = [], request.start
    for position in range(keras_ids.shape[1]):
        choices.append(greedy(decoding.step(tokens[:, None])))
        tokens = keras_ids[:, position]
    return np.stack(choices, 1)
