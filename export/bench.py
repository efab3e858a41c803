"""Times exported models beside each other, in turn, so that only ratios within a round count; needs no Keras."""

from __future__ import annotations

import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from keras_transformer import _validation
from keras_transformer.export import runtime
from keras_transformer.export.directory import graph_config, read_config
from keras_transformer.export.sessions import default_options, open_session


def bench(
    paths: Sequence[str | os.PathLike],
    batch: int = 1,
    length: int = 32,
    new_tokens: int = 16,
    rounds: int = 15,
    threads: int | None = None,
) -> list[dict]:
    """Runs exported models of one kind, such as the forms of a model, in turn.

    A graph is run once a round, on made-up inputs of `batch` rows and of `length` along every other free axis, within
    its limits. A model with a cache, or a generator, makes `new_tokens` tokens after a prompt or source of `length`.

    Args:
        paths: exported directories or files.
        batch: rows.
        length: tokens of each.
        new_tokens: tokens that are made.
        rounds: how often each runs; the median counts.
        threads: threads for one operation; default: all cores.

    Returns:
        For each of `paths` a dict: `path`, `size` in bytes, `milliseconds` (median), and `ratio`, the median over the
        rounds of its time divided by that of the first.

    Raises:
        NotAnExportError: one of `paths` is no exported model.
        ValueError: a number below 1.
    """
    _validation.positive_integers(batch=batch, length=length, new_tokens=new_tokens, rounds=rounds)
    paths = [pathlib.Path(path) for path in paths]
    runs = {str(path): _run_of(path, batch, length, new_tokens, threads) for path in paths}
    times = measured(runs, rounds)
    first = times[str(paths[0])]
    return [
        {
            "path": str(path),
            "size": sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir())),
            "milliseconds": 1000 * statistics.median(times[str(path)]),
            "ratio": statistics.median(a / b for a, b in zip(times[str(path)], first, strict=True)),
        }
        for path in paths
    ]


def ratios(runs: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """The time of every other run divided by that of the first: the median over the rounds; see `measured`."""
    times = measured(runs, rounds, warm_up)
    first, *others = times
    return {name: statistics.median(a / b for a, b in zip(times[name], times[first], strict=True)) for name in others}


def measured(runs: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """The seconds that each run takes, in each round.

    In each round all run once, in a random order: a machine that slows down or speeds up favours nobody, and nobody
    always comes after the one whose threads still wait by spinning.

    Args:
        runs: what is timed, by name; each must return only when its work is done.
        rounds: number of rounds that count.
        warm_up: number of rounds before them that do not.
    """
    names = list(runs)
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        for name in order.sample(names, len(names)):
            started = time.perf_counter()
            runs[name]()
            if number >= warm_up:
                found[name].append(time.perf_counter() - started)
    return found


def _run_of(path, batch, length, new_tokens, threads) -> Callable[[], object]:
    """What one round does with the model at `path`."""
    config = read_config(path) if path.is_dir() else {"kind": "model"}
    runners = {"encoder-decoder": runtime.OnnxTransformer, "decoder": runtime.OnnxCausalLM}
    file = path / "model.onnx" if path.is_dir() else path
    if config["kind"] == "model" or config.get("target") == "generator":
        session = open_session(file, default_options(threads))
        if graph_config(session).get("target") != "generator":
            return _graph(session, batch, length)
        runner = runtime.OnnxGenerator(path, threads=threads)
    else:
        runner = runners[config["kind"]](path, threads=threads)
    limit, size = runner.config["max_length"], min(v for k, v in runner.config.items() if "vocabulary_size" in k)
    if limit is not None and runner.config["kind"] == "decoder":
        length = max(1, min(length, limit - new_tokens))
    elif limit is not None:
        length, new_tokens = min(length, limit), min(new_tokens, limit)
    pad_id = runner.config["pad_id"]
    ids = [i for i in range(size) if i != pad_id]
    prompts = np.random.default_rng(0).choice(ids, (batch, length))
    return lambda: runner.generate(prompts, new_tokens)


def _graph(session, batch, length):
    from keras_transformer.export.verify import MadeSamples, interface

    specs, axes, _ = interface(session)
    sizes = {
        axis.name: max(axis.minimum, min(batch if axis.batch else length, axis.maximum or length + batch))
        for axis in axes
    }
    inputs = MadeSamples(specs).make(sizes, "whole", 0)
    return lambda: session.run(None, inputs)
