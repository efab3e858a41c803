"""Some of KerasHub's backbones, written by others, export and equal their graphs; `make zoo` tries all of them."""

import pytest

from tests import zoo

pytest.importorskip("keras_hub", reason="keras_hub is in the extra `dev`")

# What Keras says of other people's models: softmax over one key, masks that a layer does not take.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# A decoder with grouped heads and rotary positions, images, and Fourier transforms.
@pytest.mark.parametrize("name", ["Gemma", "ViT", "FNet"])
def test_a_backbone_exports_and_equals_its_graph(name, tmp_path):
    found = zoo.try_out(zoo.ZOO[name], tmp_path)
    assert found["verified"], found["error"]
    assert found["counts"].get("Attention", 0) == (0 if name == "FNet" else 2)
    assert not {"Einsum", "Softmax"} & set(found["counts"])


def test_a_graph_that_differs_is_not_taken_for_verified(tmp_path):
    import keras

    from keras_transformer.export import export_onnx

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    export_onnx(model, tmp_path / "model.onnx", verbose=False)
    assert zoo.check(model, tmp_path / "model.onnx", zoo.Case("", {}))["difference"] < zoo.TOLERANCE
    model.layers[-1].bias.assign([0.0, 0.0, 1e-3])
    with pytest.raises(AssertionError, match="differs by"):
        zoo.check(model, tmp_path / "model.onnx", zoo.Case("", {}))


@pytest.mark.parametrize("sizes", [{"batch", "length"}, {"batch", "encoder", "decoder"}])
def test_no_size_is_one_that_the_tracer_starts_from(sizes):
    from keras_transformer.export.dims import Axis
    from keras_transformer.export.generalise import trace_sizes

    axes = sorted(sizes)
    base = trace_sizes([Axis(name) for name in axes])[0]
    assert base not in zoo.grid(axes, 67) and all(set(point) == sizes for point in zoo.grid(axes, 67))


@pytest.mark.once
def test_the_limit_of_a_table_of_positions_is_found(tmp_path):
    import keras_hub

    from keras_transformer.export import export_onnx

    model = keras_hub.models.OPTBackbone(61, 1, 4, 16, 31, max_sequence_length=23)
    report = export_onnx(model, tmp_path / "model.onnx", verbose=False)
    assert max(comparison.sizes["length"] for comparison in report.comparisons) == 23
