"""How this package's operations run: recorded where a tensor is symbolic, computed at once where none is."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend import any_symbolic_tensors


def run(operation: type[keras.Operation], *tensors: Any, **options: Any) -> Any:
    """The operation made with `options`, applied to `tensors`.

    Only a symbolic call makes the `keras.Operation`: its making takes longer than many a computation, and breaks the
    graph of `torch.compile`. Others go to the class' static `compute(*tensors, **options)`.
    """
    if any_symbolic_tensors(tensors):
        return operation(**options)(*tensors)
    return operation.compute(*tensors, **options)
