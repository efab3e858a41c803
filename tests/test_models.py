"""Models: padding and lengths, presets, half precision, few trainable weights, and graphs at any size."""

import keras
import numpy as np
import onnx
import pytest
from keras import ops

from keras_transformer import layers, models
from keras_transformer.export import export_onnx
from keras_transformer.layers.feed_forward import activation_of
from tests.checks import gradients, numpy, randomize, run_onnx

V, D, N, F, LONGEST = 23, 12, 3, 17, 11
SIZES = {"num_layers": 2, "d_model": D, "num_heads": N, "d_ff": F}
IDS = np.array([[3, 1, 4, 1, 5, 0, 0], [9, 2, 6, 5, 3, 5, 8]], "int32")


def encoder(**arguments):
    return models.Encoder(V, **{**SIZES, "max_length": LONGEST, "seed": 0, **arguments})


def small_models(dropout=0.5):
    """One model of each family."""
    common = {**SIZES, "dropout": dropout, "max_length": LONGEST}
    return {
        "encoder": randomize(models.Encoder(V, **common)),
        "decoder": randomize(models.CausalLM(V, **common)),
        "llama": randomize(
            models.CausalLM(V, **{**common, "max_length": None}, num_kv_heads=1, position_encoding="rotary", norm="rms")
        ),
        "classifier": randomize(models.SequenceClassifier(models.Encoder(V, **common), 4)),
    }


class TestPadding:
    @pytest.mark.parametrize("norm_first", [False, True])
    def test_padding_changes_nothing_wherever_it_stands(self, norm_first):
        model = randomize(encoder(norm_first=norm_first, position_encoding=None))
        alone = numpy(model(IDS[:1, :5]))[0]
        right = numpy(model(IDS))[0, :5]
        left = numpy(model(np.roll(IDS[:1], 2, axis=1)))[0, 2:]
        np.testing.assert_allclose(right, alone, atol=1e-5)
        np.testing.assert_allclose(left, alone, atol=1e-5)

    @pytest.mark.parametrize("pooling", ["mean", "cls"])
    def test_a_text_is_the_same_in_any_batch(self, pooling):
        inner = encoder()
        for model in (
            models.SentenceEncoder(inner, pooling=pooling),
            models.SequenceClassifier(inner, 3, pooling=pooling),
        ):
            randomize(model)
            np.testing.assert_allclose(numpy(model(IDS))[0], numpy(model(IDS[:1, :5]))[0], atol=1e-5)

    def test_sentences_have_length_one_and_nothing_has_none(self):
        model = randomize(models.SentenceEncoder(encoder()))
        vectors = numpy(model(np.concatenate([IDS, np.zeros_like(IDS[:1])])))
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0], atol=1e-6)
        long = numpy(models.SentenceEncoder(model.encoder, normalize=False)(IDS))
        assert np.linalg.norm(long, axis=1).min() > 1.1

    def test_gradients_of_normalised_vectors_are_finite_where_there_is_nothing(self):
        model = randomize(models.SentenceEncoder(encoder(dropout=0.0)))
        wanted = ops.convert_to_tensor(np.random.default_rng(0).normal(size=(3, D)).astype("float32"))
        ids = np.concatenate([IDS, np.zeros_like(IDS[:1])])
        found = gradients(model, lambda vectors: ops.sum(vectors * wanted), ids)
        assert all(np.isfinite(gradient).all() for gradient in found)
        assert max(np.abs(gradient).max() for gradient in found) > 1e-2

    def test_another_padding_id(self):
        one = randomize(encoder())
        other = randomize(encoder(pad_id=7))
        ids = np.where(IDS == 0, 7, IDS)
        np.testing.assert_allclose(numpy(other(ids))[0, :5], numpy(one(IDS))[0, :5], atol=1e-5)


