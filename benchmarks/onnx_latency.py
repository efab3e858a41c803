"""Latency of a causal encoder's ONNX graph: ours, Keras' own export (tf2onnx), and torch's, of the same weights.

    KERAS_BACKEND=tensorflow python benchmarks/onnx_latency.py [--layers 4] [--width 512] [--rounds 15]

Needs the extras tensorflow, onnx, tf2onnx and benchmark; torch's export takes part where torch and onnxscript are
there. The graphs run in ONNX Runtime on the CPU and take turns in each round; the table gives the median over the
rounds of theirs / ours: above 1 ours is faster. The model is made of Keras' own layers with a causal mask and ReLU: an
exact GELU does not survive Keras' export. torch gets a module of its own with the same weights, as Keras on torch does
not export with free axes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import onnx
import onnxruntime
from keras import layers

from keras_transformer.export import export_onnx
from keras_transformer.export.bench import ratios

LENGTHS = (16, 128, 512)


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
    # Threads that wait by spinning take the core away from the next contestant.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_of(session: onnxruntime.InferenceSession, ids: np.ndarray) -> Callable[[], np.ndarray]:
    """A function that runs the graph on `ids`."""
    feed = {session.get_inputs()[0].name: ids}
    return lambda: session.run(None, feed)[0]


def export_by_torch(model: keras.Model, path: Path) -> None:
    """Torch's own export (dynamo) of a module with the same weights."""
    import torch
    from torch import nn

    def tensors(layer):
        return [torch.tensor(keras.ops.convert_to_numpy(variable.value)) for variable in layer.weights]

    def linear(kernel, bias):
        made = nn.Linear(*kernel.shape)
        made.weight.data, made.bias.data = kernel.T.contiguous(), bias
        return made

    def norm(layer):
        made = nn.LayerNorm(layer.gamma.shape, layer.epsilon)
        made.weight.data, made.bias.data = tensors(layer)
        return made

    class Block(nn.Module):
        def __init__(self, attention, attention_norm, inner, output, output_norm):
            super().__init__()
            *inputs, kernel, bias = tensors(attention)  # (D, N, H), (N, H), three times; then (N, H, D), (D)
            projections = [linear(k.flatten(1), b.flatten()) for k, b in zip(inputs[::2], inputs[1::2], strict=True)]
            self.projections = nn.ModuleList(projections)
            self.output = linear(kernel.flatten(0, 1), bias)
            self.attention_norm, self.feed_forward_norm = norm(attention_norm), norm(output_norm)
            self.feed_forward = nn.Sequential(linear(*tensors(inner)), nn.ReLU(), linear(*tensors(output)))
            self.heads = attention.num_heads

        def forward(self, x):
            parts = [dense(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for dense in self.projections]
            attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
            x = self.attention_norm(x + self.output(attended))
            return self.feed_forward_norm(x + self.feed_forward(x))

    embedding, *rest = (layer for layer in model.layers if layer.weights)
    module = nn.Sequential(
        nn.Embedding.from_pretrained(*tensors(embedding)), *(Block(*rest[i : i + 5]) for i in range(0, len(rest), 5))
    ).eval()
    free = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    ids = torch.ones((2, 7), dtype=torch.int32)
    torch.onnx.export(module, (ids,), dynamic_shapes=free, dynamo=True, verbose=False).save(str(path))


def main() -> None:
    """Prints the ratios as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15, help="at the longest; the shorter, the more")
    options = parser.parse_args()
    if keras.backend.backend() != "tensorflow":
        parser.error("Keras exports with free axes on TensorFlow only: set KERAS_BACKEND=tensorflow")

    model = encoder(options.layers, options.width)
    model(np.ones((1, 3), "int32"))  # Keras exports no model that was never called
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.onnx" for name in ("ours", "tf2onnx", "torch")}
        export_onnx(model, paths["ours"], verify=False)
        model.export(str(paths["tf2onnx"]), format="onnx", verbose=False)
        if importlib.util.find_spec("torch") and importlib.util.find_spec("onnxscript"):
            export_by_torch(model, paths["torch"])
        else:
            del paths["torch"]
        for name, path in paths.items():
            print(f"{name:8}{len(onnx.load(path).graph.node):5} nodes")
        others = list(paths)[1:]
        print(
            f"{'threads':>8}{'batch':>7}{'length':>8}{'largest difference':>20}" + "".join(f"{n:>10}" for n in others)
        )
        for threads in (1, 2):
            sessions = {name: session(path, threads) for name, path in paths.items()}
            for batch, length in itertools.product((1, 8), LENGTHS):
                ids = np.random.default_rng(0).integers(1, 1000, (batch, length)).astype("int32")
                runs = {name: run_of(each, ids) for name, each in sessions.items()}
                outputs = {name: run() for name, run in runs.items()}
                difference = max(np.abs(output - outputs["ours"]).max() for output in outputs.values())
                found = ratios(runs, options.rounds * max(LENGTHS) // length)  # short runs scatter more
                print(
                    f"{threads:>8}{batch:>7}{length:>8}{difference:>20.1e}"
                    + "".join(f"{found[name]:>10.2f}" for name in others),
                    flush=True,
                )


if __name__ == "__main__":
    main()
