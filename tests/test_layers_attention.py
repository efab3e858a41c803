"""Self-attention, cross-attention and the causal mask: truth, masks, caches, laws and faults known from elsewhere."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import ops as kt
from keras_transformer.layers import CausalMask, CrossAttention, MultiHeadSelfAttention
from tests import checks, reference
from tests.checks import close, implicit_mask, numpy, randomize, weights_of

B, T, S, D, E, N = 2, 5, 7, 6, 13, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype("float32")
MEMORY = RNG.normal(size=(B, S, E)).astype("float32")
PADDING = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]], bool)
MEMORY_PADDING = np.array([[1, 1, 1, 1, 0, 0, 0], [1] * 7], bool)


def self_attention(**kwargs):
    layer = MultiHeadSelfAttention(N, **kwargs)
    layer.build((None, None, D))
    return randomize(layer)


def cross_attention(**kwargs):
    layer = CrossAttention(N, **kwargs)
    layer.build((None, None, D), (None, None, E))
    return randomize(layer)


def masked(array, mask):
    """A tensor that carries an implicit Keras mask, as `Masking` and `Embedding` make it."""
    tensor = ops.convert_to_tensor(np.where(mask[..., None], array, -9.0).astype("float32"))
    return keras.layers.Masking(-9.0)(tensor)


class TestTruth:
    @pytest.mark.parametrize(
        "arguments", [{}, {"causal": True}, {"head_dim": 5}, {"use_bias": False}, {"num_kv_heads": 1}]
    )
    def test_self_attention(self, arguments):
        layer = self_attention(**arguments)
        causal = arguments.get("causal", False)
        expected = reference.multi_head_attention(X, X, weights_of(layer), N, PADDING[:, None], causal)
        close(numpy(layer(X, padding_mask=PADDING, return_weights=True)), expected)
        close(numpy(layer(X, padding_mask=PADDING)), expected[0])

    @pytest.mark.parametrize("arguments", [{}, {"head_dim": 5}, {"use_bias": False}, {"num_kv_heads": 1}])
    def test_cross_attention(self, arguments):
        layer = cross_attention(**arguments)
        expected = reference.multi_head_attention(X, MEMORY, weights_of(layer), N, MEMORY_PADDING[:, None])
        close(numpy(layer(X, MEMORY, padding_mask=MEMORY_PADDING, return_weights=True)), expected)
        close(numpy(layer(X, MEMORY, padding_mask=MEMORY_PADDING)), expected[0])

    @pytest.mark.parametrize("num_kv_heads", [None, 1])
    def test_rotary(self, num_kv_heads):
        layer = self_attention(causal=True, num_kv_heads=num_kv_heads)
        positions = np.array([[4, 5, 6, 7, 8], [0, 0, 0, 1, 2]], "int32")  # the second row is padded on the left
        encoding = kt.rotary_encoding(ops.convert_to_tensor(positions), kt.rotary_frequencies(D // N))
        expected = reference.multi_head_attention(X, X, weights_of(layer), N, None, True, positions)[0]
        close(numpy(layer(X, rotary=encoding)), expected)

    def test_grouped_heads_equal_repeated_ones(self):
        grouped, full = self_attention(num_kv_heads=1), self_attention()
        for name in ("query_dense", "output_dense"):
            getattr(full, name).set_weights(getattr(grouped, name).get_weights())
        for name in ("key_dense", "value_dense"):
            kernel, bias = getattr(grouped, name).get_weights()
            getattr(full, name).set_weights([np.tile(kernel, (1, N)), np.tile(bias, N)])
        close(numpy(full(X, padding_mask=PADDING)), numpy(grouped(X, padding_mask=PADDING)))

    def test_equals_the_attention_of_keras(self):
        layer = self_attention(causal=True)
        other = keras.layers.MultiHeadAttention(N, D // N)
        other.build((None, None, D), (None, None, D))
        for dense, einsum in (
            (layer.query_dense, other.query_dense),
            (layer.key_dense, other.key_dense),
            (layer.value_dense, other.value_dense),
            (layer.output_dense, other.output_dense),
        ):
            for one, two in zip(dense.weights, einsum.weights, strict=True):
                two.assign(ops.reshape(one, two.shape))
        close(numpy(layer(X)), numpy(other(X, X, use_causal_mask=True)))


class TestMasks:
    def test_implicit_equals_explicit(self):
        layer, cross = self_attention(), cross_attention()
        x, memory = masked(X, PADDING), masked(MEMORY, MEMORY_PADDING)
        close(numpy(layer(x)), numpy(layer(numpy(x), padding_mask=PADDING)))
        # With more than one tensor Keras hands the mask over under another name.
        everything = np.ones((1, T, T), bool)
        close(numpy(layer(x, attention_mask=everything)), numpy(layer(numpy(x), padding_mask=PADDING)))
        close(numpy(cross(x, memory)), numpy(cross(numpy(x), numpy(memory), padding_mask=MEMORY_PADDING)))

    def test_explicit_wins_over_implicit(self):
        layer, cross = self_attention(), cross_attention()
        x, memory = masked(X, PADDING), masked(MEMORY, MEMORY_PADDING)
        close(numpy(layer(x, padding_mask=np.ones((B, T), bool))), numpy(layer(numpy(x))))
        close(numpy(cross(x, memory, padding_mask=np.ones((B, S), bool))), numpy(cross(numpy(x), numpy(memory))))

    def test_integers_are_booleans(self):
        layer = self_attention()
        square = np.tril(np.ones((1, T, T), "int32"))
        expected = numpy(layer(X, padding_mask=PADDING, attention_mask=square.astype(bool)))
        close(numpy(layer(X, padding_mask=PADDING.astype("int32"), attention_mask=square)), expected)

    def test_layers_that_share_a_masked_tensor_all_honour_the_mask(self):
        memory = masked(MEMORY, MEMORY_PADDING)
        first, second = cross_attention(), cross_attention()
        expected = numpy(second(X, numpy(memory), padding_mask=MEMORY_PADDING))
        first(X, memory)
        close(numpy(second(X, memory)), expected)
        np.testing.assert_array_equal(numpy(implicit_mask(memory)), MEMORY_PADDING)

    def test_the_mask_of_x_goes_on_and_that_of_memory_does_not(self):
        x, memory = masked(X, PADDING), masked(MEMORY, MEMORY_PADDING)
        for outputs in (self_attention()(x), cross_attention()(x, memory)):
            np.testing.assert_array_equal(numpy(implicit_mask(outputs)), PADDING)
        output, weights = self_attention()(x, return_weights=True)
        np.testing.assert_array_equal(numpy(implicit_mask(output)), PADDING)
        assert implicit_mask(weights) is None
        assert implicit_mask(cross_attention()(X, memory)) is None

    def test_ranks_agree_when_batch_heads_and_length_are_equal(self):
        """A (4, 4) mask is about rows and keys, never about heads or queries."""
        x = np.random.default_rng(1).normal(size=(4, 4, 16)).astype("float32")
        lengths = [4, 3, 2, 1]
        padding = np.arange(4)[None] < np.array(lengths)[:, None]
        layer = MultiHeadSelfAttention(4)
        alone = checks.quick(lambda x: layer(x))
        outputs = [
            numpy(layer(x, padding_mask=padding)),
            numpy(layer(x, attention_mask=np.repeat(padding[:, None], 4, 1))),
            numpy(layer(x, attention_mask=np.repeat(padding[:, None, None], 4, 2))),
        ]
        for output in outputs:
            for row, length in enumerate(lengths):
                close(output[row, :length], numpy(alone(x[row : row + 1, :length]))[0], 1e-5)
        with pytest.raises(ValueError, match="\\(1, T, S\\).*attention_mask.shape=\\(4, 4\\)"):
            layer(x, attention_mask=padding)

    def test_queries_see_the_memory_by_its_own_mask(self):
        """The target's length and causality play no part."""
        layer = cross_attention()
        memory, mask = MEMORY[:1].copy(), MEMORY_PADDING[:1]
        output, weights = numpy(layer(X[:1], memory, padding_mask=mask, return_weights=True))
        assert weights.shape == (1, N, T, S) and np.all(weights[..., 4:] == 0)
        close(weights.sum(-1), np.ones((1, N, T)), 1e-6)
        noisy, other = memory.copy(), memory.copy()
        noisy[:, 4:] += 100.0
        other[:, 3] += 1.0
        close(numpy(layer(X[:1], noisy, padding_mask=mask)), output, 1e-6)
        changed = np.abs(numpy(layer(X[:1], other, padding_mask=mask)) - output).max(-1)
        assert np.all(changed > 1e-3)

    @pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
    def test_no_mask_constant_overflows(self, policy):
        """Scores of -40 and -41, the third key masked; then every key masked."""
        layer = CrossAttention(1, kernel_initializer="ones", dtype=policy)
        x, memory = np.array([[[-10.0]]], "float32"), np.array([[[4.0], [4.1], [7.0]]], "float32")
        tolerance = 1e-4 if policy == "float32" else 0.02 if "float16" in policy and "b" not in policy else 0.05
        output, weights = numpy(layer(x, memory, padding_mask=np.array([[1, 1, 0]]), return_weights=True))
        close(output, np.array([[[4.0269]]]), tolerance)
        close(weights[0, 0, 0], np.array([0.7311, 0.2689, 0]), tolerance)
        assert weights[0, 0, 0, 2] == 0
        close(numpy(layer(x, memory, padding_mask=np.array([[1, 1, 0]]))), output, tolerance)
        assert np.all(numpy(layer(x, memory, padding_mask=np.array([[0, 0, 0]]))) == 0)

    @pytest.mark.parametrize("dropout", [0.0, 0.3])
    def test_a_wholly_padded_row_gives_the_projection_of_zero(self, dropout):
        """Whatever the dropout argument is, at inference and in training."""
        layer = self_attention(dropout=dropout)
        padding = np.array([[1] * T, [0] * T], bool)
        for training in (False, True):
            output = numpy(layer(X, padding_mask=padding, training=training))
            close(output[1], np.broadcast_to(numpy(layer.output_dense.bias.value), (T, D)), 0)

    def test_dropout_plays_no_part_at_inference(self):
        layer, dropping = self_attention(), self_attention(dropout=0.5)
        close(numpy(dropping(X, padding_mask=PADDING)), numpy(layer(X, padding_mask=PADDING)), 0)


