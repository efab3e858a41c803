"""`export_onnx`: traces a model, writes it as ONNX, verifies it, and only then puts it where it was asked for."""

from __future__ import annotations

import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import onnx_ir

from keras_transformer.export.arguments import (
    check_arguments,
    check_cache,
    check_converter,
    check_form,
    check_sizes,
    check_tokenizer,
)
from keras_transformer.export.cached import TARGETS
from keras_transformer.export.dims import Axis
from keras_transformer.export.errors import (
    ExportError,
    NotAnExportError,
    TraceError,
    UnsupportedOperationError,
    VerificationError,
)
from keras_transformer.export.forms import convert
from keras_transformer.export.genai import write_genai_files
from keras_transformer.export.generalise import generalise, trace_sizes
from keras_transformer.export.generator import trace_generator
from keras_transformer.export.installing import check_target, install_directory, install_file, staging
from keras_transformer.export.int8_cache import measure_cache, quantize_cache
from keras_transformer.export.ir import Graph, Weight
from keras_transformer.export.lowering import find_rule, lower
from keras_transformer.export.opsets import OPSETS, lower_opset
from keras_transformer.export.origins import note_rule
from keras_transformer.export.report import Report
from keras_transformer.export.sessions import import_onnxruntime
from keras_transformer.export.signature import call_by_name, free_axes, model_inputs
from keras_transformer.export.tf2onnx_route import OPSETS as TF2ONNX_OPSETS
from keras_transformer.export.tf2onnx_route import check_tf2onnx, convert_with_tf2onnx
from keras_transformer.export.trace import InputSpec, record
from keras_transformer.export.verify import check_padded_rows, check_tolerance, verify_onnx
from keras_transformer.export.writing import share_weights, write, write_config

# The opsets of each converter.
_OPSETS = {"trace": OPSETS, "tf2onnx": TF2ONNX_OPSETS}


