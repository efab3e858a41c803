"""TensorFlow's own graph by tf2onnx: what the tracer refuses exports, verified, and all else is said clearly."""

import keras
import numpy as np
import onnx
import pytest
from keras import layers, ops

from keras_transformer.export import (
    ExportError,
    TraceError,
    UnsupportedOperationError,
    VerificationError,
    export_onnx,
    list_origins,
)
from keras_transformer.models import CausalLM

on_tensorflow = pytest.mark.backends("tensorflow")


def export(model, path, **options):
    return export_onnx(model, path, converter="tf2onnx", verbose=False, **options)


@pytest.fixture
def recurrent():
    """Masks, exact GELU and a recurrent layer, which cannot be traced."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(31, 6, mask_zero=True)(ids)
    x = layers.Dense(5, activation="gelu")(x)
    return keras.Model(ids, {"states": layers.LSTM(7, return_sequences=True)(x), "sums": ops.sum(x, axis=1)})


@on_tensorflow
def test_what_cannot_be_traced_exports(recurrent, tmp_path):
    with pytest.raises(ExportError, match="converter='tf2onnx'"):
        export_onnx(recurrent, tmp_path / "m.onnx", verbose=False)
    report = export(recurrent, tmp_path / "m.onnx")
    assert report.passed and {c.output for c in report.comparisons} == {"states", "sums"}
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [[d.dim_param for d in i.type.tensor_type.shape.dim] for i in graph.input] == [["batch", "length"]]
    rules = {origin.rule for origin in list_origins(tmp_path / "m.onnx")}
    assert rules == {"keras_transformer.export.tf2onnx_route.convert_with_tf2onnx"}
    assert not any(node.op_type == "Erfc" for node in graph.node)


@on_tensorflow
@pytest.mark.parametrize("options", [{"opset": 17}, {"opset": 18, "form": "int8"}])
def test_models_of_the_package_in_both_opsets_and_in_smaller_forms(tmp_path, options):
    model = CausalLM(vocabulary_size=67, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_length=13)
    report = export(model, tmp_path / "m.onnx", output_names=["logits"], **options)
    assert report.passed and max(c.sizes["length"] for c in report.comparisons) == 13
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == options["opset"]


@on_tensorflow
def test_an_input_that_is_an_output_twice(tmp_path):
    x = keras.Input((None, 3), name="x")
    assert export(keras.Model(x, [x, x + 1, x]), tmp_path / "m.onnx").passed
    assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.output] == ["output_0", "output_1", "output_2"]


@on_tensorflow
def test_what_tf2onnx_cannot_write_is_named(tmp_path):
    x = keras.Input((None, 3), name="x")
    with pytest.raises(UnsupportedOperationError, match="tf2onnx cannot write the operations Erfinv"):
        export(keras.Model(x, ops.erfinv(x)), tmp_path / "m.onnx")
    with pytest.raises(VerificationError):
        # A value that is drawn when the model runs: whatever the file says, it is not Keras'.
        export(keras.Model(x, layers.Lambda(lambda x: x + keras.random.uniform((3,)))(x)), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@on_tensorflow
@pytest.mark.parametrize(
    "options, match", [({"opset": 20}, "17 to 18"), ({"output_names": ["a", "b"]}, "each of the 1 outputs")]
)
def test_arguments_that_do_not_fit(tmp_path, options, match):
    x = keras.Input((None, 3), name="x")
    with pytest.raises(ExportError, match=match):
        export(keras.Model(x, x * 2), tmp_path / "m.onnx", **options)


@on_tensorflow
def test_ids_of_unknown_range_need_samples(tmp_path):
    table = np.arange(35, dtype="float32").reshape(7, 5)
    ids = keras.Input((None,), dtype="int32", name="ids")
    model = keras.Model(ids, ops.take(table, ids, axis=0))
    with pytest.raises(ExportError, match="pass `samples`"):
        export(model, tmp_path / "m.onnx")
    assert export(model, tmp_path / "m.onnx", samples={"ids": np.arange(28).reshape(4, 7) % 7}).passed


@pytest.mark.backends("torch")
def test_other_backends_are_refused(tmp_path):
    x = keras.Input((None, 3), name="x")
    with pytest.raises(ExportError, match="KERAS_BACKEND=tensorflow. Received: backend 'torch'"):
        export(keras.Model(x, x * 2), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match="`converter` must be one of"):
        export_onnx(keras.Model(x, x * 2), tmp_path / "m.onnx", converter="tf")
    with pytest.raises((TraceError, ExportError)) as info:
        export_onnx(keras.Model(x, layers.LSTM(2)(x)), tmp_path / "m.onnx")
    assert "tf2onnx" not in str(info.value)
