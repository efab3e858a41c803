"""The files of an export: graphs that say what they were made of, weights that they share, and `config.json`."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import onnx
import onnx_ir

import keras_transformer
from keras_transformer.export.directory import FORMAT, FORMAT_VERSION, file_sha256
from keras_transformer.export.errors import ExportError
from keras_transformer.export.input_values import describe_input
from keras_transformer.export.ir import Graph, Weight

# A protobuf holds at most 2 GB: beyond, the weights go to a file beside the graph.
_EXTERNAL_DATA_FROM = 1_800_000_000


# What several graphs of a directory hold, from this number of bytes on, lies in a file beside them, from a page on.
_SHARED, _SHARED_FROM, _PAGE = "shared.data", 4096, 4096


def write(model: onnx_ir.Model, graph: Graph, path: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes an ONNX model that says what it was made of, and which values and sizes its inputs may have."""
    model.metadata_props.update(
        {
            "keras_transformer.version": keras_transformer.__version__,
            "keras.version": keras.__version__,
            "keras_transformer.config": json.dumps(config),
            "keras_transformer.inputs": json.dumps([describe_input(graph, value) for value in graph.inputs]),
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


def share_weights(models: Sequence[onnx_ir.Model], folder: pathlib.Path) -> None:
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


def write_config(folder: pathlib.Path, config: dict[str, Any], weights: dict[str, Weight]) -> None:
    """Writes `config.json`, which says what the directory is and what its files must be."""
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