class TestLengths:
    """One token more than there are positions."""

    @pytest.mark.parametrize("kind", ["eager", "symbolic", "predict", "functional", "positions"])
    def test_too_long_is_refused_by_name(self, kind):
        layer = layers.LearnedPositionalEncoding(16)
        x = np.ones((1, 17, 5), "float32")
        if kind == "positions":
            # Compiled on JAX it is NaN: never another position's vector.
            try:
                found = numpy(layer(x[:, :1], positions=np.array([[16]])))
            except Exception as error:  # each backend has its own
                assert "16" in str(error) or "out of range" in str(error)
            else:
                assert np.isnan(found).all()
            return
        run = {
            "eager": lambda: layer(x),
            "symbolic": lambda: layer(keras.Input((17, 5))),
            "predict": lambda: keras.Sequential([layer]).predict(x, verbose=0),
            "functional": lambda: functional(layer).predict(x, verbose=0),
        }[kind]
        with pytest.raises(ValueError, match="`length` must not exceed the model's max_length=16. Received: length=17"):
            run()

    def test_the_longest_is_right_and_in_onnx_one_more_fails(self, tmp_path):
        layer = layers.LearnedPositionalEncoding(16)
        model = functional(layer)
        x = np.random.default_rng(0).normal(size=(2, 17, 5)).astype("float32")
        table = numpy(layer.embeddings.value)
        np.testing.assert_allclose(numpy(layer(x[:, :16])), x[:, :16] + table, atol=1e-6)
        export_onnx(model, tmp_path / "m.onnx", verbose=False)
        for length in (1, 7, 16):
            (found,) = run_onnx(tmp_path / "m.onnx", {"x": x[:, :length]})
            np.testing.assert_allclose(found, x[:, :length] + table[:length], atol=1e-6)
        with pytest.raises(Exception, match="(?i)broadcast|dimension|shape"):
            run_onnx(tmp_path / "m.onnx", {"x": x})

    def test_encoders_and_images(self):
        with pytest.raises(ValueError, match=f"max_length={LONGEST}. Received: length={LONGEST + 1}"):
            encoder()(np.ones((1, LONGEST + 1), "int32"))
        vit = models.VisionTransformer(3, image_size=8, patch_size=4, channels=1, **SIZES)
        with pytest.raises(ValueError, match=r"\(batch, 8, 8, 1\). Received: inputs.shape=\(2, 8, 4, 1\)"):
            vit(np.ones((2, 8, 4, 1), "float32"))
        with pytest.raises(ValueError, match=r"`patch_size` must divide `image_size`.*\(8, 9\), patch_size=\(4, 4\)"):
            models.VisionTransformer(3, image_size=(8, 9), patch_size=4, **SIZES)


def functional(layer):
    x = keras.Input((None, 5), name="x")
    return keras.Model(x, layer(x))


class TestHalfPrecision:
    """A norm's epsilon of 1e-12, which is 0 in float16."""

    @pytest.mark.parametrize("norm", ["layer", "rms"])
    @pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
    def test_constant_and_large_vectors(self, policy, norm):
        stack = layers.TransformerEncoder(1, 2, 5, dropout=0.0, norm=norm, norm_epsilon=1e-12, dtype=policy)
        for value in (0.0, 3.0):
            assert np.isfinite(numpy(stack(np.full((2, 3, 6), value, "float16")))).all()
        one = stack.blocks[0].feed_forward_norm
        beta = np.zeros((1, 1, 6)) if norm == "layer" else np.ones((1, 1, 6))
        np.testing.assert_allclose(numpy(one(ops.full((1, 1, 6), 3.0, "float16"))), beta, atol=1e-3)
        x = np.random.default_rng(0).normal(300, 50, (2, 3, 6)).astype("float16")  # squares pass 65504
        wide = x.astype("float64")
        centred = wide - wide.mean(-1, keepdims=True) if norm == "layer" else wide
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True))
        np.testing.assert_allclose(numpy(one(ops.convert_to_tensor(x))), expected, atol=0.02)

    def test_training_with_a_zero_vector_for_padding(self):
        keras.utils.set_random_seed(0)
        model = models.TokenClassifier(encoder(dtype="mixed_float16", dropout=0.0), 3)
        table = numpy(model.encoder.embedding.embeddings.value).copy()
        table[0] = 0
        model.encoder.embedding.embeddings.assign(table)
        model.compile(keras.optimizers.SGD(0.01))
        ids = np.tile(IDS, (5, 1))
        losses = model.fit(ids, ids % 3, batch_size=2, verbose=0).history["loss"]
        assert np.isfinite(losses).all() and np.isfinite(numpy(model(IDS))).all()


