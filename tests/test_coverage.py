"""Every public layer and model is fitted, generates if it can, and exports to verified ONNX.

`python -m tests.coverage` runs this file and the one that reloads them, and writes docs/coverage.md from what passed.
"""

import inspect
import pathlib
import re

import keras
import numpy as np
import pytest

from keras_transformer import layers, models
from keras_transformer.export import export_onnx
from keras_transformer.generation.mixin import GenerationMixin
from tests.checks import numpy
from tests.test_layers import LAYERS, MODELS

# A suite that runs on all backends has the shared checks of each there: this file costs minutes, and runs on the
# quickest, but for whoever makes the page.
pytestmark = pytest.mark.once
CASES = {**LAYERS, **MODELS}
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "coverage.md"


def made(name):
    """A model that is the case's layer or model alone, with random weights."""
    case = CASES[name]
    return case, case.saved(case.make())


def given(case):
    return {name: array.copy() for name, array in case.arguments.items()}


def labels_of(outputs):
    """Any labels that a loss can be computed with: what is there now, the other way round."""
    return keras.tree.map_structure(lambda output: -numpy(output).astype("float32"), outputs)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].make().weights])
def test_fit(name):
    case, model = made(name)
    inputs = given(case)
    if isinstance(model, models.MaskedLM | models.TokenClassifier | models.CausalLM | models.Transformer):
        shape = next(reversed(inputs.values())).shape
        labels = np.ones(shape, "int32")
        model.compile()
    elif isinstance(model, models.SequenceClassifier | models.VisionTransformer) and model.default_loss() is not None:
        labels = np.arange(3, dtype="int32") % 3
        model.compile()
    else:
        labels = keras.tree.flatten(labels_of(model(inputs)))
        labels = labels[0] if len(labels) == 1 else labels
        model.compile("sgd", "mse" if not isinstance(labels, list) else ["mse"] * len(labels))
    before = [numpy(weight.value) for weight in model.trainable_weights]
    history = model.fit(inputs, labels, epochs=2, batch_size=3, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    changed = [np.abs(numpy(w.value) - old).max() > 0 for w, old in zip(model.trainable_weights, before, strict=True)]
    assert not before or np.mean(changed) > 0.7  # a bias of the keys, say, has no gradient


@pytest.mark.parametrize("name", [name for name in CASES if issubclass(CASES[name].cls, GenerationMixin)])
def test_generate(name):
    case, model = made(name)
    inputs = next(iter(case.inputs.values()))[:1]
    ids = model.generate(inputs, max_new_tokens=5)
    assert ids.shape[0] == 1 and 1 <= ids.shape[1] <= 5 and ids.dtype == np.int32
    np.testing.assert_array_equal(model.generate(inputs, max_new_tokens=5, compile=False), ids)


@pytest.mark.parametrize("name", CASES)
def test_onnx(name, tmp_path):
    report = export_onnx(made(name)[1], tmp_path / "onnx", verbose=False)
    assert report.passed


def test_the_page_has_a_row_for_everything_public():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    public = [*layers.__all__, *models.__all__]
    assert rows == public
    assert all(inspect.isclass(getattr(layers, name, getattr(models, name, None))) for name in public)
