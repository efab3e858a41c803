"""Token embeddings, forwards and reversed, and sinusoidal positions."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.layers import SinusoidalPositionalEncoding, TokenEmbedding, TransformerEncoder
from tests import checks, reference
from tests.checks import close, implicit_mask, numpy

IDS = np.array([[3, 1, 4, 0, 0], [5, 0, 2, 6, 0]], "int32")


class TestTokenEmbedding:
    @pytest.mark.parametrize("scale", [False, True])
    def test_looks_up_and_scales(self, scale):
        layer = TokenEmbedding(7, 11, scale=scale)
        output = numpy(layer(IDS))
        close(output, numpy(layer.embeddings.value)[IDS] * (11**0.5 if scale else 1), 1e-6)

    def test_reversed_gives_logits_by_the_same_table(self):
        layer = TokenEmbedding(7, 11)
        x = np.random.default_rng(0).normal(size=(2, 5, 11)).astype("float32")
        layer.build()
        close(numpy(layer(x, reverse=True)), x @ numpy(layer.embeddings.value).T, 1e-6)
        assert layer.count_params() == 77
        spec = layer(keras.KerasTensor((None, None, 11)), reverse=True)
        assert spec.shape == (None, None, 7) and spec.dtype == "float32"

    def test_both_uses_train_the_table(self):
        class Tied(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.embedding = TokenEmbedding(7, 3)

            def build(self, shape):
                self.embedding.build(shape)

            def call(self, ids):
                return self.embedding(self.embedding(ids), reverse=True)

        layer = Tied()
        layer.build((None, None))
        (gradient,) = checks.gradients(layer, lambda y: ops.sum(y * y), np.array([[1, 2]], "int32"))
        assert np.all(np.abs(gradient).max(-1) > 0)

    def test_default_initializer_gives_unit_variance(self):
        layer = TokenEmbedding(500, 64)
        # 32000 draws: the deviation's own deviation is 0.004.
        assert abs(numpy(layer(np.arange(500)[None])).std() - 1) < 0.02

    def test_mask(self):
        layer = TokenEmbedding(7, 11)
        output = layer(IDS)
        np.testing.assert_array_equal(numpy(implicit_mask(output)), IDS != 0)
        np.testing.assert_array_equal(numpy(implicit_mask(layer(output, reverse=True))), IDS != 0)
        assert implicit_mask(TokenEmbedding(7, 11, mask_zero=False)(IDS)) is None

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
    def test_integer_dtypes(self, dtype):
        layer = TokenEmbedding(7, 11)
        close(numpy(layer(IDS.astype(dtype))), numpy(layer(IDS)), 0)

    @pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
    def test_float_ids_are_cast_before_anything_rounds_them(self, policy):
        layer = TokenEmbedding(5003, 3, dtype=policy)
        ids = np.array([[0, 4999, 5002]])  # float16 counts to 2048
        output = layer(ids.astype("float32"))
        np.testing.assert_array_equal(numpy(output), numpy(layer(ids)))
        np.testing.assert_array_equal(numpy(implicit_mask(output)), ids != 0)

    def test_a_users_model_reloads(self, tmp_path):
        class Tagger(keras.Model):
            """Keras rebuilds it from its input shape alone, by a call on floats."""

            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.embedding = TokenEmbedding(7, 11)
                self.head = keras.layers.Dense(3)

            def call(self, token_ids):
                return self.head(self.embedding(token_ids))

        model = Tagger()
        expected = numpy(model(IDS))
        model.save(tmp_path / "tagger.keras")
        loaded = keras.saving.load_model(tmp_path / "tagger.keras", custom_objects={"Tagger": Tagger})
        close(numpy(loaded(IDS)), expected, 1e-6)

    def test_refuses(self):
        with pytest.raises(ValueError, match="must be integers.*bool"):
            TokenEmbedding(7, 11)(IDS.astype("bool"))
        with pytest.raises(ValueError, match="x.shape=\\(2, 3, 5\\)"):
            TokenEmbedding(7, 11)(np.zeros((2, 3, 5), "float32"), reverse=True)
        with pytest.raises(ValueError, match="vocabulary_size=0"):
            TokenEmbedding(0, 11)
        with pytest.raises(ValueError, match="d_model=-1"):
            TokenEmbedding(7, -1)


class TestSinusoidalPositions:
    @pytest.mark.parametrize("width", [1, 3, 5, 8, 29])
    def test_adds_the_encoding_at_any_width(self, width):
        """Odd widths among them."""
        x = np.random.default_rng(0).normal(size=(2, 17, width)).astype("float32")
        expected = x + reference.sinusoidal_encoding(np.arange(17), width)
        close(numpy(SinusoidalPositionalEncoding()(x)), expected, 2e-6)

    def test_published_values(self):
        output = numpy(SinusoidalPositionalEncoding()(np.zeros((1, 3, 5), "float32")))[0]
        close(output[0], np.array([0, 1, 0, 1, 0.0]), 1e-6)
        close(output[1], np.array([0.841471, 0.540302, 0.025116, 0.999685, 0.000631]), 1e-6)

    def test_positions_may_be_given(self):
        layer = SinusoidalPositionalEncoding(max_wavelength=500)
        x = np.zeros((2, 3, 7), "float32")
        positions = np.array([[4, 5, 6], [70000, 70001, 70002]], "int32")
        close(numpy(layer(x, positions=positions)), reference.sinusoidal_encoding(positions, 7, 500), 2e-6)
        close(numpy(layer(x, positions=positions[:1])), reference.sinusoidal_encoding(positions[[0, 0]], 7, 500), 2e-6)

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
    def test_is_computed_in_float32_under_every_policy(self, policy):
        positions = np.array([[0, 257, 2049, 65537]], "int32")
        layer = SinusoidalPositionalEncoding(dtype=policy)
        output = layer(np.zeros((1, 4, 8), "float32"), positions=positions)
        assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
        # Rounded once: half a unit in the last place below 1.
        tolerance = 2**-9 if "bfloat16" in policy else 2**-12
        close(numpy(output), reference.sinusoidal_encoding(positions, 8), tolerance + 1e-6)

    def test_has_no_longest_length_and_keeps_the_mask(self):
        x = TokenEmbedding(7, 3)(IDS)
        np.testing.assert_array_equal(numpy(implicit_mask(SinusoidalPositionalEncoding()(x))), IDS != 0)
        long = numpy(SinusoidalPositionalEncoding()(np.zeros((1, 9001, 3), "float32")))
        close(long[0], reference.sinusoidal_encoding(np.arange(9001), 3), 1e-6)

    def test_an_encoder_of_odd_width_reloads(self, tmp_path):
        x = keras.Input((None, 5))
        model = keras.Model(x, TransformerEncoder(1, 1, 7)(SinusoidalPositionalEncoding()(x)))
        model.save(tmp_path / "model.keras")
        batch = np.random.default_rng(0).normal(size=(2, 3, 5)).astype("float32")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        close(numpy(loaded(batch)), numpy(model(batch)), 1e-6)

    @pytest.mark.parametrize("value", [0, -3, "a", None])
    def test_refuses_a_wavelength_that_is_none(self, value):
        with pytest.raises(ValueError, match="max_wavelength="):
            SinusoidalPositionalEncoding(max_wavelength=value)

    def test_refuses_what_does_not_fit(self):
        layer, x = SinusoidalPositionalEncoding(), np.zeros((2, 5, 3), "float32")
        for positions in (np.arange(5), np.zeros((2, 4), int), np.zeros((3, 5), int), np.zeros((1, 5), "float32")):
            with pytest.raises(ValueError, match="`positions` must be integers"):
                layer(x, positions=ops.convert_to_tensor(positions))
        with pytest.raises(ValueError, match="x.shape=\\(5, 3\\)"):
            layer(x[0])
