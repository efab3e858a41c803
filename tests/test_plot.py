import sys

import numpy as np
import pytest

from keras_transformer import plot
from keras_transformer.ops import sinusoidal_table

PNG = b"\x89PNG"


def test_history(tmp_path):
    history = {"loss": [3.0, 1.0, 0.5], "val_loss": [3.5, 1.5, 0.7], "accuracy": [0.0, 0.5, 0.9]}
    figure = plot.plot_history(history, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["training", "validation"]
    np.testing.assert_array_equal(lines[1].get_ydata(), history["val_loss"])
    np.testing.assert_array_equal(lines[0].get_xdata(), [1, 2, 3])
    assert figure.axes[0].get_yscale() == "log"
    assert plot.plot_history(history, name="accuracy").axes[0].get_yscale() == "linear"
    with pytest.raises(ValueError, match="name='losss'"):
        plot.plot_history(history, name="losss")


def test_attention(tmp_path):
    weights = np.random.default_rng(0).random((3, 2, 5))
    keys, queries = ["$x", "_y^", "<pad>", " a", "\n"], ["<start>", "ü"]
    figure = plot.plot_attention(weights, keys, queries, tmp_path / "map.png", title="$5")
    assert (tmp_path / "map.png").read_bytes().startswith(PNG)
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), weights.mean(0))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$x", "_y^", "<pad>", " a", "\\n"]
    assert len(plot.plot_attention(weights[0], keys, queries).axes) == 2
    with pytest.raises(ValueError, match=r"weights.shape=\(5, 2\)"):
        plot.plot_attention(weights[0].T, keys, queries)


def test_position_encoding(tmp_path):
    table = sinusoidal_table(11, 6)
    for encoding in (table, table[None]):
        figure = plot.plot_position_encoding(encoding, tmp_path / "positions.png")
        np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), table)
    assert (tmp_path / "positions.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match=r"\(T, D\) or \(1, T, D\). Received: shape \(6,\)"):
        plot.plot_position_encoding(table[0])


def test_no_global_state():
    """Drawing neither opens windows nor changes what pyplot would do."""
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    plot.plot_history({"loss": [1.0, 2.0]})
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_missing_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"keras-transformer-onnx\[plot\]"):
        plot.plot_history({"loss": [1.0]})
