r"""Trains a language model on the characters of one text, lets it write, and exports it to ONNX.

Any UTF-8 text file will do, of some hundred thousand characters or more: a novel or collected plays, such as
https://www.gutenberg.org has. Its last tenth is held out. What the model makes of that is given in bits per character,
beside those of the best guess from the character before alone. For example:

    python examples/write.py --backend torch --output runs/plays --text plays.txt --llama
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
from common import begin, finish, options_parser, run_onnx, verbosity


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    text = options.text.read_text(encoding="utf-8")
    alphabet = "".join(sorted(set(text)))
    ids = np.array([alphabet.index(character) for character in text], "int32")
    kept = len(ids) - len(ids) // 10
    check(options, alphabet, held_out=len(ids) - kept)
    begin(options, "write")
    (options.output / "alphabet.json").write_text(json.dumps(alphabet), encoding="utf-8")

    from keras_transformer.data import cut_text

    rows, labels = cut_text(ids[:kept], options.length)
    test_rows, test_labels = cut_text(ids[kept:], options.length)
    model = make_model(options, len(alphabet), steps=options.epochs * -(-len(rows) // options.batch_size))
    print(f"{model.count_params():,} parameters; {rows.size:,} characters of {len(alphabet)} kinds to train on")
    model.fit(
        rows,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test_rows, test_labels),
        verbose=verbosity(),
    )
    model.save(options.output / "model.keras")
    print("\nIt writes:\n")
    write(model, alphabet, options)

    from keras_transformer.export import export_onnx

    graph = options.output / "model.onnx"  # of whole texts: a directory would have a key/value cache, for steps
    report = export_onnx(model, graph, force=True)
    perplexity = model.evaluate(test_rows, test_labels, verbose=0, return_dict=True)["perplexity"]
    logits = run_onnx(graph, {"token_ids": test_rows})
    figures = {
        "the character before alone": bigram_bits(ids[:kept], test_rows, test_labels, len(alphabet)),
        "Keras": math.log2(perplexity),
        "ONNX Runtime": bits(logits, test_labels),
    }
    for engine, value in figures.items():
        print(f"{engine:27} {value:.4f} bits per character of the held-out tenth, perplexity {2**value:.3f}")
    finish(options, "write", figures)
    # float32 sums over many characters, in another order: not equal to the last digit
    return 0 if report.passed and abs(figures["Keras"] - figures["ONNX Runtime"]) < 1e-4 else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to options."""
    parser = options_parser(__doc__)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text to learn from")
    parser.add_argument("--llama", action="store_true", help="the shape of Llama in place of GPT-2's")
    parser.add_argument("--num-layers", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--d-model", type=int, default=128, help="width (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="characters that it sees at most (%(default)s)")
    parser.add_argument("--epochs", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest (%(default)s)")
    parser.add_argument("--prompt", default="\n", help="what the written text goes on from (a line's end)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of the draws (%(default)s)")
    parser.add_argument("--top-p", type=float, default=0.95, help="see `generate` (%(default)s)")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, alphabet: str, held_out: int) -> None:
    """Refuses what would fail after training only."""
    if held_out <= options.length:
        sys.exit(f"A tenth of {options.text} must be longer than --length {options.length}. Received: {held_out}")
    if not 0 < len(options.prompt) < options.length:
        sys.exit(f"--prompt must have 1 to {options.length - 1} characters. Received: {len(options.prompt)}")
    if unknown := set(options.prompt) - set(alphabet):
        sys.exit(f"--prompt must be of the characters of {options.text}. Received also: {sorted(unknown)}")


def make_model(options: argparse.Namespace, vocabulary_size: int, steps: int):
    """The compiled model; its learning rate rises for a tenth of `steps` and then falls to 0."""
    import keras

    from keras_transformer.models import CausalLM

    if options.llama:
        # As in Llama: rotary positions, gated SiLU of two thirds the width, RMS norms, no biases, keys shared by heads.
        shape = {
            "d_ff": 8 * options.d_model // 3,
            "num_kv_heads": 2,
            "activation": "silu",
            "gated": True,
            "norm": "rms",
            "use_bias": False,
            "position_encoding": "rotary",
            "tie_output": False,
        }
    else:
        shape = {"d_ff": 4 * options.d_model}
    model = CausalLM(
        vocabulary_size,
        options.num_layers,
        options.d_model,
        num_heads=4,
        max_length=options.length,
        seed=options.seed,
        **shape,
    )
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=steps - steps // 10, warmup_target=options.learning_rate, warmup_steps=steps // 10
    )
    model.compile(keras.optimizers.AdamW(rate, weight_decay=0.1, clipnorm=1.0))
    return model


def write(model, alphabet: str, options: argparse.Namespace) -> None:
    """Prints the prompt and what the model writes after it, as it comes, up to its longest text."""
    print(options.prompt, end="", flush=True)
    prompt = [[alphabet.index(character) for character in options.prompt]]
    for token in model.stream(
        prompt,
        options.length - len(options.prompt),
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
    ):
        print(alphabet[token[0]], end="", flush=True)
    print("\n")


def bits(logits, labels) -> float:
    """The mean bits that `labels` (B, T) take under `logits` (B, T, V)."""
    logits = logits.astype("float64")
    chosen = np.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    peak = logits.max(axis=-1)
    log_total = peak + np.log(np.exp(logits - peak[..., None]).sum(axis=-1))
    return float(np.mean(log_total - chosen) / math.log(2))


def bigram_bits(ids, rows, labels, vocabulary_size: int) -> float:
    """The same when a character is guessed by how often it came after the one before, each counted once too often."""
    counts = np.ones((vocabulary_size, vocabulary_size))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.mean(np.log2(shares[rows, labels])))


if __name__ == "__main__":
    sys.exit(main())
