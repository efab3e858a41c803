import json
import pathlib

import keras
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from keras_transformer.export import verify
from keras_transformer.export.errors import NotAnExportError, VerificationError
from keras_transformer.export.verify import FreeAxis, InputSpec, verify_onnx
from tests import mutations
from tests.toy import INPUTS, LONGEST, VOCABULARY, WIDTH, Toy, toy_numpy, toy_onnx

# The verifier is NumPy and ONNX Runtime.
pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The toy's layer, its function, its file and its graph."""
    keras.utils.set_random_seed(1337)
    layer = Toy()
    path = tmp_path_factory.mktemp("toy") / "toy.onnx"
    graph = toy_onnx(layer, path)
    return layer, toy_numpy(layer), path, graph


def changed(graph, path, change):
    """A copy of `graph` with a fault, at `path`."""
    graph = onnx.ModelProto.FromString(graph.SerializeToString())
    change(graph)
    onnx.save(graph, path)
    return path


def test_passes_and_reports(good, tmp_path, capsys):
    layer, _, path, _ = good
    report = verify_onnx(layer, path, json_path=tmp_path / "report.json")
    assert report.passed and 0 < report.max_error < 1e-5
    sizes = {(c.sizes["batch"], c.sizes["length"]) for c in report.comparisons}
    assert {batch for batch, _ in sizes} == {1, 2, 3}
    assert {length for _, length in sizes} == {1, 7, 12, 16, LONGEST}
    assert {(1, 1), (1, LONGEST)} < sizes
    assert {c.case for c in report.comparisons} == {"whole", "padded"}
    assert {"keras", "onnxruntime", "backend"} < set(report.versions)

    written = json.loads((tmp_path / "report.json").read_text())
    assert written["passed"] is True
    assert len(written["comparisons"]) == len(report.comparisons)
    assert written["comparisons"][0]["sizes"] == {"batch": 1, "length": 1}
    assert "passed" in repr(report)
    assert "<table>" in report._repr_html_()
    printed = capsys.readouterr().out
    assert "max error" in printed and f"Compared in {report.seconds:.1f} s." in printed
    assert written["seconds"] == report.seconds > 0


def test_same_figures_every_time(good):
    _, model, path, _ = good
    first, second = (verify_onnx(model, path, verbose=False) for _ in range(2))
    assert first.comparisons == second.comparisons


