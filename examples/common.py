"""What digits.py, classify.py and write.py share: their first options, their directory, and running a graph."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def options_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every example has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory of this run")
    parser.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    return parser


def begin(options: argparse.Namespace, name: str) -> None:
    """Chooses the backend, takes possession of the output directory, and seeds everything.

    A run writes `name`.json first; a directory that holds other things but no such file is somebody else's.
    """
    output = options.output
    if output.exists() and not output.is_dir():
        sys.exit(f"{output} is a file: choose another --output.")
    if output.exists() and any(output.iterdir()) and not (output / f"{name}.json").exists():
        sys.exit(f"{output} holds something that {name}.py did not write: choose another --output.")
    output.mkdir(parents=True, exist_ok=True)
    finish(options, name, {})
    os.environ["KERAS_BACKEND"] = options.backend  # before the first import of Keras
    import keras

    keras.utils.set_random_seed(options.seed)


def finish(options: argparse.Namespace, name: str, figures: Mapping[str, float]) -> None:
    """Keeps the options of the run and what came out."""
    settings = {key: value if isinstance(value, int | float) else str(value) for key, value in vars(options).items()}
    text = json.dumps({"options": settings, "figures": dict(figures)}, indent=1)
    (options.output / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def verbosity() -> str | int:
    """What `fit` prints: a bar on a terminal, a line an epoch elsewhere."""
    return "auto" if sys.stdout.isatty() else 2


def run_onnx(path: Path, inputs: Mapping[str, np.ndarray], batch_size: int = 64) -> Any:
    """The first output of the graph at `path`, by ONNX Runtime alone, batch by batch."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = len(next(iter(inputs.values())))
    batches = [
        {name: array[start : start + batch_size] for name, array in inputs.items()}
        for start in range(0, rows, batch_size)
    ]
    return np.concatenate([session.run(None, batch)[0] for batch in batches])
