"""Feed-forward, encoder and decoder blocks and stacks: truth, parameter counts, masks, caches, laws."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.layers import (
    FeedForward,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from tests import checks, reference
from tests.checks import close, implicit_mask, numpy, quick, randomize, weights_of

B, T, S, D, E, F, N = 2, 5, 7, 6, 13, 11, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype("float32")
MEMORY = RNG.normal(size=(B, S, E)).astype("float32")
PADDING = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 0]], bool)
MEMORY_PADDING = np.array([[1, 1, 1, 1, 0, 0, 0], [1] * 7], bool)
ACTIVATIONS = {"relu": reference.relu, "gelu": reference.gelu}


def built(cls, *shapes, **arguments):
    layer = cls(num_heads=N, d_ff=F, **{"dropout": 0.0, **arguments})
    layer.build(*((None, None, width) for width in shapes))
    return randomize(layer)


def masked(array, mask):
    tensor = ops.convert_to_tensor(np.where(mask[..., None], array, -9.0).astype("float32"))
    return keras.layers.Masking(-9.0)(tensor)


class TestTruth:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_feed_forward(self, activation):
        layer = FeedForward(F, activation)
        layer.build((None, None, D))
        randomize(layer)
        close(numpy(layer(X)), reference.feed_forward(X, weights_of(layer), ACTIVATIONS[activation]))

    @pytest.mark.parametrize("activation, norm_first", [("relu", False), ("gelu", True)])
    def test_encoder_block(self, activation, norm_first):
        layer = built(TransformerEncoderBlock, D, activation=activation, norm_first=norm_first)
        arguments = ACTIVATIONS[activation], norm_first
        expected = reference.encoder_block(X, weights_of(layer), N, PADDING[:, None], *arguments)
        close(numpy(layer(X, padding_mask=PADDING)), expected)

    @pytest.mark.parametrize("activation, norm_first", [("relu", False), ("gelu", True)])
    @pytest.mark.parametrize("memory", [MEMORY, None])
    def test_decoder_block(self, activation, norm_first, memory):
        shapes = (D,) if memory is None else (D, E)
        layer = built(TransformerDecoderBlock, *shapes, activation=activation, norm_first=norm_first)
        mask = None if memory is None else MEMORY_PADDING
        arguments = None if mask is None else mask[:, None], ACTIVATIONS[activation], norm_first
        expected = reference.decoder_block(X, memory, weights_of(layer), N, *arguments)
        close(numpy(layer(X, memory=memory, memory_padding_mask=mask)), expected)

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_stacks(self, norm_first):
        encoder = built(TransformerEncoder, D, num_layers=2, norm_first=norm_first)
        decoder = built(TransformerDecoder, D, D, num_layers=2, norm_first=norm_first)
        memory, x = X[:, :3], X
        for i in range(2):
            weights = reference.within(weights_of(encoder), f"block_{i}")
            memory = reference.encoder_block(memory, weights, N, norm_first=norm_first)
        if norm_first:
            memory = reference.layer_norm(memory, weights_of(encoder), "final_norm")
        close(numpy(encoder(X[:, :3])), memory)
        for i in range(2):
            weights = reference.within(weights_of(decoder), f"block_{i}")
            x = reference.decoder_block(x, memory, weights, N, norm_first=norm_first)
        if norm_first:
            x = reference.layer_norm(x, weights_of(decoder), "final_norm")
        close(numpy(decoder(X, memory=memory.astype("float32"))), x)


class TestParameters:
    """`build` alone makes every weight."""

    @pytest.mark.parametrize("layers, extra", [(1, 0), (3, 32)])
    def test_counts(self, layers, extra):
        shape = (None, None, 16)
        arguments = {"num_layers": layers, "num_heads": 2, "d_ff": 32, "norm_first": bool(extra)}
        encoder, decoder = TransformerEncoder(**arguments), TransformerDecoder(**arguments)
        encoder.build(shape)
        decoder.build(shape, shape)
        assert encoder.count_params() == 2224 * layers + extra
        assert decoder.count_params() == 3344 * layers + extra
        decoder_only = TransformerDecoder(**arguments)
        decoder_only.build(shape)
        assert decoder_only.count_params() == 2224 * layers + extra

    def test_counts_in_a_functional_model(self):
        x, memory = keras.Input((None, 16)), keras.Input((None, 16))
        encoded = TransformerEncoderBlock(2, 32)(memory)
        model = keras.Model([x, memory], TransformerDecoderBlock(2, 32)(x, memory=encoded))
        assert model.count_params() == 2224 + 3344

    def test_counts_and_order_last(self, tmp_path):
        """In the summary, after `fit`, and after reloading."""
        x = keras.Input((None, 16))
        model = keras.Model(x, TransformerEncoderBlock(2, 32)(x))
        paths = [weight.path for weight in model.weights]
        lines = []
        model.summary(print_fn=lines.append)
        assert "2,224" in "".join(map(str, lines))
        model.compile("sgd", "mse")
        data = RNG.normal(size=(2, 3, 16)).astype("float32")
        model.fit(data, data, verbose=0)
        model.save(tmp_path / "model.keras")
        for one in (model, keras.saving.load_model(tmp_path / "model.keras")):
            assert one.count_params() == 2224
            assert [weight.path for weight in one.weights] == paths

    def test_the_defaults_are_the_base_model(self):
        encoder, decoder = TransformerEncoder(), TransformerDecoder()
        for stack in (encoder, decoder):
            assert (len(stack.blocks), stack.num_heads, stack.d_ff, stack.dropout) == (6, 8, 2048, 0.1)
            assert (stack.norm_first, stack.final_norm) == (False, None)


class TestMasks:
    def test_the_mask_lasts_from_embedding_to_head(self):
        ids = np.array([[3, 1, 4, 0, 0], [5, 0, 2, 6, 0]], "int32")
        embedding = TokenEmbedding(7, D)
        x = SinusoidalPositionalEncoding()(embedding(ids))
        memory = TransformerEncoder(2, N, F, dropout=0.0)(x)
        output = TransformerDecoder(2, N, F, dropout=0.0)(x, memory=memory)
        logits = embedding(FeedForward(F)(output), reverse=True)
        for tensor in (x, memory, output, logits):
            np.testing.assert_array_equal(numpy(implicit_mask(tensor)), ids != 0)

    @pytest.mark.parametrize("norm_first", [False, True])
    def test_implicit_equals_explicit_in_every_block(self, norm_first):
        encoder = built(TransformerEncoder, D, num_layers=2, norm_first=norm_first)
        decoder = built(TransformerDecoder, D, E, num_layers=2, norm_first=norm_first)
        x, memory = masked(X, PADDING), masked(MEMORY, MEMORY_PADDING)
        plain_x, plain_memory = numpy(x), numpy(memory)
        close(numpy(encoder(x)), numpy(encoder(plain_x, padding_mask=PADDING)))
        close(
            numpy(decoder(x, memory=memory)),
            numpy(decoder(plain_x, memory=plain_memory, padding_mask=PADDING, memory_padding_mask=MEMORY_PADDING)),
        )
        everything = np.ones((B, T), bool)
        close(numpy(encoder(x, padding_mask=everything)), numpy(encoder(plain_x)))
        np.testing.assert_array_equal(numpy(implicit_mask(memory)), MEMORY_PADDING)

    def test_a_block_in_the_middle_sees_the_padding(self):
        """Noise in padded positions changes no real position, two residuals later."""
        encoder = built(TransformerEncoder, D, num_layers=3)
        noise = np.where(PADDING[..., None], X, X + 30)
        expected = numpy(encoder(X, padding_mask=PADDING))
        close(numpy(encoder(noise, padding_mask=PADDING))[PADDING], expected[PADDING], 1e-5)

    def test_attention_mask_joins_the_padding_mask(self):
        encoder = built(TransformerEncoder, D, num_layers=2)
        band = np.abs(np.arange(T)[:, None] - np.arange(T)) < 2
        both = band[None] & PADDING[:, None]
        close(
            numpy(encoder(X, padding_mask=PADDING, attention_mask=band[None])),
            numpy(encoder(X, attention_mask=both)),
        )

    def test_a_wholly_padded_row(self):
        """Finite, and without effect on the other row's outputs and gradients."""
        x = np.random.default_rng(3).normal(size=(2, 4, 8)).astype("float32")
        mask = np.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)
        encoder = TransformerEncoder(2, 2, 11, dropout=0.0)
        encoder.build(x.shape)
        run = quick(lambda x: encoder(x))

        def loss(y):
            return ops.mean(ops.square(y[0, :3]))

        output, both = checks.outputs_and_gradients(encoder, loss, x, padding_mask=mask)
        output = numpy(output)
        assert np.isfinite(output).all()
        close(output[0, :3], numpy(run(x[:1, :3]))[0], 1e-5)
        alone = checks.gradients(encoder, loss, x[:1], padding_mask=mask[:1])
        largest = max(np.abs(gradient).max() for gradient in alone)
        for one, two in zip(both, alone, strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6 * largest)

    @pytest.mark.parametrize("policy", ["float16", "bfloat16"])
    def test_a_wholly_padded_row_in_half_precision(self, policy):
        x = np.random.default_rng(3).normal(size=(2, 4, 8)).astype("float32")
        mask = np.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)
        encoder = TransformerEncoder(1, 2, 11, dropout=0.0, dtype=policy)
        encoder.build(x.shape)

        def loss(y):
            return ops.mean(ops.square(ops.cast(y, "float32")[0, :3]))

        output, gradients = checks.outputs_and_gradients(encoder, loss, x, padding_mask=mask)
        assert np.isfinite(numpy(output)).all()
        assert all(np.isfinite(gradient).all() for gradient in gradients)


