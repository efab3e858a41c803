"""Every layer and model passes the shared checks, and reloads in a fresh process."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import layers, losses, models
from tests import checks
from tests.checks import Case, HeadCase, ModelCase, numpy, weights_of

B, T, S, D, E, V = 3, 5, 7, 6, 13, 11


def floats(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def ids(*shape, seed=0):
    """Ids of which the second row ends in padding, and the third is nothing else."""
    made = np.random.default_rng(seed).integers(1, V, shape).astype("int32")
    made[1, 3:], made[2] = 0, 0
    return made


X = {"x": floats(B, T, D)}
WITH_MEMORY = {**X, "memory": floats(B, S, E, seed=1)}
ATTENTION = {
    "num_heads": 2,
    "head_dim": 4,
    "dropout": 0.1,
    "use_bias": False,
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "seed": 3,
    "num_kv_heads": 1,
}
SELF_ATTENTION = {**ATTENTION, "causal": True, "sliding_window": 3}
BLOCK = {
    "num_heads": 2,
    "d_ff": 11,
    "head_dim": 4,
    "num_kv_heads": 2,
    "dropout": 0.2,
    "activation": "gelu",
    "gated": False,
    "norm_first": True,
    "norm": "layer",
    "norm_epsilon": 1e-5,
    "use_bias": True,
    "sliding_window": None,
    "kernel_initializer": "he_normal",
}
# As Llama and Mistral have it.
LLAMA = {"num_kv_heads": 1, "activation": "silu", "gated": True, "norm": "rms", "use_bias": False, "sliding_window": 3}
STACK = {**BLOCK, "num_layers": 2}
TRANSFORMER = {
    "source_vocabulary_size": V,
    "target_vocabulary_size": V,
    "num_layers": 1,
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 11,
    "dropout": 0.25,
    "activation": "gelu",
    "norm_first": True,
    "share_embeddings": True,
    "tie_output": False,
    "max_length": 17,
    "start_id": 3,
    "end_id": 4,
    "pad_id": 0,
    "num_decoder_layers": 2,
    "norm_epsilon": 1e-5,
    "position_encoding": "sinusoidal",
    "scale_embedding": True,
    "embedding_norm": False,
    "output_bias": False,
    "seed": 5,
}
TOKENS = {"source": ids(B, S), "target": ids(B, T, seed=1)}

WEIGHTS = {"return_weights": True}
OWN, BOTH = {"x": "padding_mask"}, {"x": "padding_mask", "memory": "memory_padding_mask"}
LAYERS = {
    "self-attention": Case(layers.MultiHeadSelfAttention, SELF_ATTENTION, X, masks=OWN),
    "self-attention, weights": Case(layers.MultiHeadSelfAttention, SELF_ATTENTION, X, WEIGHTS, OWN),
    "cross-attention": Case(layers.CrossAttention, ATTENTION, WITH_MEMORY, masks={"x": None, "memory": "padding_mask"}),
    "cross-attention, weights": Case(layers.CrossAttention, ATTENTION, WITH_MEMORY, WEIGHTS, carries=None),
    "single-head attention": Case(
        layers.SelfAttention,
        {"d_k": 7, "d_v": 3, "causal": True, "use_bias": True, "kernel_initializer": "he_normal"},
        X,
        masks=OWN,
    ),
    "feed-forward": Case(
        layers.FeedForward,
        {"d_ff": 11, "activation": "gelu", "gated": True, "use_bias": False, "kernel_initializer": "he_normal"},
        X,
        masks={"x": None},
    ),
    "encoder block": Case(layers.TransformerEncoderBlock, BLOCK, X, masks=OWN),
    "decoder block": Case(layers.TransformerDecoderBlock, BLOCK, WITH_MEMORY, masks=BOTH),
    "decoder block without memory": Case(layers.TransformerDecoderBlock, {**BLOCK, **LLAMA}, X, WEIGHTS, carries=None),
    "encoder": Case(layers.TransformerEncoder, STACK, X, WEIGHTS, OWN),
    "Llama's encoder": Case(layers.TransformerEncoder, {**STACK, **LLAMA}, X, masks=OWN),
    "decoder": Case(layers.TransformerDecoder, STACK, WITH_MEMORY, WEIGHTS, BOTH),
    "Llama's encoder block": Case(layers.TransformerEncoderBlock, {**BLOCK, **LLAMA}, X, masks=OWN),
    "Llama's decoder": Case(layers.TransformerDecoder, {**STACK, **LLAMA}, X, masks=OWN),
    "token embedding": Case(
        layers.TokenEmbedding,
        {
            "vocabulary_size": V,
            "d_model": 6,
            "scale": False,
            "mask_zero": False,
            "embeddings_initializer": "he_normal",
        },
        {"x": ids(B, T)},
        carries=None,
    ),
    "sinusoidal positions": Case(
        layers.SinusoidalPositionalEncoding, {"max_wavelength": 500, "interleaved": False}, X, masks={"x": None}
    ),
    "learned positions": Case(
        layers.LearnedPositionalEncoding,
        {"max_length": 7, "embeddings_initializer": "he_normal"},
        X,
        masks={"x": None},
    ),
    "causal mask": Case(layers.CausalMask, {}, X, masks={"x": None}, carries=None),
}
SIZES = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 11, "head_dim": 4, "num_kv_heads": 2, "dropout": 0.2}
CAUSAL_LM = {
    **{name: value for name, value in BLOCK.items() if name != "kernel_initializer"},
    **SIZES,
    "norm_epsilon": 1e-4,
    "vocabulary_size": V,
    "position_encoding": "learned",
    "rotary_base": 500,
    "rotary_width": 2,
    "rotary_scaling": {"rope_type": "linear", "factor": 2.0},
    "scale_embedding": True,
    "tie_output": True,
    "max_length": 17,
    "end_id": 4,
    "pad_id": 0,
    "seed": 5,
}
PACKED = {
    "token_ids": ids(B, T),
    "segment_ids": np.array([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]], "int32"),
    "positions": np.array([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3], [0, 1, 2, 3, 4]], "int32"),
}
ENCODER = {
    **{name: value for name, value in BLOCK.items() if name != "kernel_initializer"},
    **SIZES,
    "norm_first": False,
    "vocabulary_size": V,
    "position_encoding": "learned",
    "num_token_types": 2,
    "embedding_norm": True,
    "max_length": 17,
    "pad_id": 0,
    "seed": 5,
}
TYPED = {"token_ids": ids(B, S), "token_types": ids(B, S, seed=1) % 2}
VISION = {
    **{name: value for name, value in BLOCK.items() if name not in ("kernel_initializer", "sliding_window")},
    **SIZES,
    "num_classes": 5,
    "image_size": (6, 8),
    "patch_size": (3, 2),
    "channels": 2,
    "pooling": "cls",
    "seed": 5,
}
IMAGES = {"images": floats(B, 6, 8, 2)}
MODELS = {
    "transformer": ModelCase(models.Transformer, TRANSFORMER, TOKENS, carries="target"),
    "BART": ModelCase(
        models.Transformer,
        {
            **TRANSFORMER,
            "norm_first": False,
            "tie_output": True,
            "position_encoding": "learned",
            "scale_embedding": False,
            "embedding_norm": True,
            "output_bias": True,
        },
        TOKENS,
        carries="target",
    ),
    "GPT-2, post-norm": ModelCase(
        models.CausalLM, {**CAUSAL_LM, "norm_first": False}, {"token_ids": ids(B, S)}, carries=None
    ),
    "Llama": ModelCase(
        models.CausalLM,
        {**CAUSAL_LM, **LLAMA, "position_encoding": "rotary", "tie_output": False, "max_length": None},
        PACKED,
        carries=None,
    ),
    "BERT": ModelCase(models.Encoder, ENCODER, TYPED, carries="token_ids"),
    "pre-norm encoder": ModelCase(
        models.Encoder,
        {
            **ENCODER,
            **LLAMA,
            "norm_first": True,
            "num_token_types": 0,
            "embedding_norm": False,
            "position_encoding": "sinusoidal",
            "max_length": None,
        },
        {"token_ids": ids(B, S)},
        carries="token_ids",
    ),
    "masked LM": HeadCase(models.MaskedLM, {"encoder": ENCODER, "activation": "relu"}, TYPED, carries="token_ids"),
    "token classifier": HeadCase(
        models.TokenClassifier, {"encoder": ENCODER, "num_classes": 3, "dropout": 0.3}, TYPED, carries="token_ids"
    ),
    "classifier": HeadCase(
        models.SequenceClassifier,
        {"encoder": ENCODER, "num_classes": 3, "pooling": "mean", "hidden_activation": "relu", "dropout": 0.3},
        TYPED,
        carries=None,
    ),
    "sentence encoder": HeadCase(
        # Not normalised: of vectors of length 1 the loss of the shared checks is constant, and its gradient rounding.
        models.SentenceEncoder,
        {"encoder": ENCODER, "pooling": "cls", "normalize": False},
        TYPED,
        carries=None,
    ),
    "ViT": ModelCase(models.VisionTransformer, VISION, IMAGES, carries=None, fixed=True),
    "ViT, mean": ModelCase(
        models.VisionTransformer,
        {
            **VISION,
            **{name: value for name, value in LLAMA.items() if name != "sliding_window"},
            "norm_first": False,
            "pooling": "mean",
            "num_classes": None,
        },
        IMAGES,
        carries=None,
        fixed=True,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_pass_the_shared_checks(name, tmp_path):
    checks.check_layer(LAYERS[name], tmp_path)


# One of each kind where shapes are compiled; the rest differ in settings of layers that have been checked there.
ONE_OF_EACH = ("transformer", "Llama", "BERT", "sentence encoder", "ViT")


@pytest.mark.parametrize(
    "name", [name if name in ONE_OF_EACH else pytest.param(name, marks=pytest.mark.once) for name in MODELS]
)
def test_models_pass_the_shared_checks(name, tmp_path):
    checks.check_model(MODELS[name], tmp_path)


def test_every_argument_is_tried_with_another_value_than_its_default():
    cases = [*LAYERS.values(), *MODELS.values()]
    for cls in {case.cls for case in cases}:
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            # Implicit masks mean id 0, so that a case has no other padding.
            if name not in ("self", "kwargs", "pad_id"):
                values = [case.config[name] for case in cases if case.cls is cls]
                assert any(value != parameter.default for value in values), (cls.__name__, name)


@pytest.mark.parametrize("module, cases", [(layers, LAYERS), (models, MODELS)], ids=["layers", "models"])
def test_everything_public_is_checked(module, cases):
    assert {case.cls.__name__ for case in cases.values()} == set(module.__all__)


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """By case, what a new process found in the saved models, and what it had to find."""
    saved = {name: (case.saved(case.make()), case.arguments, None) for name, case in {**LAYERS, **MODELS}.items()}
    saved["made of layers"] = made_of_layers(), TOKENS, None
    trained = models.Transformer(**{**TRANSFORMER, "dropout": 0.0})
    trained.compile(keras.optimizers.Adam(0.01), losses.MaskedCrossentropy())
    trained.optimizer.build(trained.trainable_variables)
    for number, variable in enumerate(trained.optimizer.variables):
        variable.assign(ops.full(variable.shape, number + 3, variable.dtype))  # other values than a new one has
    saved["trained"] = trained, TOKENS, TOKENS["target"]
    return checks.reload(saved, tmp_path_factory.mktemp("saved"))


def made_of_layers():
    """Implicit masks throughout, and an embedding that is used for three things."""
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    embedding, positions = layers.TokenEmbedding(V, 12), layers.SinusoidalPositionalEncoding()
    arguments = {"num_layers": 1, "num_heads": 3, "d_ff": 11}
    memory = layers.TransformerEncoder(**arguments)(positions(embedding(source)))
    output = layers.TransformerDecoder(**arguments)(positions(embedding(target)), memory=memory)
    return keras.Model({"source": source, "target": target}, embedding(output, reverse=True))


@pytest.mark.once  # elsewhere test_reloading.py has some of them
@pytest.mark.parametrize("name", [*LAYERS, *MODELS, "made of layers", "trained"])
def test_everything_reloads_in_a_fresh_process(name, reloaded):
    """Also into a model that was made from the config alone; with the optimizer's state, so that training goes on."""
    found, wanted = reloaded[name]
    assert set(found) == set(wanted)
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=1e-6, atol=1e-6, err_msg=key)


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
    columns = np.concatenate([value for name, value in weights_of(layer).items() if name.endswith("kernel")], axis=1)
    assert len(np.unique(columns, axis=1).T) == columns.shape[1] == 4 * 6


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
