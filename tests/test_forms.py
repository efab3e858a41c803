"""Smaller forms: what is stored, how far it is from Keras, and that a table and its output projection are one."""

import json
import shutil

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from keras_transformer.export import export_onnx, verify_onnx
from keras_transformer.export.errors import ExportError, VerificationError
from keras_transformer.export.forms import FORMS, LEAST_COSINE, convert
from keras_transformer.export.runtime import OnnxCausalLM, OnnxTransformer
from keras_transformer.models import CausalLM, Encoder, Transformer
from tests import mutations
from tests.checks import numpy, roughen

# The graphs are the same bytes on every backend, and so are their forms.
pytestmark = pytest.mark.once

SMALLER = FORMS[1:]
# A vocabulary above the smallest table that shrinks, and widths that are multiples of a block.
ARGUMENTS = {"num_layers": 1, "d_model": 64, "num_heads": 4, "d_ff": 96, "max_length": 17, "seed": 3}
PROMPTS = [[5, 6, 7, 8, 9, 3, 4], [11], [13, 5, 4]]


def rough(model):
    return roughen(model, scale=0.05)


@pytest.fixture(scope="module")
def tied():
    return rough(CausalLM(131, **ARGUMENTS, position_encoding="sinusoidal", end_id=2, pad_id=0))


@pytest.fixture(scope="module")
def directories(tied, tmp_path_factory):
    """The directory of each form, exported with its verification, and the reports."""
    folder = tmp_path_factory.mktemp("forms")
    reports = {form: export_onnx(tied, folder / form, form=form, verbose=False) for form in FORMS}
    return folder, reports


def weight(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def graph_of(*nodes, inputs, outputs, **weights):
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = onnx.helper.make_graph(list(nodes), "g", inputs, outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", 23)]
    return onnx_ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))


def value(name, dtype, *shape):
    return onnx.helper.make_tensor_value_info(name, dtype, shape)


def run(model, **feeds):
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("form, steps", [("int8", 127), ("int8-weights", 128), ("int4", 8)])
@pytest.mark.parametrize("width", [64, 45])
def test_a_product_is_near_to_each_weight(form, steps, width):
    w, x = weight(width, 37), np.eye(width, dtype=np.float32)
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    model = graph_of(
        node, inputs=[value("x", 1, "n", width)], outputs=[value("y", 1, "n", 37)], w=np.asfortranarray(w).copy()
    )
    result = run(convert(model, form), x=x)
    # One-hot rows show the stored weights: half a step, a whole one where blocks lack the highest integer, and what the
    # activations lose, which are integers in all three.
    step = np.abs(w).max(0) / steps
    allowed = step * (0.5 if form == "int8" else 1) + np.abs(w).max(0) * 0.01
    assert (np.abs(result - w).max(0) <= allowed).all()
    assert np.abs(result - w).max() > 0
    assert "w" not in model.graph.initializers


