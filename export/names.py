"""Names of layers and weights: the attributes by which a model reaches them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common.variables import Variable as KerasVariable

from keras_transformer.export.ir import Weight


class Names:
    """Names of layers and weights from the attributes that hold them, which are the same in every process."""

    def __init__(self, root: keras.layers.Layer | dict[str, keras.layers.Layer]):
        self._paths: dict[int, str] = {}
        self._variables: dict[int, str] = {}
        self._weights: dict[tuple[int, str], Weight] = {}
        self._taken: set[str] = set()
        for name, layer in root.items() if isinstance(root, dict) else [("", root)]:
            self._walk(layer, name)

    def path(self, layer, parent: str) -> str:
        """The path of `layer`; if no attribute holds it, its class under the layer that called it."""
        if id(layer) not in self._paths:
            return _join(parent, _snake_case(type(layer).__name__))
        return self._paths[id(layer)]

    def weight(self, variable: KerasVariable, dtype: str) -> Weight:
        """The weight that `variable` holds, as seen in `dtype`."""
        key = (id(variable), dtype)
        if key not in self._weights:
            name = self._variables.get(id(variable), variable.name)
            if keras.backend.standardize_dtype(variable._dtype) != dtype:
                name = f"{name}.{dtype}"
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            with backend.AutocastScope(None):
                value = backend.convert_to_numpy(backend.cast(variable.value, dtype))
            self._weights[key] = Weight(name, np.asarray(value), dtype)
        return self._weights[key]

    def _walk(self, layer, path: str) -> None:
        if id(layer) in self._paths:
            return
        self._paths[id(layer)] = path
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            self._variables.setdefault(id(variable), _join(path, variable.name))
        for name, child in _children(layer):
            self._walk(child, _join(path, name))


def _children(layer) -> Iterator[tuple[str, Any]]:
    """The layers that `layer` holds, with names that do not depend on what was built before."""
    if isinstance(layer, keras.Sequential) or hasattr(layer, "_operations_by_depth"):
        counts: dict[str, int] = {}
        for child in layer.layers:
            automatic = _snake_case(type(child).__name__)
            if re.fullmatch(rf"{automatic}(_\d+)?", child.name):
                count = counts[automatic] = counts.get(automatic, -1) + 1
                yield (f"{automatic}_{count}" if count else automatic), child
            else:
                yield child.name, child
        return
    # Bookkeeping of Keras and the backends holds the same layers again; torch keeps attributes in `_modules`.
    attributes = {**vars(layer), **vars(layer).get("_modules", {})}
    for name in sorted(attributes):
        if name not in _BOOKKEEPING and not name.startswith("_self_"):
            yield from _layers_in(attributes[name], name.strip("_"))
    for child in layer._layers:
        yield _snake_case(type(child).__name__), child


_BOOKKEEPING = {"_layers", "_metrics", "_losses", "_functional", "_tracker", "_modules"}


def _layers_in(value, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.layers.Layer):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _layers_in(item, f"{name}.{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _layers_in(item, f"{name}.{key}")


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _snake_case(name: str) -> str:
    return keras.src.utils.naming.to_snake_case(name)
