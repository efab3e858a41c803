"""`export_onnx` on whole models: right at every size, the same from every backend, and written whole or not at all."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import subprocess
import sys

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
from keras import layers, ops

from keras_transformer import ops as kt
from keras_transformer.export import (
    ExportError,
    TraceError,
    UnsupportedOperationError,
    VerificationError,
    export_onnx,
    register_lowering,
    writing,
)
from keras_transformer.layers import (
    CausalMask,
    MultiHeadSelfAttention,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
    TransformerDecoder,
    TransformerEncoder,
)
from keras_transformer.models import CausalLM, Transformer


def randomise(model, seed=0):
    """Weights that are the same on every backend, none of them zero or one."""
    rng = np.random.default_rng(seed)
    model.set_weights([rng.normal(1 if w.name == "gamma" else 0, 0.3, w.shape) for w in model.weights])
    return model


def encoder_model(num_layers=2, dropout=0.1, **kwargs):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    x = SinusoidalPositionalEncoding()(TokenEmbedding(31, 12)(ids))
    x = TransformerEncoder(num_layers, num_heads=3, d_ff=20, dropout=dropout, **kwargs)(x)
    return randomise(keras.Model(ids, layers.Dense(5, name="head")(x)))


def export(model, path, **kwargs):
    return export_onnx(model, path, verbose=False, **kwargs)


def run(path, inputs, optimised=True):
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def operators(path):
    return collections.Counter(node.op_type for node in onnx.load(path).graph.node)


def numpy(x):
    return ops.convert_to_numpy(x)


# The graph.


def test_an_encoder_exports_with_named_free_axes_and_is_verified(tmp_path):
    model = encoder_model()
    report = export(model, tmp_path / "out")
    assert report.passed
    assert {c.sizes["batch"] for c in report.comparisons} >= {1, 2, 3}
    assert {c.case for c in report.comparisons} >= {"whole", "padded"}
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    (ids,) = graph.input
    assert ids.name == "token_ids"
    assert [d.dim_param for d in ids.type.tensor_type.shape.dim] == ["batch", "length"]
    (output,) = graph.output
    assert [d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim] == ["batch", "length", 5]
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"), full_check=True)
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.onnx", "verification.json"]


def test_the_encoder_graph_has_one_node_for_each_thing(tmp_path):
    export(encoder_model(num_layers=2), tmp_path / "m.onnx", verify=False)
    count = operators(tmp_path / "m.onnx")
    # For each layer four attention projections and two of the feed-forward; and the head.
    assert (count["MatMul"], count["Attention"], count["LayerNormalization"], count["Sum"]) == (13, 2, 4, 4)
    assert not {"Einsum", "Where", "Softmax", "Transpose", "Dropout", "Identity"} & set(count)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (5, 9), (3, 40)])
def test_the_exported_encoder_equals_keras_at_any_shape(tmp_path, shape):
    model = encoder_model()
    export(model, tmp_path / "m.onnx", verify=False)
    ids = np.random.default_rng(1).integers(1, 31, shape).astype("int32")
    (actual,) = run(tmp_path / "m.onnx", {"token_ids": ids})
    # float32 sums in another order, through two blocks.
    np.testing.assert_allclose(actual, numpy(model(ids)), atol=2e-5)


def test_rotary_grouped_attention_is_three_nodes(tmp_path):
    class Rotated(keras.layers.Layer):
        def build(self, input_shape):
            self.attention = MultiHeadSelfAttention(4, num_kv_heads=2, causal=True)
            self.attention.build(input_shape)

        def call(self, x):
            encoding = kt.rotary_encoding(kt.positions(ops.shape(x)[1]), kt.rotary_frequencies(2))
            return self.attention(x, rotary=encoding)

    inputs = keras.Input((None, 12), name="x")
    model = randomise(keras.Model(inputs, Rotated()(inputs)))
    export(model, tmp_path / "m.onnx", verify=False)
    count = operators(tmp_path / "m.onnx")
    assert (count["Attention"], count["RotaryEmbedding"], count["MatMul"]) == (1, 2, 4)
    assert not {"Transpose", "Where", "Tile"} & set(count)
    for shape in ((1, 1, 12), (2, 3, 12), (3, 40, 12)):
        x = np.random.default_rng(1).normal(size=shape).astype("float32")
        (actual,) = run(tmp_path / "m.onnx", {"x": x})
        np.testing.assert_allclose(actual, numpy(model(x)), atol=2e-5)  # float32 sums in another order


def test_decoders_equal_keras_at_any_shape(tmp_path):
    """For a decoder alone, and for encoder and decoder with lengths of their own."""
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    arguments = {"num_layers": 1, "num_heads": 3, "d_ff": 20, "dropout": 0.1}

    def embedded(ids):
        return SinusoidalPositionalEncoding()(TokenEmbedding(31, 12)(ids))

    alone = randomise(keras.Model([target], layers.Dense(5)(TransformerDecoder(**arguments)(embedded(target)))))
    memory = TransformerEncoder(**arguments)(embedded(source))
    both = randomise(keras.Model([source, target], TransformerDecoder(**arguments)(embedded(target), memory=memory)))
    rng = np.random.default_rng(2)
    for number, (model, names) in enumerate([(alone, ["target"]), (both, ["source", "target"])]):
        export(model, tmp_path / f"{number}.onnx", verify=False)
        inputs = onnx.load(tmp_path / f"{number}.onnx").graph.input
        axes = [[dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in inputs]
        assert all(all(names) for names in axes) and len({names[1] for names in axes}) == len(axes)
        for batch, source_length, target_length in [(1, 1, 1), (2, 3, 3), (2, 7, 5), (5, 4, 9), (3, 17, 33)]:
            lengths = {"source": source_length, "target": target_length}
            ids = {name: rng.integers(1, 31, (batch, lengths[name])).astype("int32") for name in names}
            (actual,) = run(tmp_path / f"{number}.onnx", ids)
            np.testing.assert_allclose(actual, numpy(model(list(ids.values()))), atol=2e-5)


@pytest.mark.parametrize("optimised", [True, False])
def test_wholly_padded_rows_are_finite_and_equal_keras(tmp_path, optimised):
    """With a padding mask as an input of the graph."""
    x = keras.Input((None, 12), name="x")
    mask = keras.Input((None,), dtype="bool", name="padding_mask")
    model = randomise(keras.Model([x, mask], TransformerEncoder(2, num_heads=3, d_ff=20)(x, padding_mask=mask)))
    export(model, tmp_path / "m.onnx", verify=optimised)
    for rows in ([[1, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]):
        inputs = {
            "x": np.random.default_rng(0).normal(size=(2, 3, 12)).astype("float32"),
            "padding_mask": np.array(rows, bool),
        }
        (actual,) = run(tmp_path / "m.onnx", inputs, optimised)
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, numpy(model(list(inputs.values()))), atol=2e-5)


def test_dropout_is_not_in_the_graph_after_training(tmp_path):
    """Exported right after `fit`, and inside a callback; training goes on with dropout active."""
    model = encoder_model(dropout=0.5)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x, y = rng.integers(1, 31, (8, 7)), rng.integers(0, 5, (8, 7))

    class ExportAtEnd(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            export(self.model, tmp_path / f"{epoch}.onnx", verify=False)

    model.fit(x, y, epochs=2, verbose=0, callbacks=[ExportAtEnd()])
    export(model, tmp_path / "after.onnx", verify=False)
    assert (tmp_path / "1.onnx").read_bytes() == (tmp_path / "after.onnx").read_bytes()
    assert (tmp_path / "0.onnx").read_bytes() != (tmp_path / "after.onnx").read_bytes()
    feed = {"token_ids": x.astype("int32")}
    (first,), (second,) = (run(tmp_path / "after.onnx", feed) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, model.predict(x, verbose=0), atol=2e-5)
    assert not [op for op in operators(tmp_path / "after.onnx") if "Random" in op or op in ("Bernoulli", "Dropout")]
    assert not np.allclose(numpy(model(x, training=True)), numpy(model(x, training=True)))


def test_attention_fed_by_the_causal_mask_layer_exports_as_causal(tmp_path):
    def model(fed):
        x = keras.Input((None, 12), name="x")
        if fed:
            y = MultiHeadSelfAttention(3)(x, attention_mask=CausalMask()(x))
        else:
            y = MultiHeadSelfAttention(3, causal=True)(x)
        return randomise(keras.Model(x, y))

    counts = []
    for fed in (True, False):
        samples = {"x": np.random.default_rng(0).normal(size=(2, 5, 12))}
        assert export(model(fed), tmp_path / "m.onnx", force=True, samples=samples).passed
        counts.append(operators(tmp_path / "m.onnx"))
        (node,) = [n for n in onnx.load(tmp_path / "m.onnx").graph.node if n.op_type == "Attention"]
        assert {a.name: a.i for a in node.attribute}["is_causal"] == 1
        assert not any(node.input[3:])
    assert counts[0] == counts[1]


def test_keras_own_attention_reproduces_its_value_in_wholly_masked_rows(tmp_path):
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(17, 12, mask_zero=True)(ids)
    y = layers.MultiHeadAttention(3, 4)(x, x, use_causal_mask=True)
    model = randomise(keras.Model(ids, layers.LayerNormalization()(layers.Add()([x, y]))))
    assert export(model, tmp_path / "m.onnx").passed
    feed = np.array([[0, 0, 0], [0, 4, 5], [3, 0, 0]], "int32")
    np.testing.assert_allclose(run(tmp_path / "m.onnx", {"ids": feed})[0], numpy(model(feed)), atol=2e-5)


# Inputs and outputs of every kind.


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = TokenEmbedding(17, 12)
        self.encoder = TransformerEncoder(1, num_heads=3, d_ff=20)
        self.heads = {"start": layers.Dense(2), "end": layers.Dense(3)}

    def call(self, ids, training=None):
        x = self.encoder(self.embedding(ids), training=training)
        return {"start": self.heads["start"](x), "end": self.heads["end"](x)}


def test_a_subclassed_model_exports_with_its_signature(tmp_path):
    model = Subclassed()
    with pytest.raises(ExportError, match="not built"):
        export(model, tmp_path / "m.onnx")
    model(np.ones((1, 4), "int32"))
    with pytest.raises(ExportError, match="input_signature"):
        export(model, tmp_path / "m.onnx")
    randomise(model)
    report = export(
        model,
        tmp_path / "m.onnx",
        input_signature={"ids": ((None, None), "int32")},
        samples={"ids": np.random.default_rng(0).integers(0, 17, (3, 7))},
        output_names=["end_logits", "start_logits"],
    )
    assert report.passed
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert [output.name for output in graph.output] == ["end_logits", "start_logits"]
    assert any(name.name == "heads.start/kernel" for name in graph.initializer)


class Pair(keras.Model):
    """Takes its two inputs in one argument."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        a, b = (inputs["a"], inputs["b"]) if isinstance(inputs, dict) else inputs
        return [self.dense(a), (self.dense(b) * 2.0,)]


