"""Makes `import keras_transformer` enough to load a saved model, without importing Keras for it."""

from __future__ import annotations

import importlib
import importlib.util
import sys

_SERIALIZABLE = ("layers", "losses", "metrics", "models", "schedules")


def register() -> None:
    """Imports every module whose classes a `.keras` file may name: as soon as Keras is imported, or now if it is."""
    if "keras" in sys.modules:
        _import_serializable()
    else:
        sys.meta_path.insert(0, _KerasFinder)


class _KerasFinder:
    """An import finder that is asked for `keras` once, and registers our classes right after it is loaded."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None):
        if name != "keras":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module):
                load(module)
                _import_serializable()

            spec.loader.exec_module = load_and_register
        return spec


def _import_serializable():
    for name in _SERIALIZABLE:
        importlib.import_module(f"keras_transformer.{name}")
