r"""Trains a translator on two parallel text files, exports it to ONNX, and scores Keras and ONNX Runtime by sacreBLEU.

Line n of one file translates line n of the other; names that end in `.gz` are gzip files. Captions such as Multi30k
(https://github.com/multi30k/dataset) or the corpora of https://opus.nlpl.eu come in this form. For example:

    python examples/translate.py --backend jax --output runs/en-de \
        --source train.en.gz --target train.de.gz \
        --validation-source val.en.gz --validation-target val.de.gz \
        --test-source test.en.gz --test-target test.de.gz

Everything is kept in the output directory. The same command goes on after an interruption, at the last whole epoch, and
does not train again what is trained. `keras-transformer translate runs/en-de/onnx` then translates without Keras.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parse(arguments)
    os.environ["KERAS_BACKEND"] = options.backend  # before the first import of Keras
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    check_same_run(options)

    import keras

    from keras_transformer.text import Tokenizer, read_lines

    keras.utils.set_random_seed(options.seed)
    corpus = read_pairs(options.source, options.target, read_lines)
    path = output / "tokenizer.json"
    if not path.exists():
        # One vocabulary for both languages: names and numbers are the same in both, and embeddings can be shared.
        write(path, Tokenizer.train(corpus[0] + corpus[1], options.vocabulary_size).save)
    tokenizer = Tokenizer.load(path)
    train = dataset(corpus, tokenizer, options, "training")
    validation = None
    if options.validation_source:
        pairs = read_pairs(options.validation_source, options.validation_target, read_lines)
        validation = dataset(pairs, tokenizer, options, "validation", shuffle=False)

    model = make_model(tokenizer.vocabulary_size, options)
    print(f"{model.count_params():,} parameters; {len(train)} batches an epoch of shapes {train.shapes}", flush=True)
    train_model(model, train, validation, options)
    write(output / "model.keras", model.save)

    from keras_transformer.export import OnnxTransformer, export_onnx

    export_onnx(model, output / "onnx", tokenizer=tokenizer, force=True)
    if not options.test_source:
        return 0
    sources, references = read_pairs(options.test_source, options.test_target, read_lines)
    return score(model, OnnxTransformer(output / "onnx"), tokenizer, sources, references, output)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    files = parser.add_argument_group("text files")
    files.add_argument("--source", type=Path, required=True, metavar="FILE", help="training text to translate from")
    files.add_argument("--target", type=Path, required=True, metavar="FILE", help="its translation")
    for part, use in (("validation", "chooses the best epoch and stops early"), ("test", "is translated and scored")):
        files.add_argument(f"--{part}-source", type=Path, metavar="FILE", help=f"text that {use}")
        files.add_argument(f"--{part}-target", type=Path, metavar="FILE", help="its translation")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of this run")
    parser.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    model = parser.add_argument_group("model")
    model.add_argument("--vocabulary-size", type=int, default=6000, help="of source and target together (%(default)s)")
    model.add_argument("--num-layers", type=int, default=3, help="in encoder and decoder each (%(default)s)")
    model.add_argument("--d-model", type=int, default=256, help="width (%(default)s)")
    model.add_argument("--num-heads", type=int, default=4, help="(%(default)s)")
    model.add_argument("--d-ff", type=int, default=1024, help="(%(default)s)")
    model.add_argument("--dropout", type=float, default=0.2, help="(%(default)s)")
    model.add_argument("--max-length", type=int, default=128, help="longest sentence in tokens (%(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=20, help="at most (%(default)s)")
    training.add_argument("--minutes", type=float, default=float("inf"), help="begin no further epoch after these")
    training.add_argument("--patience", type=int, default=4, help="epochs without a better one (%(default)s)")
    training.add_argument("--batch-tokens", type=int, default=2048, help="places in a batch (%(default)s)")
    training.add_argument("--warmup-steps", type=int, default=800, help="(%(default)s)")
    training.add_argument("--learning-rate", type=float, default=1e-3, help="the highest (%(default)s)")
    training.add_argument("--label-smoothing", type=float, default=0.1, help="(%(default)s)")
    training.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    for part in ("validation", "test"):
        if (getattr(options, f"{part}_source") is None) != (getattr(options, f"{part}_target") is None):
            parser.error(f"--{part}-source and --{part}-target belong together")
    return options


def check_same_run(options: argparse.Namespace) -> None:
    """Refuses to go on with a run that was begun with other data or another model."""
    free = {"output", "epochs", "minutes", "patience", "test_source", "test_target"}
    settings = {name: str(value) for name, value in vars(options).items() if name not in free}
    path = options.output / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [
            f"{name}: {before.get(name)} → {value}" for name, value in settings.items() if before.get(name) != value
        ]
        if changed:
            sys.exit(
                f"{options.output} holds a run with other settings ({'; '.join(changed)}): choose another --output."
            )
    else:
        write(path, lambda name: Path(name).write_text(json.dumps(settings, indent=1), encoding="utf-8"))


def read_pairs(source: Path, target: Path, read_lines) -> tuple[list[str], list[str]]:
    """The lines of two parallel files."""
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        sys.exit(f"{source} has {len(sources)} lines and {target} has {len(targets)}: they must be parallel.")
    return sources, targets


def dataset(
    pairs: tuple[list[str], list[str]], tokenizer, options: argparse.Namespace, name: str, shuffle: bool = True
):
    """Batches of `pairs`, without those that are empty or too long."""
    from keras_transformer.data import SentencePairs

    ids = list(zip(tokenizer.encode(pairs[0]), tokenizer.encode(pairs[1]), strict=True))
    kept = [pair for pair in ids if all(1 < len(side) <= options.max_length for side in pair)]
    print(
        f"{len(kept):,} {name} pairs; {len(ids) - len(kept)} empty or longer than {options.max_length} tokens left out"
    )
    return SentencePairs(
        *zip(*kept, strict=True), batch_tokens=options.batch_tokens, shuffle=shuffle, seed=options.seed
    )


def make_model(vocabulary_size: int, options: argparse.Namespace):
    """The compiled model."""
    import keras

    from keras_transformer.losses import MaskedCrossentropy
    from keras_transformer.metrics import Perplexity
    from keras_transformer.models import Transformer
    from keras_transformer.schedules import InverseSqrtWarmup

    model = Transformer(
        vocabulary_size,
        vocabulary_size,
        num_layers=options.num_layers,
        d_model=options.d_model,
        num_heads=options.num_heads,
        d_ff=options.d_ff,
        dropout=options.dropout,
        share_embeddings=True,
        max_length=options.max_length,
        seed=options.seed,
    )
    peak = (options.d_model * options.warmup_steps) ** -0.5
    rate = InverseSqrtWarmup(options.d_model, options.warmup_steps, scale=options.learning_rate / peak)
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9),
        MaskedCrossentropy(options.label_smoothing),
        metrics=[Perplexity()],
    )
    model.optimizer.build(model.trainable_variables)
    return model


def train_model(model, train, validation, options: argparse.Namespace) -> None:
    """Trains on from the last whole epoch, and leaves the best epoch's weights in the model."""
    import keras

    path = options.output / "history.json"
    history = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    measure = "perplexity" if validation is None else "val_perplexity"

    def best() -> int:
        return min(range(len(history)), key=lambda epoch: history[epoch][measure])

    def weights(epoch: int) -> Path:
        return options.output / f"epoch-{epoch + 1:03}.weights.h5"

    def finished() -> bool:
        seconds = sum(row["seconds"] for row in history)
        return bool(history) and (
            len(history) >= options.epochs
            or seconds > 60 * options.minutes
            or len(history) - 1 - best() >= options.patience
        )

    class KeepRun(keras.callbacks.Callback):
        """Writes weights (the optimizer's too) and history after each epoch, and says when to stop."""

        def on_epoch_begin(self, epoch, logs=None):
            train.epoch = epoch  # the same order as without an interruption
            self.started = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            write(weights(epoch), self.model.save_weights)
            seconds = round(time.monotonic() - self.started, 1)
            history.append({**{name: float(value) for name, value in logs.items()}, "seconds": seconds})
            write(path, lambda name: Path(name).write_text(json.dumps(history, indent=1), encoding="utf-8"))
            for file in options.output.glob("epoch-*.weights.h5"):
                if file not in (weights(best()), weights(epoch)):
                    file.unlink()
            self.model.stop_training = finished()

    if history:
        model.load_weights(weights(len(history) - 1))
        print(f"Going on after epoch {len(history)} of {options.output}")
    if not finished():
        verbose = "auto" if sys.stdout.isatty() else 2
        model.fit(
            train,
            validation_data=validation,
            epochs=options.epochs,
            initial_epoch=len(history),
            callbacks=[KeepRun()],
            shuffle=False,
            verbose=verbose,
        )
    model.load_weights(weights(best()))
    print(f"Best epoch: {best() + 1} of {len(history)}, {measure} {history[best()][measure]:.3f}", flush=True)