def export_onnx(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    input_signature: Mapping[str, Any] | None = None,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    samples: Mapping[str, Any] | Callable[[dict[str, int]], Mapping[str, Any]] | None = None,
    padded_rows: str = "exact",
    tolerance: tuple[float, float] = (1e-5, 1e-5),
    form: str = "fp32",
    target: str = "portable",
    logits: str = "all",
    cache: str | None = None,
    tokenizer: Any = None,
    converter: str = "trace",
    verify: bool = True,
    force: bool = False,
    verbose: bool = True,
) -> Report | None:
    """Exports a built Keras model to ONNX, from any backend, and verifies the result in ONNX Runtime.

    A `models.Transformer` becomes a directory with an encoder and a decoder graph that has a key/value cache, for
    `OnnxTransformer`; a `models.CausalLM` a directory with such a decoder, for `OnnxCausalLM`, or, where `path` is a
    file, the graph of whole texts. Any other model becomes one graph. The batch and every axis that the model leaves
    open are free. Nothing is left behind by an export that fails, verification included.

    Args:
        model: a built model made of layers and `keras.ops`; its weights are read, nothing of it is changed.
        path: a directory to make, or, for a single graph, a file name that ends in `.onnx`.
        input_signature: `(shape, dtype)` by input name, None in a shape for a free axis. Needed where the model does
            not keep its own (subclassed models).
        dynamic_axes: names of the free axes, `{"source": {0: "batch", 1: "source_length"}}`. Equal names are one axis.
            Without it axis 0 is the batch, and lengths are taken as one where the model needs them equal.
        min_length: smallest size of every free axis but the batch; 1 if None. Not for graphs with a cache, which take
            texts from one token on.
        max_length: largest size; the smallest `max_length` of the model and its layers (or limit of a KerasHub model),
            if any has one, else no limit.
        output_names: names of the graph's outputs, in the order of the model's. These three are not for graphs with a
            cache, which have names and axes of their own.
        opset: version of the standard ONNX operators, 17 to 23 (default). Below 23 attention, rotations and RMS norms
            are written in single steps, for runtimes that lack these operators, which makes the graph several times as
            large.
        samples: inputs to verify with, as for `verify_onnx`; made up if None.
        padded_rows: as for `verify_onnx`.
        tolerance: as for `verify_onnx`.
        form: `"fp32"`, or a smaller one, `"fp16"`, `"int8"`, `"int8-weights"` or `"int4"`: see `export.forms`. Its
            outputs are held against Keras' by their cosine (`forms.LEAST_COSINE`); a form that misses it is not
            written.
        target: of graphs with a cache: `"portable"` has past and present that grow, in standard operators.
            `"onnxruntime"` has a buffer that is written where it lies, through ONNX Runtime's `GroupQueryAttention`, so
            that a step copies no cache; the runner allocates it. `"generator"` is one graph from prompts to finished
            ids, the loop over tokens inside, for whoever wants a single call; `path` may then be a file.
        logits: of graphs with a cache: `"all"` positions' logits, or only the `"last"` one's, which is all that
            generation needs.
        cache: of `target="onnxruntime"`: `"int8"` holds keys and values in a quarter of float32's memory, with scales
            that are measured on the inputs of verification; see `export.int8_cache`. None: as the model computes.
        tokenizer: a `keras_transformer.text.Tokenizer`, or one of the package `tokenizers`, to put beside the graphs,
            so that a runner takes and gives text. For models that generate, sentence encoders and classifiers.
        converter: `"trace"`, or `"tf2onnx"`: TensorFlow's graph of the whole model, by the package tf2onnx in opset 18
            or 17, for what the tracer refuses, such as recurrent layers. Without a cache, larger and slower.
        verify: False leaves verification to you; the files are then not known to be right.
        force: write into a directory that holds other files, which stay; or replace a file.
        verbose: with verification, print how long the export took and what was found.

    Returns:
        The verification's report; None with `verify=False`.

    Raises:
        ExportError: the model is not built, its inputs are not known, or an argument does not fit it.
        TraceError: what the model computes depends on a size in a way that a graph cannot follow.
        UnsupportedOperationError: an operation has no rule; the message says how to add one.
        VerificationError: ONNX Runtime's results differ from Keras'. Nothing is written.
        FileExistsError: `path` holds something else and `force` is False.
        ImportError: ONNX Runtime is not installed, which verification needs, or two of its wheels are.
    """
    path = pathlib.Path(path)
    opset = check_converter(
        converter,
        opset,
        _OPSETS,
        target=(target, "portable"),
        logits=(logits, "all"),
        cache=(cache, None),
        tokenizer=(tokenizer, None),
    )
    if logits not in ("all", "last"):
        raise ExportError(f"`logits` must be 'all' or 'last'. Received: logits={logits!r}")
    if target not in TARGETS:
        raise ExportError(f"`target` must be one of {TARGETS}. Received: target={target!r}")
    check_form(form, model)
    check_cache(cache, model, target)
    family = _family(model, path, target) if converter == "trace" else None
    takes_text = family is not None or bool(_text_task(model, None))
    check_arguments(
        model,
        family,
        logits=(logits, "all"),
        target=(target, "portable"),
        input_signature=input_signature,
        dynamic_axes=dynamic_axes,
        output_names=output_names,
    )
    max_length = check_sizes(model, family is not None, min_length, max_length)
    if converter == "tf2onnx":
        check_tf2onnx()
    check_tolerance(tolerance)
    check_padded_rows(padded_rows)
    if verify or cache is not None:
        import_onnxruntime()
    if path.suffix == ".onnx" and (tokenizer is not None or family is not None and target != "generator"):
        what = type(model).__name__ if tokenizer is None else "A graph with a tokenizer"
        raise ExportError(f"{what} becomes a directory. Received: path={str(path)!r}")
    check_tokenizer(tokenizer, model, takes_text)
    check_target(path, force)
    started = time.perf_counter()
    with staging(path) as folder:
        if family is None:
            config = {"kind": "model", **_text_task(model, max_length)}
        else:
            config = family.runner_config(model, max_length, logits, target)
        config["form"] = form
        if cache is not None:
            config["cache"] = cache
        weights: dict[str, Weight] = {}
        if family is None:
            make = _traced if converter == "trace" else functools.partial(convert_with_tf2onnx, opset=opset)
            graphs = _plain_graph(model, make, input_signature, dynamic_axes, min_length, max_length, output_names)
        else:
            graphs = _cached_graphs(model, family, max_length, logits, target)
        made = [(name, graph, _rewritten(lowered, form, opset, converter)) for name, graph, lowered in graphs]
        share_weights([model for _, _, model in made], folder)
        for name, graph, lowered in made:
            weights |= {weight.name: weight for weight in graph.weights}
            write(lowered, graph, folder / f"{name}.onnx", config)
        if cache == "int8":
            # The last one is the decoder; as it stands its cache is float, which is what is measured.
            quantize_cache(lowered, measure_cache(model, folder, config, samples))
            write(lowered, graph, folder / f"{name}.onnx", config)
        if tokenizer is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
        if config["kind"] == "decoder" and target != "generator":
            write_genai_files(model, folder, config)
        write_config(folder, config, weights)
        if verbose and verify:
            print(f"Exported in {time.perf_counter() - started:.1f} s.")
        report = None
        if verify:
            try:
                report = verify_onnx(
                    model,
                    folder,
                    samples=samples,
                    padded_rows=padded_rows,
                    tolerance=tolerance,
                    json_path=folder / "verification.json",
                    name=str(path),
                    verbose=verbose,
                )
            except NotAnExportError as error:
                raise VerificationError(
                    "ONNX Runtime cannot load the graph, so it is not verified; its CPU kernels lack some dtypes, such "
                    f"as bfloat16. Export the model in another one, or pass `verify=False`. {error}"
                ) from error
            except VerificationError as error:
                if config["kind"] == "model" and dynamic_axes is None and len(graph.axes) > 2:
                    names = [axis.name for axis in graph.axes]
                    error.add_note(f"{names} were taken as independent; pass `dynamic_axes` if some are equal.")
                raise
        if path.suffix == ".onnx":
            install_file(folder, path)
        else:
            install_directory(folder, path)
    return report