FAULTS = {
    "gelu": mutations.other_gelu,
    "epsilon": mutations.larger_epsilon,
    "mask": mutations.no_mask,
    "causal": mutations.flipped_causal,
    "heads": mutations.swapped_heads,
    "fixed length": mutations.fixed_length,
    "positions": lambda graph: mutations.set_array(
        graph, "positions", np.roll(mutations.arrays(graph)["positions"], -1, axis=0)
    ),
    "inner length": lambda graph: mutations.nodes(graph, "Slice")[0].input.__setitem__(2, "one"),
    **{
        f"1% of {name}": mutations.heavier_weight(name)
        for name in ("tokens", "positions", "query", "key", "value", "output", "gamma", "beta", "up", "down")
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(good, tmp_path, fault):
    _, model, path, graph = good
    assert verify_onnx(model, path, verbose=False).passed
    path = changed(graph, tmp_path / "faulty.onnx", FAULTS[fault])
    with pytest.raises(VerificationError) as error:
        verify_onnx(model, path, verbose=False, json_path=tmp_path / "report.json")
    report = error.value.report
    assert not report.passed
    assert report.failures[0] == report.worst
    assert str(report.worst) in str(error.value)
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is False


def test_one_weight_alone_is_noticed(good, tmp_path):
    _, model, _, graph = good

    def change(graph):
        weight = mutations.arrays(graph)["up"].copy()
        weight[3, 5] *= 1.01
        mutations.set_array(graph, "up", weight)

    with pytest.raises(VerificationError):
        verify_onnx(model, changed(graph, tmp_path / "faulty.onnx", change), verbose=False)


def append(kind, **attributes):
    def change(graph):
        graph.graph.node[-1].output[0] = "y_before"
        graph.graph.node.append(helper.make_node(kind, ["y_before"], ["y"], **attributes))

    return change


def cast_output(graph):
    append("Cast", to=onnx.TensorProto.DOUBLE)(graph)
    graph.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE


def squeeze_output(graph):
    append("Flatten", axis=2)(graph)
    del graph.graph.output[0].type.tensor_type.shape.dim[2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (append("Sqrt"), "ONNX Runtime gives nan"),
        (cast_output, "dtype float64, Keras float32"),
        (squeeze_output, "shape"),
    ],
)
def test_nan_dtype_and_shape(good, tmp_path, change, problem):
    _, model, _, graph = good
    with pytest.raises(VerificationError, match=problem):
        verify_onnx(model, changed(graph, tmp_path / "faulty.onnx", change), verbose=False)


def test_a_size_that_keras_cannot_run_is_a_failure(good):
    _, model, path, _ = good

    def short(ids, mask):
        if ids.shape[1] > 12:
            raise RuntimeError("too long")
        return model(ids, mask)

    with pytest.raises(VerificationError, match="length=16.*Keras itself cannot run: too long"):
        verify_onnx(short, path, verbose=False)


def test_padded_rows_any(good, tmp_path):
    """A mask of a large negative number gives empty rows the mean of the values: allowed there, and nowhere else."""
    _, model, _, graph = good

    def additive(graph):
        attention = mutations.nodes(graph, "Attention")[0]
        for name, value in (("pass", 0.0), ("stop", -1e9)):
            graph.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
        at = list(graph.graph.node).index(attention)
        graph.graph.node.insert(at, helper.make_node("Where", ["mask_full", "pass", "stop"], ["bias"]))
        attention.input[3] = "bias"

    path = changed(graph, tmp_path / "mean.onnx", additive)
    with pytest.raises(VerificationError):
        verify_onnx(model, path, verbose=False)
    report = verify_onnx(model, path, padded_rows="any", verbose=False)
    assert report.passed and report.padded_rows == "any"
    assert "not compared" in report.notes[0]
    with pytest.raises(VerificationError):
        verify_onnx(
            model,
            changed(graph, tmp_path / "faulty.onnx", mutations.no_mask),
            padded_rows="any",
            verbose=False,
        )


def test_tolerance(good, tmp_path):
    _, model, path, graph = good
    with pytest.raises(VerificationError):
        verify_onnx(model, path, tolerance=(1e-9, 0), verbose=False)
    faulty = changed(graph, tmp_path / "faulty.onnx", mutations.heavier_weight("up"))
    assert verify_onnx(model, faulty, tolerance=(1.0, 0), verbose=False).passed


def test_given_arrays(good):
    _, model, path, _ = good
    rng = np.random.default_rng(0)
    arrays = {"ids": rng.integers(0, VOCABULARY, (5, 11)), "mask": rng.random((5, 11)) < 0.5}
    report = verify_onnx(model, path, samples=arrays, verbose=False)
    assert {c.case for c in report.comparisons} == {"samples"}
    assert max(c.sizes["length"] for c in report.comparisons) == 11
    assert min(c.sizes["length"] for c in report.comparisons) == 1
    # The arrays in whole are among what is compared.
    assert any(c.sizes == {"batch": 5, "length": 11} for c in report.comparisons)


def test_called_samples(good):
    _, model, path, _ = good
    seen = []

    def samples(sizes):
        seen.append(sizes)
        shape = sizes["batch"], sizes["length"]
        return {"ids": np.ones(shape, "int64"), "mask": np.ones(shape, bool)}

    assert verify_onnx(model, path, samples=samples, verbose=False).passed
    assert {"batch": 1, "length": LONGEST} in seen


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"ids": np.ones((2, 3), int)}, "map the input names"),
        ([np.ones((2, 3), int)], "map the input names"),
        ({"ids": np.full((2, 3), VOCABULARY), "mask": np.ones((2, 3), bool)}, f"Received: {VOCABULARY} in row 0"),
        ({"ids": np.array([[1, 2], [-3, 1]]), "mask": np.ones((2, 2), bool)}, "Received: -3 in row 1"),
        ({"ids": np.ones((2, 3), int), "mask": np.ones((2, 4), bool)}, "agree on the size of 'length'"),
        ({"ids": np.ones((2, 3, 1), int), "mask": np.ones((2, 3), bool)}, "rank 2"),
        ({"ids": np.ones((2, 20), int), "mask": np.ones((2, 20), bool)}, "length between 1 and 19"),
        (lambda sizes: {"ids": np.ones((2, 3), int), "mask": np.ones((2, 3), bool)}, "must return 'ids' of shape"),
    ],
)
def test_wrong_samples(good, samples, message):
    _, model, path, _ = good
    with pytest.raises(ValueError, match=message):
        verify_onnx(model, path, samples=samples, verbose=False)


