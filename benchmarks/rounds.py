"""Times several ways to do one thing in turn, so that only their ratio within a round counts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable


def ratios(runs: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """The time of every other run divided by that of the first: the median over the rounds.

    In each round all run once, in a random order: a machine that slows down or speeds up favours nobody, and nobody
    always comes after the one whose threads still wait by spinning.

    Args:
        runs: what is timed, by name; each must return only when its work is done.
        rounds: number of rounds that count.
        warm_up: number of rounds before them that do not.
    """
    names = list(runs)
    first, *others = names
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in others}
    for number in range(warm_up + rounds):
        times = {}
        for name in order.sample(names, len(names)):
            started = time.perf_counter()
            runs[name]()
            times[name] = time.perf_counter() - started
        if number >= warm_up:
            for name in others:
                found[name].append(times[name] / times[first])
    return {name: statistics.median(values) for name, values in found.items()}
