"""Blocks of users and of ours, and twin models, find every weight in its place in a fresh process and in ONNX."""

import warnings

import keras
import numpy as np
import onnx
import pytest

from keras_transformer.export import export_onnx
from keras_transformer.layers import (
    CrossAttention,
    FeedForward,
    MultiHeadSelfAttention,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
    TransformerDecoder,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from keras_transformer.models import CausalLM, Encoder, SequenceClassifier, VisionTransformer
from tests.arguments import IDS, IMAGES, MEMORY, D, E, F, N, V, X, base_of, same, with_call_argument
from tests.checks import close, numpy, randomize, reload, run_onnx
from tests.forms import flat


@keras.saving.register_keras_serializable("tests")
class TutorialBlock(keras.layers.Layer):
    """The block of the best-known tutorials, of our layers: neither `build` nor `get_config`."""

    def __init__(self, num_heads, d_ff, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.attention = MultiHeadSelfAttention(num_heads)
        self.feed_forward = FeedForward(d_ff)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(rate) for _ in range(2)]

    def call(self, x, training=None):
        x = self.norms[0](x + self.dropouts[0](self.attention(x), training=training))
        return self.norms[1](x + self.dropouts[1](self.feed_forward(x), training=training))


@keras.saving.register_keras_serializable("tests")
class BuiltBlock(TutorialBlock):
    """The same with the `build` that Keras asks for."""

    def build(self, shape):
        for layer in (self.attention, self.feed_forward, *self.norms):
            layer.build(shape)


@keras.saving.register_keras_serializable("tests")
class LouderBlock(TransformerEncoderBlock):
    """A user's subclass of ours, with an argument of its own."""

    def __init__(self, *args, gain=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = gain

    def call(self, x, **kwargs):
        return self.gain * super().call(x, **kwargs)

    def get_config(self):
        return {**super().get_config(), "gain": self.gain}


@keras.saving.register_keras_serializable("tests")
class QuietAttention(MultiHeadSelfAttention):
    """A user's subclass of ours with nothing but a call."""

    def call(self, x, padding_mask=None, mask=None):
        return super().call(x, padding_mask=padding_mask, mask=mask) / 3


@keras.saving.register_keras_serializable("tests")
class Gpt(keras.layers.Layer):
    """A whole decoder-only model as a part of another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.encoding = TokenEmbedding(V, D), SinusoidalPositionalEncoding()
        self.decoder = TransformerDecoder(2, N, F)

    def build(self, shape):
        self.embedding.build(shape)
        self.decoder.build((*shape, D))

    def call(self, ids):
        return self.embedding(self.decoder(self.encoding(self.embedding(ids))), reverse=True)


def twin_stacks():
    """Two separately made stacks of the same sizes, each for an input of its own."""
    inputs = {name: keras.Input((None, D), name=name) for name in "ab"}
    return keras.Model(inputs, [TransformerEncoder(2, N, F)(x) for x in inputs.values()])


def twin_models():
    """Two whole decoder-only models of the same sizes in one parent."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    return keras.Model({"ids": ids}, [Gpt()(ids) for _ in range(2)])


def blocks_of_users():
    x = keras.Input((None, D), name="x")
    layers_ = (TutorialBlock(N, F), BuiltBlock(N, F), LouderBlock(N, F, gain=3.0), QuietAttention(N))
    return keras.Model({"x": x}, [layer(x) for layer in layers_])


def blocks_of_ours():
    """Every layer of ours that takes and gives a sequence."""
    x, memory = keras.Input((None, D), name="x"), keras.Input((None, E), name="memory")
    outputs = [cls(**base_of(cls))(x) for cls in with_call_argument("padding_mask") if cls is not CrossAttention]
    outputs += [cls(**base_of(cls))(x, memory=memory) for cls in with_call_argument("memory_padding_mask")]
    return keras.Model({"x": x, "memory": memory}, [*outputs, CrossAttention(N)(x, memory), FeedForward(F)(x)])


SAVED = (twin_stacks, twin_models, blocks_of_users, blocks_of_ours)
SAVED_INPUTS = {"a": X, "b": 2 * X, "x": X, "memory": MEMORY, "ids": IDS}


def few_trainable_weights():
    """Models with LoRA, and with something frozen, each with inputs by name and labels."""
    sizes = {"num_layers": 1, "d_model": D, "num_heads": N, "d_ff": F, "dropout": 0.0}
    frozen = SequenceClassifier(Encoder(V, **sizes), 3)
    frozen.encoder.trainable = False
    decoder, images = CausalLM(V, **sizes), VisionTransformer(3, (6, 4), 2, 2, **sizes)
    decoder.enable_lora(2, alpha=3.0)
    images.enable_lora(2)
    x = keras.Input((None, D), name="x")
    stack = TransformerEncoder(1, N, F)
    nested = keras.Model({"x": x}, keras.layers.Dense(3)(keras.layers.GlobalMaxPooling1D()(stack(x))))
    stack.trainable = False
    labels = np.array([0, 2, 1])
    return {
        "LoRA": (decoder, {"token_ids": IDS}, np.roll(IDS, -1, 1)),
        "LoRA of images": (images, {"images": IMAGES}, labels),
        "frozen": (frozen, {"token_ids": IDS}, labels),
        "frozen stack": (nested, {"x": X}, labels),
    }


def fitted(model, inputs, labels):
    loss = None if hasattr(model, "default_loss") else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss)
    model.fit(inputs, labels, epochs=2, verbose=0)
    return model, inputs, labels


# Users import the modules of their own classes. Other layers come first, so that automatic numbers differ.
SETUP = """
import warnings
import keras
from tests import test_reloading as users
for _ in range(3):
    users.TransformerEncoder(3, 2, 5).build((None, None, 4)), keras.layers.Dense(3).build((None, 2))
warnings.filterwarnings("ignore", ".build... was called on layer", UserWarning)
"""


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    models = {}
    for seed, make in enumerate(SAVED):
        model = randomize(make(), seed)
        models[make.__name__] = model, {x.name: SAVED_INPUTS[x.name] for x in model.inputs}, None
    models |= {name: fitted(*case) for name, case in few_trainable_weights().items()}
    return reload(models, tmp_path_factory.mktemp("saved"), SETUP)


class TestReloading:
    """Blocks that do not reload, and twin blocks that overwrite each other's weights."""

    @pytest.mark.parametrize("make", SAVED)
    def test_a_fresh_process_finds_every_weight_in_its_place(self, reloaded, make):
        found, wanted = reloaded[make.__name__]
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-6 if "output" in name else 0, err_msg=name)

    @pytest.mark.parametrize("name, trained", [("LoRA", 4), ("LoRA of images", 6), ("frozen", 4), ("frozen stack", 2)])
    def test_training_of_few_weights_goes_on_where_it_was(self, reloaded, name, trained):
        """The low-rank weights are there again, what was frozen is, and the optimizer's state is that of both."""
        found, wanted = reloaded[name]
        assert set(found) == set(wanted)
        # Two moments of each, the number of steps and the learning rate.
        moments = [value for key, value in wanted.items() if key.startswith("optimizer") and value.ndim]
        assert len(moments) == 2 * trained and all(value.any() for value in moments)
        for key, value in wanted.items():
            # A kernel was stored with the product added, which is taken out again: rounded twice.
            tolerance = 0 if "lora" in key or key.startswith("optimizer") else 2e-6
            np.testing.assert_allclose(found[key], value, rtol=0, atol=tolerance, err_msg=key)

    def test_weights_without_lora_leave_it_able_to_learn(self, tmp_path):
        plain, other = (CausalLM(V, 1, D, N, F, dropout=0.0) for _ in range(2))
        plain.save_weights(tmp_path / "m.weights.h5")
        other.enable_lora(2)
        other.load_weights(tmp_path / "m.weights.h5")
        close(numpy(other(IDS)), numpy(plain(IDS)), 1e-6)
        other.compile("adam")
        other.fit(IDS, np.roll(IDS, -1, 1), verbose=0)
        assert np.abs(numpy(other(IDS)) - numpy(plain(IDS))).max() > 1e-6
        other.save_weights(tmp_path / "m.weights.h5")
        plain.load_weights(tmp_path / "m.weights.h5")
        close(numpy(plain(IDS)), numpy(other(IDS)), 1e-6)

    @pytest.mark.parametrize("make", [twin_stacks, twin_models])
    def test_twins_keep_their_own_weights_in_onnx(self, make, tmp_path):
        model = randomize(make())
        inputs = {x.name: SAVED_INPUTS[x.name] for x in model.inputs}
        expected = flat(model(inputs))
        assert np.abs(expected[0] - expected[1]).max() > 0.1
        for optimised in (True, False):
            export_onnx(model, tmp_path / "m.onnx", force=True, verify=False, verbose=False)
            close(run_onnx(tmp_path / "m.onnx", inputs, optimised), expected)
        graph = onnx.load(tmp_path / "m.onnx").graph
        names = [tensor.name for tensor in graph.initializer]
        assert len(set(names)) == len(names)
        stored = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
        # Every weight of either twin, once. A kernel that is only used transposed is stored so.
        for weight in model.weights:
            value = numpy(weight.value)
            found = [x for x in stored if any(same([x], [value_]) for value_ in (value, value.T))]
            assert len(found) == 1, weight.path

    def test_a_block_without_build_reloads_with_the_warning_of_keras_and_with_build_without(self, tmp_path):
        x = keras.Input((None, D))
        for cls, warned in ((TutorialBlock, True), (BuiltBlock, False)):
            model = randomize(keras.Model(x, cls(N, F)(x)))
            model.save(tmp_path / "model.keras")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                loaded = keras.saving.load_model(tmp_path / "model.keras")
            assert any("does not have a `build()` method" in str(w.message) for w in caught) == warned
            close(numpy(loaded(X)), numpy(model(X)), 1e-6)