@pytest.mark.parametrize("form, steps", [("int8", 127), ("int8-weights", 128), ("int4", 8)])
def test_a_table_that_is_the_output_too_is_stored_once(form, steps):
    table, ids = weight(70, 64), np.arange(70)
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["rows"], name="look_up"),
        onnx.helper.make_node("Transpose", ["table"], ["columns"], perm=[1, 0], name="turned"),
        onnx.helper.make_node("MatMul", ["rows", "columns"], ["scores"], name="product"),
    ]
    inputs, outputs = [value("ids", 7, "n")], [value("rows", 1, "n", 64), value("scores", 1, "n", 70)]
    model = convert(graph_of(*nodes, inputs=inputs, outputs=outputs, table=table), form)
    large = [v for v in model.graph.initializers.values() if v.const_value.size >= 70 * 64 // 2]
    assert len(large) == 1 and large[0].const_value.nbytes <= 70 * 64 * (1 if form != "int4" else 0.5)
    rows = run(model, ids=ids)
    np.testing.assert_allclose(rows, table, atol=np.abs(table).max() / steps + 1e-6)


@pytest.mark.parametrize("form", ["int8-weights", "int4"])
def test_a_table_whose_rows_are_no_whole_blocks_stays(form):
    node = onnx.helper.make_node("Gather", ["table", "ids"], ["rows"], name="look_up")
    table = weight(70, 45)
    model = graph_of(node, inputs=[value("ids", 7, "n")], outputs=[value("rows", 1, "n", 45)], table=table)
    np.testing.assert_array_equal(run(convert(model, form), ids=np.arange(70)), table)


def test_every_form_is_near_to_keras_and_smaller(directories):
    folder, reports = directories
    sizes = {form: (folder / form / "decoder.onnx").stat().st_size for form in FORMS}
    assert sizes["fp32"] > sizes["fp16"] > sizes["int8"] > sizes["int4"] and sizes["int8-weights"] > sizes["int4"]
    # A fifth of so small a file is the graph itself.
    assert sizes["fp16"] < 0.6 * sizes["fp32"] and sizes["int8"] < 0.45 * sizes["fp32"]
    assert sizes["int4"] < 0.35 * sizes["fp32"]
    for form in SMALLER:
        report = reports[form]
        assert report.form == form and report.passed and {c.measure for c in report.comparisons} == {"1 - cosine"}
        assert 0 < report.max_error and 0.5 < report.agreement <= 1
        assert f"Form {form}: {report.size:,} bytes" in report.summary()
        assert json.loads((folder / form / "config.json").read_text())["form"] == form
    assert reports["fp16"].max_error < 1e-5 < reports["int8"].max_error < 0.005
    assert reports["fp16"].agreement > 0.99


def test_forms_generate(directories, tied):
    folder, _ = directories
    expected = tied.generate(PROMPTS, 9)
    for form in SMALLER:
        ids = OnnxCausalLM(folder / form).generate(PROMPTS, 9)
        assert ids.shape[0] == 3 and ids.max() < 131
        if form == "fp16":
            np.testing.assert_array_equal(ids, expected)


def test_quantized_graphs_have_no_float_weights(directories):
    folder, _ = directories
    for form in SMALLER:
        graph = onnx.load(folder / form / "decoder.onnx").graph
        kinds = {node.op_type for node in graph.node}
        large = [tensor for tensor in graph.initializer if np.prod(tensor.dims) > 600]
        assert large and not any(tensor.data_type == onnx.TensorProto.FLOAT for tensor in large)
        assert "MatMul" not in kinds or form == "fp16"
        # Positions are exact in every form: their sines are not made in half precision.
        (sine,) = (node for node in graph.node if node.op_type == "Sin")
        types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
        assert types.get(sine.output[0], onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT


@pytest.mark.parametrize("form", SMALLER)
def test_free_axes_padded_rows_and_no_dropout_in_every_form(form, tmp_path):
    model = rough(Encoder(131, **ARGUMENTS, dropout=0.5, pad_id=0))
    export_onnx(model, tmp_path / "model.onnx", form=form, verify=False)
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert not any(node.op_type.startswith(("Random", "Bernoulli", "Dropout")) for node in graph.node)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", "length"]
    for batch, length in ((1, 1), (2, 3), (5, 9), (3, 17)):
        ids = np.random.default_rng(length).integers(1, 131, (batch, length)).astype("int32")
        ids[-1] = 0
        (first,), (again,) = (session.run(None, {"token_ids": ids}) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        expected = numpy(model(ids))
        assert np.isfinite(first).all() and first.shape == expected.shape
        cosine = (first * expected).sum() / np.linalg.norm(first) / np.linalg.norm(expected)
        assert cosine > LEAST_COSINE[form]


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_encoder_decoder(tmp_path, form):
    model = rough(Transformer(71, 83, **ARGUMENTS))
    report = export_onnx(model, tmp_path / "model", form=form, logits="last", target="onnxruntime", verbose=False)
    assert report.passed
    ids = OnnxTransformer(tmp_path / "model").generate(PROMPTS, 9)
    assert ids.shape == model.generate(PROMPTS, 9).shape


def test_a_form_that_is_too_far_off_is_noticed(directories, tied, tmp_path):
    folder, _ = directories
    shutil.copytree(folder / "int8", tmp_path / "wrong")
    graph = onnx.load(tmp_path / "wrong" / "decoder.onnx")
    name = next(t.name for t in graph.graph.initializer if t.name.endswith("value_dense/kernel.scale"))
    mutations.set_array(graph, name, -mutations.arrays(graph)[name])
    onnx.save(graph, tmp_path / "wrong" / "decoder.onnx")
    from tests.test_verify_cached import sign

    sign(tmp_path / "wrong", "decoder.onnx")
    with pytest.raises(VerificationError, match="1 - cosine"):
        verify_onnx(tied, tmp_path / "wrong", verbose=False)


def test_bad_input(tied, tmp_path):
    with pytest.raises(ExportError, match="`form` must be one of .*Received: form='int2'"):
        export_onnx(tied, tmp_path / "x", form="int2")
    half = CausalLM(131, **ARGUMENTS, dtype="mixed_float16")
    with pytest.raises(ExportError, match="computes in float16. Received: form='int8'"):
        export_onnx(half, tmp_path / "x", form="int8")
    assert not list(tmp_path.iterdir())
