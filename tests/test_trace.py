"""What would make an export silently wrong is either right at every size or refused with its place."""

from __future__ import annotations

import itertools
import threading

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_transformer.export.dims import Axis, evaluate, solve
from keras_transformer.export.errors import TraceError
from keras_transformer.export.exporter import trace
from keras_transformer.export.generalise import trace_sizes
from keras_transformer.export.ir import Constant, Weight
from keras_transformer.export.trace import InputSpec

BATCH, LENGTH = Axis("batch"), Axis("length")


class Lambda(layers.Layer):
    """A layer around a function; its path in messages is "inner"."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        pass

    def call(self, x):
        return self.function(x)


class Outer(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.inner = Lambda(function)

    def build(self, shape):
        pass

    def call(self, x):
        return self.inner(x)


def traced(function, length=LENGTH, width=5, dtype="float32"):
    axes = [BATCH, length]
    return trace(function, [InputSpec("x", (BATCH, length, width), dtype)], axes, {"outer": function})


def refused(function, match, **kwargs):
    with pytest.raises(TraceError, match=match) as info:
        traced(Outer(function), **kwargs)
    return str(info.value)


def names_its_place(message):
    assert "outer/inner" in message or "test_trace.py:" in message, message


# Conditions on a size.


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.shape[1] > 4 else x,
        lambda x: x * 2 if x.shape[1] == 1 else x,
        lambda x: x * 2 if ops.shape(x)[0] == 1 else x,
        lambda x: x * 2 if x.shape[1] - 3 >= 300 else x,
        lambda x: x * 2 if x.shape[1] % 7 == 6 else x,
        lambda x: x * 2 if x.shape[1] // 2 == 40 else x,
        lambda x: x * 2 if x.shape[1] > 5000 else x,
        lambda x: x * 2 if x.shape[1] - x.shape[0] == 100 else x,
        lambda x: x * 2 if abs(x.shape[1] - 100) < 3 else x,
        lambda x: x * min(x.shape[1], 128),
        lambda x: x[:, -min(ops.shape(x)[1], 64) :],
        lambda x: sum((x * (i + 1) for i in range(0, x.shape[1], 16)), x),
    ],
)
def test_conditions_on_a_size_are_refused_with_their_line(function):
    message = refused(function, "sizes")
    names_its_place(message)


def test_a_condition_that_the_range_decides_is_accepted():
    layer = Outer(lambda x: x * 2 if x.shape[1] > 4 else x)
    assert len(traced(layer, Axis("length", 5, 90)).nodes) == 1
    with pytest.raises(TraceError, match="length > 4"):
        traced(layer, Axis("length", 4, 90))


def test_a_condition_near_the_end_of_a_long_range_is_refused():
    with pytest.raises(TraceError, match="length == 6000"):
        traced(Outer(lambda x: x * 2 if x.shape[1] == 6000 else x), Axis("length", 1, 8192))


def test_a_condition_on_a_width_that_looks_like_a_size_is_accepted():
    def check(x):
        if x.shape[-1] != width:
            raise ValueError("width")
        return x * 2

    for width in {size for sizes in trace_sizes([BATCH, LENGTH]) for size in sizes.values()}:
        layer = Outer(lambda x, width=width: check(ops.matmul(x, np.ones((5, width), "float32"))))
        assert traced(layer).outputs[0].shape == (BATCH, LENGTH, width)


def test_a_width_that_becomes_a_tensor_may_look_like_a_size():
    def numbered(x):
        return x * (ops.cast(x.shape[-1], "float32") + ops.convert_to_tensor(3, "float32"))

    for width in {size for sizes in trace_sizes([BATCH, LENGTH]) for size in sizes.values()}:
        layer = Outer(lambda x, width=width: numbered(ops.matmul(x, np.ones((5, width), "float32"))))
        numbers = [node.kwargs["fill_value"] for node in traced(layer).nodes if node.kind == "full"]
        assert numbers == [width, 3]


def test_what_is_computed_of_weights_alone_is_computed_in_the_graph():
    layer = layers.Dense(3)
    layer.build((None, 5))
    function = Outer(lambda x: ops.matmul(x, ops.transpose(ops.convert_to_tensor(layer.kernel)[:2])))
    graph = traced(function, width=3)
    assert [node.kind_name for node in graph.nodes] == ["ConvertToTensor", "GetItem", "Transpose", "Matmul"]
    assert isinstance(graph.nodes[0].args[0], Weight)


def test_a_condition_on_a_size_that_shape_inference_lost_is_refused():
    def lose(x):
        x = x[:, ::1]
        return x * 2 if x.shape[1] > 4000 else x

    names_its_place(refused(lose, "length > 4000"))


def test_the_message_of_a_condition_says_where_and_at_which_size():
    message = refused(lambda x: x * 2 if x.shape[1] > 100 else x, "compares sizes")
    assert "length > 100" in message and "test_trace.py:" in message
    assert "101" in message, message
    assert "max_length" in message


# Numbers that depend on a size.


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: ops.reshape(x, (-1, x.shape[1] * 5)), lambda b, t: (b, t * 5)),
        (lambda x: ops.reshape(x, (x.shape[0] * x.shape[1], 5)), lambda b, t: (b * t, 5)),
        (lambda x: x[:, : x.shape[1] // 2], lambda b, t: (b, t // 2, 5)),
        (lambda x: x[:, : (x.shape[1] + 1) // 2], lambda b, t: (b, (t + 1) // 2, 5)),
        (lambda x: x[:, ::2], lambda b, t: (b, (t + 1) // 2, 5)),
        (lambda x: ops.pad(x, ((0, 0), (0, -x.shape[1] % 64), (0, 0))), lambda b, t: (b, t + -t % 64, 5)),
        (lambda x: ops.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], lambda b, t: (b, t, 5)),
        (lambda x: ops.ones((int(np.prod(x.shape[:2])), 2)), lambda b, t: (b * t, 2)),
        (lambda x: x[:, : divmod(x.shape[1], 4)[0] * 4], lambda b, t: (b, t // 4 * 4, 5)),
        (lambda x: ops.concatenate([x, x, x[:, :1]], axis=1), lambda b, t: (b, 2 * t + 1, 5)),
    ],
)
def test_sizes_become_expressions_of_the_axes(function, expected):
    (output,) = traced(Outer(function)).outputs
    for b in (1, 2, 5):
        for t in (1, 2, 9, 64, 65, 700):
            assert tuple(evaluate(d, {"batch": b, "length": t}) for d in output.shape) == expected(b, t)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.shape[1] ** 0.5,
        lambda x: x * float(x.shape[1]),
        lambda x: x * np.float32(1 / x.shape[0]),
        lambda x: x * ops.convert_to_tensor(1.0 / x.shape[1]),
    ],
)
def test_a_float_made_from_a_size_is_refused(function):
    names_its_place(refused(function, "depend"))


def test_a_size_cast_by_keras_ops_is_computed_in_the_graph():
    graph = traced(Outer(lambda x: x / ops.sqrt(ops.cast(ops.shape(x)[1], "float32"))))
    (full,) = [node for node in graph.nodes if node.kind == "full"]
    assert full.kwargs["fill_value"] == LENGTH


def test_a_size_that_holds_in_a_narrower_range_only_is_refused_with_advice():
    layer = Outer(lambda x: x[:, :3])
    names_its_place(refused(layer.inner.function, "min_length"))
    assert traced(layer, Axis("length", 3)).outputs[0].shape == (BATCH, 3, 5)


def test_a_result_of_unknown_shape_is_refused():
    names_its_place(refused(lambda x: ops.bincount(x[0], minlength=5), "not known before", dtype="int32"))


def test_layer_code_that_calls_the_backend_is_told_of_another():
    def function(x):
        if keras.config.backend() in ("tensorflow", "jax", "torch"):
            raise ValueError("a function of the backend was given a symbolic tensor")
        return x + 1

    assert [node.kind_name for node in traced(Outer(function)).nodes] == ["Add"]
    assert keras.config.backend() in ("tensorflow", "jax", "torch")


def test_layer_code_that_asks_for_the_backend_and_works_is_told_which_it_is():
    def function(x):
        return x + 1 if keras.backend.backend() in ("tensorflow", "jax", "torch") else x * 2

    assert [node.kind_name for node in traced(Outer(function)).nodes] == ["Add"]


def test_layer_code_that_fails_with_any_backend_says_what_it_said_of_its_own():
    def function(x):
        raise ValueError("another" if keras.backend.backend() == "numpy" else "the own")

    assert "the own" in refused(function, "fails on symbolic tensors")


def test_a_call_that_fails_names_its_line():
    def fail(x):
        raise RuntimeError("broken")

    names_its_place(refused(fail, r"'outer/inner' \(.*test_trace.py:\d+\).*RuntimeError"))


def test_multiples_of_a_strided_length_are_found():
    axis, pixels = Axis("length", 2), InputSpec("x", (BATCH, Axis("length", 2), 6, 5), "float32")
    graph = trace(lambda x: ops.reshape(x[:, ::2], (x.shape[0], -1, 5)), [pixels], [BATCH, axis], {})
    assert [evaluate(graph.outputs[0].shape[1], {"batch": 2, "length": t}) for t in (2, 7, 80)] == [6, 24, 240]


def test_numpy_numbers_may_stand_left_and_losses_are_left_out():
    class Scaled(layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(x))
            return np.float32(2.0) * x + np.sqrt(4.0) * x

    layer = Scaled()
    layer.built = True
    assert [node.kind_name for node in traced(layer).nodes] == ["Multiply", "Multiply", "Add"]
    assert traced(layer).outputs[0].dtype == "float32"
    assert "__array_ufunc__" not in vars(keras.KerasTensor) and not layer.losses


def test_tensors_may_be_looked_for_in_lists_and_have_a_rank():
    def function(x):
        y = x + 1
        assert x in [x] and (x == "x") is False
        return ops.expand_dims(y, ops.ndim(y))

    assert [node.kind_name for node in traced(Outer(function)).nodes] == ["Add", "ExpandDims"]


def test_an_index_that_is_a_tensor_takes_rows():
    table = keras.Variable(np.ones((9, 4), "float32"), name="table")
    graph = traced(Outer(lambda x: [table[ops.argmax(x, axis=-1)], x[ops.argmax(x[0], axis=-1)]]))
    assert [node.kind_name for node in graph.nodes].count("Take") == 2
    assert [output.shape for output in graph.outputs] == [(BATCH, LENGTH, 4), (LENGTH, LENGTH, 5)]


@pytest.mark.parametrize(("minimum", "maximum"), [(1, None), (16, 32), (7, 9), (1, 3), (5, 11), (1, 128), (600, None)])
def test_a_number_that_lost_its_size_is_found_or_refused_in_any_range(minimum, maximum):
    axes = [BATCH, Axis("length", minimum, maximum)]
    traces = trace_sizes(axes)
    lengths = {sizes["length"] for sizes in traces}
    assert len(lengths) >= min(7, (maximum or 999) - minimum + 1)
    for function in (
        lambda b, t: t * t,
        lambda b, t: t * (t + 1) // 2,
        lambda b, t: t - t % 4,
        lambda b, t: (t + 1) // 2,
        lambda b, t: b * (t // 2),
        lambda b, t: t.bit_length(),
        lambda b, t: max(b, t),
        lambda b, t: abs(b - t),
        lambda b, t: int(t > 20),
        lambda b, t: min(t, 18),
    ):
        found = solve([function(s["batch"], s["length"]) for s in traces], traces, axes)
        for b, t in itertools.product((1, 2, 9, 999), range(minimum, (maximum or minimum + 300) + 1)):
            assert found is None or evaluate(found, {"batch": b, "length": t}) == function(b, t), (found, b, t)


def test_squeeze_without_an_axis_is_refused():
    refused(lambda x: ops.squeeze(ops.sum(x, axis=-1, keepdims=True)), "rank depends on a size")


# Constants.


def test_tensors_made_from_numbers_are_computed_in_the_graph():
    graph = traced(Outer(lambda x: x + ops.reshape(ops.cast(ops.flip(ops.arange(x.shape[1])), x.dtype), (1, -1, 1))))
    (arange,) = [node for node in graph.nodes if node.kind == "arange"]
    assert LENGTH in (arange.kwargs["start"], arange.kwargs["stop"])


def test_a_table_along_the_batch_is_stored_once():
    graph = traced(Outer(lambda x: x + np.tile(np.arange(5, dtype="float32"), (x.shape[0], 1, 1))))
    (table,) = [item for node in graph.nodes for item in node.args if isinstance(item, Constant)]
    assert table.shape == (1, 1, 5)


@pytest.mark.parametrize("suffix", [False, True])
def test_a_table_along_the_length_is_stored_at_its_longest(suffix):
    def table(x):
        values = np.arange(x.shape[1], dtype="float32")[None, :, None]
        return x + (values - np.float32(x.shape[1]) if suffix else values)

    graph = traced(Outer(table), Axis("length", 1, 23))
    (constant,) = [item for node in graph.nodes for item in node.args if isinstance(item, Constant)]
    assert constant.shape == (1, 23, 1)
    refused(table, "max_length")


@pytest.mark.parametrize(
    "make",
    [
        lambda t: np.arange(t, dtype="float32")[::-1].copy() * np.float32(0.5) * (1 + t % 3),
        lambda t: np.linspace(0, 1, t).astype("float32"),
    ],
)
def test_tables_whose_values_depend_on_the_length_are_refused(make):
    function = lambda x: x + make(x.shape[1])[None, :, None]  # noqa: E731
    names_its_place(refused(function, "depend on a size", length=Axis("length", 1, 23)))


def test_a_square_table_is_refused():
    refused(
        lambda x: ops.matmul(np.tril(np.ones((x.shape[1], x.shape[1]), "float32")), x),
        "several axes",
        length=Axis("length", 1, 23),
    )


def test_an_array_whose_values_change_at_equal_shape_is_refused():
    names_its_place(refused(lambda x: x + np.full(5, x.shape[1], "float32"), "not the same"))


# What a graph cannot do.


def test_random_numbers_are_refused_and_the_seed_is_kept():
    seed = keras.random.SeedGenerator(3)
    before = ops.convert_to_numpy(seed.state.value).copy()
    names_its_place(refused(lambda x: x + keras.random.normal((5,), seed=seed), "random"))
    np.testing.assert_array_equal(ops.convert_to_numpy(seed.state.value), before)


def test_writing_to_a_variable_is_refused_and_the_variable_is_kept():
    class Counter(layers.Layer):
        def build(self, shape):
            self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            self.count.assign(self.count + 1)
            return x * self.count

    layer = Counter()
    layer.build((None, None, 5))
    with pytest.raises(TraceError, match="writes to a variable"):
        traced(layer)
    assert float(layer.count.value) == 0


def test_a_layer_built_at_its_first_call_is_refused():
    with pytest.raises(TraceError, match="creates a variable"):
        traced(Outer(layers.Dense(3)))


def test_a_loop_body_is_never_lost():
    graph = traced(Outer(lambda x: ops.fori_loop(0, 3, lambda i, y: y * 2, x)))
    assert [node.kind_name for node in graph.nodes] == ["ForiLoop"]


# Names.


def small_model():
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(11, 6, mask_zero=True)(ids)
    y = layers.MultiHeadAttention(2, 3, dropout=0.5)(x, x, use_causal_mask=True)
    x = layers.Dropout(0.5)(layers.LayerNormalization()(layers.Add()([x, y])))
    x = layers.BatchNormalization()(x)
    return keras.Model(ids, layers.Dense(4, activation="gelu")(x))


def listing(model):
    axes = [BATCH, LENGTH]
    graph = trace(model, [InputSpec("ids", (BATCH, LENGTH), "int32")], axes, model)
    return [(node.kind_name, node.path) for node in graph.nodes], [weight.name for weight in graph.weights]


def test_names_do_not_depend_on_what_was_built_before():
    first = listing(small_model())
    layers.Dense(3), keras.Input((2,)), layers.MultiHeadAttention(1, 1)
    assert listing(small_model()) == first
    assert "multi_head_attention/query_dense/kernel" in first[1]
    assert "dense/kernel" in first[1]


def test_weights_keep_the_dtype_that_the_layer_saw():
    x = keras.Input((None, 5))
    model = keras.Model(x, layers.Dense(3, dtype="mixed_bfloat16", name="narrow")(x))
    graph = traced(model)
    assert {(w.name, w.dtype) for w in graph.weights} == {
        ("outer/narrow/kernel.bfloat16", "bfloat16"),
        ("outer/narrow/bias.bfloat16", "bfloat16"),
    }


def test_a_variable_may_stand_on_either_side_of_an_operator():
    class Scale(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=(5,), initializer="ones")

        def call(self, x):
            y = self.scale * x - x / self.scale
            return y + ops.expand_dims((1.0 + self.scale) @ ops.transpose(x, (0, 2, 1)), 2)

    layer = Scale()
    layer.build((None, None, 5))
    graph = traced(layer)
    kinds = [node.kind_name for node in graph.nodes]
    assert "Multiply" in kinds and any(isinstance(arg, Weight) for arg in graph.nodes[0].args)


# The model is left as it was.


def test_tracing_leaves_the_model_and_keras_as_they_were():
    model = small_model()
    weights = [w.copy() for w in model.get_weights()]
    operations = [model, *model.layers]
    nodes = [(len(o._inbound_nodes), len(o._outbound_nodes)) for o in operations]
    names = keras.backend.get_uid("anything"), layers.Dense(2).name
    listing(model)
    assert [(len(o._inbound_nodes), len(o._outbound_nodes)) for o in operations] == nodes
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    number = int(layers.Dense(2).name.rpartition("_")[2])
    assert number == int(names[1].rpartition("_")[2] or 0) + 1 if names[1] != "dense" else number == 1


def test_patches_are_gone_after_an_error():
    from keras.src.layers import layer as layer_module
    from keras.src.ops.operation import Operation

    before = Operation.symbolic_call, layers.Layer.symbolic_call, layer_module.Node, keras.Variable.assign
    refused(lambda x: x * x.shape[1] ** 0.5, "depends")
    assert (Operation.symbolic_call, layers.Layer.symbolic_call, layer_module.Node, keras.Variable.assign) == before
    x = keras.Input((3,))
    assert keras.Model(x, layers.Dense(2)(x)).count_params() == 8


def test_training_goes_on_the_same_after_a_trace_in_a_batch_callback():
    def losses(trace_inside):
        keras.utils.set_random_seed(7)
        model = small_model()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        rng = np.random.default_rng(0)
        x, y = rng.integers(1, 11, (12, 7)), rng.integers(0, 4, (12, 7))
        seen = []

        class Trace(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(logs["loss"])
                if trace_inside:
                    listing(self.model)

        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Trace()], shuffle=False)
        return seen

    assert losses(True) == losses(False)


def test_a_second_thread_is_not_disturbed():
    model = small_model()
    started, done = threading.Event(), threading.Event()
    found = {}

    def work():
        started.wait(30)
        x = keras.Input((4,))
        found["model"] = keras.Model(x, layers.Dense(2)(x))
        found["ones"] = ops.convert_to_numpy(ops.ones((2, 3)))
        found["drawn"] = keras.random.uniform((2,), seed=keras.random.SeedGenerator(1))
        done.set()

    def inside(x):
        started.set()
        assert done.wait(30), "the other thread was held up"
        return x * 2

    thread = threading.Thread(target=work)
    thread.start()
    graph = traced(Outer(inside))
    thread.join()
    assert [node.kind_name for node in graph.nodes] == ["Multiply"]
    assert found["model"].count_params() == 10
    np.testing.assert_array_equal(found["ones"], np.ones((2, 3)))
    assert model.count_params() == small_model().count_params()


def test_traces_may_nest():
    model = small_model()

    def function(x):
        listing(model)
        return x * 2

    assert [node.kind_name for node in traced(Outer(function)).nodes] == ["Multiply"]