class TestWeights:
    def test_of_each_block(self):
        encoder = built(TransformerEncoder, D, num_layers=2)
        decoder = built(TransformerDecoder, D, E, num_layers=2)
        output, weights = numpy(encoder(X, padding_mask=PADDING, return_weights=True))
        close(output, numpy(encoder(X, padding_mask=PADDING)))
        assert [w.shape for w in weights] == [(B, N, T, T)] * 2
        arguments = {"memory": MEMORY, "memory_padding_mask": MEMORY_PADDING}
        output, weights = numpy(decoder(X, **arguments, return_weights=True))
        close(output, numpy(decoder(X, **arguments)))
        for own, cross in weights:
            assert own.shape == (B, N, T, T) and np.all(np.triu(own, 1) == 0)
            assert cross.shape == (B, N, T, S) and np.all(cross[0, ..., 4:] == 0)
            close(own.sum(-1), np.ones((B, N, T)), 1e-6)
            close(cross.sum(-1), np.ones((B, N, T)), 1e-6)


class TestCache:
    @pytest.mark.parametrize(
        "form, with_memory", [("append", True), ("scalar", True), ("rows", True), ("scalar", False)]
    )
    def test_equals_no_cache(self, form, with_memory):
        """A first part, then token by token."""
        decoder = built(TransformerDecoder, *((D, E) if with_memory else (D,)), num_layers=2, norm_first=True)
        memory = {"memory": MEMORY, "memory_padding_mask": MEMORY_PADDING} if with_memory else {}
        expected = numpy(decoder(X, **memory))
        if with_memory:
            memory = {"memory_cache": decoder.project_memory(MEMORY), "memory_padding_mask": MEMORY_PADDING}
        cache = decoder.init_cache(B, 0 if form == "append" else T + 2)
        step = quick(lambda x, cache, start: decoder(x, cache=cache, start=start, **memory))
        outputs = []
        for start, stop in ((0, 3), (3, 4), (4, 5)):
            first = {
                "append": None,
                "scalar": ops.convert_to_tensor(start, "int32"),
                "rows": ops.convert_to_tensor([start, start], "int32"),
            }[form]
            output, cache = step(X[:, start:stop], cache, first)
            outputs.append(numpy(output))
        close(np.concatenate(outputs, 1), expected)

    def test_returns_weights_between_output_and_cache(self):
        decoder = built(TransformerDecoder, D, E, num_layers=2)
        cache = decoder.init_cache(B, S)
        _, weights, written = decoder(X, memory=MEMORY, cache=cache, start=0, return_weights=True)
        assert [[tuple(w.shape) for w in pair] for pair in weights] == [[(B, N, T, S), (B, N, T, S)]] * 2
        keras.tree.assert_same_structure(written, cache)

    def test_symbolic_cache(self):
        decoder = built(TransformerDecoder, D, E, num_layers=2)
        for slots, start, written in ((None, None, None), (3, None, 4), (S, 2, S)):
            spec = keras.KerasTensor((B, slots, N, D // N))
            output, weights, cache = decoder(
                keras.KerasTensor((B, 1, D)),
                memory_cache=((keras.KerasTensor((B, S, N, D // N)),) * 2,) * 2,
                cache=((spec, spec),) * 2,
                start=start,
                return_weights=True,
            )
            assert output.shape == (B, 1, D)
            assert [[w.shape for w in pair] for pair in weights] == [[(B, N, 1, written), (B, N, 1, S)]] * 2
            assert [[c.shape for c in pair] for pair in cache] == [[(B, written, N, D // N)] * 2] * 2

    def test_init_cache_has_the_compute_dtype(self):
        decoder = TransformerDecoder(1, N, F, dtype="mixed_bfloat16")
        decoder.build((None, None, D))
        dtypes = {keras.backend.standardize_dtype(part.dtype) for part in decoder.init_cache(B, T)[0]}
        assert dtypes == {"bfloat16"}


class TestLaws:
    def test_the_decoder_is_causal(self):
        decoder = built(TransformerDecoder, D, E, num_layers=2)
        run = quick(lambda x: decoder(x, memory=MEMORY))
        output = numpy(run(X))
        for position in range(T):
            changed = X.copy()
            changed[:, position] += RNG.normal(size=D)
            other = numpy(run(changed))
            close(other[:, :position], output[:, :position], 1e-6)
            assert np.all(np.abs(other[:, position] - output[:, position]).max(-1) > 1e-4)

    def test_padding_changes_nothing(self):
        encoder = built(TransformerEncoder, D, num_layers=2)
        padded = np.concatenate([X, 9 * np.ones((B, 3, D), "float32")], 1)
        mask = np.repeat(np.arange(T + 3)[None] < T, B, 0)
        close(numpy(encoder(padded, padding_mask=mask))[:, :T], numpy(encoder(X)), 1e-5)


class TestRefuses:
    def test_a_missing_or_unexpected_memory(self):
        with_memory, without = built(TransformerDecoderBlock, D, E), built(TransformerDecoderBlock, D)
        with pytest.raises(ValueError, match="`memory` and `memory_cache`.*neither"):
            with_memory(X)
        with pytest.raises(ValueError, match="built without a memory"):
            without(X, memory=MEMORY)
        with pytest.raises(ValueError, match="built without a memory"):
            without(keras.KerasTensor((B, T, D)), memory=keras.KerasTensor((B, S, E)))

    def test_caches_that_are_not_one_for_each_block(self):
        decoder = TransformerDecoder(2, N, F)
        with pytest.raises(ValueError, match="not built"):
            decoder.init_cache(B, T)
        decoder.build((None, None, D), (None, None, E))
        cache, memory_cache = decoder.init_cache(B, T), decoder.project_memory(MEMORY)
        for kwargs in ({"cache": cache[:1], "start": 0}, {"cache": cache[0], "start": 0}, {"cache": cache * 2}):
            with pytest.raises(ValueError, match="`cache` must hold a pair|`cache` must be a pair"):
                decoder(X, memory_cache=memory_cache, **kwargs)
        for wrong in (memory_cache[:1], memory_cache * 2):
            with pytest.raises(ValueError, match="`memory_cache` must hold a pair"):
                decoder(X, memory_cache=wrong)
        with pytest.raises(ValueError, match="`start` needs a `cache`"):
            decoder(X, memory_cache=memory_cache, start=0)

    def test_masks(self):
        decoder = built(TransformerDecoderBlock, D, E)
        with pytest.raises(ValueError, match="memory_padding_mask.dtype=float32"):
            decoder(X, memory=MEMORY, memory_padding_mask=np.ones((B, S), "float32"))
        x, memory = keras.KerasTensor((B, T, D)), keras.KerasTensor((B, S, E))
        with pytest.raises(ValueError, match="padding_mask.shape=\\(2, 5\\)"):
            decoder(x, memory=memory, memory_padding_mask=keras.KerasTensor((B, T), "bool"))
        with pytest.raises(ValueError, match="padding_mask.shape=\\(2, 7\\)"):
            built(TransformerEncoderBlock, D)(x, padding_mask=keras.KerasTensor((B, S), "bool"))

    @pytest.mark.parametrize("cls", [TransformerEncoder, TransformerDecoder])
    def test_arguments(self, cls):
        with pytest.raises(ValueError, match="norm_epsilon=-1"):
            cls(norm_epsilon=-1)
        with pytest.raises(ValueError, match="num_layers=0"):
            cls(num_layers=0)
        with pytest.raises(ValueError, match="d_ff=0"):
            cls(d_ff=0)
        with pytest.raises(ValueError, match="num_heads=4, width 6"):
            cls(num_heads=4).build((None, None, 6))


@pytest.mark.backends("torch")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # of Keras' own dtype rules
@pytest.mark.parametrize("cls", [TransformerEncoder, TransformerDecoder])
def test_torch_compile_takes_a_stack_as_one_graph(cls):
    """A break splits the compiled code, until torch's limit of recompilations leaves the rest uncompiled."""
    import torch

    layer = cls(num_layers=1, num_heads=N, d_ff=F, dropout=0.1)
    layer.build((None, None, D))
    x, padding_mask = ops.convert_to_tensor(X), ops.convert_to_tensor(PADDING)
    explained = torch._dynamo.explain(lambda x: layer(x, padding_mask=padding_mask, training=True))(x)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons


@pytest.mark.parametrize("cls", [TransformerEncoderBlock, TransformerEncoder, TransformerDecoder])
def test_training_reaches_the_dropouts_however_the_layer_is_called(cls):
    layer = built(cls, D, dropout=0.5)

    class Outer(keras.layers.Layer):
        def call(self, x, training=None):
            return layer(x)

    outer = Outer()
    inference = numpy(layer(X))
    close(numpy(layer(X, training=False)), inference)
    close(numpy(layer.call(ops.convert_to_tensor(X), training=False)), inference)
    close(numpy(outer(X, training=False)), inference)
    for output in (
        layer(X, training=True),
        layer.call(ops.convert_to_tensor(X), training=True),  # without Keras' call context, as `stateless_call` does
        outer(X, training=True),
    ):
        assert np.abs(numpy(output) - inference).max() > 0.1