def test_wrong_arguments(good, tmp_path):
    layer, model, path, _ = good
    with pytest.raises(ValueError, match="padded_rows='some'"):
        verify_onnx(model, path, padded_rows="some")
    with pytest.raises(ValueError, match="tolerance"):
        verify_onnx(model, path, tolerance=(1e-5, -1))
    with pytest.raises(NotAnExportError, match="no such file"):
        verify_onnx(model, tmp_path / "missing.onnx")
    (tmp_path / "text.onnx").write_text("not a graph")
    with pytest.raises(NotAnExportError, match="cannot load"):
        verify_onnx(model, tmp_path / "text.onnx")
    toy_onnx(layer, tmp_path / "bare.onnx", metadata=False)
    with pytest.raises(ValueError, match="does not say which values its integer input 'ids'"):
        verify_onnx(model, tmp_path / "bare.onnx")
    arrays = {"ids": np.ones((2, 8), int), "mask": np.ones((2, 8), bool)}
    assert verify_onnx(model, tmp_path / "bare.onnx", samples=arrays, verbose=False).passed


def test_arguments_of_another_kind(good, tmp_path):
    _, model, path, _ = good
    for tolerance in (1e-5, None, ("a", "b"), (float("nan"), 0)):
        with pytest.raises(ValueError, match="`tolerance` must be"):
            verify_onnx(model, path, tolerance=tolerance)
    with pytest.raises(ValueError, match="model=None"):
        verify_onnx(None, path)
    with pytest.raises(ValueError, match="not built"):
        verify_onnx(keras.layers.Dense(2), path)
    with pytest.raises(ValueError, match="`json_path`"):
        verify_onnx(model, path, json_path=tmp_path / "missing" / "report.json")
    with pytest.raises(ValueError, match="must map the input names.*'more'"):
        verify_onnx(model, path, samples=lambda sizes: {"ids": 1, "mask": 1, "more": 1})


def test_lengths():
    assert verify.lengths() == [1, 7, 12, 24, 160]
    assert verify.lengths(1, 4096) == [1, 7, 12, 24, 4096]
    assert verify.lengths(1, 1) == [1]
    assert verify.lengths(3, 10) == [3, 4, 7, 8, 10]
    low, *_, longest = verify.lengths(100)
    assert low == 100 and longest > 200
    for low, high in ((0, 5), (2, 9), (17, 17), (90, 99), (5, 1000)):
        found = verify.lengths(low, high)
        assert found[0] == low and found[-1] == high or low == high
        assert all(low <= n <= high for n in found) and len(set(found)) == len(found)


def test_grid_gives_independent_axes_different_sizes():
    axes = [FreeAxis("batch", True), FreeAxis("source", False, 1, 50), FreeAxis("target", False, 1, 40)]
    points, skipped = verify.grid(axes)
    assert not skipped
    assert {point["batch"] for point in points} == {1, 2, 3}
    assert {point["source"] for point in points} == set(verify.lengths(1, 50))
    assert {point["target"] for point in points} == set(verify.lengths(1, 40))
    assert all(point["source"] != point["target"] for point in points)


