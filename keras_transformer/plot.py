"""Pictures: training curves, attention and position encodings, drawn with matplotlib and without its global state."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def plot_history(
    history: Mapping[str, Sequence[float]], path: str | os.PathLike[str] | None = None, name: str = "loss"
):
    """A quantity of training over the epochs, with its validation counterpart where there is one.

    Args:
        history: what `model.fit(...)` returned, as its `.history`: one number for each epoch, by name.
        path: where to save the picture; the name's ending says in which format.
        name: the quantity.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ValueError: `history` does not hold `name`.
    """
    if name not in history:
        raise ValueError(f"`name` must be one of {sorted(history)}. Received: name={name!r}")
    figure, axes = _figure(6, 4)
    for key, label in ((name, "training"), (f"val_{name}", "validation")):
        if key in history:
            axes.plot(range(1, len(history[key]) + 1), history[key], marker=".", label=label)
    if min(history[name]) > 0:
        axes.set_yscale("log")
    axes.set(xlabel="epoch", ylabel=name.replace("_", " "))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, path)


def plot_attention(
    weights: Any,
    key_tokens: Sequence[str],
    query_tokens: Sequence[str],
    path: str | os.PathLike[str] | None = None,
    title: str = "",
):
    """A heat map of attention weights: which keys (across) each query (down) attends to.

    Args:
        weights: (T, S), or (N, T, S), of which the mean over the heads is drawn.
        key_tokens: S labels.
        query_tokens: T labels.
        path: where to save the picture; the name's ending says in which format.
        title: a line above it.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ValueError: the weights' shape does not fit the labels.
    """
    weights = np.asarray(weights)
    if weights.ndim == 3:
        weights = weights.mean(axis=0)
    if weights.shape != (len(query_tokens), len(key_tokens)):
        raise ValueError(
            "`weights` must have shape (T, S) or (N, T, S) for T `query_tokens` and S `key_tokens`. Received: "
            f"weights.shape={weights.shape}, {len(query_tokens)} query_tokens, {len(key_tokens)} key_tokens"
        )
    height, width = weights.shape
    figure, axes = _figure(2 + 0.4 * width, 1.2 + 0.35 * height)
    image = axes.imshow(weights, cmap="viridis", vmin=0, aspect="auto")
    axes.set_xticks(range(width), [repr(token)[1:-1] for token in key_tokens], rotation=60, ha="right")
    axes.set_yticks(range(height), [repr(token)[1:-1] for token in query_tokens])
    # Tokens are any text: a dollar sign in one of them starts no formula.
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    axes.set_title(title, parse_math=False)
    figure.colorbar(image, label="attention weight")
    return _saved(figure, path)


def plot_position_encoding(encoding: Any, path: str | os.PathLike[str] | None = None):
    """A heat map of what stands for each position (down), by its columns (across).

    Args:
        encoding: (T, D), or (1, T, D) as `ops.sinusoidal_encoding` gives it; a learned table will do as well.
        path: where to save the picture; the name's ending says in which format.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ValueError: another shape.
    """
    encoding = np.asarray(encoding)
    if encoding.ndim == 3 and encoding.shape[0] == 1:
        encoding = encoding[0]
    if encoding.ndim != 2:
        raise ValueError(f"`encoding` must have the shape (T, D) or (1, T, D). Received: shape {encoding.shape}")
    figure, axes = _figure(6, 4)
    largest = np.abs(encoding).max()
    image = axes.imshow(encoding, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
    axes.set(xlabel="column", ylabel="position")
    figure.colorbar(image, label="value")
    return _saved(figure, path)


def _figure(width, height):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'keras-transformer-onnx[plot]'.") from error
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    return figure, figure.add_subplot()


def _saved(figure, path):
    if path is not None:
        figure.savefig(path)
    return figure
