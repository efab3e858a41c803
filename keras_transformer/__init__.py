"""Transformer layers, models, training pieces and ONNX export for Keras 3."""

from __future__ import annotations

import importlib

from keras_transformer import _links, _registration

__version__ = "0.1.0"

_SUBMODULES = (
    "callbacks",
    "data",
    "export",
    "generation",
    "layers",
    "losses",
    "metrics",
    "models",
    "ops",
    "plot",
    "pretrained",
    "schedules",
    "text",
)


_links.explain_missing_link(__path__[0])
_registration.register()


def __getattr__(name: str):
    # Lazy, so that the ONNX runner, which lives below this package, loads neither Keras nor a backend.
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBMODULES])
