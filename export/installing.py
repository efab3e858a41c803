"""Where an export goes: made beside its place, and put there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from keras_transformer.export.directory import FORMAT
from keras_transformer.export.errors import ExportError


def check_target(path: pathlib.Path, force: bool) -> None:
    """Refuses a place that holds something else, unless `force` is given."""
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
def staging(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A directory beside the target, so that moving it there is one step; gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        folder.chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install_directory(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Puts the files of `folder` at `path`, in place of an earlier export's."""
    if not path.exists():
        os.rename(folder, path)
        return
    foreign = set(os.listdir(path)) - _own_files(path)
    if foreign:
        for file in folder.iterdir():
            os.replace(file, path / file.name)
        return
    with staging(path) as old:
        os.rename(path, old / "old")
        os.rename(folder, path)


def install_file(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Puts the graph in `folder` at `path`."""
    data = folder / "model.onnx.data"
    if data.exists():
        raise ExportError(
            f"The weights need a file beside the graph: export to a directory. Received: path={str(path)!r}"
        )
    os.replace(folder / "model.onnx", path)