@pytest.mark.parametrize("container", [list, tuple, dict])
def test_inputs_in_one_argument(tmp_path, container):
    model, arrays = Pair(), np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype("float32")
    given = dict(zip("ba", arrays, strict=True)) if container is dict else container(arrays)
    expected = [numpy(x) for x in keras.tree.flatten(model(given))]
    signature = {name: ((None, None, 4), "float32") for name in "ba"}
    export(model, tmp_path / "m.onnx", input_signature=signature, verify=False)
    outputs = run(tmp_path / "m.onnx", dict(zip("ba", arrays, strict=True)))
    for output, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, wanted, atol=1e-6)


def test_a_signature_may_name_the_inputs_of_a_functional_model_in_any_order(tmp_path):
    a, b = keras.Input((None, 4), name="a"), keras.Input((None, 4), name="b")
    model = keras.Model([a, b], ops.subtract(a, b))
    signature = {name: ((None, None, 4), "float32") for name in "ba"}
    export(model, tmp_path / "m.onnx", input_signature=signature, verify=False)
    arrays = dict(zip("ab", np.ones((2, 1, 1, 4), "float32") * [[[[1.0]]], [[[5.0]]]], strict=True))
    (output,) = run(tmp_path / "m.onnx", {name: x.astype("float32") for name, x in arrays.items()})
    np.testing.assert_array_equal(output, np.full((1, 1, 4), -4.0, "float32"))
    with pytest.raises(ExportError, match=r"\['a', 'b'\]"):
        export(model, tmp_path / "w.onnx", input_signature={"a": ((None, None, 4), "float32")})


