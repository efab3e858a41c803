"""Makes `import keras_transformer` enough to load a saved model, without importing Keras for it."""

from __future__ import annotations

import importlib
import sys

_SERIALIZABLE = ("layers", "losses", "metrics", "models", "schedules")


def register() -> None:
    """Imports every module whose classes a `.keras` file may name: as soon as Keras is imported, or now if it is."""
    if "keras" in sys.modules:
        _import_serializable()
    else:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """An import finder that watches Keras and this package being imported, until Keras is there.

    If a module of ours is what imports Keras, ours has to be finished first: the others import from it.
    """

    _depth = 0

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None):
        if name != "keras" and not name.startswith("keras_transformer."):
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module):
                cls._depth += 1
                try:
                    load(module)
                finally:
                    cls._depth -= 1
                if cls._depth == 0 and "keras" in sys.modules and cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                    _import_serializable()

            spec.loader.exec_module = load_and_register
        return spec


def _import_serializable():
    for name in _SERIALIZABLE:
        importlib.import_module(f"keras_transformer.{name}")
