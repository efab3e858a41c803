"""Compares the graph that generates by itself with its model: the logits of each token, and what is chosen by them."""

from __future__ import annotations

import pathlib

import numpy as np
import onnx

from keras_transformer.export.directory import graph_config
from keras_transformer.export.generator import LOGITS
from keras_transformer.export.report import Comparison
from keras_transformer.export.runtime import generator_feeds, generator_request
from keras_transformer.export.verify import Check, FreeAxis, InputSpec
from keras_transformer.export.verify_cached import keras_forward, logits_of_choices

# Generated tokens in each row, at most.
GENERATED = 12
# By how much the score of a token may be below the best one: the last places of quotients and logarithms differ.
TIE = 1e-4
_ASKED = (
    {},
    {"temperature": 1.0, "seed": 2**32 - 5},
    {"temperature": 0.8, "seed": 7, "top_k": 5, "top_p": 0.9},
)


def verify_generator(model, path: pathlib.Path, check: Check, samples=None) -> None:
    """Lets the graph at `path` generate and asks two things of each token, into `check.report`.

    Its logits must be those that Keras has after the same tokens, which it sees whole and uncached; and it must be what
    the rules in NumPy choose by the graph's own logits. The error of a token is by how much its score there is below
    the best one. The graph gives no logits: a copy in memory does, and the file must give the ids of its copy.
    """
    file = path / "model.onnx" if path.is_dir() else path
    session = check.session(file)
    config = graph_config(session)
    encoder_decoder = config["kind"] == "encoder-decoder"
    if hasattr(model, "encode") != encoder_decoder or not hasattr(model, "start_generation"):
        raise ValueError(f"{path} holds a model of kind {config['kind']!r}. Received: model={model!r}")
    copy = check.session_of(file, _with_logits(file))
    name, axis = ("source", "source_length") if encoder_decoder else ("token_ids", "length")
    size = config["source_vocabulary_size" if encoder_decoder else "vocabulary_size"]
    limit = config["max_length"]
    longest = limit if encoder_decoder or limit is None else limit - 1
    specs = [InputSpec(name, np.dtype("int32"), ("batch", axis), "ids", 0, size - 1)]
    axes = [FreeAxis("batch", True), FreeAxis(axis, False, 1, longest)]
    forward = keras_forward(model)
    for sizes, case, inputs in check.runs(path, specs, axes, samples, 1):
        prompts = _rows(inputs[name], config)
        if not prompts:
            continue
        length = GENERATED
        if limit is not None:
            length = min(length, limit if encoder_decoder else limit - max(map(len, prompts)))
        for asked in _ASKED:
            request = generator_request(config, prompts, length).asking(**asked)
            feeds = generator_feeds(config, request)
            words = f"{case}, {', '.join(asked) or 'greedy'}"
            try:
                ids, (copied, logits) = session.run(["ids"], feeds)[0].astype(np.int32), copy.run(None, feeds)
            except Exception as error:  # onnxruntime raises many types, none of them documented
                check.fail("ids", sizes, words, f"ONNX Runtime cannot run: {str(error).strip()[:300]}")
                continue
            if not np.array_equal(ids, copied):
                check.fail("ids", sizes, words, "the file does not give the ids of its copy, whose logits are compared")
                continue
            logits = logits.swapaxes(0, 1).astype(np.float32)
            compared = _compare(request.rules, ids, logits, sizes, words, length)
            check.report.comparisons.append(compared)
            expected = logits_of_choices(forward, request, ids)
            check.compare("logits", expected, logits.astype(expected.dtype), sizes, words, ~_ended(request.rules, ids))


def _with_logits(file: pathlib.Path) -> bytes:
    """The graph in `file`, which besides the ids gives the logits (L, B, V) of all steps."""
    model = onnx.load(file, load_external_data=False)
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    loop.attribute[0].g.output.append(onnx.ValueInfoProto(name=LOGITS))
    loop.output.append("logits")
    model.graph.output.append(onnx.ValueInfoProto(name="logits"))
    return model.SerializeToString()


def _rows(ids, config):
    """Prompts without padding, and without rows that are nothing else; 0 is padding where the model has none."""
    pad_id = 0 if config["pad_id"] is None else config["pad_id"]
    return [row[row != pad_id] for row in ids if (row != pad_id).any()]


def _ends(rules, ids):
    """(B, L): True where a row ends."""
    return np.isin(ids, [] if rules.end_id is None else rules.end_id)


def _ended(rules, ids):
    """(B, L): True after a row's end."""
    ends = _ends(rules, ids)
    return np.cumsum(ends, axis=1) - ends > 0


def _compare(rules, ids, logits, sizes, case, length) -> Comparison:
    """Compares `ids` (B, L) with what the rules choose by `logits` (B, L, V)."""
    ended = _ended(rules, ids)
    worst = Comparison("ids", sizes, case, 0.0, 0.0, TIE)
    for position in range(ids.shape[1]):
        scores = rules.scores(logits[:, position], position, {})
        chosen, over = ids[:, position], ended[:, position]
        for row in np.flatnonzero(over & (chosen != rules.pad_id)):
            return _wrong(sizes, case, f"row {row} goes on after its end, at token {position}")
        best, own = scores.max(-1), np.take_along_axis(scores, chosen[:, None], 1)[:, 0]
        error = np.where(over, 0, best - own)
        row = int(error.argmax())
        if error[row] > worst.max_error:
            worst = Comparison(
                "ids", sizes, case, float(error[row]), 0.0, TIE, (row, position), float(best[row]), float(own[row])
            )
    if ids.shape[1] < length and not _ends(rules, ids).any(1).all():
        return _wrong(sizes, case, f"it ends after {ids.shape[1]} of {length} tokens with rows that have not ended")
    return worst


def _wrong(sizes, case, problem) -> Comparison:
    return Comparison("ids", sizes, case, float("inf"), float("inf"), 0.0, problem=problem)