def score(model, onnx_model, tokenizer, sources: list[str], references: list[str], output: Path) -> int:
    """Translates the test set with both engines; 0 if they agree."""
    import sacrebleu

    ids = tokenizer.encode(sources)
    bleu, rows = {}, {}
    # Keras' time includes compiling a program for each shape.
    for engine, generate in (("Keras", model.generate), ("ONNX Runtime", onnx_model.generate)):
        started = time.monotonic()
        rows[engine] = translate(generate, ids)
        seconds = time.monotonic() - started
        texts = tokenizer.decode(rows[engine])
        write(output / f"test.{engine.split()[0].lower()}.txt", lambda name, texts=texts: Path(name).write_text(
            "".join(text.replace("\n", " ") + "\n" for text in texts), encoding="utf-8"))  # fmt: skip
        metric = sacrebleu.BLEU()
        bleu[engine] = metric.corpus_score(texts, [references]).score
        print(f"{engine:13} BLEU {bleu[engine]:.2f}   {len(ids) / seconds:.1f} sentences/s   {metric.get_signature()}")
    differing = [i for i, pair in enumerate(zip(*rows.values(), strict=True)) if pair[0] != pair[1]]
    gaps = [top_two_gap(model, ids[i], rows["Keras"][i], rows["ONNX Runtime"][i]) for i in differing]
    print(f"{len(differing)} of {len(ids)} translations differ")
    for i, gap in zip(differing, gaps, strict=True):
        keras_text, onnx_text = tokenizer.decode([rows["Keras"][i], rows["ONNX Runtime"][i]])
        print(f"  line {i + 1}, top-2 logit gap {gap:.2e} where they part\n    {keras_text}\n    {onnx_text}")
    agree = all(gap < 1e-3 for gap in gaps) and abs(bleu["Keras"] - bleu["ONNX Runtime"]) <= 0.05
    report = {"bleu": bleu, "sentences": len(ids), "differing": dict(zip(map(str, differing), gaps, strict=True))}
    write(output / "scores.json", lambda name: Path(name).write_text(json.dumps(report, indent=1), encoding="utf-8"))
    return 0 if agree else 1


def translate(generate, ids: list[list[int]], batch_size: int = 50) -> list[list[int]]:
    """The ids of each row's translation; rows of similar length share a batch."""
    rows: list[list[int]] = [[]] * len(ids)
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for i, row in zip(batch, generate([ids[i] for i in batch]).tolist(), strict=True):
            rows[i] = row[: row.index(2) + 1] if 2 in row else row
    return rows


def top_two_gap(model, source: list[int], first: list[int], second: list[int]) -> float:
    """How far apart Keras' two highest logits are where two translations of `source` part."""
    import keras
    import numpy as np

    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    inputs = {"source": np.array([source], "int32"), "target": np.array([[model.start_id, *first[:same]]], "int32")}
    logits = np.sort(keras.ops.convert_to_numpy(model(inputs, training=False))[0, -1])
    return float(logits[-1] - logits[-2])


def write(path: Path, save) -> None:
    """Calls `save` with a name beside `path`, then renames: an interruption leaves no half-written file."""
    partial = path.with_name("partial-" + path.name)
    save(str(partial))
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