def test_low_rank_weights_and_quantization_of_the_projections_count():
    """JAX takes the projections' kernels itself, in a product by heads."""
    layer = MultiHeadSelfAttention(N)
    layer.build((None, None, D))
    randomize(layer)
    for dense in (layer.query_dense, layer.output_dense):
        dense.enable_lora(2)
        for weight in (dense.lora_kernel_a, dense.lora_kernel_b):
            weight.assign(RNG.normal(size=weight.shape))
    merged = MultiHeadSelfAttention(N)
    merged.build((None, None, D))
    for name in ("query_dense", "key_dense", "value_dense", "output_dense"):
        ours, theirs = getattr(merged, name), getattr(layer, name)
        ours.kernel.assign(theirs.kernel)
        ours.bias.assign(theirs.bias)
    expected = numpy(merged(X))
    close(numpy(layer(X)), expected)
    for name in ("query_dense", "output_dense"):
        getattr(merged, name).quantize("int8")
    quantized = numpy(merged(X))
    assert 0 < np.abs(quantized - expected).max() < 0.05 * np.abs(expected).max()


class TestCausalMask:
    def test_shows_the_matrix_of_the_paper(self):
        mask = CausalMask()(X)
        expected = np.triu(np.full((1, T, T), -np.inf), 1)
        np.testing.assert_array_equal(numpy(CausalMask.additive(mask)), expected)

    def test_positions_for_a_cache(self):
        mask = CausalMask()(X, positions=np.array([[3], [4]]), key_positions=np.arange(5)[None])
        np.testing.assert_array_equal(numpy(mask), [[[1, 1, 1, 1, 0]], [[1, 1, 1, 1, 1]]])
        with pytest.raises(ValueError, match="given together"):
            CausalMask()(X, positions=np.array([[3]]))

    def test_attention_fed_by_it_runs_as_causal(self, monkeypatch):
        calls = []
        attention = MultiHeadSelfAttention._attend

        def spy(layer, query, key, value, mask, causal, *rest):
            calls.append((mask is None, causal))
            return attention(layer, query, key, value, mask, causal, *rest)

        monkeypatch.setattr(MultiHeadSelfAttention, "_attend", spy)
        layer, causal = self_attention(), self_attention(causal=True)
        x = ops.convert_to_tensor(X)
        close(numpy(layer(x, attention_mask=CausalMask()(x))), numpy(causal(x)))
        symbolic = keras.Input((None, D))
        model = keras.Model(symbolic, layer(symbolic, attention_mask=CausalMask()(symbolic)))
        close(numpy(model(x)), numpy(causal(x)))
        assert calls == [(True, True)] * 4

    def test_a_mask_that_was_changed_is_applied(self):
        layer = self_attention()
        mask = CausalMask()(ops.convert_to_tensor(X))
        mask &= ops.convert_to_tensor(np.eye(T, dtype=bool)[None])  # torch does this in place
        expected = numpy(layer(X, attention_mask=np.eye(T, dtype=bool)[None]))
        close(numpy(layer(X, attention_mask=mask)), expected)

    def test_compiled(self):
        layer, causal = self_attention(), self_attention(causal=True)
        output = checks.compiled(lambda x: layer(x, attention_mask=CausalMask()(x)))(ops.convert_to_tensor(X))
        close(numpy(output), numpy(causal(X)))

    def test_combines_with_padding(self):
        layer, causal = self_attention(), self_attention(causal=True)
        x = ops.convert_to_tensor(X)
        output = layer(x, padding_mask=PADDING, attention_mask=CausalMask()(x))
        close(numpy(output), numpy(causal(x, padding_mask=PADDING)))
        inverted = ops.logical_not(CausalMask()(x))
        close(
            numpy(layer(x, attention_mask=inverted)), numpy(layer(x, attention_mask=np.triu(np.ones((1, T, T)), 1) > 0))
        )


