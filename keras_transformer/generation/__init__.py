"""Token rules, the compiled loop and the Python loop; resolved lazily, as the ONNX runner needs no Keras."""

from __future__ import annotations

import importlib

_NAMES = {
    "Engine": "rules",
    "Rules": "rules",
    "greedy": "rules",
    "generated_length": "rules",
    "Beams": "beam",
    "GenerationMixin": "mixin",
    "Request": "request",
    "source_request": "request",
    "stream_tokens": "stream",
    "collect_tokens": "stream",
    "loop_tokens": "loop",
    "Generator": "backends",
}


def __getattr__(name: str):
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_NAMES])
