"""Every layer passes the shared checks, reloads in a fresh process, and trains the same compiled and not."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_transformer import layers
from tests import checks
from tests.checks import numpy

B, T, S, D, E = 2, 5, 7, 6, 13


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


X = {"x": floats(B, T, D)}
WITH_MEMORY = {**X, "memory": floats(B, S, E)}
ATTENTION = {
    "num_heads": 3,
    "head_dim": 4,
    "dropout": 0.1,
    "use_bias": False,
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "seed": 3,
}
BLOCK = {
    "num_heads": 3,
    "d_ff": 11,
    "head_dim": 4,
    "dropout": 0.2,
    "activation": "gelu",
    "norm_first": True,
    "layer_norm_epsilon": 1e-5,
    "kernel_initializer": "he_normal",
}
STACK = {**BLOCK, "num_layers": 2}
CASES = {
    "self-attention": (layers.MultiHeadSelfAttention, {**ATTENTION, "causal": True}, X, {}),
    "self-attention, weights": (
        layers.MultiHeadSelfAttention,
        {**ATTENTION, "causal": True},
        X,
        {"return_weights": True},
    ),
    "cross-attention": (layers.CrossAttention, ATTENTION, WITH_MEMORY, {}),
    "cross-attention, weights": (layers.CrossAttention, ATTENTION, WITH_MEMORY, {"return_weights": True}),
    "feed-forward": (
        layers.FeedForward,
        {"d_ff": 11, "activation": "gelu", "kernel_initializer": "he_normal"},
        X,
        {},
    ),
    "encoder block": (layers.TransformerEncoderBlock, BLOCK, X, {}),
    "decoder block": (layers.TransformerDecoderBlock, BLOCK, WITH_MEMORY, {}),
    "decoder block without memory": (layers.TransformerDecoderBlock, BLOCK, X, {"return_weights": True}),
    "encoder": (layers.TransformerEncoder, STACK, X, {"return_weights": True}),
    "decoder": (layers.TransformerDecoder, STACK, WITH_MEMORY, {"return_weights": True}),
    "token embedding": (
        layers.TokenEmbedding,
        {
            "vocabulary_size": 11,
            "d_model": 6,
            "scale": False,
            "mask_zero": False,
            "embeddings_initializer": "he_normal",
        },
        {"x": np.random.default_rng(0).integers(0, 11, (B, T)).astype("int32")},
        {},
    ),
    "sinusoidal positions": (layers.SinusoidalPositionalEncoding, {"max_wavelength": 500}, X, {}),
    "causal mask": (layers.CausalMask, {}, X, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_checks(name):
    cls, config, inputs, call = CASES[name]
    trainable = cls not in (layers.SinusoidalPositionalEncoding, layers.CausalMask)
    checks.check_layer(cls, config, inputs, call=call, trainable=trainable)


def test_every_public_layer_is_checked():
    assert {case[0].__name__ for case in CASES.values()} == set(layers.__all__)


def translation_model():
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    embedding, positions = layers.TokenEmbedding(17, 12), layers.SinusoidalPositionalEncoding()
    arguments = {"num_layers": 1, "num_heads": 3, "d_ff": 11, "dropout": 0.0}
    memory = layers.TransformerEncoder(**arguments)(positions(embedding(source)))
    output = layers.TransformerDecoder(**arguments)(positions(embedding(target)), memory=memory)
    return keras.Model({"source": source, "target": target}, embedding(output, reverse=True))


def translation_batch():
    rng = np.random.default_rng(5)
    source, target = rng.integers(1, 17, (4, 7)), rng.integers(1, 17, (4, 5))
    source[1, 4:], source[2, 1:], target[1, 3:] = 0, 0, 0
    return {"source": source.astype("int32"), "target": target.astype("int32")}, rng.integers(1, 17, (4, 5))


FRESH_PROCESS = """
import sys
import keras, numpy as np
import keras_transformer.layers
keras.layers.Dense(3), keras_transformer.layers.TransformerEncoder(2, 3, 11)  # other layers were made before
model = keras.saving.load_model(sys.argv[1])
with np.load(sys.argv[2]) as batch:
    output = model.predict({name: batch[name] for name in ("source", "target")}, verbose=0)
    loss = model.train_on_batch({name: batch[name] for name in ("source", "target")}, batch["labels"])
