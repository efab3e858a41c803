"""Attention, the cache, masks and positions against their NumPy truth."""

import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import ops as kt
from tests import checks, reference
from tests.checks import close, compiled, numpy

B, T, S, H, W = 2, 5, 7, 11, 13


def arrays(heads=(6, 3), length=T, slots=S, width=H, value_width=H, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = (B, length, heads[0], width), (B, slots, heads[1], width), (B, slots, heads[1], value_width)
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def masks(seed=1):
    """Each rank and broadcast, with a query that sees nothing in the ones that have rows of their own."""
    rng = np.random.default_rng(seed)
    full = rng.random((B, 6, T, S)) < 0.6
    full[0, :, 2] = False
    padding = np.array([[1, 1, 0, 1, 0, 0, 1], [0] * 7], bool)
    return {
        "none": None,
        "batch and heads": full,
        "heads only": full[:1],
        "batch only": full[:, :1],
        "rank 3": full[:, 0],
        "rank 3, one for all": full[:1, 0],
        "padding": padding[:, None],
        "padding of rank 4": padding[:, None, None],
    }


class TestAttention:
    @pytest.mark.parametrize("heads", [(6, 6), (6, 3), (6, 1), (1, 1)])
    @pytest.mark.parametrize("value_width", [H, W])
    @pytest.mark.parametrize("return_weights", [False, True])
    def test_heads_and_widths(self, heads, value_width, return_weights):
        query, key, value = arrays(heads, value_width=value_width)
        mask = masks()["batch only"]
        result = kt.attention(query, key, value, mask, return_weights=return_weights)
        output, weights = reference.attention(query, key, value, mask)
        close(numpy(result), (output, weights) if return_weights else output)

    @pytest.mark.parametrize("name", masks())
    @pytest.mark.parametrize("return_weights", [False, True])
    def test_masks(self, name, return_weights):
        query, key, value = arrays()
        mask = masks()[name]
        result = kt.attention(query, key, value, mask, return_weights=return_weights)
        output, weights = reference.attention(query, key, value, mask)
        close(numpy(result), (output, weights) if return_weights else output)

    @pytest.mark.parametrize("return_weights", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_causal(self, return_weights, masked):
        query, key, value = arrays(length=S)
        mask = masks()["padding"] if masked else None
        result = kt.attention(query, key, value, mask, causal=True, return_weights=return_weights)
        output, weights = reference.attention(query, key, value, mask, causal=True)
        close(numpy(result), (output, weights) if return_weights else output)

    @pytest.mark.parametrize("return_weights", [False, True])
    def test_scale(self, return_weights):
        query, key, value = arrays()
        result = kt.attention(query, key, value, scale=0.7, return_weights=return_weights)
        output, weights = reference.attention(query, key, value, scale=0.7)
        close(numpy(result), (output, weights) if return_weights else output)

    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    @pytest.mark.parametrize("return_weights", [False, True])
    def test_a_query_that_sees_nothing_gives_exactly_zero_on_every_path(self, dropout, return_weights):
        query, key, value = arrays()
        mask = np.ones((B, T, S), bool)
        mask[1], mask[0, 3] = False, False
        result = kt.attention(query, key, value, mask, dropout=dropout, seed=1, return_weights=return_weights)
        output, *weights = result if return_weights else (result,)
        assert np.all(numpy(output)[1] == 0) and np.all(numpy(output)[0, 3] == 0)
        assert np.all(numpy(output)[0, 2] != 0)
        for w in weights:
            assert np.all(numpy(w)[~np.broadcast_to(mask[:, None], w.shape)] == 0)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("return_weights", [False, True])
    def test_half_precision(self, dtype, return_weights):
        """Scores of 200 are within float16, but not the exponentials of an unshifted softmax or 1e9 as a mask."""
        query, key, value = (ops.cast(x, dtype) for x in arrays())
        query = query * 30
        mask = masks()["batch only"]
        result = kt.attention(query, key, value, mask, return_weights=return_weights)
        exact, _ = reference.attention(*(numpy(x) for x in (query, key, value)), mask)
        output = result[0] if return_weights else result
        assert keras.backend.standardize_dtype(output.dtype) == dtype
        # A score of 200 is known to half a unit in its last place: 2**-4 in float16, 2**-1 in bfloat16.
        tolerance = {"float16": 0.1, "bfloat16": 0.7}[dtype]
        close(numpy(output), exact, tolerance)

    def test_dropout_scales_what_is_left(self):
        """All values are one, so an output is the sum of the kept weights, which is 1 on average."""
        query, key = (np.zeros((1, 50, 2, 3), "float32") for _ in range(2))
        value = np.ones((1, 50, 2, 3), "float32")
        output, weights = kt.attention(query, key, value, dropout=0.5, seed=3, return_weights=True)
        close(numpy(weights), np.full((1, 2, 50, 50), 0.02))
        # 100 sums of 50 weights, each 0 or 0.04: their mean deviates by 0.014, so this is 5 deviations.
        assert abs(numpy(output).mean() - 1) < 0.07
        assert numpy(output).std() > 0.05

    def test_gradients_are_finite_where_a_query_sees_nothing(self):
        class Attend(keras.layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

            def call(self, x, weights=False):
                y = x * self.scale
                result = kt.attention(y, y, y, mask, return_weights=weights)
                return result[0] if weights else result

        x = np.random.default_rng(0).normal(size=(B, T, 3, H)).astype("float32")
        mask = np.tril(np.ones((1, T, T), bool), -1)
        layer = Attend()
        layer.build(x.shape)
        for weights in (False, True):
            (gradient,) = checks.gradients(layer, lambda y: ops.sum(y * y), x, weights=weights)
            assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0

    @pytest.mark.parametrize("dims", [(B, T, S), (None, T, S), (None, None, None)])
    @pytest.mark.parametrize("value_width", [H, W])
    def test_spec(self, dims, value_width):
        b, t, s = dims
        query, key, value = (keras.KerasTensor(shape) for shape in ((b, t, 6, H), (b, s, 3, H), (b, s, 3, value_width)))
        output, weights = kt.attention(query, key, value, return_weights=True)
        assert output.shape == (b, t, 6, value_width)
        assert weights.shape == (b, 6, t, s)
        assert kt.attention(query, key, value).shape == output.shape

    def test_one_operation_is_recorded(self):
        inputs = [keras.Input(shape) for shape in ((None, 6, H), (None, 3, H), (None, 3, H), (None, None))]
        mask = ops.cast(inputs.pop(), "bool")
        output = kt.attention(*inputs, mask, causal=False, scale=0.5)
        operation = output._keras_history.operation
        assert isinstance(operation, kt.Attention)
        assert (operation.causal, operation.scale, operation.dropout, operation.return_weights) == (
            False,
            0.5,
            0.0,
            False,
        )
        assert [t is i for t, i in zip(operation._inbound_nodes[0].input_tensors, (*inputs, mask), strict=True)]

    def test_compiled(self):
        query, key, value = (ops.convert_to_tensor(x) for x in arrays())
        mask = ops.convert_to_tensor(masks()["batch only"])
        output = compiled(lambda *args: kt.attention(*args))(query, key, value, mask)
        close(numpy(output), reference.attention(*arrays(), masks()["batch only"])[0])

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"query": (B, T, 6)}, "must have the shapes"),
            ({"query": (B, T, 5, H)}, "K must divide N"),
            ({"key": (B, S, 3, H + 1)}, "do not fit together"),
            ({"value": (B, S + 1, 3, H)}, "do not fit together"),
            ({"mask": (S,)}, "mask.shape=\\(7,\\)"),
            ({"mask": (B, T, S + 1)}, "mask.shape=\\(2, 5, 8\\)"),
            ({"mask": (3, T, S)}, "mask.shape=\\(3, 5, 7\\)"),
            ({"mask": (B, T, 1)}, "mask.shape=\\(2, 5, 1\\)"),
            ({"causal": True}, "as many queries as keys"),
        ],
    )
    @pytest.mark.parametrize("symbolic", [False, True])
    def test_refuses(self, change, message, symbolic):
        shapes = {"query": (B, T, 6, H), "key": (B, S, 3, H), "value": (B, S, 3, H)}
        make = keras.KerasTensor if symbolic else ops.ones
        arguments = {
            name: value if name == "causal" else make(value, "bool" if name == "mask" else "float32")
            for name, value in {**shapes, **change}.items()
        }
        with pytest.raises(ValueError, match=message):
            kt.attention(**arguments)

    def test_refuses_a_mask_of_numbers(self):
        with pytest.raises(ValueError, match="must be boolean.*float32"):
            kt.attention(*arrays(), mask=np.zeros((B, T, S), "float32"))