def test_grid_keeps_attention_small_and_says_so():
    points, skipped = verify.grid([FreeAxis("batch", True), FreeAxis("length", False, 1, 8192)], num_heads=8)
    assert all(point["batch"] * 8 * point["length"] ** 2 <= 2e8 for point in points)
    assert max(point["length"] for point in points) == 5000
    assert len(skipped) == 2 and "length=8192 at batch 1" in skipped[0]
    assert verify.grid([FreeAxis("batch", True)])[0] == [{"batch": 1}, {"batch": 2}, {"batch": 3}]


def test_made_samples_have_every_kind_of_padding():
    axes = ("batch", "length")
    specs = [
        InputSpec("ids", np.dtype("int32"), axes, "ids", 0, 6),
        InputSpec("mask", np.dtype("int64"), axes, "mask"),
        InputSpec("pairs", np.dtype("bool"), (*axes, "past + length"), "mask"),
        InputSpec("x", np.dtype("float32"), (*axes, 3), "float"),
    ]
    source = verify.MadeSamples(specs)
    sizes = {"batch": 4, "length": 12, "past": 5}
    whole, padded = (source.make(sizes, case, 0) for case in source.cases)
    assert whole["ids"].min() == 1 and whole["ids"].max() == 6 and whole["ids"].dtype == "int32"
    assert whole["mask"].all() and whole["pairs"].shape == (4, 12, 17)
    empty, holes, right, left = padded["ids"] != 0
    assert not empty.any()
    assert 0 < holes.sum() < 12 and not np.array_equal(np.sort(holes), holes)
    assert right[0] and not right[-1] and left[-1] and not left[0]
    assert not np.array_equal(padded["ids"] != 0, padded["mask"] != 0)
    assert padded["x"].shape == (4, 12, 3) and padded["x"].std() > 0.1
    assert np.array_equal(padded["ids"], source.make(sizes, "padded", 0)["ids"])


def test_dimension_expressions():
    sizes = {"past_length": 3, "length": 4}
    assert verify.evaluate("past_length + length", sizes) == 7
    assert verify.evaluate("2*length*past_length - 1", sizes) == 23
    assert verify.evaluate("(length + 3) // 2 % 2", sizes) == 1
    with pytest.raises(ValueError, match="Cannot read"):
        verify.evaluate("max(length, 2)", sizes)


def test_compare_reports_the_place():
    want = np.zeros((2, 3), "float32")
    got = want.copy()
    got[1, 2] = 0.5
    result = verify.compare("y", want, got, (0.1, 0.0), {"batch": 2}, "whole")
    assert result.place == (1, 2) and result.max_error == 0.5 and not result.passed
    assert result.mean_error == pytest.approx(0.5 / 6)
    ints = verify.compare("y", np.array([1, 2]), np.array([1, 2]), (0.1, 0.1), {}, "whole")
    assert ints.passed and ints.allowed == 0
    nan = verify.compare("y", np.float32([np.nan, np.inf]), np.float32([np.nan, np.inf]), (0, 0), {}, "whole")
    assert nan.passed
    empty = verify.compare("y", np.zeros((0, 3)), np.zeros((0, 3)), (0, 0), {}, "whole")
    assert empty.passed


def test_example_metadata_matches_the_signature(good):
    _, _, path, _ = good
    from keras_transformer.export import runtime

    specs, axes, fixed = verify.interface(runtime.open_session(path))
    assert [spec.name for spec in specs] == [entry["name"] for entry in INPUTS]
    assert axes == [FreeAxis("batch", True, 1, None), FreeAxis("length", False, 1, LONGEST)]
    assert not fixed and pathlib.Path(path).stat().st_size > WIDTH