def test_the_two_gelus():
    x = np.array([1.0, 2.7, -2.7], "float32")
    exact, by_tanh = (numpy(activation_of(name)(ops.convert_to_tensor(x))) for name in ("gelu", "gelu_tanh"))
    np.testing.assert_allclose([exact[0], by_tanh[0]], [0.841345, 0.841192], atol=1e-6)
    np.testing.assert_allclose(np.abs(exact - by_tanh)[1:], 4.7e-4, atol=0.2e-4)
    with pytest.raises(ValueError, match="gelu_twice"):
        activation_of("gelu_twice")


@pytest.mark.once  # numbers of parameters are the same everywhere
class TestPresets:
    # Parameters of the published models: without BERT's pooler (768 · 769) and ViT's (none).
    @pytest.mark.parametrize(
        "cls, name, count",
        [
            (models.Encoder, "bert-base-uncased", 109_482_240 - 768 * 769),
            (models.Encoder, "all-minilm-l6-v2", 22_713_216 - 384 * 385),
            (models.CausalLM, "gpt2", 124_439_808),
            (models.CausalLM, "llama-3.2-1b", 1_235_814_400),
            (models.VisionTransformer, "vit-base-16", 86_567_656),
            (models.Transformer, "base", 63_082_496),
        ],
    )
    def test_have_the_number_of_parameters_that_was_published(self, cls, name, count):
        layers_ = cls.presets[name]["num_layers"] if "num_layers" in cls.presets[name] else 6
        small = {key: 7 for key in cls.presets[name] if key.endswith("vocabulary_size")}
        ids = {"end_id": None} if "end_id" in cls.presets[name] else {}
        one, two = (cls.from_preset(name, num_layers=n, **small, **ids).count_params() for n in (1, 2))
        config = cls.presets[name]
        width = config.get("d_model", 768)
        tables = 1 if config.get("share_embeddings") or config.get("tie_output", True) else 2
        rows = next((config[key] - 7 for key in small), 0)
        assert one + (layers_ - 1) * (two - one) + tables * rows * width == count

    def test_arguments_win_and_unknown_names_are_refused(self):
        assert models.CausalLM.from_preset("gpt2", num_layers=1, vocabulary_size=9, end_id=3).end_id == 3
        with pytest.raises(ValueError, match="`name` must be one of .*'gpt2'.*Received: name='gpt5'"):
            models.CausalLM.from_preset("gpt5")