def test_nested_outputs_are_named_by_their_place(tmp_path):
    x = keras.Input((4,), name="x")
    model = keras.Model(x, {"z": x * 2.0, "a": {"q": x + 2.0, "p": [x, x - 1.0]}})
    export(model, tmp_path / "m.onnx", verify=False)
    names = [output.name for output in onnx.load(tmp_path / "m.onnx").graph.output]
    outputs = dict(zip(names, run(tmp_path / "m.onnx", {"x": np.ones((1, 4), "float32")}), strict=True))
    assert {name: output[0, 0] for name, output in outputs.items()} == {"z": 2, "a_q": 3, "a_p_0": 1, "a_p_1": 0}


def test_a_dtype_that_the_runtime_lacks_is_named(tmp_path):
    x = keras.Input((None, 4), name="x")
    model = keras.Model(x, layers.Dense(3, dtype="mixed_bfloat16")(x))
    with pytest.raises(VerificationError, match="bfloat16.*verify=False"):
        export(model, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def two_inputs(join):
    a = keras.Input((None, 4), name="a")
    b = keras.Input((None, 4), name="b")
    return randomise(keras.Model({"a": a, "b": b}, join(layers.Dense(4)(a), layers.Dense(4)(b))))


def axis_names(path):
    return {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in onnx.load(path).graph.input
    }


def test_lengths_are_one_axis_only_where_the_model_needs_it(tmp_path):
    independent = two_inputs(lambda a, b: ops.matmul(a, ops.transpose(b, (0, 2, 1))))
    a, b = np.random.default_rng(0).normal(size=(2, 2, 5, 4))
    assert export(independent, tmp_path / "i.onnx", samples={"a": a, "b": b[:, :3]}).passed
    assert axis_names(tmp_path / "i.onnx") == {"a": ["batch", "a_length", 4], "b": ["batch", "b_length", 4]}
    equal = two_inputs(lambda a, b: layers.Concatenate()([a, b]))
    assert export(equal, tmp_path / "e.onnx", samples={"a": a, "b": b}).passed
    assert axis_names(tmp_path / "e.onnx") == {"a": ["batch", "length", 4], "b": ["batch", "length", 4]}


def test_lengths_are_told_apart_within_a_short_range(tmp_path):
    equal = two_inputs(lambda a, b: a + b)
    export(equal, tmp_path / "m.onnx", max_length=3, verify=False)
    assert axis_names(tmp_path / "m.onnx")["a"] == ["batch", "length", 4]


def test_a_model_that_runs_at_no_size_says_why(tmp_path):
    x = keras.Input((None, 4), name="x")
    model = keras.Model(x, layers.Conv1D(3, 9)(x))
    with pytest.raises(ExportError, match="min_length"):
        export(model, tmp_path / "m.onnx")
    assert export(model, tmp_path / "m.onnx", min_length=9, max_length=20).passed


def test_the_batch_has_no_limit_by_whatever_name(tmp_path):
    model = two_inputs(lambda a, b: a + b)
    names = {"a": {0: "rows", 1: "length"}, "b": {0: "rows", 1: "length"}}
    export(model, tmp_path / "m.onnx", dynamic_axes=names, min_length=2, max_length=5, verify=False)
    axes = json.loads({p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}["keras_transformer.axes"])
    assert axes == {"rows": {"minimum": 1, "maximum": None}, "length": {"minimum": 2, "maximum": 5}}


@pytest.mark.parametrize(
    ("function", "maximum"),
    [
        (lambda ids: layers.Embedding(13, 4)(ops.pad(ids, ((0, 0), (1, 0)))[:, :-1]), 12),
        (lambda ids: ops.one_hot(ids, 7), 6),
        (lambda ids: ops.cast(ids, "float32") * 2.0, 9),
        (lambda ids: layers.Embedding(13, 4)(ids + 2), None),
    ],
)
def test_the_range_of_integer_inputs_is_found(tmp_path, function, maximum):
    ids = keras.Input((None,), dtype="int32", name="ids")
    export(keras.Model(ids, function(ids)), tmp_path / "m.onnx", verify=False)
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert json.loads(metadata["keras_transformer.inputs"])[0].get("maximum") == maximum


def test_dynamic_axes_name_what_is_free(tmp_path):
    model = two_inputs(lambda a, b: ops.matmul(a, ops.transpose(b, (0, 2, 1))))
    names = {"a": {0: "rows", 1: "queries"}, "b": {0: "rows", 1: "keys"}}
    export(model, tmp_path / "m.onnx", dynamic_axes=names, verify=False)
    assert axis_names(tmp_path / "m.onnx") == {"a": ["rows", "queries", 4], "b": ["rows", "keys", 4]}
    for wrong, match in [
        ({"c": {0: "rows"}}, "does not have"),
        ({"a": {7: "rows"}}, "3 axes"),
        ({"a": {0: "rows"}}, "without a name"),
        ({"a": {0: "two words"}}, "identifiers"),
    ]:
        with pytest.raises(ExportError, match=match):
            export(model, tmp_path / "w.onnx", dynamic_axes=wrong)


def test_a_sequential_model_exports(tmp_path):
    model = keras.Sequential([layers.Input((None, 6)), layers.Dense(4, activation="gelu"), layers.Dropout(0.3)])
    assert export(randomise(model), tmp_path / "m.onnx").passed
    assert axis_names(tmp_path / "m.onnx") == {"input": ["batch", "length", 6]}


def test_the_users_own_arrays_are_what_is_verified_on(tmp_path):
    arrays = {"token_ids": np.random.default_rng(0).integers(1, 31, (3, 11))}
    report = export(encoder_model(), tmp_path / "m.onnx", samples=arrays)
    assert report.passed and max(c.sizes["length"] for c in report.comparisons) == 11


# Encoder–decoder.


def toy_transformer(**kwargs):
    return randomise(Transformer(31, 29, num_layers=2, d_model=12, num_heads=3, d_ff=20, **kwargs))


def test_a_transformer_becomes_an_encoder_and_a_cached_decoder(tmp_path):
    report = export(toy_transformer(max_length=24), tmp_path / "out")
    assert report.passed
    count = operators(tmp_path / "out" / "decoder.onnx")
    assert (count["Attention"], count["LayerNormalization"]) == (4, 6)
    assert not {"Einsum", "Where", "Softmax"} & set(count)
    names = axis_names(tmp_path / "out" / "decoder.onnx")
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "out" / "decoder.onnx").metadata_props}
    special = json.loads(metadata["keras_transformer.config"])
    assert [special[name] for name in ("pad_id", "start_id", "end_id", "max_length")] == [0, 1, 2, 24]
    assert names["input_ids"] == ["batch", "length"]
    assert names["attention_mask"] == ["batch", "length + past_length"]
    assert names["past_key_values.1.value"] == ["batch", 3, "past_length", 4]
    assert names["cross_key_values.0.key"] == ["batch", 3, "source_length", 4]


