"""What export asks of a backend: to run a Keras function fast at many sizes, once each, or on shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np


def run_once(function: Callable, shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> None:
    """Calls `function` on ones of these shapes, to see whether it works.

    JAX, which would compile every operation, only infers the shapes, and finds the same faults in them.
    """
    if keras.backend.backend() == "jax":
        import jax

        with keras.StatelessScope():
            specs = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            jax.eval_shape(function, *specs)
        return
    function(*(keras.ops.convert_to_tensor(np.ones(s), dtype=d) for s, d in zip(shapes, dtypes, strict=True)))


def inference(function: Callable, variables: list) -> Callable:
    """`function` for forward passes only, reading `variables` at each call.

    JAX compiles every primitive anew for every shape, which takes ten times as long as compiling the whole
    function with XLA's optimiser off; torch would record gradients. TensorFlow runs eagerly as it is.
    """
    backend = keras.backend.backend()
    if backend == "torch":
        import torch

        return torch.no_grad()(function)
    if backend != "jax":
        return function

    import jax

    def stateless(values, args):
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*args)

    compiled = jax.jit(stateless, compiler_options={"xla_backend_optimization_level": 0})
    return lambda *args: compiled([variable.value for variable in variables], args)