class TestCache:
    def pair(self, length, seed):
        rng = np.random.default_rng(seed)
        return tuple(rng.normal(size=(B, length, 3, H)).astype("float32") for _ in range(2))

    def test_append(self):
        old, new = self.pair(S, 0), self.pair(T, 1)
        close(numpy(kt.write_cache(old, *new)), tuple(np.concatenate(pair, 1) for pair in zip(old, new, strict=True)))

    @pytest.mark.parametrize("kind", ["int", "scalar", "rows"])
    @pytest.mark.parametrize("length", [1, 3])
    def test_buffer(self, kind, length):
        old, new = self.pair(S, 0), self.pair(length, 1)
        starts = [2, 4] if kind == "rows" else [2, 2]
        start = {"int": 2, "scalar": np.array(2, "int32"), "rows": np.array(starts, "int32")}[kind]
        expected = tuple(x.copy() for x in old)
        for buffer, values in zip(expected, new, strict=True):
            for row, first in enumerate(starts):
                buffer[row, first : first + length] = values[row]
        start = start if kind == "int" else ops.convert_to_tensor(start)
        close(numpy(kt.write_cache(old, *new, start)), expected, 0)
        if kind != "int":
            tensors = keras.tree.map_structure(ops.convert_to_tensor, (old, *new))
            close(numpy(compiled(kt.write_cache)(*tensors, start)), expected, 0)

    def test_keeps_the_dtype_of_the_cache(self):
        old = tuple(ops.cast(x, "float16") for x in self.pair(S, 0))
        for start in (None, 1):
            written = kt.write_cache(old, *self.pair(T, 1), start)
            assert {keras.backend.standardize_dtype(x.dtype) for x in written} == {"float16"}

    @pytest.mark.parametrize("dims", [(B, S, T), (None, None, T), (None, None, None)])
    def test_spec(self, dims):
        b, s, t = dims
        old = tuple(keras.KerasTensor((b, s, 3, width)) for width in (H, W))
        new = tuple(keras.KerasTensor((b, t, 3, width)) for width in (H, W))
        appended = None if None in (s, t) else s + t
        assert [x.shape for x in kt.write_cache(old, *new)] == [(b, appended, 3, H), (b, appended, 3, W)]
        start = keras.KerasTensor((), "int32")
        assert [x.shape for x in kt.write_cache(old, *new, start)] == [(b, s, 3, H), (b, s, 3, W)]

    @pytest.mark.parametrize("start", [3, 7, -1])
    def test_refuses_to_write_over_the_end(self, start):
        with pytest.raises(ValueError, match=f"5 entries.*7 slots.*start={start}"):
            kt.write_cache(self.pair(S, 0), *self.pair(T, 1), start)

    def test_refuses_other_shapes(self):
        with pytest.raises(ValueError, match="agree in B, K and H"):
            kt.write_cache(self.pair(S, 0), *(x[:, :, :2] for x in self.pair(T, 1)))
        with pytest.raises(ValueError, match="start.shape=\\(2, 1\\)"):
            kt.write_cache(self.pair(S, 0), *self.pair(T, 1), np.zeros((2, 1), "int32"))