def test_the_decoder_may_give_the_last_logits_only(tmp_path):
    export(toy_transformer(), tmp_path / "out", logits="last", verify=False)
    graph = onnx.load(tmp_path / "out" / "decoder.onnx").graph
    assert [d.dim_param or d.dim_value for d in graph.output[0].type.tensor_type.shape.dim] == ["batch", 1, 29]
    with pytest.raises(ExportError, match="logits='first'"):
        export(toy_transformer(), tmp_path / "other", logits="first")
    with pytest.raises(ExportError, match="becomes a directory"):
        export(toy_transformer(), tmp_path / "m.onnx")


def test_the_length_limit_is_the_models(tmp_path):
    with pytest.raises(ExportError, match="within the model's own, 24. Received: max_length=25"):
        export(toy_transformer(max_length=24), tmp_path / "out", max_length=25)


# The same file every time.


def digests(folder):
    return {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in os.listdir(folder) if "onnx" in f}


def toy_generator():
    """Grouped heads, rotary positions and draws: all that its graph may have."""
    return randomise(CausalLM(29, 2, 24, 4, 40, num_kv_heads=2, position_encoding="rotary", max_length=23))


def test_exporting_twice_gives_the_same_bytes(tmp_path):
    model = toy_transformer()
    export(model, tmp_path / "a", verify=False)
    layers.Dense(3), keras.Input((2,))
    export(model, tmp_path / "b", verify=False)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