class TestClasses:
    """Labels of whole texts and images mean the same on every backend."""

    def heads(self, num_classes=3):
        inner = encoder(dropout=0.0)
        images = models.VisionTransformer(num_classes, 4, 2, 1, **SIZES, dropout=0.0)
        ids = np.repeat(IDS, 2, axis=0)
        return [
            (models.SequenceClassifier(inner, num_classes), ids),
            (images, np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype("float32")),
        ]

    def test_labels_in_rows_and_columns_that_do_not_count_and_that_are_none(self):
        labels = np.array([0, 2, 1, -100])
        for model, inputs in self.heads():
            loss, (accuracy,) = model.default_loss(), model.default_metrics()
            assert accuracy.name == "accuracy"
            logits = numpy(model(inputs))
            chosen = logits[:3].astype("float64")
            wanted = np.mean(np.log(np.exp(chosen).sum(1)) - chosen[range(3), labels[:3]])
            for given in (labels[:, None], labels):
                np.testing.assert_allclose(numpy(loss(given, logits)), wanted, rtol=1e-5)
                accuracy.reset_state()
                accuracy.update_state(given, logits)
                assert numpy(accuracy.result()) == pytest.approx(np.mean(chosen.argmax(1) == labels[:3]))
            for outside in (3, -1):
                assert np.isnan(numpy(loss(np.array([0, 2, 1, outside]), logits)))
            with pytest.raises(ValueError, match=r"Labels must have the shape .*y_true.shape=\(4, 3\)"):
                loss(np.eye(3)[labels % 3], logits)

    def test_one_class_needs_a_loss_of_its_own(self):
        for model, _ in [*self.heads(1), (models.TokenClassifier(encoder(), 1), None)]:
            with pytest.raises(ValueError, match="needs 2 classes or more; give a loss.*Received: num_classes=1"):
                model.compile("sgd")
            model.compile("sgd", "mse")

    @pytest.mark.parametrize(
        "make, message",
        [
            (lambda: encoder(norm="batch"), "`norm` must be one of .*Received: norm='batch'"),
            (lambda: models.TokenClassifier(encoder(), 3, dropout=1.0), r"`dropout` must be in \[0, 1\)"),
            (lambda: models.SequenceClassifier(encoder(), 3, dropout="x"), r"`dropout` must be in \[0, 1\)"),
            (
                lambda: encoder(num_token_types=2)({"token_ids": IDS, "token_types": IDS[:, :3]}),
                r"Inputs must be of one shape .*'token_types': \(2, 3\)",
            ),
            (
                lambda: models.VisionTransformer(3, 4, 2, 1, **SIZES)({"image": np.ones((1, 4, 4, 1))}),
                r"""Inputs must be images, or a dict of "images". Received: \['image'\]""",
            ),
            (
                lambda: models.Transformer(V, V, **SIZES, num_decoder_layers=0),
                "`num_decoder_layers` must be an integer of at least 1. Received: num_decoder_layers=0",
            ),
        ],
    )
    def test_bad_arguments_are_refused(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


class TestFewTrainableWeights:
    def test_lora_trains_what_it_adds_and_the_head(self, tmp_path):
        keras.utils.set_random_seed(0)
        model = models.SequenceClassifier(encoder(dropout=0.0), 3)
        before = numpy(model(IDS))
        model.enable_lora(2)
        np.testing.assert_allclose(numpy(model(IDS)), before, atol=1e-6)
        names = [weight.path.split("/")[-2] + "/" + weight.name for weight in model.trainable_weights]
        assert len(names) == 2 * 2 * 2 + 4
        assert sum("lora" in name for name in names) == 8 and {name.split("/")[0] for name in names} == {
            "query",
            "value",
            "hidden",
            "output",
        }
        others = model.non_trainable_variables
        frozen = [numpy(variable.value) for variable in others]
        model.compile(keras.optimizers.Adam(0.05))
        rows = np.random.default_rng(0).integers(1, V, (30, 5)).astype("int32")
        history = model.fit(rows, rows[:, 0] % 3, epochs=15, verbose=0).history["loss"]
        assert history[-1] < 0.8 * history[0]
        for old, variable in zip(frozen, others, strict=True):
            if "seed" not in variable.name:
                np.testing.assert_array_equal(old, numpy(variable.value))
        export_onnx(model, tmp_path / "m.onnx", verify=False, verbose=False)
        np.testing.assert_allclose(run_onnx(tmp_path / "m.onnx", {"token_ids": IDS})[0], numpy(model(IDS)), atol=1e-4)
        with pytest.raises(ValueError, match="`rank` must be an integer of at least 1. Received: rank=0"):
            model.enable_lora(0)
        for alpha in (0, float("nan"), "x"):
            with pytest.raises(ValueError, match="`alpha` must be a positive number. Received: alpha="):
                encoder().enable_lora(2, alpha)
        with pytest.raises(ValueError, match="once only. Received: rank=3, where it is 2 already"):
            model.enable_lora(3)

    def test_lora_freezes_weights_of_the_model_itself(self):
        model = models.Transformer(V, V, **SIZES, output_bias=True)
        model.enable_lora(2)
        assert {weight.name for weight in model.trainable_weights} == {"lora_kernel_a", "lora_kernel_b"}
        model = models.VisionTransformer(3, 4, 2, **SIZES)
        model.enable_lora(2)
        assert [weight.path.split("/")[-2] for weight in model.trainable_weights if "lora" not in weight.name] == [
            "output",
            "output",
        ]

    def test_lora_in_generation(self):
        model = randomize(models.CausalLM(V, **SIZES, dropout=0.0, max_length=LONGEST, tie_output=False))
        before = model.generate(IDS[:1, :4], max_new_tokens=5)
        model.enable_lora(2)
        np.testing.assert_array_equal(model.generate(IDS[:1, :4], max_new_tokens=5), before)
        for weight in model.trainable_weights:
            weight.assign(ops.ones_like(weight.value))
        found = model.generate(IDS[:1, :4], max_new_tokens=5)
        np.testing.assert_array_equal(found, model.generate(IDS[:1, :4], max_new_tokens=5, compile=False))

    def test_a_frozen_encoder(self):
        model = models.SequenceClassifier(encoder(dropout=0.0), 3)
        model.encoder.trainable = False
        assert len(model.trainable_weights) == 4
        before = numpy(model.encoder(IDS))
        model.compile("adam")
        model.fit(IDS, np.array([0, 2]), verbose=0)
        np.testing.assert_array_equal(numpy(model.encoder(IDS)), before)


class TestGraphs:
    """Sizes that an export fixes, rows of padding only, and dropout that stays."""

    @pytest.mark.once
    @pytest.mark.parametrize("name", ["encoder", "decoder", "llama", "classifier"])
    def test_any_batch_and_length_after_training_with_dropout(self, name, tmp_path):
        model = small_models()[name]
        ids = np.random.default_rng(0).integers(1, V, (12, 6)).astype("int32")
        if name == "encoder":
            model.compile("sgd", "mse")
            labels = np.zeros((12, 6, D), "float32")
        else:
            model.compile("sgd")
            labels = np.zeros(12, "int32") if name == "classifier" else ids
        model.fit(ids, labels, epochs=2, batch_size=4, verbose=0)
        export_onnx(model, tmp_path / "m.onnx", verbose=False)
        graph = onnx.load(tmp_path / "m.onnx").graph
        assert not any("Random" in node.op_type or node.op_type in ("Dropout", "Bernoulli") for node in graph.node)
        dims = [dim.dim_param for dim in graph.input[0].type.tensor_type.shape.dim]
        assert len(set(dims)) == 2 and "" not in dims
        for batch, length in ((1, 1), (2, 3), (5, 9), (3, LONGEST)):
            ids = np.random.default_rng(length).integers(1, V, (batch, length)).astype("int32")
            ids[-1, length // 2 :] = 0
            ids[: batch // 2] = 0
            for optimised in (True, False):
                first, again = (run_onnx(tmp_path / "m.onnx", {"token_ids": ids}, optimised)[0] for _ in range(2))
                np.testing.assert_array_equal(first, again)
                np.testing.assert_allclose(first, numpy(model(ids)), atol=1e-4)
        assert not np.allclose(numpy(model(ids, training=True)), numpy(model(ids, training=True)))


def test_a_model_inside_a_users_own_is_saved_with_it(tmp_path):
    @keras.saving.register_keras_serializable("test_models")
    class Tagger(keras.Model):
        def __init__(self, encoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.head = keras.layers.Dense(3)

        def build(self, shape):
            self.head.build((None, None, D))

        def call(self, ids):
            return self.head(self.encoder(ids))

        def get_config(self):
            return {**super().get_config(), "encoder": keras.saving.serialize_keras_object(self.encoder)}

        @classmethod
        def from_config(cls, config):
            return cls(**{**config, "encoder": keras.saving.deserialize_keras_object(config["encoder"])})

    model = Tagger(encoder(dropout=0.0))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(IDS, IDS % 3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numpy(loaded(IDS)), numpy(model(IDS)), atol=1e-6)
    losses = [one.fit(IDS, IDS % 3, verbose=0).history["loss"][0] for one in (model, loaded)]
    np.testing.assert_allclose(*losses, rtol=1e-5)  # the optimizer's state came along