def _plain_graph(model, make, input_signature, dynamic_axes, min_length, max_length, output_names):
    """Name, traced graph and ONNX model of a model without a cache; the latter two by `make`."""
    inputs = model_inputs(model, input_signature)
    call = call_by_name(model, [entry.name for entry in inputs])
    specs, axes = free_axes(inputs, call, dynamic_axes, min_length, max_length)
    output_names = _output_names(model) if output_names is None else output_names
    yield "model", *make(model, call, specs, axes, output_names)


def _traced(model, call, specs, axes, output_names):
    try:
        graph = trace(call, specs, axes, model, output_names)
        return graph, lower(graph)
    except (TraceError, UnsupportedOperationError) as error:
        if keras.backend.backend() == "tensorflow":
            error.args = (f"{error}\nOr try TensorFlow's own graph of the model: converter='tf2onnx'.",)
        raise


def _cached_graphs(model, family, max_length, logits, target):
    """The same of each graph of a model with a cache."""

    def traced(function, specs, axes, names):
        return trace(function, specs, axes, model, names)

    if target == "generator":
        parts = family.generator(model, max_length)
        yield "model", *trace_generator(parts, traced, lower)
        return
    for name, part in family.graphs(model, max_length, logits, target).items():
        graph = traced(*part)
        yield name, graph, lower(graph)


def _rewritten(model: onnx_ir.Model, form: str, opset: int, converter: str) -> onnx_ir.Model:
    # What joins the generator's parts, and all of tf2onnx; what was traced has its rules.
    note_rule(model, trace_generator if converter == "trace" else convert_with_tf2onnx)
    for rewrite, wanted in ((convert, form), (lower_opset, opset)):
        model = rewrite(model, wanted)
        note_rule(model, rewrite)
    return model


def trace(
    function: Callable,
    specs: Sequence[InputSpec],
    axes: Sequence[Axis],
    root: keras.layers.Layer | dict[str, keras.layers.Layer],
    output_names: Sequence[str] | None = None,
) -> Graph:
    """The graph of `function(*inputs)` with `axes` free.

    Args:
        function: takes one tensor for each of `specs` and returns a nested structure of tensors.
        specs: the inputs.
        axes: the free axes in their shapes.
        root: the model, or layers by name, whose attributes name layers and weights.
        output_names: names of the flattened outputs.

    Raises:
        TraceError: see `export_onnx`.
    """
    recordings = record(function, tuple(specs), trace_sizes(axes), root, _kept_whole)
    return generalise(recordings, axes, [s.name for s in specs], [s.shape for s in specs], output_names)


def _kept_whole(layer: keras.layers.Layer) -> bool:
    return find_rule(type(layer)) is not None


def _family(model, path: pathlib.Path, target: str):
    """The module that knows the graphs of a model with a cache; None for a model that becomes one plain graph."""
    from keras_transformer.export import decoder_only, encoder_decoder
    from keras_transformer.models import CausalLM, Transformer

    if isinstance(model, Transformer):
        return encoder_decoder
    whole = path.suffix == ".onnx" and target != "generator"
    return decoder_only if isinstance(model, CausalLM) and not whole else None


def _text_task(model, max_length: int | None) -> dict[str, Any]:
    """What the runner has to know of a model that makes vectors or classes of texts; nothing of other models."""
    from keras_transformer.models import SentenceEncoder, SequenceClassifier

    tasks = {SentenceEncoder: "embed", SequenceClassifier: "classify"}
    task = next((task for kind, task in tasks.items() if isinstance(model, kind)), None)
    if task is None:
        return {}
    return {"task": task, "pad_id": model.encoder.pad_id or 0, "max_length": max_length}


def _output_names(model) -> list[str] | None:
    """The model's own names for its outputs, where it has some."""
    struct = getattr(model, "_outputs_struct", None)
    if not isinstance(struct, dict):
        return None
    numbered = keras.tree.pack_sequence_as(struct, list(range(len(keras.tree.flatten(struct)))))
    names = dict(_leaves(numbered))
    return [names[number] for number in sorted(names)]


def _leaves(x, *path: Any) -> Iterator[tuple[Any, str]]:
    """What a nested structure holds, each with its place as a name."""
    if isinstance(x, dict | list | tuple):
        for key, item in x.items() if isinstance(x, dict) else enumerate(x):
            yield from _leaves(item, *path, key)
    else:
        yield x, "_".join(map(str, path))