EXPORT_ALONE = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # an import of it fails
import keras
for _ in range({before}):
    keras.layers.Dense(2)(keras.Input((3,))), keras.layers.MultiHeadAttention(1, 2)
sys.path.insert(0, {tests!r})
from test_export import encoder_model, toy_generator, toy_transformer, export
import pathlib
folder = pathlib.Path({folder!r})
export(encoder_model(), folder / "encoder", verify={verify})
export(toy_transformer(), folder / "transformer", verify={verify})
export(toy_generator(), folder / "generator", target="generator", verify=False)
assert all(sys.modules[name] is None for name in {blocked!r})
"""


@pytest.mark.backends("tensorflow")
@pytest.mark.once
def test_every_backend_alone_writes_the_same_bytes(tmp_path):
    """Three processes, each with the other two backends blocked, and one with other layers built first."""
    found = {}
    backends = ("tensorflow", "jax", "torch")
    for number, backend in enumerate(backends):
        folder = tmp_path / backend
        folder.mkdir()
        code = EXPORT_ALONE.format(
            blocked={*backends, "sklearn"} - {backend},  # it looks closer at what is blocked
            before=3 * (number == 1),
            tests=os.path.dirname(__file__),
            folder=str(folder),
            # Verification runs the model too; once is enough.
            verify=number == 1,
        )
        environment = os.environ | {"KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-3000:]
        found[backend] = [digests(folder / name) for name in ("encoder", "transformer", "generator")]
        assert [len(files) for files in found[backend]] == [1, 2, 1]
    assert found["tensorflow"] == found["jax"] == found["torch"]


# Refusals.


@keras.saving.register_keras_serializable("test_export")
class Twice(keras.Operation):
    def call(self, x):
        return x * 2

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_an_operation_without_a_rule_is_named_and_a_rule_can_be_registered(tmp_path):
    class Doubling(layers.Layer):
        def call(self, x):
            return Twice()(x)

    x = keras.Input((None, 4), name="x")
    model = keras.Model(x, Doubling(name="doubling")(x))
    with pytest.raises(UnsupportedOperationError) as info:
        export(model, tmp_path / "out")
    for words in ("Twice", "doubling", "register_lowering", "test_export.py:"):
        assert words in str(info.value)
    assert os.listdir(tmp_path) == []

    @register_lowering(Twice)
    def lower_twice(g, node, x):
        return g.op("Mul", x, g.scalar(2, x.dtype))

    assert export(model, tmp_path / "out").passed


def test_nothing_is_left_behind_by_an_export_that_fails_verification(tmp_path):
    class Tripled(keras.Operation):
        call = compute_output_spec = Twice.compute_output_spec

    @register_lowering(Tripled)
    def wrong(g, node, x):
        return g.op("Mul", x, g.scalar(3, x.dtype))

    class Layer(layers.Layer):
        def call(self, x):
            return Tripled()(x) if isinstance(x, keras.KerasTensor) else x * 2

    x = keras.Input((None, 4), name="x")
    model = keras.Model(x, Layer()(x))
    with pytest.raises(VerificationError) as info:
        export(model, tmp_path / "out")
    assert not info.value.report.passed
    assert os.listdir(tmp_path) == []


def test_a_model_that_depends_on_a_size_is_refused_and_nothing_is_written(tmp_path):
    class Long(layers.Layer):
        def call(self, x):
            return x * 2 if ops.shape(x)[1] > 100 else x

        def compute_output_shape(self, shape):
            return shape

    x = keras.Input((None, 4), name="x")
    model = keras.Model(x, Long(name="long")(x))
    with pytest.raises(TraceError, match="length > 100"):
        export(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []
    export(model, tmp_path / "out", max_length=100, verify=False)
    assert os.listdir(tmp_path) == ["out"]


def test_what_the_user_has_is_not_overwritten_unasked(tmp_path):
    model = encoder_model(num_layers=1)
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="force=True"):
        export(model, target, verify=False)
    assert os.listdir(target) == ["notes.txt"]
    export(model, target, verify=False, force=True)
    assert sorted(os.listdir(target)) == ["config.json", "model.onnx", "notes.txt"]
    # An earlier export is replaced, files that it no longer has included.
    (target / "notes.txt").unlink()
    export(toy_transformer(), target, verify=False)
    assert sorted(os.listdir(target)) == ["config.json", "decoder.onnx", "encoder.onnx"]
    (tmp_path / "m.onnx").write_text("mine")
    with pytest.raises(FileExistsError):
        export(model, tmp_path / "m.onnx", verify=False)
    assert (tmp_path / "m.onnx").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "out"]


def test_a_function_is_no_model(tmp_path):
    with pytest.raises(ExportError, match="`model` must be a Keras model. Received: model=<function"):
        export(lambda x: x, tmp_path / "out", input_signature={"x": ((None, 3), "float32")})


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"opset": 11}, "opset=11"),
        ({"opset": 17.0}, "opset=17.0"),
        ({"converter": ["trace"]}, "`converter` must be one of .*Received: converter="),
        ({"min_length": 5, "max_length": 4}, "min_length=5, max_length=4"),
        ({"input_signature": ["ids"]}, "dict"),
        ({"output_names": ["a", "b"]}, "output_names"),
        ({"output_names": ["token_ids"]}, "no input"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path, kwargs, match):
    with pytest.raises(ExportError, match=match):
        export(encoder_model(num_layers=1), tmp_path / "out", **kwargs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"logits": "last"}, "for graphs with a cache"),
        ({"output_names": "logits"}, "output_names='logits'"),
        ({"output_names": []}, r"output_names=\[\]"),
        ({"output_names": [1]}, r"output_names=\[1\]"),
        ({"max_length": 2.5}, "max_length=2.5"),
        ({"min_length": True}, "min_length=True"),
        ({"tolerance": 1e-3}, "tolerance=0.001"),
        ({"tolerance": (float("nan"), 0)}, "tolerance"),
        ({"tokenizer": "tokenizer.json"}, "tokenizer='tokenizer.json'"),
        ({"input_signature": {"token_ids": (None, None)}}, "shape, dtype"),
        ({"input_signature": {"token_ids": ((None, "T"), "int32")}}, "shape, dtype"),
        ({"input_signature": {}}, "input_signature={}"),
        ({"dynamic_axes": {"token_ids": ["batch", "length"]}}, "dynamic_axes="),
        ({"dynamic_axes": {"token_ids": {0: "batch", 1: "class"}}}, "'class'"),
        ({"dynamic_axes": {"token_ids": {"0": "batch", 1: "length"}}}, "axis '0'"),
    ],
)
def test_arguments_of_another_kind_are_refused(tmp_path, kwargs, match):
    model = keras.Sequential([keras.Input((None,), dtype="int32", name="token_ids"), TokenEmbedding(7, 4)])
    with pytest.raises(ValueError, match=match):
        export(model, tmp_path / "out", **kwargs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"output_names": ["logits"]}, "`output_names` is for other models"),
        ({"dynamic_axes": {"source": {0: "batch", 1: "length"}}}, "`dynamic_axes` is for other models"),
        ({"input_signature": {"source": ((None, None), "int32")}}, "`input_signature` is for other models"),
    ],
)
def test_a_transformer_takes_no_names(tmp_path, kwargs, match):
    model = Transformer(7, 7, num_layers=1, d_model=4, num_heads=2, d_ff=5)
    with pytest.raises(ExportError, match=match):
        export(model, tmp_path / "out", **kwargs)


def test_a_tokenizer_that_is_not_the_models(tmp_path):
    class Other:
        pad_id, start_id, end_id, vocabulary_size, save = 0, 1, 2, 8, None

    with pytest.raises(ExportError, match="no more ids than the model, 7. Received: 8"):
        export(Transformer(7, 7, num_layers=1, d_model=4, num_heads=2, d_ff=5), tmp_path / "out", tokenizer=Other())
    model = Transformer(9, 9, num_layers=1, d_model=4, num_heads=2, d_ff=5, end_id=3)
    with pytest.raises(ExportError, match="same `end_id`. Received: 2 and 3"):
        export(model, tmp_path / "out", tokenizer=Other())


def test_half_precision_is_not_let_pass_silently(tmp_path):
    """The default tolerance is float32's; a wider one is written into the report."""
    model = encoder_model(num_layers=1, dtype="mixed_float16")
    with pytest.raises(VerificationError, match="largest error"):
        export(model, tmp_path / "out", max_length=6)
    assert os.listdir(tmp_path) == []
    report = export(model, tmp_path / "out", tolerance=(0.03, 0.03), max_length=6)
    assert 1e-4 < report.max_error < 0.03


