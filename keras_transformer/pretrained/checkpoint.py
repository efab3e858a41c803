"""A folder's config.json and safetensors files, with an account of which tensors were used."""

from __future__ import annotations

import difflib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

try:
    import safetensors
except ImportError as error:
    raise ImportError(
        "keras_transformer.pretrained needs the package `safetensors`: pip install keras-transformer-onnx[pretrained]",
        name="safetensors",
    ) from error


_OLDER_NAMES = {"weight": "gamma", "bias": "beta"}


class Checkpoint:
    """The configuration and the tensors of a folder. Nothing is unpickled; other formats are refused.

    Args:
        directory: holds `config.json`, and `model.safetensors` or the shards that `model.safetensors.index.json` names.

    Attributes:
        config: what `config.json` says.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the weights are in another format.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = pathlib.Path(directory)
        self.config = self.read_json("config.json")
        self._files = self._find_files()
        self._used: set[str] = set()

    def read_json(self, name: str, kind: type = dict) -> Any:
        """The content of a JSON file of the folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or holds something else than a `kind`.
        """
        path = self.directory / name
        if not path.is_file():
            raise FileNotFoundError(f"{self.directory} holds no {name}.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if not isinstance(content, kind):
            raise ValueError(f"{path} must hold a {kind.__name__}. Received: {type(content).__name__}")
        return content

    def _find_files(self):
        """The open file of each tensor, by its name."""
        if (self.directory / "model.safetensors").is_file():
            names = ["model.safetensors"]
        elif (self.directory / "model.safetensors.index.json").is_file():
            places = self.read_json("model.safetensors.index.json").get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise ValueError(
                    f"{self.directory / 'model.safetensors.index.json'} must give a `weight_map` from tensors to files."
                )
            names = sorted(set(places.values()))
        else:
            others = sorted(path.name for path in self.directory.glob("*.bin"))
            advice = f" It holds {', '.join(others)}: convert that to safetensors first." if others else ""
            raise FileNotFoundError(f"{self.directory} holds no model.safetensors.{advice}")
        files = {}
        for name in names:
            if pathlib.PurePath(name).name != name or not (self.directory / name).is_file():
                raise FileNotFoundError(f"{self.directory} holds no {name}, which its index names.")
            try:
                file = safetensors.safe_open(self.directory / name, "numpy")
            except safetensors.SafetensorError as error:
                raise ValueError(f"{self.directory / name} is damaged: {error}") from error
            files.update(dict.fromkeys(file.keys(), file))
        return files

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._files)

    def take(self, key: str, shape: Sequence[int] | None = None) -> np.ndarray:
        """The tensor called `key`, which then counts as used.

        Norms of models that came from TensorFlow, such as BERT's own, have `gamma` and `beta` in place of `weight` and
        `bias`.

        Raises:
            ValueError: there is none, or its shape is not `shape`.
        """
        base, _, last = key.rpartition(".")
        older = f"{base}.{_OLDER_NAMES.get(last)}"
        key = older if key not in self._files and older in self._files else key
        if key not in self._files:
            near = difflib.get_close_matches(key, self.keys(), 3)
            raise ValueError(f"{self.directory} has no tensor {key!r}; the nearest names are {near}.")
        self._used.add(key)
        array = self._files[key].get_tensor(key)
        if shape is not None and tuple(array.shape) != tuple(shape):
            raise ValueError(
                f"Tensor {key!r} of {self.directory} must have the shape {tuple(shape)}. "
                f"Received: shape {tuple(array.shape)}"
            )
        return array

    def check_all_used(self, ignored: Iterable[str] = ()) -> None:
        """Raises ValueError where a tensor was not used whose name no pattern in `ignored` matches wholly."""
        rest = [key for key in self.keys() if key not in self._used]
        rest = [key for key in rest if not any(re.fullmatch(pattern, key) for pattern in ignored)]
        if rest:
            more = f" and {len(rest) - 8} more" if len(rest) > 8 else ""
            raise ValueError(
                f"{self.directory} has tensors that the model has no place for: {', '.join(rest[:8])}{more}."
            )

    def setting(self, *names: str, default: Any = ..., kind: type | tuple[type, ...] = object) -> Any:
        """The first of the entries `names` that the configuration has.

        Raises:
            ValueError: it has none of them, and there is no default; or what it has is not of the `kind`.
        """
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if not isinstance(value, kind):
                    kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
                    raise ValueError(
                        f"{name!r} must be of type {kinds}. "
                        f"Received: {name}={value!r} in {self.directory / 'config.json'}"
                    )
                return value
        if default is ...:
            raise ValueError(f"{self.directory / 'config.json'} must give {' or '.join(map(repr, names))}.")
        return default

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ValueError where the configuration asks for something under `name` that is none of `allowed`."""
        if name in self.config and self.config[name] not in allowed:
            raise ValueError(
                f"{name!r} must be {' or '.join(map(repr, allowed))} to be loaded. "
                f"Received: {name}={self.config[name]!r} in {self.directory / 'config.json'}"
            )
