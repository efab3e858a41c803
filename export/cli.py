"""The `keras-transformer` command."""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence

BACKENDS = ("tensorflow", "jax", "torch")

DESCRIPTION = """\
Exports Keras Transformers to ONNX, verified against ONNX Runtime, and runs the result without Keras.

  keras-transformer demo                               train, export, verify and run a small model
  keras-transformer export model.keras exported        write ONNX graphs, compare them with Keras
  keras-transformer verify model.keras exported        compare again
  keras-transformer translate exported < in > out      one line in, one line out; needs no Keras
  keras-transformer generate exported < prompts        what follows each line; needs no Keras
  keras-transformer embed exported vectors.npy < in    a vector for each line; needs no Keras
  keras-transformer bench exported other               times of exported models beside each other
  keras-transformer info exported                      what a directory holds; needs no Keras

Exit status: 0 success; 1 the model cannot be exported or differs from its export; 2 wrong usage or input."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (default: those of the process) and returns its exit status."""
    options = parser().parse_args(arguments)
    if getattr(options, "backend", None):
        os.environ["KERAS_BACKEND"] = options.backend  # read at the first import of Keras
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from keras_transformer.export.errors import ExportError

    try:
        return options.run(options) or 0
    except ExportError as error:
        return _failed(error, 1)
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has seen enough; there is nothing left to flush to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _failed(error, 2)
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    top = argparse.ArgumentParser(
        prog="keras-transformer", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run, name, summary, description):
        sub = commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.set_defaults(run=run)
        return sub

    demo = command(
        _demo,
        "demo",
        "train, export, verify and run a small model",
        "Teaches a small Transformer to turn dates in several styles into ISO dates (about three minutes on two CPU\n"
        "cores, nothing is downloaded), exports it, verifies it, and compares Keras with ONNX Runtime on new dates.",
    )
    _backend(demo)
    demo.add_argument(
        "--output", metavar="DIR", default="demo", help="where model, export and pictures go (default: %(default)s)"
    )

    export = command(
        _export,
        "export",
        "export a saved model to ONNX and verify it",
        "Exports a saved Keras model. A keras_transformer.models.Transformer becomes an encoder and a decoder graph\n"
        "with key/value cache, a CausalLM such a decoder; any other model one graph. Batch and lengths stay free.\n"
        "Before the files appear in DIR, ONNX Runtime is compared with Keras over a grid of sizes and masks; a failed\n"
        "export leaves nothing.",
    )
    _model_and_directory(export, "directory to write; FILE.onnx writes a single graph alone")
    export.add_argument(
        "--opset", type=int, help="version of the ONNX operators, from 17 (default: 23; 18 with --converter tf2onnx)"
    )
    export.add_argument(
        "--min-length", type=int, metavar="N", help="smallest size of every free axis but the batch (default: 1)"
    )
    export.add_argument("--max-length", type=int, metavar="N", help="largest size (default: the model's own limit)")
    export.add_argument(
        "--form",
        default="fp32",
        metavar="FORM[,FORM]",
        help="fp32, or smaller: fp16, int8, int8-weights, int4; of several each becomes DIR/FORM (default: fp32)",
    )
    export.add_argument(
        "--target",
        choices=("portable", "onnxruntime", "generator"),
        default="portable",
        help="graphs with a key/value cache: growing past and present in standard operators, ONNX Runtime's own "
        "attention over a buffer, or one graph that generates by itself (default: %(default)s)",
    )
    export.add_argument(
        "--logits",
        choices=("all", "last"),
        default="all",
        help="graphs with a key/value cache: logits of all positions, or only the last one's, which is all that "
        "generation needs (default: %(default)s)",
    )
    export.add_argument(
        "--cache",
        choices=("int8",),
        help="with --target onnxruntime: hold keys and values as int8 (default: as the model computes)",
    )
    export.add_argument(
        "--converter",
        choices=("trace", "tf2onnx"),
        default="trace",
        help="tf2onnx: of TensorFlow's graph, for what cannot be traced; without a cache (default: %(default)s)",
    )
    export.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to put beside the graphs, for `translate`")
    export.add_argument("--force", action="store_true", help="write into DIR although it holds other files")
    _comparison(export)

    verify = command(
        _verify,
        "verify",
        "compare a saved model with its export",
        "Compares Keras with ONNX Runtime, as `export` does, and prints the largest error of every output.\n"
        "Exit status 1 if they differ by more than the tolerance.",
    )
    _model_and_directory(verify, "exported directory or .onnx file")
    verify.add_argument("--json", metavar="FILE", help="write the whole report there")
    _comparison(verify)

    translate = command(
        _translate,
        "translate",
        "translate lines of text with an exported model",
        "Reads lines of UTF-8 text and writes one line for each. Needs ONNX Runtime and tokenizers, and no Keras.\n"
        "Empty lines stay empty.",
    )
    translate.add_argument(
        "--max-new-tokens", type=_positive, metavar="N", help="longest output, in tokens (default: input + 50)"
    )
    _runner(translate)

    generate = command(
        _generate,
        "generate",
        "continue lines of text with an exported model",
        "Reads lines of UTF-8 text and writes what follows each, on one line. Needs ONNX Runtime and tokenizers, and\n"
        "no Keras. The best token is taken; with --temperature it is drawn. Empty lines stay empty.",
    )
    generate.add_argument(
        "--max-new-tokens", type=_positive, metavar="N", help="longest continuation, in tokens (default: 50)"
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="above 0, draw (default: 0)")
    generate.add_argument("--top-k", type=_positive, metavar="K", help="draw from the K best tokens")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw from the best tokens that make up P")
    generate.add_argument("--num-beams", type=_positive, default=1, metavar="N", help="beam search (default: 1, none)")
    generate.add_argument("--seed", type=int, metavar="S", help="of the draws (default: another one each time)")
    _runner(generate)

    embed = command(
        _embed,
        "embed",
        "make a vector of each line of text with an exported sentence encoder",
        "Reads lines of UTF-8 text and writes float32 vectors, one a line, as a NumPy file. Needs ONNX Runtime and\n"
        "tokenizers, and no Keras.",
    )
    _runner(embed)
    embed.add_argument("output", metavar="FILE.npy", help="file to write; one that is there is replaced")

    bench = command(
        _bench,
        "bench",
        "time exported models beside each other",
        "Runs exported models, such as the forms of one, in turn: one call of a graph, or a few generated tokens.\n"
        "Prints sizes, median times, and the ratio to the first. Needs no Keras.",
    )
    bench.add_argument("paths", metavar="DIR", nargs="+", help="exported directory or .onnx file")
    for name, default, what in (
        ("batch", 1, "rows"),
        ("length", 32, "tokens of each row, or of each prompt"),
        ("new-tokens", 16, "tokens to generate"),
        ("rounds", 15, "how often each runs"),
    ):
        bench.add_argument(
            f"--{name}", type=_positive, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )
    bench.add_argument("--threads", type=_positive, metavar="N", help="threads of ONNX Runtime (default: all cores)")

    info = command(
        _info,
        "info",
        "say what an exported directory or file holds",
        "Prints kind, form, sizes, versions, files, operators, inputs and outputs of an exported model, and how it\n"
        "was verified. Checks that every file is whole. Needs no Keras.",
    )
    info.add_argument("path", metavar="DIR", help="exported directory or .onnx file")
    info.add_argument("--nodes", action="store_true", help="list every node, its operation in Keras and its rule")
    return top


