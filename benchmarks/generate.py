"""Greedy generation with the cached loop, against recomputing everything at each token, and against its peers.

    KERAS_BACKEND=torch python benchmarks/generate.py [--batch 4] [--tokens 64] [--width 128] [--layers 2] [--rounds 5]

Needs a backend; what else is installed of the extra `benchmark` (transformers, on torch) and `onnx` takes part. All
generate the same number of tokens with models of the same shape. In each round they take turns, and the table gives
the median over the rounds of theirs / ours: above 1 `Transformer.generate` is faster.

- recomputation: `predict_on_batch` of the whole model at each token, its target padded to the full length.
- step by step: our own cached steps, run through the layers without a compiled or recorded program.
- transformers: `MarianMTModel.generate` (torch), which has the same encoder, decoder and cache.
- ONNX Runtime: our exported graphs in `OnnxTransformer`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from keras_transformer.export.bench import ratios
from keras_transformer.models import Transformer

VOCABULARY = 1000
HEADS = 4


def transformer(options: argparse.Namespace) -> Transformer:
    """A model with random weights that never ends a row."""
    model = Transformer(
        VOCABULARY,
        VOCABULARY,
        num_layers=options.layers,
        d_model=options.width,
        num_heads=HEADS,
        d_ff=4 * options.width,
        share_embeddings=True,
        seed=0,
    )
    table = keras.ops.convert_to_numpy(model.target_embedding.embeddings.value).copy()
    table[[model.pad_id, model.end_id]] = 0  # logit 0, below the best of 998 random ones
    model.target_embedding.embeddings.assign(table)
    return model


def recomputation(model: Transformer, source: np.ndarray, tokens: int):
    """Greedy decoding as a Keras model without a cache allows it."""

    def run():
        target = np.zeros((len(source), tokens + 1), "int32")
        target[:, 0] = model.start_id
        for position in range(tokens):
            logits = model.predict_on_batch({"source": source, "target": target[:, :-1]})
            target[:, position + 1] = logits[:, position].argmax(-1)
        return target[:, 1:]

    return run


def marian(options: argparse.Namespace, source: np.ndarray):
    """Hugging Face's model of the same shape."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    size = {"attention_heads": HEADS, "ffn_dim": 4 * options.width, "layers": options.layers}
    config = MarianConfig(
        vocab_size=VOCABULARY,
        d_model=options.width,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in size.items()},
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        decoder_start_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
    )
    model = MarianMTModel(config).eval()
    ids = torch.tensor(source.astype("int64"))
    length = {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}

    def run():
        with torch.inference_mode():
            return model.generate(ids, num_beams=1, do_sample=False, **length)[:, 1:].numpy()

    return run


def onnx_runtime(model: Transformer, source: np.ndarray, tokens: int, folder: str):
    """Our exported graphs in our runner."""
    from keras_transformer.export import export_onnx
    from keras_transformer.export.runtime import OnnxTransformer

    export_onnx(model, os.path.join(folder, "model"), verify=False)
    runner = OnnxTransformer(os.path.join(folder, "model"))
    return lambda: runner.generate(source, max_new_tokens=tokens)


def main() -> None:
    """Prints the ratios as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--source-length", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    model = transformer(options)
    shape = (options.batch, options.source_length)
    source = np.random.default_rng(0).integers(3, VOCABULARY, shape).astype("int32")
    runs = {
        "ours": lambda: model.generate(source, max_new_tokens=options.tokens),
        "recomputation": recomputation(model, source, options.tokens),
        "step by step": lambda: model.generate(source, max_new_tokens=options.tokens, compile=False),
    }
    if keras.backend.backend() == "torch" and importlib.util.find_spec("transformers"):
        runs["transformers"] = marian(options, source)
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("onnxruntime"):
            runs["ONNX Runtime"] = onnx_runtime(model, source, options.tokens, folder)
        ids = {name: run() for name, run in runs.items()}
        assert all(result.shape == (options.batch, options.tokens) for result in ids.values())
        assert all((ids[name] == ids["ours"]).all() for name in ids if name != "transformers")
        print(f"{keras.backend.backend()}, {options.tokens} tokens in {options.batch} rows: time / time of ours")
        for name, ratio in ratios(runs, options.rounds, warm_up=1).items():
            print(f"{name:>16}{ratio:8.2f}")


if __name__ == "__main__":
    main()
