"""Every node of an exported graph says which operation it came from and which rule wrote it."""

import importlib

import keras
import pytest
from keras import layers

from keras_transformer.export import NotAnExportError, export_onnx, list_origins, register_lowering
from keras_transformer.models import CausalLM, Transformer

pytestmark = pytest.mark.once


class Halved(keras.Operation):
    def call(self, x):
        return x / 2

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Halving(layers.Layer):
    def call(self, x):
        return Halved()(x)


@register_lowering(Halved)
def lower_halved(g, node, x):
    return g.op("Mul", x, g.scalar(0.5, x.dtype))


def test_a_node_names_operation_and_rule(tmp_path):
    x = keras.Input((None, 4), name="x")
    export_onnx(keras.Model(x, layers.Dense(3)(Halving(name="halving")(x))), tmp_path / "m.onnx", verbose=False)
    first, product, bias = list_origins(tmp_path / "m.onnx")
    assert first == ("halving/Mul", "Mul", "Halved", f"{__name__}.lower_halved")
    assert product[1:] == ("MatMul", "Matmul", "keras_transformer.export.lowering.linear._matmul")
    assert bias[1:3] == ("Add", "Add")


@pytest.mark.parametrize(
    "options",
    [
        {"form": "fp16"},
        {"form": "int8", "opset": 17},
        {"form": "int4", "target": "onnxruntime"},
        {"target": "generator", "opset": 18},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_what_forms_opsets_and_loops_add_has_a_rule_too(tmp_path, options):
    model = CausalLM(vocabulary_size=67, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_length=16)
    if options.get("form") == "fp16":
        model = Transformer(67, 71, num_layers=1, d_model=32, num_heads=4, d_ff=64, max_length=16)
    export_onnx(model, tmp_path / "out", verify=False, **options)
    for file in (tmp_path / "out").glob("*.onnx"):
        origins = list_origins(file)
        assert len({origin.node for origin in origins}) == len(origins) > 20
        for origin in origins:
            module, _, name = origin.rule.rpartition(".")
            while not module.split(".")[-1].islower():  # a method of a class
                module = module.rpartition(".")[0]
            assert importlib.import_module(module) and name, origin


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "m.onnx").write_text("no graph")
    with pytest.raises(NotAnExportError, match=r"m\.onnx is not an ONNX file"):
        list_origins(tmp_path / "m.onnx")
