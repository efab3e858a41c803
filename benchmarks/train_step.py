"""Time of a training step of an encoder: its blocks ours, KerasHub's, or made of `keras.layers.MultiHeadAttention`.

    KERAS_BACKEND=jax python benchmarks/train_step.py [--batch 16] [--length 128] [--width 256] [--layers 4]

Needs a backend and the extra `benchmark`. The three models have the same embedding, head, widths and number of
parameters; each step is one `train_on_batch`. In each round the models take turns, and the table gives the median over
the rounds of theirs / ours: above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

from keras_transformer.export.bench import ratios
from keras_transformer.layers import TransformerEncoderBlock

VOCABULARY = 1000
HEADS = 4


def ours(x, width, dropout):
    """A block of this package."""
    return TransformerEncoderBlock(HEADS, 4 * width, dropout=dropout)(x)


def keras_hub(x, width, dropout):
    """KerasHub's block."""
    from keras_hub.layers import TransformerEncoder

    return TransformerEncoder(4 * width, HEADS, dropout=dropout)(x)


def keras_mha(x, width, dropout):
    """The block that one writes by hand with Keras' own attention."""
    attended = layers.MultiHeadAttention(HEADS, width // HEADS, dropout=dropout)(x, x)
    x = layers.LayerNormalization()(layers.Add()([x, layers.Dropout(dropout)(attended)]))
    inner = layers.Dense(width)(layers.Dense(4 * width, activation="relu")(x))
    return layers.LayerNormalization()(layers.Add()([x, layers.Dropout(dropout)(inner)]))


BLOCKS = {"ours": ours, "keras_hub": keras_hub, "keras MHA": keras_mha}


def model(block, options: argparse.Namespace, dropout: float, jit: bool) -> keras.Model:
    """A compiled token classifier made of `options.layers` blocks."""
    ids = keras.Input((options.length,), dtype="int32")
    x = layers.Embedding(VOCABULARY, options.width)(ids)
    for _ in range(options.layers):
        x = block(x, options.width, dropout)
    made = keras.Model(ids, layers.Dense(10)(x))
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
    return made


def arguments(description: str, **switches: str) -> argparse.Namespace:
    """The command line's sizes, and switches with their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    for name, text in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()


def table(blocks: dict, options: argparse.Namespace, dropouts=(0.0, 0.1), jits=(False, True)) -> None:
    """Prints, for every dropout and with XLA (torch: its compiler) or without, each block's time by the first's."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, (options.batch, options.length)).astype("int32")
    labels = rng.integers(0, 10, ids.shape).astype("int32")
    if keras.backend.backend() == "torch":
        import torch

        # Keras' layers share one `__call__`, which torch would stop compiling after 8 kinds of layers of all models.
        torch._dynamo.config.recompile_limit = 256
        ids, labels = torch.tensor(ids), torch.tensor(labels)  # as `fit` hands them on: arrays break the graph
    print(f"{keras.backend.backend()}, {options.rounds} rounds: time / time of {next(iter(blocks))}")
    print(f"{'dropout':>8}{'jit':>7}" + "".join(f"{name:>12}" for name in list(blocks)[1:]))
    for dropout in dropouts:
        for jit in jits:
            models = {name: model(block, options, dropout, jit) for name, block in blocks.items()}
            assert len({made.count_params() for made in models.values()}) == 1
            runs = {name: lambda made=made: made.train_on_batch(ids, labels) for name, made in models.items()}
            found = ratios(runs, options.rounds)
            print(f"{dropout:>8}{jit!s:>7}" + "".join(f"{ratio:>12.2f}" for ratio in found.values()), flush=True)
            keras.backend.clear_session()


if __name__ == "__main__":
    table(BLOCKS, arguments(__doc__))