def _runner(sub):
    sub.add_argument("directory", metavar="DIR", help="exported directory with a tokenizer.json")
    sub.add_argument(
        "--batch-size", type=_positive, default=32, metavar="N", help="lines that run together (default: %(default)s)"
    )
    sub.add_argument("--threads", type=_positive, metavar="N", help="threads of ONNX Runtime (default: all cores)")
    sub.add_argument(
        "--provider",
        action="append",
        metavar="NAME",
        help="ONNX Runtime execution provider, such as CUDAExecutionProvider; may be given again as a second choice "
        "(default: CPUExecutionProvider)",
    )


def _positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


_positive.__name__ = "whole number"  # what argparse calls it


def _backend(sub):
    sub.add_argument(
        "--backend",
        choices=BACKENDS,
        help="Keras backend (default: KERAS_BACKEND, else the only one installed, else Keras' own setting)",
    )


def _model_and_directory(sub, directory_help):
    sub.add_argument("model", metavar="MODEL.keras", help="model saved by `model.save`")
    sub.add_argument("directory", metavar="DIR", help=directory_help)
    _backend(sub)
    sub.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="Python module with the model's own layers, imported before the model is loaded; may be given again",
    )


def _comparison(sub):
    sub.add_argument(
        "--samples", metavar="FILE.npz", help="arrays by input name to compare with (default: made-up inputs)"
    )
    sub.add_argument(
        "--tolerance",
        type=float,
        nargs=2,
        default=(1e-5, 1e-5),
        metavar=("ABSOLUTE", "RELATIVE"),
        help="largest error allowed: ABSOLUTE + RELATIVE * largest output (default: 1e-5 1e-5)",
    )
    sub.add_argument(
        "--padded-rows",
        choices=("exact", "any"),
        default="exact",
        help="whether padding positions are compared too (default: %(default)s)",
    )


