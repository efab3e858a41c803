"""Latency of an encoder's ONNX graph, ours against Keras' own export of the same weights (TensorFlow, through tf2onnx).

    KERAS_BACKEND=tensorflow python benchmarks/onnx_latency.py [--layers 4] [--width 512] [--rounds 15]

Needs the extras tensorflow, onnx and tf2onnx. Both graphs run in ONNX Runtime on the CPU, one after the other in each
round, so that only their ratio counts. The model is made of Keras' own layers with a causal mask and ReLU: an exact
GELU does not survive Keras' export.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import onnx
import onnxruntime
from keras import layers

from keras_transformer.export import export_onnx


def encoder(num_layers: int, width: int) -> keras.Model:
    """A post-norm causal stack of Keras' own layers over token ids."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(1000, width)(ids)
    for _ in range(num_layers):
        attended = layers.MultiHeadAttention(8, width // 8)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        inner = layers.Dense(width)(layers.Dense(4 * width, activation="relu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return keras.Model(ids, x)


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """The graph at `path` with every optimisation."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def paired_ratio(theirs: tuple, ours: tuple, rounds: int) -> float:
    """Median over the rounds of their time by ours; each is (session, inputs)."""
    ratios = []
    for number in range(rounds + 2):
        times = {}
        for run in (theirs, ours) if number % 2 else (ours, theirs):
            started = time.perf_counter()
            run[0].run(None, run[1])
            times[run[0]] = time.perf_counter() - started
        if number >= 2:  # the first rounds warm up
            ratios.append(times[theirs[0]] / times[ours[0]])
    return statistics.median(ratios)


def main() -> None:
    """Prints the ratios as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if keras.backend.backend() != "tensorflow":
        parser.error("Keras exports with free axes on TensorFlow only: set KERAS_BACKEND=tensorflow")

    model = encoder(options.layers, options.width)
    model(np.ones((1, 3), "int32"))  # Keras exports no model that was never called
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in ("theirs", "ours")}
        model.export(str(paths["theirs"]), format="onnx", verbose=False)
        export_onnx(model, paths["ours"], verify=False)
        for name, path in paths.items():
            print(f"{name:6}: {len(onnx.load(path).graph.node)} nodes")
        print(f"{'threads':>8}{'batch':>7}{'length':>8}{'largest difference':>20}{'theirs / ours':>15}")
        for threads in (1, 2):
            theirs, ours = (session(path, threads) for path in paths.values())
            for batch, length in ((1, 16), (1, 128), (1, 512), (8, 16), (8, 128)):
                ids = np.random.default_rng(0).integers(1, 1000, (batch, length)).astype("int32")
                pair = [(run, {run.get_inputs()[0].name: ids}) for run in (theirs, ours)]
                (a,), (b,) = (run.run(None, feed) for run, feed in pair)
                ratio = paired_ratio(*pair, options.rounds)
                print(f"{threads:>8}{batch:>7}{length:>8}{np.abs(a - b).max():>20.1e}{ratio:>15.2f}")


if __name__ == "__main__":
    main()
