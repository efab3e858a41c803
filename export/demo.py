"""The demo: dates in several styles become ISO dates; trained, exported, verified, and run from ONNX Runtime alone."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Pair = tuple[str, str]

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_IRREGULAR = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_IRREGULAR |= {"twelve": "twelfth", "twenty": "twentieth", "thirty": "thirtieth"}
_MONTHS = ("January February March April May June July August September October November December").split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)


def number(n: int) -> str:
    """0 … 99 in words."""
    return _ONES[n] if n < 20 else _TENS[n // 10] + (f"-{_ONES[n % 10]}" if n % 10 else "")


def ordinal(n: int) -> str:
    """1 … 31 in words, such as twenty-first."""
    head, dash, last = number(n).rpartition("-")
    return head + dash + _IRREGULAR.get(last, f"{last}th")


def year(n: int) -> str:
    """A year as it is said, such as nineteen oh five or two thousand and seven."""
    century, rest = divmod(n, 100)
    if 2000 <= n < 2010:
        return "two thousand" + (f" and {number(rest)}" if rest else "")
    if rest == 0:
        return f"{number(century)} hundred"
    return f"{number(century)} {'oh ' if rest < 10 else ''}{number(rest)}"


def _suffix(n):
    return "th" if 10 <= n <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")


STYLES: tuple[Callable[[datetime.date], str], ...] = (
    lambda d: f"{_DAYS[d.weekday()]}, {d.day} {_MONTHS[d.month - 1]} {d.year}",
    lambda d: f"{_MONTHS[d.month - 1]} {d.day}{_suffix(d.day)}, {d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d.day:02}-{_MONTHS[d.month - 1][:3].upper()}-{d.year}",
    lambda d: f"the {ordinal(d.day)} of {_MONTHS[d.month - 1]}, {year(d.year)}",
    lambda d: f"{_MONTHS[d.month - 1]} the {ordinal(d.day)}, {year(d.year)}",
)


def make_pairs(train: int, held_out: int, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Pairs (a date in some style, the ISO date); no held-out date is among the training dates in any style."""
    rng = random.Random(seed)
    dates = [FIRST + datetime.timedelta(days=n) for n in range((LAST - FIRST).days + 1)]
    rng.shuffle(dates)

    def pairs(dates):
        return [(rng.choice(STYLES)(date), date.isoformat()) for date in dates]

    return pairs(dates[held_out : held_out + train]), pairs(dates[:held_out])


def make_tokenizer():
    """A tokenizer that knows the words of dates and keeps digits single.

    It learns from words alone: pairs of digits merged into tokens would have to be learnt one by one.
    """
    from keras_transformer.text import Tokenizer

    words = [f" {word}" for n in range(100) for word in (number(n), ordinal(n))]
    words += [*_MONTHS, *(f" {month}" for month in _MONTHS), *(f"-{month[:3].upper()}-" for month in _MONTHS), *_DAYS]
    words += [" of", "the ", " the", " oh", " hundred", " thousand and"]
    return Tokenizer.train(words, vocabulary_size=420)


def look_up(train: Sequence[Pair], texts: Sequence[str]) -> list[str]:
    """The answer of the training text that shares most three-letter pieces: what remembering alone would give."""

    def counts(texts):
        table = np.zeros((len(texts), 1024), np.float32)
        for row, text in enumerate(texts):
            for i in range(len(text) - 2):
                table[row, int.from_bytes(text[i : i + 3].encode()) % 1021] += 1
        return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1)

    nearest = (counts(texts) @ counts([source for source, _ in train]).T).argmax(axis=1)
    return [train[i][1] for i in nearest]