class TestCache:
    @pytest.mark.parametrize("form", ["append", "integer", "scalar", "rows"])
    def test_equals_no_cache_at_every_split(self, form):
        layer = self_attention(causal=True)
        expected = numpy(layer(X))

        def step(x, cache, start):
            return layer(x, cache=cache, start=start)

        if form != "integer":
            step = checks.quick(step)
        for split in range(1, T):
            length = 0 if form == "append" else T + 2
            cache = tuple(ops.zeros((B, length, N, D // N)) for _ in range(2))
            outputs = []
            for start, stop in ((0, split), (split, T)):
                first = {
                    "append": None,
                    "integer": start,
                    "scalar": ops.convert_to_tensor(start, "int32"),
                    "rows": ops.convert_to_tensor([start, start], "int32"),
                }[form]
                output, cache = step(X[:, start:stop], cache, first)
                outputs.append(numpy(output))
            close(np.concatenate(outputs, 1), expected)

    @pytest.mark.parametrize("start", [0, None])
    def test_rotary_and_grouped_heads(self, start):
        """Keys are rotated by their own positions before they are written."""
        layer = self_attention(causal=True, num_kv_heads=1)
        encoding = kt.rotary_encoding(kt.positions(T), kt.rotary_frequencies(D // N))
        expected = numpy(layer(X, rotary=encoding))
        cache = tuple(ops.zeros((B, 0 if start is None else T, *layer.kv_shape)) for _ in range(2))
        outputs = []
        for first, last in ((0, 3), (3, 4), (4, 5)):
            output, cache = layer(
                X[:, first:last],
                cache=cache,
                start=None if start is None else first,
                rotary=encoding[:, first:last],
            )
            outputs.append(numpy(output))
        close(np.concatenate(outputs, 1), expected)

    def test_rows_at_different_positions(self):
        """Row 0 has three tokens and row 1 one; each gets its next token at its own slot."""
        layer = self_attention(causal=True)
        expected = numpy(layer(X))
        cache = tuple(ops.zeros((B, T, N, D // N)) for _ in range(2))
        _, cache = layer(X[:, :3], cache=cache, start=0)
        following = np.stack([X[0, 3:4], X[1, 1:2]])
        output, _ = layer(following, cache=cache, start=np.array([3, 1], "int32"))
        close(numpy(output)[:, 0], np.stack([expected[0, 3], expected[1, 1]]))

    def test_padding_mask_covers_the_slots(self):
        layer = self_attention(causal=True)
        expected = numpy(layer(X, padding_mask=PADDING))
        cache = tuple(ops.zeros((B, T, N, D // N)) for _ in range(2))
        output, cache, weights = None, cache, None
        output, weights, cache = layer(X, padding_mask=PADDING, cache=cache, start=0, return_weights=True)
        close(numpy(output), expected)
        assert weights.shape == (B, N, T, T)

    def test_the_implicit_mask_counts_without_a_cache_only(self):
        layer = self_attention(causal=True)
        cache = tuple(ops.zeros((B, T + 2, N, D // N)) for _ in range(2))
        x = masked(X, PADDING)
        output, _ = layer(x, cache=cache, start=0)
        close(numpy(output), numpy(layer(numpy(x))))

    def test_projected_memory(self):
        layer = cross_attention()
        cache = layer.project_memory(MEMORY)
        assert [tuple(part.shape) for part in cache] == [(B, S, N, D // N)] * 2
        close(
            numpy(layer(X, cache=cache, padding_mask=MEMORY_PADDING)),
            numpy(layer(X, MEMORY, padding_mask=MEMORY_PADDING)),
            1e-6,
        )

    def test_symbolic(self):
        layer = self_attention(causal=True)
        x = keras.KerasTensor((None, 1, D))
        cache = tuple(keras.KerasTensor((None, None, N, 2)) for _ in range(2))
        output, weights, (key, value) = layer(x, cache=cache, return_weights=True)
        assert output.shape == (None, 1, D) and weights.shape == (None, N, 1, None)
        assert key.shape == value.shape == (None, None, N, 2)
        buffer = tuple(keras.KerasTensor((B, S, N, 2)) for _ in range(2))
        output, weights, (key, value) = layer(x, cache=buffer, start=3, return_weights=True)
        assert weights.shape == (None, N, 1, S) and key.shape == (B, S, N, 2)


class TestLaws:
    def test_a_causal_position_ignores_what_follows(self):
        layer = self_attention(causal=True)
        output = numpy(layer(X))
        for position in range(T):
            changed = X.copy()
            changed[:, position] += 1.0
            other = numpy(layer(changed))
            close(other[:, :position], output[:, :position], 0)
            assert np.all(np.abs(other[:, position:] - output[:, position:]).max(-1) > 1e-4)

    def test_padding_changes_nothing(self):
        layer = self_attention()
        lengths = PADDING[0].sum()
        longer = np.concatenate([X[:, :lengths], 50 * X], 1)
        mask = np.arange(longer.shape[1])[None] < lengths
        output = numpy(layer(longer, padding_mask=np.repeat(mask, B, 0)))
        close(output[:, :lengths], numpy(layer(X[:, :lengths])))

    def test_self_attention_commutes_with_permutation(self):
        order = np.array([3, 0, 4, 1, 2])
        layer = self_attention()
        close(numpy(layer(X[:, order])), numpy(layer(X))[:, order])


class TestRefuses:
    @pytest.mark.parametrize("cls", [MultiHeadSelfAttention, CrossAttention])
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"num_heads": 0}, "num_heads=0"),
            ({"num_heads": 2.0}, "num_heads=2.0"),
            ({"num_heads": 2, "head_dim": 0}, "head_dim=0"),
            ({"num_heads": 2, "head_dim": -3}, "head_dim=-3"),
            ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
            ({"num_heads": 4, "num_kv_heads": 0}, "num_kv_heads=0"),
            ({"num_heads": True}, "num_heads=True"),
            ({"num_heads": 2, "dropout": 1.0}, "dropout=1.0"),
            ({"num_heads": 2, "dropout": None}, "dropout=None"),
        ],
    )
    def test_arguments(self, cls, arguments, message):
        with pytest.raises(ValueError, match=message):
            cls(**arguments)

    @pytest.mark.parametrize("cls", [MultiHeadSelfAttention, CrossAttention])
    def test_a_width_that_the_heads_do_not_divide(self, cls):
        shapes = [(None, None, D)] * (1 if cls is MultiHeadSelfAttention else 2)
        with pytest.raises(ValueError, match="num_heads=4, width 6"):
            cls(4).build(*shapes)

    def test_masks(self):
        layer = self_attention()
        with pytest.raises(ValueError, match="padding_mask.shape=\\(2, 1, 5\\)"):
            layer(X, padding_mask=PADDING[:, None])
        with pytest.raises(ValueError, match="padding_mask.dtype=float32"):
            layer(X, padding_mask=PADDING.astype("float32"))
        with pytest.raises(ValueError, match="attention_mask.dtype=float32"):
            layer(X, attention_mask=np.zeros((1, T, T), "float32"))
        with pytest.raises(ValueError, match="padding_mask.shape=\\(2, 4\\)"):
            layer(X, padding_mask=PADDING[:, :4])
        with pytest.raises(ValueError, match="padding_mask of type list"):
            layer(X, padding_mask=PADDING.tolist())
        with pytest.raises(ValueError, match="mask.shape=\\(1, 5, 7\\)"):
            layer(X, attention_mask=np.ones((1, T, S), bool))

    def test_masks_of_symbolic_tensors(self):
        x = keras.Input((T, D))
        with pytest.raises(ValueError, match="padding_mask.shape=\\(None, 4\\)"):
            self_attention()(x, padding_mask=keras.Input((4,), dtype="bool"))
        with pytest.raises(ValueError, match="attention_mask.dtype=float32"):
            self_attention()(x, attention_mask=keras.Input((T, T)))
        with pytest.raises(ValueError, match="padding_mask.shape=\\(None, 5\\)"):
            cross_attention()(x, keras.Input((S, E)), padding_mask=keras.Input((T,), dtype="bool"))

    @pytest.mark.parametrize("shape", [(T, D), (1, B, T, D), (None, None, None)])
    def test_what_is_no_sequence(self, shape):
        for layer in (MultiHeadSelfAttention(N), self_attention()):
            with pytest.raises(ValueError, match="`x` must have the shape"):
                layer(keras.KerasTensor(shape))
        with pytest.raises(ValueError, match="`memory` must have the shape"):
            cross_attention()(keras.KerasTensor((B, T, D)), keras.KerasTensor(shape))

    def test_another_number_of_rows(self):
        with pytest.raises(ValueError, match="as many rows"):
            cross_attention()(X, MEMORY[:1])

    @pytest.mark.parametrize(
        "shapes",
        [
            [(B, S, 1, D // N)] * 2,
            [(B, S, N, 5)] * 2,
            [(1, S, N, D // N)] * 2,
            [(B, S, D)] * 2,
            [(B, S, N, D // N), (B, S + 1, N, D // N)],
            [(B, S, N, D // N)] * 3,
        ],
    )
    def test_caches_of_another_shape(self, shapes):
        cache = tuple(ops.zeros(shape) for shape in shapes)
        with pytest.raises(ValueError, match="`cache` must be a pair"):
            cross_attention()(X, cache=cache)
        with pytest.raises(ValueError, match="`cache` must be a pair"):
            self_attention()(X, cache=cache, start=0)

    @pytest.mark.parametrize(
        "start, message",
        [
            (-1, "start=-1"),
            (3, "do not fit into the 7 slots"),
            (1.0, "must hold integers"),
            ([0, 1], "must hold integers"),
            (np.array([0, 1, 2]), "start.shape=\\(3,\\)"),
        ],
    )
    def test_start(self, start, message):
        cache = tuple(ops.zeros((B, S, N, D // N)) for _ in range(2))
        with pytest.raises(ValueError, match=message):
            self_attention(causal=True)(X, cache=cache, start=start)
        with pytest.raises(ValueError, match="`start` needs a `cache`"):
            self_attention(causal=True)(X, start=start)

    def test_memory(self):
        with pytest.raises(ValueError, match="has no weights yet"):
            CrossAttention(N).project_memory(MEMORY)
        layer = cross_attention()
        with pytest.raises(ValueError, match="Received: neither"):
            layer(X)
        with pytest.raises(ValueError, match="Received: both"):
            layer(X, MEMORY, cache=layer.project_memory(MEMORY))

    def test_a_buffer_that_is_too_short(self):
        cache = tuple(ops.zeros((B, T - 1, N, D // N)) for _ in range(2))
        with pytest.raises(ValueError, match="4 slots"):
            self_attention(causal=True)(X, cache=cache, start=0)


def test_gradients_reach_every_weight_and_are_finite_with_a_wholly_padded_row():
    padding = np.array([[1, 1, 1, 0, 0], [0] * 5], bool)
    for call in ({}, {"return_weights": True}):
        layer = self_attention()
        gradients = checks.gradients(
            layer, lambda y: ops.sum(ops.square(keras.tree.flatten(y)[0])), X, padding_mask=padding, **call
        )
        for weight, gradient in zip(layer.trainable_variables, gradients, strict=True):
            assert np.isfinite(gradient).all()
            # A bias of the keys shifts all scores of a query alike, so the softmax does not see it.
            assert np.abs(gradient).max() > 1e-4 or weight is layer.key_dense.bias