np.savez(sys.argv[3], output=output, loss=loss)
"""


def test_a_trained_model_reloads_in_a_fresh_process(tmp_path):
    model = translation_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs, labels = translation_batch()
    model.train_on_batch(inputs, labels)
    expected = model.predict(inputs, verbose=0)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "batch.npz", **inputs, labels=labels)
    paths = [str(tmp_path / name) for name in ("model.keras", "batch.npz", "result.npz")]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, *paths],
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    loss = model.train_on_batch(inputs, labels)
    with np.load(paths[2]) as result:
        np.testing.assert_allclose(result["output"], expected, atol=1e-6)
        np.testing.assert_allclose(result["loss"], loss, rtol=1e-5)


def test_twin_stacks_keep_their_own_weights(tmp_path):
    """C16: two stacks with default names in one model are saved and loaded apart."""

    def make():
        inputs = [keras.Input((None, 6)) for _ in range(2)]
        return keras.Model(inputs, [layers.TransformerEncoder(2, 3, 11)(x) for x in inputs])

    model = make()
    for name in ("model.keras", "model.weights.h5"):
        path = tmp_path / name
        model.save(path) if name.endswith("keras") else model.save_weights(path)
        layers.TransformerEncoder(1, 3, 11)  # moves the automatic numbering
        other = keras.saving.load_model(path) if name.endswith("keras") else make()
        if not name.endswith("keras"):
            other.load_weights(path)
        for one, two in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(numpy(one.value), numpy(two.value))
    assert not np.array_equal(numpy(model.weights[0].value), numpy(model.weights[len(model.weights) // 2].value))


@pytest.mark.backends("tensorflow", "jax")
def test_compiled_training_has_the_same_losses():
    (inputs, labels), losses = translation_batch(), []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(3)
        model = translation_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=jit_compile)
        losses.append([float(model.train_on_batch(inputs, labels)) for _ in range(2)])
    # Two small steps: rounding differs by a few units in the last place of losses near 3.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][0] != losses[0][1]


@pytest.mark.parametrize(
    "cls, sizes", [(layers.MultiHeadSelfAttention, (3,)), (layers.TransformerEncoderBlock, (3, 5))]
)
def test_dropout_is_live_in_training_only(cls, sizes):
    layer = cls(*sizes, dropout=0.5)
    inference = [numpy(layer(X["x"], training=False)) for _ in range(2)]
    training = [numpy(layer(X["x"], training=True)) for _ in range(2)]
    np.testing.assert_array_equal(*inference)
    assert not np.allclose(*training) and not np.allclose(training[0], inference[0])


def test_an_initializer_instance_makes_different_kernels():
    layer = layers.MultiHeadSelfAttention(2, kernel_initializer=keras.initializers.GlorotNormal())
    layer.build((None, None, 6))
    query, key = numpy(layer.query_dense.kernel.value), numpy(layer.key_dense.kernel.value)
    assert not np.array_equal(query, key)


class TestInUserModels:
    """A user's own layer and model made of ours need no more than Keras' own rules."""

    def test_subclassed_block_reloads(self, tmp_path):
        @keras.saving.register_keras_serializable(package="test_layers")
        class Block(keras.layers.Layer):
            def __init__(self, width, **kwargs):
                super().__init__(**kwargs)
                self.width = width
                self.attention = layers.MultiHeadSelfAttention(2)
                self.feed_forward = layers.FeedForward(width)

            def build(self, shape):
                self.attention.build(shape)
                self.feed_forward.build(shape)

            def call(self, x):
                return self.feed_forward(x + self.attention(x))

            def get_config(self):
                return {**super().get_config(), "width": self.width}

        x = keras.Input((None, 6))
        model = keras.Model(x, Block(5)(x))
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(numpy(loaded(X["x"])), numpy(model(X["x"])), atol=1e-6)