def run(
    output: str | os.PathLike[str],
    *,
    train: int = 12_800,
    held_out: int = 500,
    epochs: int = 6,
    seed: int = 0,
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Runs the demo on the Keras backend in use and leaves its products in `output`.

    Args:
        output: a directory: `model.keras`, `onnx/` (the export), `loss.png`, `attention.png`, `results.json`.
        train: training pairs.
        held_out: held-out pairs.
        epochs: training epochs.
        seed: of the data and the training.
        say: where the lines of the account go.

    Returns:
        What `results.json` holds: exact matches, the largest difference, speeds.

    Raises:
        VerificationError: the exported files do not compute what Keras computes.
    """
    import keras

    from keras_transformer import plot
    from keras_transformer.export import OnnxTransformer, export_onnx

    started = time.perf_counter()
    output = pathlib.Path(output)
    output.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(seed)
    pairs, test = make_pairs(train, held_out, seed)
    sources, references = [source for source, _ in test], [target for _, target in test]
    tokenizer = make_tokenizer()
    say(f"Dates in {len(STYLES)} styles to ISO dates, on {keras.backend.backend()}: {train:,} training pairs,")
    say(f"{held_out:,} held-out pairs whose dates do not occur in training in any style. For example:")
    for source, target in pairs[: len(STYLES)]:
        say(f"  {source:48} {target}")

    model, history = fit(tokenizer, pairs, epochs, seed)
    model.save(output / "model.keras")
    plot.plot_history(history, output / "loss.png")

    translate_keras(model, tokenizer, sources)  # compiles
    keras_texts, keras_speed = _timed(lambda: translate_keras(model, tokenizer, sources))
    say("\nExporting to ONNX and comparing with Keras at many sizes:")
    report = export_onnx(model, output / "onnx", tokenizer=tokenizer, force=True)

    runner = OnnxTransformer(output / "onnx", threads=1)
    onnx_texts, onnx_speed = _timed(lambda: runner.translate(sources, TARGET_LENGTH, BATCH))
    remembered = look_up(pairs, sources)
    shown = max(range(held_out), key=lambda i: len(sources[i]))
    _draw_attention(model, tokenizer, sources[shown], keras_texts[shown], output / "attention.png")

    say("\nFrom ONNX Runtime alone, held-out dates:")
    for style in range(len(STYLES)):
        i = next((i for i, text in enumerate(sources) if text in _in_style(style, references[i])), style % held_out)
        say(f"  {sources[i]:48} {onnx_texts[i]}  {'' if onnx_texts[i] == references[i] else 'wrong'}")
    results = {
        "backend": keras.backend.backend(),
        "keras_exact_match": _share(keras_texts, references),
        "onnx_exact_match": _share(onnx_texts, references),
        "look_up_exact_match": _share(remembered, references),
        "differing_outputs": sum(a != b for a, b in zip(keras_texts, onnx_texts, strict=True)),
        "max_error": report.max_error,
        "keras_sentences_per_second": len(sources) / keras_speed,
        "onnx_sentences_per_second": len(sources) / onnx_speed,
        "seconds": time.perf_counter() - started,
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    say(f"\n{'':24}{'exact match':>12}{'sentences/s':>14}")
    for name, key in (("Keras", "keras"), ("ONNX Runtime", "onnx"), ("nearest training text", "look_up")):
        speed = results.get(f"{key}_sentences_per_second")
        say(f"{name:24}{results[f'{key}_exact_match']:>12.1%}{'' if speed is None else f'{speed:,.0f}':>14}")
    say(f"Largest difference of any number: {report.max_error:.2g}. Time: {results['seconds']:.0f} s.")
    say(f"In {output}: model.keras, onnx/, loss.png, attention.png, results.json. Try:")
    command = "keras-transformer" if shutil.which("keras-transformer") else sys.argv[0]  # of `make demo`: .venv/bin/…
    say(f'  echo "the fifth of May, nineteen ninety-nine" | {command} translate {output / "onnx"}')
    return results


SOURCE_LENGTH, TARGET_LENGTH, BATCH = 32, 12, 100
MODEL_SIZE = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128}


def fit(tokenizer, pairs: Sequence[Pair], epochs: int, seed: int):
    """Trains a small Transformer; returns it and the history of its training."""
    import keras

    from keras_transformer.losses import MaskedCrossentropy
    from keras_transformer.metrics import MaskedAccuracy
    from keras_transformer.models import Transformer

    source = padded(tokenizer.encode([source for source, _ in pairs]), SOURCE_LENGTH)
    labels = padded(tokenizer.encode([target for _, target in pairs]), TARGET_LENGTH)
    # What the decoder sees is the answer one position late: it begins with the start token and lacks the end.
    target = np.where(labels == tokenizer.end_id, tokenizer.pad_id, labels)
    target = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=tokenizer.start_id)
    model = Transformer(
        tokenizer.vocabulary_size,
        tokenizer.vocabulary_size,
        **MODEL_SIZE,
        dropout=0.0,
        share_embeddings=True,
        max_length=SOURCE_LENGTH,
        start_id=tokenizer.start_id,
        end_id=tokenizer.end_id,
        seed=seed,
    )
    batch_size = 64
    steps = epochs * -(-len(pairs) // batch_size)
    rate = keras.optimizers.schedules.CosineDecay(
        3e-5, max(steps - steps // 10, 1), warmup_target=3e-3, warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9),
        MaskedCrossentropy(label_smoothing=0.0),
        metrics=[MaskedAccuracy()],
    )
    history = model.fit(
        {"source": source, "target": target}, labels, batch_size=batch_size, epochs=epochs, verbose=2
    ).history
    return model, history


def translate_keras(model, tokenizer, texts: Sequence[str]) -> list[str]:
    """Texts by `model.generate`, in full batches of one shape."""
    source = padded(tokenizer.encode(texts), SOURCE_LENGTH)
    results: list[str] = []
    for start in range(0, len(source), BATCH):
        ids = model.generate(source[start : start + BATCH], max_new_tokens=TARGET_LENGTH)
        results += tokenizer.decode(ids.tolist())
    return results


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Rows of ids as one int32 array, padded on the right with 0."""
    return np.array([[*row, *[0] * (length - len(row))] for row in rows], np.int32)


def _timed(function):
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def _share(texts, references):
    return sum(a == b for a, b in zip(texts, references, strict=True)) / len(references)


def _in_style(style, iso):
    return (STYLES[style](datetime.date.fromisoformat(iso)),)


def _draw_attention(model, tokenizer, source_text, target_text, path):
    """The last block's cross-attention while `target_text` is made."""
    from keras import ops

    from keras_transformer import plot

    source, target = tokenizer.encode([source_text, target_text])
    seen = [tokenizer.start_id, *target[:-1]]
    memory, source_mask = model.encode(ops.convert_to_tensor([source]))
    x = model.target_positions(model.target_embedding(ops.convert_to_tensor([seen])))
    _, weights = model.decoder(x, memory=memory, memory_padding_mask=source_mask, return_weights=True)
    tokens = [[text or "<end>" for text in tokenizer.decode([[i] for i in ids])] for ids in (source, target)]
    plot.plot_attention(ops.convert_to_numpy(weights[-1][1])[0], *tokens, path, title=f"{source_text} → {target_text}")
