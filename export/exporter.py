"""`export_onnx`: traces a model, writes it as ONNX, verifies it, and only then puts it where it was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import onnx
import onnx_ir

import keras_transformer
from keras_transformer.export.cached import TARGETS
from keras_transformer.export.dims import Axis
from keras_transformer.export.directory import FORMAT, FORMAT_VERSION, file_sha256
from keras_transformer.export.errors import ExportError, NotAnExportError, VerificationError
from keras_transformer.export.forms import FORMS, convert
from keras_transformer.export.genai import write_genai_files
from keras_transformer.export.generalise import generalise, trace_sizes
from keras_transformer.export.generator import trace_generator
from keras_transformer.export.ir import Graph, Value, Weight
from keras_transformer.export.lowering import find_rule, lower
from keras_transformer.export.opsets import OPSETS, lower_opset
from keras_transformer.export.report import Report
from keras_transformer.export.signature import call_by_name, free_axes, model_inputs
from keras_transformer.export.trace import InputSpec, record
from keras_transformer.export.verify import check_padded_rows, check_tolerance, verify_onnx

# A protobuf holds at most 2 GB: beyond, the weights go to a file beside the graph.
_EXTERNAL_DATA_FROM = 1_800_000_000
# What several graphs of a directory hold, from this number of bytes on, lies in a file beside them, from a page on.
_SHARED, _SHARED_FROM, _PAGE = "shared.data", 4096, 4096


def export_onnx(
    model: keras.Model,
    path: str | os.PathLike,
    *,
    input_signature: Mapping[str, Any] | None = None,
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    output_names: Sequence[str] | None = None,
    opset: int = 23,
    samples: Mapping[str, Any] | Callable[[dict[str, int]], Mapping[str, Any]] | None = None,
    padded_rows: str = "exact",
    tolerance: tuple[float, float] = (1e-5, 1e-5),
    form: str = "fp32",
    target: str = "portable",
    logits: str = "all",
    tokenizer: Any = None,
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
        min_length: smallest size of every free axis but the batch; 1 if None.
        max_length: largest size; the smallest `max_length` of the model and its layers (or limit of a KerasHub model),
            if any has one, else no limit.
        output_names: names of the graph's outputs, in the order of the model's. These three are not for graphs with a
            cache, which have names and axes of their own.
        opset: version of the standard ONNX operators, 17 to 23. Below 23 attention, rotations and RMS norms are written
            in single steps, for runtimes that lack these operators, which makes the graph several times as large.
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
        tokenizer: a `keras_transformer.text.Tokenizer`, or one of the package `tokenizers`, to put beside the graphs,
            so that a runner takes and gives text. For models that generate, sentence encoders and classifiers.
        verify: False leaves verification to you; the files are then not known to be right.
        force: write into a directory that holds other files, which stay; or replace a file.
        verbose: print the verification's table.

    Returns:
        The verification's report; None with `verify=False`.

    Raises:
        ExportError: the model is not built, its inputs are not known, or an argument does not fit it.
        TraceError: what the model computes depends on a size in a way that a graph cannot follow.
        UnsupportedOperationError: an operation has no rule; the message says how to add one.
        VerificationError: ONNX Runtime's results differ from Keras'. Nothing is written.
        FileExistsError: `path` holds something else and `force` is False.
    """
    path = pathlib.Path(path)
    if opset not in OPSETS:
        raise ExportError(f"`opset` must be from {OPSETS[0]} to {OPSETS[-1]}. Received: opset={opset}")
    if logits not in ("all", "last"):
        raise ExportError(f"`logits` must be 'all' or 'last'. Received: logits={logits!r}")
    if target not in TARGETS:
        raise ExportError(f"`target` must be one of {TARGETS}. Received: target={target!r}")
    _check_form(form, model, target)
    family = _family(model, path, target)
    takes_text = family is not None or bool(_text_task(model, None))
    _check_arguments(
        model,
        family,
        logits=(logits, "all"),
        target=(target, "portable"),
        input_signature=input_signature,
        dynamic_axes=dynamic_axes,
        output_names=output_names,
    )
    _check_sizes(min_length=min_length, max_length=max_length)
    check_tolerance(tolerance)
    check_padded_rows(padded_rows)
    _check_tokenizer(tokenizer, model, takes_text)
    if path.suffix == ".onnx" and (tokenizer is not None or family is not None and target != "generator"):
        what = type(model).__name__ if tokenizer is None else "A graph with a tokenizer"
        raise ExportError(f"{what} becomes a directory. Received: path={str(path)!r}")
    _check_target(path, force)
    limit, usual = _longest(model)
    if max_length is None:
        max_length = usual
    elif limit is not None and max_length > limit:
        raise ExportError(f"`max_length` must be within the model's own, {limit}. Received: max_length={max_length}")
    with _staging(path) as folder:
        if family is None:
            config = {"kind": "model", **_text_task(model, max_length)}
        else:
            config = family.runner_config(model, max_length, logits, target)
        config["form"] = form
        weights: dict[str, Weight] = {}
        if family is None:
            graphs = _plain_graph(model, input_signature, dynamic_axes, min_length, max_length, output_names)
        else:
            graphs = _cached_graphs(model, family, min_length, max_length, logits, target)
        made = [(name, graph, lower_opset(convert(lowered, form), opset)) for name, graph, lowered in graphs]
        _share([model for _, _, model in made], folder)
        for name, graph, lowered in made:
            weights |= {weight.name: weight for weight in graph.weights}
            write(lowered, graph, folder / f"{name}.onnx", config)
        if tokenizer is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
        if config["kind"] == "decoder" and target != "generator":
            write_genai_files(model, folder, config)
        _write_config(folder, config, weights)
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
            _install_file(folder, path)
        else:
            _install_directory(folder, path)
    return report


