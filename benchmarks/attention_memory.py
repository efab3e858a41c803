"""Peak memory of a training step with causal self-attention, without it, and with all T×T scores at once.

    KERAS_BACKEND=jax python benchmarks/attention_memory.py [--length 8192] [--width 256] [--no-jit] [--times]

Needs a backend. The model is an embedding, one attention layer with a residual, and a dense layer. Each variant makes
two steps in a process of its own; the table has its peak resident memory, and how much that is above the peak without
attention. `--times` prints instead, for lengths up to this one, the time with all scores at once / ours: above 1 ours
is faster, in a step and in `predict_on_batch`, causal and not; not of torch, which has a kernel for every length.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

from keras_transformer.export.bench import ratios
from keras_transformer.layers import MultiHeadSelfAttention

HEADS = 4
VOCABULARY = 1000
VARIANTS = ("without", "attention", "plain")
operation = importlib.import_module("keras_transformer.ops.attention")


def step(variant: str, options: argparse.Namespace, length: int, causal: bool = True):
    """(model, ids, labels) of a variant; "plain" is "attention" after `choose("plain")`."""
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(VOCABULARY, options.width)(ids)
    if variant != "without":
        x = layers.Add()([x, MultiHeadSelfAttention(HEADS, causal=causal)(x)])
    model = keras.Model(ids, layers.Dense(10)(x))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=not options.no_jit)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (options.batch, length)).astype("int32")
    return model, ids, ids % 10


def choose(variant: str) -> None:
    """Has the models that are traced from here on take all scores at once; only for "plain"."""
    if variant == "plain":
        operation.BLOCKWISE_FROM = float("inf")
        operation._backend_has_fused_kernel = lambda dtype: False


def peak(variant: str, options: argparse.Namespace) -> float:
    """GiB that two steps of a variant took at most, in this process."""
    choose(variant)
    model, ids, labels = step(variant, options, options.length)
    for _ in range(2):
        model.train_on_batch(ids, labels)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def memory(options: argparse.Namespace) -> None:
    """Prints every variant's peak, and how much of it is due to attention."""
    print(f"{keras.backend.backend()}, length {options.length}: peak memory in GiB")
    found = {}
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[variant] = float(run.stdout.split()[-1])
        more = "" if variant == "without" else f"{found[variant] - found['without']:>+10.2f}"
        print(f"{variant:>12}{found[variant]:>10.2f}{more}", flush=True)


def times(options: argparse.Namespace) -> None:
    """Prints, for lengths from the first that is cut into blocks, the time of the plain path by ours."""
    print(f"{keras.backend.backend()}, {options.rounds} rounds: plain / ours")
    print(f"{'length':>8}{'causal':>8}{'step':>10}{'predict':>10}")
    length = min(options.length, int((operation.BLOCKWISE_FROM / HEADS) ** 0.5))
    while length <= options.length:
        for causal in (True, False):
            steps, predictions = {}, {}
            shipped = operation.BLOCKWISE_FROM, operation._backend_has_fused_kernel
            for variant in ("attention", "plain"):
                choose(variant)
                model, ids, labels = step(variant, options, length, causal)
                steps[variant] = lambda model=model, data=(ids, labels): model.train_on_batch(*data)
                predictions[variant] = lambda model=model, ids=ids: model.predict_on_batch(ids)
                steps[variant](), predictions[variant]()  # traced and compiled as chosen
            operation.BLOCKWISE_FROM, operation._backend_has_fused_kernel = shipped
            found = [ratios(runs, options.rounds, warm_up=1)["plain"] for runs in (steps, predictions)]
            print(f"{length:>8}{causal!s:>8}" + "".join(f"{ratio:>10.2f}" for ratio in found), flush=True)
            keras.backend.clear_session()
        length *= 2


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-jit", action="store_true", help="do not compile with XLA (torch: its compiler)")
    parser.add_argument("--times", action="store_true", help="times in place of memory")
    parser.add_argument("--variant", choices=VARIANTS, help="this one, in this process")
    return parser.parse_args()


def main() -> None:
    """Does what the command line asks for."""
    options = arguments()
    if options.variant:
        print(peak(options.variant, options))
    elif options.times:
        times(options)
    else:
        memory(options)


if __name__ == "__main__":
    main()