def _demo(options) -> int:
    # Its tensors are so small that a second thread costs more than it brings, most of all on a busy machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _need_backend()
    from keras_transformer.export import demo

    results = demo.run(options.output)
    if results["differing_outputs"]:
        return _failed(f"{results['differing_outputs']} outputs of ONNX Runtime differ from those of Keras.", 1)
    if results["onnx_exact_match"] < 0.98:
        return _failed(f"Only {results['onnx_exact_match']:.1%} exact match was learnt; 98% is usual.", 1)
    return 0


def _export(options):
    from keras_transformer.export.errors import ExportError
    from keras_transformer.export.forms import FORMS

    forms = options.form.split(",")
    if not set(forms) <= set(FORMS):
        raise ExportError(f"--form must be one or several of {', '.join(FORMS)}. Received: {options.form}")
    if len(forms) > 1 and options.directory.endswith(".onnx"):
        raise ExportError(f"Several forms need a directory, with one for each. Received: {options.directory}")
    model = _load(options)
    tokenizer = None
    if options.tokenizer:
        from keras_transformer import models, pretrained, text

        ours = isinstance(model, models.Transformer)
        tokenizer = (text.Tokenizer.load if ours else pretrained.read_tokenizer)(options.tokenizer)
    from keras_transformer.export import export_onnx

    for form in forms:
        directory = options.directory if len(forms) == 1 else os.path.join(options.directory, form)
        export_onnx(
            model,
            directory,
            min_length=options.min_length,
            max_length=options.max_length,
            opset=options.opset,
            samples=_samples(options.samples),
            padded_rows=options.padded_rows,
            tolerance=tuple(options.tolerance),
            form=form,
            target=options.target,
            logits=options.logits,
            converter=options.converter,
            cache=options.cache,
            tokenizer=tokenizer,
            force=options.force,
        )
        print(f"Wrote {directory}")


def _verify(options):
    from keras_transformer.export import runtime

    path = pathlib.Path(options.directory)
    if path.suffix != ".onnx":
        runtime.read_config(path)  # before the model is loaded, which takes longer
    from keras_transformer.export import verify_onnx

    verify_onnx(
        _load(options),
        path,
        samples=_samples(options.samples),
        padded_rows=options.padded_rows,
        tolerance=tuple(options.tolerance),
        json_path=options.json,
    )


def _translate(options):
    from keras_transformer.export.runtime import OnnxTransformer

    runner = OnnxTransformer(options.directory, options.provider, options.threads)
    _each_line(
        lambda texts: runner.translate(texts, options.max_new_tokens, options.batch_size),
        options.batch_size,
        "Translating",
    )


def _generate(options):
    from keras_transformer.export.runtime import OnnxCausalLM

    runner = OnnxCausalLM(options.directory, options.provider, options.threads)
    asked = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "num_beams", "seed")}
    _each_line(
        lambda texts: runner.complete(texts, options.max_new_tokens, options.batch_size, **asked),
        options.batch_size,
        "Generating",
    )


def _each_line(run, batch_size, what):
    """Writes a line for each line of the standard input, from `run`, which takes a list of texts that are not empty."""
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", newline="\n")
    # A person at a terminal gets each answer at once; a pipe gets batches of lines of similar length.
    size = 1 if sys.stdin.isatty() else 16 * batch_size
    done = 0
    for lines in _chunks(_progress(sys.stdin, what), size):
        texts = [line.removesuffix("\n").removesuffix("\r") for line in lines]
        filled = [text for text in texts if text.strip()]
        try:
            results = iter(run(filled) if filled else [])
        except ValueError as error:
            raise ValueError(f"In lines {done + 1} to {done + len(lines)}, not counting empty ones: {error}") from error
        done += len(lines)
        for text in texts:
            print(" ".join(next(results).splitlines()) if text.strip() else "")
        sys.stdout.flush()


def _embed(options):
    import numpy as np

    from keras_transformer.export.encoder_runtime import OnnxEncoder

    output = pathlib.Path(options.output)
    if output.suffix != ".npy" or not output.absolute().parent.is_dir():
        raise ValueError(f"FILE must end in .npy and be in a directory that exists. Received: {output}")
    runner = OnnxEncoder(options.directory, options.provider, options.threads)
    sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    texts = [line.removesuffix("\n").removesuffix("\r") for line in _progress(sys.stdin, "Reading")]
    vectors = runner.embed(texts, options.batch_size)
    part = output.with_name(f".{output.name}.part")
    with open(part, "wb") as file:
        np.save(file, vectors)
    os.replace(part, output)
    print(f"Wrote {output}: {vectors.shape[0]} vectors of {vectors.shape[1]} numbers")