def _plain_graph(model, input_signature, dynamic_axes, min_length, max_length, output_names):
    """Name, traced graph and ONNX model of a model without a cache."""
    inputs = model_inputs(model, input_signature)
    call = call_by_name(model, [entry.name for entry in inputs])
    specs, axes = free_axes(inputs, call, dynamic_axes, min_length, max_length)
    graph = trace(call, specs, axes, model, _output_names(model) if output_names is None else output_names)
    yield "model", graph, lower(graph)


def _cached_graphs(model, family, min_length, max_length, logits, target):
    """The same of each graph of a model with a cache."""

    def traced(function, specs, axes, names):
        return trace(function, specs, axes, model, names)

    if target == "generator":
        parts = family.generator(model, min_length, max_length)
        yield "model", *trace_generator(parts, traced, lower)
        return
    for name, part in family.graphs(model, min_length, max_length, logits, target).items():
        graph = traced(*part)
        yield name, graph, lower(graph)


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


def write(model: onnx_ir.Model, graph: Graph, path: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes an ONNX model that says what it was made of, and which values and sizes its inputs may have."""
    model.metadata_props.update(
        {
            "keras_transformer.version": keras_transformer.__version__,
            "keras.version": keras.__version__,
            "keras_transformer.config": json.dumps(config),
            "keras_transformer.inputs": json.dumps([_describe(graph, value) for value in graph.inputs]),
            "keras_transformer.axes": json.dumps(
                {axis.name: {"minimum": axis.minimum, "maximum": axis.maximum} for axis in graph.axes}
            ),
            "keras_transformer.weights_sha256": weights_hash(graph.weights),
        }
    )
    external = f"{path.name}.data" if _size(model) > _EXTERNAL_DATA_FROM else None
    onnx_ir.save(model, path, external_data=external)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        # By a lowering rule that someone registered, and said whether or not the file is verified.
        raise ExportError(f"The graph is no valid ONNX: {error}") from error


def _share(models: Sequence[onnx_ir.Model], folder: pathlib.Path) -> None:
    """Puts what several graphs hold into one file, which all of them name."""
    if len(models) < 2 or sum(map(_size, models)) > _EXTERNAL_DATA_FROM:
        return  # the latter have a file each
    places: dict[tuple, list[onnx_ir.Value]] = {}
    for model in models:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor.nbytes >= _SHARED_FROM:
                key = (tensor.dtype, tuple(tensor.shape), hashlib.sha256(tensor.tobytes()).digest())
                places.setdefault(key, []).append(value)
    file = folder / _SHARED
    for values in places.values():
        if len(values) > 1:
            tensor = values[0].const_value
            with open(file, "ab") as data:
                data.write(bytes(-data.tell() % _PAGE))
                offset = data.tell()
                data.write(tensor.tobytes())
            for value in values:
                value.const_value = onnx_ir.ExternalTensor(
                    _SHARED, offset, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=folder
                )


def _size(model: onnx_ir.Model) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values())


def weights_hash(weights: Sequence[Weight]) -> str:
    """SHA-256 over names, shapes and values, the same on every backend."""
    digest = hashlib.sha256()
    for weight in sorted(weights, key=lambda weight: weight.name):
        digest.update(f"{weight.name} {weight.dtype} {weight.shape}".encode())
        digest.update(weight.array.tobytes())
    return digest.hexdigest()


def _kept_whole(layer: keras.layers.Layer) -> bool:
    return find_rule(type(layer)) is not None


def _longest(model) -> tuple[int | None, int | None]:
    """The smallest `max_length` of the model and its layers, and the smallest limit of any name; None if there is none.

    Other names are `max_sequence_length`, and the `sequence_length` of a layer that has a table of so many rows: those
    of KerasHub. They need not be a limit of what the model takes, as `max_length` is.
    """
    own, others = [], []
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        own.append(getattr(layer, "max_length", None))
        others.append(getattr(layer, "max_sequence_length", None))
        rows = getattr(layer, "sequence_length", None)
        others += [rows for weight in layer._trainable_variables if weight.shape and weight.shape[0] == rows]
    own, others = ([limit for limit in limits if isinstance(limit, int)] for limits in (own, others))
    return min(own, default=None), min([*own, *others], default=None)


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


def _describe(graph: Graph, value: Value) -> dict[str, Any]:
    """What values an input may take, for verification: ids are within the smallest table that they index."""
    entry: dict[str, Any] = {"name": value.name, "dtype": value.dtype}
    # What holds the input's entries as they are, and what is computed of them in any other way.
    same, derived, rows, free = {id(value)}, set(), [], True
    for node in graph.nodes:
        touched = [x for x in _values((node.args, node.kwargs)) if id(x) in same | derived]
        if not touched:
            continue
        arguments = [*node.args, *node.kwargs.values()]
        index = next(iter(arguments[_INDEX_PLACES.get(node.kind_name, len(arguments)) :]), None)
        if isinstance(index, Value) and id(index) in same and isinstance(size := _rows(node), int):
            rows.append(size)
        elif any(x in touched for x in _values(index)):
            free = False
        moved = node.kind_name in _MOVING and any(id(x) in same for x in touched)
        (same if moved else derived).update(map(id, node.outputs))
    if value.dtype == "bool" or not rows and value.name.endswith("mask"):
        return entry | {"kind": "mask"}
    if value.dtype.startswith(("float", "bfloat")):
        return entry | {"kind": "float"}
    if rows:
        return entry | {"kind": "ids", "minimum": 0, "maximum": min(rows) - 1}
    # Numbers that are only computed with may be any.
    return entry | ({"kind": "ids", "minimum": 0, "maximum": 9} if free else {"kind": "ids"})


# Operations that fail where a number is out of range, with the argument that it must not be in.
_INDEX_PLACES = {"Take": 1, "TakeAlongAxis": 1, "OneHot": 0, "GetItem": 1, "Slice": 1, "SliceUpdate": 1}
_INDEX_PLACES |= {"Scatter": 0, "ScatterUpdate": 1, "WriteCache": 3}
_MOVING = (
    *("Cast", "ConvertToTensor", "Copy", "StopGradient", "Reshape", "Ravel", "ExpandDims", "Squeeze", "Transpose"),
    *("GetItem", "BroadcastTo", "Repeat", "Tile", "Flip", "Roll", "Swapaxes", "Moveaxis", "Concatenate", "Stack"),
    *("Pad", "Where", "Clip", "Maximum", "Minimum"),
)


def _values(x) -> list[Value]:
    if isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    return [
        part
        for item in keras.tree.flatten(x)
        for part in (_values(item) if isinstance(item, slice) else [item])
        if isinstance(part, Value)
    ]


def _rows(node) -> Any:
    """How many entries an index into the first operand may name."""
    if node.kind_name == "OneHot":
        return node.attributes["num_classes"]
    if node.kind_name not in ("Take", "TakeAlongAxis"):
        return None
    shape, axis = node.args[0].shape, node.attributes["axis"]
    return math.prod(shape) if axis is None and all(isinstance(n, int) for n in shape) else shape[axis or 0]


def _write_config(folder: pathlib.Path, config: dict[str, Any], weights: dict[str, Weight]) -> None:
    files = {file.name: {"sha256": file_sha256(file), "size": file.stat().st_size} for file in sorted(folder.iterdir())}
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **config,
        "files": files,
        "versions": {"keras": keras.__version__, "keras_transformer": keras_transformer.__version__},
        "weights_sha256": weights_hash(list(weights.values())),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Arguments: refused before any work.


def _check_arguments(model, family, logits, target, **described: Any) -> None:
    """Refuses what is no model, and arguments that its kind does not take."""
    if not callable(model):
        raise ExportError(f"`model` must be a Keras model. Received: model={model!r}")
    for name, value in described.items():
        if family is not None and value is not None:
            raise ExportError(
                f"`{name}` is for other models: the graphs of a {type(model).__name__} have names and axes of their "
                f"own. Received: {name}={value!r}"
            )
    for name, (value, default) in (("logits", logits), ("target", target)):
        if family is None and value != default:
            raise ExportError(
                f"`{name}` is for graphs with a cache: a Transformer's, or a CausalLM's that becomes a directory. "
                f"Received: {name}={value!r}"
            )
    names = described["output_names"]
    if names is not None and (
        isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names)
    ):
        raise ExportError(f"`output_names` must be a list of names. Received: output_names={names!r}")


def _check_form(form, model, target):
    if form not in FORMS:
        raise ExportError(f"`form` must be one of {FORMS}. Received: form={form!r}")
    if form == "fp32":
        return
    if target == "generator":
        raise ExportError(f"`form` must be 'fp32' for target='generator'. Received: form={form!r}")
    if (dtype := getattr(model, "compute_dtype", "float32")) != "float32":
        raise ExportError(
            f"`form` must be 'fp32', which keeps what there is, for a model that computes in {dtype}. "
            f"Received: form={form!r}"
        )


def _check_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ExportError(f"`{name}` must be an integer. Received: {name}={value!r}")


def _check_tokenizer(tokenizer, model, takes_text: bool) -> None:
    """Refuses what is no tokenizer, or one whose ids are not those of `model`."""
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "save"):
        raise ExportError(f"`tokenizer` must be a tokenizer, with `save`. Received: tokenizer={tokenizer!r}")
    if not takes_text:
        raise ExportError(
            "`tokenizer` is for models that a runner feeds with text: Transformer, CausalLM, SentenceEncoder and "
            f"SequenceClassifier. Received: a {type(model).__name__}"
        )
    # Ours, or one of the package `tokenizers`.
    count = tokenizer.vocabulary_size if hasattr(tokenizer, "vocabulary_size") else tokenizer.get_vocab_size()
    sizes = ("source_vocabulary_size", "target_vocabulary_size", "vocabulary_size")
    owner = getattr(model, "encoder", model) if not hasattr(model, "target_vocabulary_size") else model
    size = min(getattr(owner, name) for name in sizes if hasattr(owner, name))
    if count > size:
        raise ExportError(f"`tokenizer` must have no more ids than the model, {size}. Received: {count} ids")
    for name in ("start_id", "end_id", "pad_id"):
        own, other = getattr(tokenizer, name, None), getattr(model, name, None)
        if None not in (own, other) and own not in (other if isinstance(other, tuple) else (other,)):
            raise ExportError(f"`tokenizer` and model must have the same `{name}`. Received: {own} and {other}")


# The target: written whole or not at all.


def _check_target(path: pathlib.Path, force: bool) -> None:
    if path.exists() and path.is_dir() == (path.suffix == ".onnx"):
        what = "a directory, and a file" if path.is_dir() else "a file, and a directory"
        raise FileExistsError(f"{path} is {what} would be written there.")
    if not path.exists() or force:
        return
    if path.is_dir() and path.suffix != ".onnx" and not set(os.listdir(path)) - _own_files(path):
        return
    raise FileExistsError(
        f"{path} holds something else already; pass `force=True` (`--force`) to write there all the same."
    )


def _own_files(path: pathlib.Path) -> set[str]:
    """The files in a directory that an earlier export wrote."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return set()
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        return set()
    return {*config["files"], "config.json", "verification.json"}


@contextlib.contextmanager
def _staging(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside the target, so that moving it there is one step; gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install_directory(folder: pathlib.Path, path: pathlib.Path) -> None:
    if not path.exists():
        os.rename(folder, path)
        return
    foreign = set(os.listdir(path)) - _own_files(path)
    if foreign:
        for file in folder.iterdir():
            os.replace(file, path / file.name)
        return
    with _staging(path) as old:
        os.rename(path, old / "old")
        os.rename(folder, path)


def _install_file(folder: pathlib.Path, path: pathlib.Path) -> None:
    data = folder / "model.onnx.data"
    if data.exists():
        raise ExportError(
            f"The weights need a file beside the graph: export to a directory. Received: path={str(path)!r}"
        )
    os.replace(folder / "model.onnx", path)
