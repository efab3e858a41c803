"""The line of layer code that something comes from: past Keras', NumPy's and this package's own files."""

from __future__ import annotations

import functools
import os
import sys
import traceback

import keras
import numpy as np

# Where a call or a comparison comes from: code of these folders only carries out what layer code asked for.
KERAS = os.path.dirname(keras.src.__file__)
_PLUMBING = tuple(os.path.join(KERAS, "layers", part) for part in ("layer.py", "input_spec.py"))
_TORCH_MODULE = os.path.join("torch", "nn", "modules", "module.py")
_NUMPY = os.path.dirname(np.__file__)
PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OURS = tuple(os.path.join(PACKAGE, part) for part in ("ops", "export"))


@functools.cache
def is_plumbing(filename: str) -> bool:
    """Whether a file's code is of those that only carry out what layer code asked for."""
    if filename.startswith(KERAS):
        return not filename.startswith(os.path.join(KERAS, "layers")) or filename.startswith(_PLUMBING)
    return filename.startswith((*_OURS, _NUMPY)) or filename.endswith(("contextlib.py", _TORCH_MODULE))


def source_line() -> str:
    """`file:line` of the innermost call that layer code made."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not is_plumbing(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def failing_line(error: Exception) -> str:
    """The same of an error, in brackets; empty if it came from elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if not is_plumbing(frame.filename)]
    return f" ({lines[-1]})" if lines else ""
