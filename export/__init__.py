"""Export to ONNX, verification, and the runner of exported models.

Names are resolved when they are used: the runner and its errors load no Keras.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "ExportError": "errors",
    "NotAnExportError": "errors",
    "OnnxCausalLM": "runtime",
    "OnnxEncoder": "encoder_runtime",
    "OnnxGenerator": "runtime",
    "OnnxTransformer": "runtime",
    "Report": "report",
    "TraceError": "errors",
    "UnsupportedOperationError": "errors",
    "VerificationError": "errors",
    "export_onnx": "exporter",
    "list_origins": "origins",
    "register_lowering": "lowering",
    "verify_onnx": "verify",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
