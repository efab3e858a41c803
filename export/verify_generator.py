"""Compares the graph that generates by itself with its model: each of its tokens, by the logits of Keras there."""

from __future__ import annotations

import pathlib

import numpy as np

from keras_transformer.export.directory import graph_config
from keras_transformer.export.report import Comparison
from keras_transformer.export.runtime import OnnxGenerator
from keras_transformer.export.verify import Check, FreeAxis, InputSpec
from keras_transformer.export.verify_cached import keras_forward, logits_of_choices

# Generated tokens in each row, at most.
GENERATED = 12
# By how much the score of a token may be below the best one: such tokens are a tie for two engines.
TIE = 1e-3
_ASKED = (
    {},
    {"temperature": 1.0, "seed": 2**32 - 5},
    {"temperature": 0.8, "seed": 7, "top_k": 5, "top_p": 0.9},
)


def verify_generator(model, path: pathlib.Path, check: Check, samples=None) -> None:
    """Lets the graph at `path` generate, and asks of each token whether Keras chooses it too, into `check.report`.

    Keras sees the prompt and the tokens before, whole and uncached, and the same rules in NumPy choose by its logits.
    The error of a token is by how much its score there is below the best one.
    """
    runner = OnnxGenerator(path)
    runner._session = check.session(path / "model.onnx" if path.is_dir() else path)
    config = graph_config(runner._session)
    encoder_decoder = config["kind"] == "encoder-decoder"
    if hasattr(model, "encode") != encoder_decoder or not hasattr(model, "start_generation"):
        raise ValueError(f"{path} holds a model of kind {config['kind']!r}. Received: model={model!r}")
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
            request = runner.generation_request(prompts, length)
            words = f"{case}, {', '.join(asked) or 'greedy'}"
            try:
                ids = runner.generate(prompts, length, **asked)
            except Exception as error:  # onnxruntime raises many types, none of them documented
                check.fail("ids", sizes, words, f"ONNX Runtime cannot run: {str(error).strip()[:300]}")
                continue
            logits = logits_of_choices(forward, request, ids)
            check.report.comparisons.append(_compare(request.asking(**asked).rules, ids, logits, sizes, words, length))


def _rows(ids, config):
    """Prompts without padding, and without rows that are nothing else; 0 is padding where the model has none."""
    pad_id = 0 if config["pad_id"] is None else config["pad_id"]
    return [row[row != pad_id] for row in ids if (row != pad_id).any()]


def _compare(rules, ids, logits, sizes, case, length) -> Comparison:
    finished = np.zeros(len(ids), bool)
    notes = rules.first_notes(len(ids))
    worst = Comparison("ids", sizes, case, 0.0, 0.0, TIE)
    for position in range(ids.shape[1]):
        scores = rules.scores(logits[:, position], position, notes)
        chosen = ids[:, position]
        for row in np.flatnonzero(finished & (chosen != rules.pad_id)):
            return _wrong(sizes, case, f"row {row} goes on after its end, at token {position}")
        best, own = scores.max(-1), np.take_along_axis(scores, chosen[:, None], 1)[:, 0]
        error = np.where(finished, 0, best - own)
        row = int(error.argmax())
        if error[row] > worst.max_error:
            worst = Comparison(
                "ids", sizes, case, float(error[row]), 0.0, TIE, (row, position), float(best[row]), float(own[row])
            )
        ended, notes = rules.noted(chosen, position, notes)
        finished = finished | ended
    if ids.shape[1] < length and not finished.all():
        return _wrong(sizes, case, f"it ends after {ids.shape[1]} of {length} tokens with rows that have not ended")
    return worst


def _wrong(sizes, case, problem) -> Comparison:
    return Comparison("ids", sizes, case, float("inf"), float("inf"), 0.0, problem=problem)