def _bench(options):
    from keras_transformer.export.bench import bench

    asked = {name: getattr(options, name) for name in ("batch", "length", "new_tokens", "rounds", "threads")}
    print(f"{'bytes':>14} {'median ms':>10} {'ratio':>7}")
    for row in bench(options.paths, **asked):
        print(f"{row['size']:14,} {row['milliseconds']:10.2f} {row['ratio']:7.2f}  {row['path']}")


def _info(options):
    from keras_transformer.export import runtime

    path = pathlib.Path(options.path)
    if path.is_file():
        config, files = runtime.graph_config(runtime.open_session(path)), {path.name: {"size": path.stat().st_size}}
        folder, report = path.parent, None
    else:
        config, folder, report = runtime.read_config(path), path, path / "verification.json"
        files = config.pop("files")
    versions = config.pop("versions", {})
    for key, value in config.items():
        if key not in ("format", "format_version"):
            print(f"{key:24} {value}")
    if report is not None:
        print(f"{'made with':24} {', '.join(f'{name} {version}' for name, version in versions.items())}")
        print(f"{'verified':24} {_verified(report)}")
    for name, entry in files.items():
        print(f"\n{name} ({entry['size']:,} bytes)")
        if name.endswith(".onnx"):
            _print_graph(folder / name, options.nodes)


def _print_graph(path, every_node):
    """Operators, inputs and outputs of a graph, and its nodes where that is asked for."""
    from keras_transformer.export import runtime
    from keras_transformer.export.origins import list_origins

    session = runtime.open_session(path)
    try:
        nodes = list_origins(path)
    except ImportError:
        if every_node:
            raise
        print("  operators: unknown without the package onnx")
    else:
        counts = collections.Counter(node.operator for node in nodes)
        print(f"  {len(nodes)} nodes: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    for word, entries in (("in", session.get_inputs()), ("out", session.get_outputs())):
        for entry in entries:
            kind = entry.type.removeprefix("tensor(").removesuffix(")")
            print(f"  {word:4} {entry.name:28} {kind:8} ({', '.join(map(str, entry.shape))})")
    if every_node:
        widths = [max(map(len, column)) for column in zip(*nodes, strict=True)]
        for node in nodes:
            print("  " + "  ".join(map(str.ljust, node, widths)).rstrip())


def _verified(path):
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no"
    except ValueError:
        return f"{path} is damaged"
    try:
        verdict = "yes" if report["passed"] else "no, it failed"
        made = ", ".join(f"{name} {report['versions'][name]}" for name in ("keras", "backend", "onnxruntime"))
        return f"{verdict}: {len(report['comparisons'])} comparisons, largest error {report['max_error']:.2g} ({made})"
    except (KeyError, TypeError, ValueError):
        return f"{path} is of another kind"


def _load(options):
    """The saved model, once the modules that define its layers are imported."""
    path = pathlib.Path(options.model)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: {'a directory, not a file' if path.exists() else 'no such file'}.")
    keras = _need_backend()
    if path.suffix == ".keras" and not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a model that `model.save` wrote, or is damaged.")
    sys.path.insert(0, os.getcwd())
    for name in options.imports:
        importlib.import_module(name)
    try:
        return keras.saving.load_model(path, compile=False)
    except TypeError as error:  # what Keras raises for a class that it does not know
        raise ValueError(f"{path} cannot be loaded. If it has layers of your own, see --import. {error}") from error


def _need_backend():
    """The `keras` module, on the only backend installed if none is named; says how to install one that is missing."""
    installed = [name for name in BACKENDS if importlib.util.find_spec(name)]
    if len(installed) == 1:
        os.environ.setdefault("KERAS_BACKEND", *installed)  # Keras itself takes TensorFlow, installed or not
    try:
        import keras
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in BACKENDS:
            raise ImportError(
                f"The Keras backend {name!r} is not installed: pip install 'keras-transformer-onnx[{name}]', or choose "
                "another one with --backend."
            ) from error
        raise
    return keras


def _samples(path):
    if path is None:
        return None
    import numpy as np

    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except Exception as error:  # NumPy raises several types on a file that is none of its own
        raise ValueError(f"{path} is not an .npz file of arrays, as `np.savez` writes them: {error}") from error


def _chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _progress(lines, what):
    """`lines`, counted on the terminal where the output goes elsewhere."""
    if sys.stdin.isatty() or sys.stdout.isatty() or not sys.stderr.isatty():
        return lines
    import rich.console
    import rich.progress

    columns = (rich.progress.TextColumn(what), rich.progress.SpinnerColumn(), rich.progress.MofNCompleteColumn())
    console = rich.console.Console(stderr=True)
    return _counted(lines, rich.progress.Progress(*columns, console=console, transient=True))


def _counted(lines, progress):
    with progress:
        yield from progress.track(lines, total=None)


def _failed(message, status) -> int:
    print(f"keras-transformer: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
