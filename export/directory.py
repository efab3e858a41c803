"""What an exported directory says of itself, and whether its files are whole; imports no Keras."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib

from keras_transformer.export.errors import NotAnExportError

# What `config.json` says of itself: the exporter writes it, this file reads it.
FORMAT, FORMAT_VERSION = "keras_transformer", 2


def read_config(directory: str | os.PathLike) -> dict:
    """What an exported directory says of itself, once each of its files is found whole.

    Raises:
        NotAnExportError: it is no exported directory, a file is missing or damaged, or a newer version wrote
            it.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        what = "a file, not a directory" if directory.exists() else "no such directory"
        raise NotAnExportError(f"{directory} is not an exported model: {what}.")
    if not path.is_file():
        raise NotAnExportError(f"{directory} is not an exported model: it holds no config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAnExportError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise NotAnExportError(f"{directory} is not an exported model: its config.json is of another kind.")
    if config.get("format_version") != FORMAT_VERSION:
        raise NotAnExportError(
            f"{directory} has format version {config.get('format_version')}; this version of "
            f"keras_transformer reads {FORMAT_VERSION}."
        )
    _check_config(config, path)
    for name, expected in config["files"].items():
        _check_file(directory / name, expected)
    return config


# What the runners need, by kind: the graphs, and entries of the types that they may have.
_KINDS = {
    "model": ((), {}),
    "encoder-decoder": (
        ("encoder.onnx", "decoder.onnx"),
        {
            "source_vocabulary_size": int,
            "target_vocabulary_size": int,
            "start_id": int,
            "end_id": int,
            "pad_id": int,
            "max_length": int | None,
            "target": str,
        },
    ),
    "decoder": (
        ("decoder.onnx",),
        {
            "vocabulary_size": int,
            "end_id": int | list | None,
            "pad_id": int | None,
            "max_length": int | None,
            "target": str,
        },
    ),
}


def _check_config(config, path):
    """Raises NotAnExportError where an entry that the runner needs is missing, or of another type."""
    files, kind = config.get("files"), config.get("kind")
    needed, entries = _KINDS.get(kind, ((), {}))
    needed = ("model.onnx",) if config.get("target") == "generator" else needed
    wrong = [] if kind in _KINDS else ["kind"]
    wrong += [name for name, type in entries.items() if name not in config or not isinstance(config[name], type)]
    if (
        not isinstance(files, dict)
        or not set(needed) <= set(files)
        or not all(
            name == pathlib.PurePath(name).name and isinstance(entry, dict) and {"size", "sha256"} <= set(entry)
            for name, entry in files.items()
        )
    ):
        wrong.append("files")
    if wrong:
        raise NotAnExportError(f"{path} is damaged: its {', '.join(wrong)} are missing or of another type.")


def _check_file(path, expected):
    if not path.is_file():
        raise NotAnExportError(f"{path.parent} is not complete: {path.name} is missing.")
    if path.stat().st_size != expected["size"]:
        raise NotAnExportError(
            f"{path} is damaged: it has {path.stat().st_size} bytes, {expected['size']} were written."
        )
    if file_sha256(path) != expected["sha256"]:
        raise NotAnExportError(f"{path} is damaged: its contents are not those that were written.")


def file_sha256(path: pathlib.Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def graph_config(session) -> dict:
    """What the exporter noted in a graph of what the runner needs; empty if it wrote none."""
    try:
        return json.loads(session.get_modelmeta().custom_metadata_map["keras_transformer.config"])
    except (KeyError, ValueError):
        return {}