class TestMasks:
    def test_square(self):
        mask = kt.square_causal_mask(np.zeros((3, T, 2), "float32"))
        np.testing.assert_array_equal(numpy(mask), np.tril(np.ones((1, T, T), bool)))

    @pytest.mark.parametrize("rows, key_rows", [(1, 1), (B, 1), (1, B), (B, B)])
    def test_from_positions(self, rows, key_rows):
        rng = np.random.default_rng(0)
        positions, keys = rng.integers(0, 9, (rows, T)), rng.integers(0, 9, (key_rows, S))
        mask = kt.causal_mask(ops.convert_to_tensor(positions), ops.convert_to_tensor(keys))
        expected = np.array([[[k <= p for k in ks] for p in ps] for ps, ks in _paired(positions, keys)])
        np.testing.assert_array_equal(numpy(mask), expected)
        spec = kt.causal_mask(keras.KerasTensor((rows, None), "int32"), keras.KerasTensor((key_rows, S), "int32"))
        assert spec.shape == (max(rows, key_rows), None, S) and spec.dtype == "bool"

    def test_last_query_of_a_cache_sees_every_key(self):
        mask = kt.causal_mask(kt.positions(1, 4), kt.positions(5))
        assert numpy(mask).all()

    def test_refuses_other_ranks(self):
        with pytest.raises(ValueError, match="key_positions.shape=\\(5,\\)"):
            kt.causal_mask(ops.arange(5)[None], ops.arange(5))