def test_unknown_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="opsett"):
        export(encoder_model(num_layers=1), tmp_path / "out", opsett=23)


# Metadata and large weights.


def test_the_directory_says_what_it_holds(tmp_path):
    export(encoder_model(), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    file = tmp_path / "out" / "model.onnx"
    assert config["format"] == "keras_transformer" and config["kind"] == "model"
    assert config["files"]["model.onnx"] == {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "size": file.stat().st_size,
    }
    metadata = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    (said,) = json.loads(metadata["keras_transformer.inputs"])
    assert said == {"name": "token_ids", "dtype": "int32", "kind": "ids", "minimum": 0, "maximum": 30}
    assert metadata["keras_transformer.weights_sha256"] == config["weights_sha256"]


def test_large_weights_go_to_a_file_beside_the_graph_that_moves_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_EXTERNAL_DATA_FROM", 1000)
    model = encoder_model()
    export(model, tmp_path / "out", verify=False)
    assert "model.onnx.data" in os.listdir(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    os.rename(tmp_path / "out", tmp_path / "elsewhere" / "moved")
    ids = np.array([[3, 4, 5]], "int32")
    (actual,) = run(tmp_path / "elsewhere" / "moved" / "model.onnx", {"token_ids": ids})
    np.testing.assert_allclose(actual, numpy(model(ids)), atol=2e-5)
    with pytest.raises(ExportError, match="directory"):
        export(model, tmp_path / "m.onnx", verify=False)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]