class TestPositions:
    def test_positions(self):
        np.testing.assert_array_equal(numpy(kt.positions(3)), [[0, 1, 2]])
        np.testing.assert_array_equal(numpy(kt.positions(3, 4)), [[4, 5, 6]])
        np.testing.assert_array_equal(numpy(kt.positions(3, ops.convert_to_tensor(4))), [[4, 5, 6]])
        rows = ops.convert_to_tensor(np.array([4, 0], "int32"))
        np.testing.assert_array_equal(numpy(kt.positions(3, rows)), [[4, 5, 6], [0, 1, 2]])

    @pytest.mark.parametrize("d_model", [1, 3, 7, 8, 29])
    def test_encoding_is_accurate_at_every_position(self, d_model):
        rng = np.random.default_rng(d_model)
        edges = [0, 1, 256, 257, 2048, 2049, 4095, 4096, 4097, 2**20, 2**24 - 1, 2**24]
        positions = np.concatenate([edges, rng.integers(0, 2**24, 3000)])[None].astype("int32")
        encoding = numpy(kt.sinusoidal_encoding(ops.convert_to_tensor(positions), d_model))
        assert encoding.dtype == "float32"
        close(encoding, reference.sinusoidal_encoding(positions, d_model), 1e-6)
        encode = compiled(lambda p: kt.sinusoidal_encoding(p, d_model))
        close(numpy(encode(ops.convert_to_tensor(positions))), reference.sinusoidal_encoding(positions, d_model), 1e-6)

    def test_published_values(self):
        encoding = numpy(kt.sinusoidal_encoding(kt.positions(17), 5))[0]
        close(encoding[0], np.array([0, 1, 0, 1, 0.0]), 1e-6)
        close(encoding[1], np.array([0.841471, 0.540302, 0.025116, 0.999685, 0.000631]), 1e-6)
        close(encoding[16, :2], np.array([-0.287903, -0.957659]), 1e-6)

    def test_table_and_max_wavelength(self):
        table = kt.sinusoidal_table(T, 7, 100)
        assert table.dtype == "float32"
        # Half a unit in the last place of 1.
        close(table, reference.sinusoidal_encoding(np.arange(T), 7, 100), 6e-8)
        close(numpy(kt.sinusoidal_encoding(kt.positions(T), 7, 100))[0], table, 1e-6)

    def test_spec(self):
        spec = kt.sinusoidal_encoding(keras.KerasTensor((None, None), "int32"), 7)
        assert spec.shape == (None, None, 7) and spec.dtype == "float32"


class TestRotary:
    X = np.random.default_rng(5).normal(size=(2, T, 3, 10)).astype("float32")

    @pytest.mark.parametrize("width", [10, 6, 2])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_equals_complex_numbers(self, width, rows):
        positions = np.random.default_rng(6).integers(0, 2**24, (rows, T)).astype("int32")
        encoding = kt.rotary_encoding(ops.convert_to_tensor(positions), kt.rotary_frequencies(width, 500.0))
        assert keras.backend.standardize_dtype(encoding.dtype) == "float32"
        close(numpy(kt.rotate(self.X, encoding)), reference.rotate(self.X, positions, 500.0, width), 5e-6)

    def test_products_depend_on_differences_only(self):
        def product(shift):
            encoding = kt.rotary_encoding(kt.positions(T, shift), kt.rotary_frequencies(10))
            query, key = numpy(kt.rotate(self.X, encoding)), numpy(kt.rotate(self.X[::-1].copy(), encoding))
            return np.einsum("btnh,bsnh->bnts", query, key)

        close(product(100_003), product(0))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_far_away(self, dtype):
        """The angles are exact at position 100,000, where half precision has steps of hundreds."""
        x = ops.cast(self.X, dtype)
        encoding = kt.rotary_encoding(kt.positions(T, 100_000), kt.rotary_frequencies(10))
        rotated = kt.rotate(x, encoding)
        assert keras.backend.standardize_dtype(rotated.dtype) == dtype
        expected = reference.rotate(numpy(x), np.arange(T)[None] + 100_000)
        # Rounded once: half a unit in the last place of the largest, which is near 4.
        close(numpy(rotated), expected, 0.01 if dtype == "bfloat16" else 0.002)

    def test_spec(self):
        x, positions = keras.KerasTensor((None, None, 3, 10), "float16"), keras.KerasTensor((1, None), "int32")
        encoding = kt.rotary_encoding(positions, kt.rotary_frequencies(4))
        rotated = kt.rotate(x, encoding)
        assert encoding.shape == (1, None, 4) and rotated.shape == x.shape and rotated.dtype == "float16"

    @pytest.mark.parametrize(
        "shape, other",
        [((2, 5, 3, 10), (1, 5, 12)), ((2, 5, 3, 10), (3, 5, 4)), ((2, 5, 3, 10), (1, 7, 4)), ((2, 5, 10), (1, 5, 4))],
    )
    def test_refuses(self, shape, other):
        with pytest.raises(ValueError, match=re.escape(f"x.shape={shape}, encoding.shape={other}")):
            kt.rotate(ops.zeros(shape), ops.zeros(other))
        with pytest.raises(ValueError, match="Received: width=7"):
            kt.rotary_frequencies(7)


def _paired(positions, keys):
    rows = max(len(positions), len(keys))
    return zip(np.broadcast_to(positions, (rows, T)), np.broadcast_to(keys, (rows, S)), strict=True)
