"""Encoders: BERT, RoBERTa, DistilBERT, what is put on them, and ViT."""

from __future__ import annotations

from keras_transformer.models import (
    Encoder,
    MaskedLM,
    SentenceEncoder,
    SequenceClassifier,
    TokenClassifier,
    VisionTransformer,
)
from keras_transformer.pretrained.parts import Part, activation, architecture, block_parts, prefix

_BERT_BLOCK = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm": "output.LayerNorm",
}


def bert(checkpoint, arguments):
    """BERT, and what has its shape, such as MiniLM (https://arxiv.org/abs/1810.04805)."""
    return _bert_like(checkpoint, arguments, "bert", offset=0)


def roberta(checkpoint, arguments):
    """RoBERTa (https://arxiv.org/abs/1907.11692): its positions are counted from `pad_token_id` + 1."""
    return _bert_like(checkpoint, arguments, "roberta", offset=checkpoint.setting("pad_token_id", default=1) + 1)


def _bert_like(checkpoint, arguments, name, offset):
    checkpoint.only("position_embedding_type", "absolute")
    checkpoint.only("is_decoder", False)
    head = architecture(checkpoint)
    encoder, model, arguments = _encoder(
        checkpoint,
        arguments,
        head,
        num_layers=checkpoint.setting("num_hidden_layers"),
        d_model=checkpoint.setting("hidden_size"),
        num_heads=checkpoint.setting("num_attention_heads"),
        d_ff=checkpoint.setting("intermediate_size"),
        dropout=checkpoint.setting("hidden_dropout_prob", default=0.1),
        activation=activation(checkpoint, "hidden_act"),
        norm_epsilon=checkpoint.setting("layer_norm_eps", default=1e-12),
        num_token_types=checkpoint.setting("type_vocab_size", default=2),
        max_length=checkpoint.setting("max_position_embeddings") - offset,
        pad_id=checkpoint.setting("pad_token_id", default=0),
        hidden_activation="tanh",
    )
    base = prefix(checkpoint, name, "embeddings.word_embeddings.weight")
    parts = [
        Part(encoder.embedding, f"{base}embeddings.word_embeddings"),
        Part(encoder.positions, f"{base}embeddings.position_embeddings", change=lambda table: table[offset:]),
        Part(encoder.token_types, f"{base}embeddings.token_type_embeddings"),
        Part(encoder.input_norm, f"{base}embeddings.LayerNorm"),
    ]
    for i, block in enumerate(encoder.encoder.blocks):
        parts += block_parts(block, f"{base}encoder.layer.{i}", _BERT_BLOCK)
    if name == "bert":
        names = {
            "hidden": "cls.predictions.transform.dense",
            "norm": "cls.predictions.transform.LayerNorm",
            "bias": "cls.predictions.bias",
            "pooler": f"{base}pooler.dense",
            "output": "classifier",
        }
    else:
        names = {
            "hidden": "lm_head.dense",
            "norm": "lm_head.layer_norm",
            "bias": "lm_head.bias",
            "pooler": "classifier.dense",
            "output": "classifier.out_proj" if head == "ForSequenceClassification" else "classifier",
        }
    parts += _head_parts(model, names)
    return model, parts, _IGNORED_OF_BERT


# Buffers; the tied output projection, which is stored again by some; BERT's second task, and the pooler that only it
# and classifiers use.
_IGNORED_OF_BERT = (
    r"(.*\.)?embeddings\.position_ids",
    r"cls\.predictions\.decoder\.(weight|bias)",
    r"cls\.seq_relationship\.(weight|bias)",
    r"lm_head\.decoder\.(weight|bias)",
    r"(.*\.)?pooler\.dense\.(weight|bias)",
    r"vocab_projector\.weight",
)


def distilbert(checkpoint, arguments):
    """DistilBERT (https://arxiv.org/abs/1910.01108): BERT with half the blocks and no token types."""
    checkpoint.only("sinusoidal_pos_embds", False, True)  # what they were made from: they are stored
    head = architecture(checkpoint)
    encoder, model, arguments = _encoder(
        checkpoint,
        arguments,
        head,
        num_layers=checkpoint.setting("n_layers", "num_hidden_layers"),
        d_model=checkpoint.setting("dim", "hidden_size"),
        num_heads=checkpoint.setting("n_heads", "num_attention_heads"),
        d_ff=checkpoint.setting("hidden_dim"),
        dropout=checkpoint.setting("dropout", default=0.1),
        activation=activation(checkpoint, "activation"),
        norm_epsilon=1e-12,
        max_length=checkpoint.setting("max_position_embeddings"),
        pad_id=checkpoint.setting("pad_token_id", default=0),
        hidden_activation="relu",
    )
    base = prefix(checkpoint, "distilbert", "embeddings.word_embeddings.weight")
    parts = [
        Part(encoder.embedding, f"{base}embeddings.word_embeddings"),
        Part(encoder.positions, f"{base}embeddings.position_embeddings"),
        Part(encoder.input_norm, f"{base}embeddings.LayerNorm"),
    ]
    names = {
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "inner": "ffn.lin1",
        "outer": "ffn.lin2",
        "norm": "output_layer_norm",
    }
    for i, block in enumerate(encoder.encoder.blocks):
        parts += block_parts(block, f"{base}transformer.layer.{i}", names)
    heads = {
        "hidden": "vocab_transform",
        "norm": "vocab_layer_norm",
        "bias": "vocab_projector.bias",
        "pooler": "pre_classifier",
        "output": "classifier",
    }
    return model, [*parts, *_head_parts(model, heads)], _IGNORED_OF_BERT


def _encoder(checkpoint, arguments, head, hidden_activation, **settings):
    """An `Encoder`, and the model with the head that the folder has; and the arguments that went to it."""
    own = {name: arguments.pop(name) for name in ("num_classes", "pooling", "normalize") if name in arguments}
    settings = {"vocabulary_size": checkpoint.setting("vocab_size"), **settings, **arguments}
    encoder = Encoder(**settings)
    classes = len(checkpoint.setting("id2label", default={"0": "", "1": ""}, kind=dict))
    dropout = checkpoint.setting("classifier_dropout", "seq_classif_dropout", default=settings["dropout"])
    sentences = checkpoint.directory / "modules.json"
    if sentences.is_file():
        model = SentenceEncoder(encoder, **{**_sentence_settings(checkpoint), **own})
    elif head in ("ForMaskedLM", "ForPreTraining"):
        checkpoint.only("tie_word_embeddings", True)
        model = MaskedLM(encoder, activation=settings["activation"], **own)
    elif head == "ForSequenceClassification":
        checkpoint.only("problem_type", None, "single_label_classification")
        model = SequenceClassifier(
            encoder, **{"num_classes": classes, "hidden_activation": hidden_activation, "dropout": dropout, **own}
        )
    elif head == "ForTokenClassification":
        model = TokenClassifier(encoder, **{"num_classes": classes, "dropout": dropout, **own})
    elif not head:
        if own:
            raise ValueError(
                f"{checkpoint.directory} is an encoder with nothing on it, that takes none of {sorted(own)}. Put a "
                "model such as `models.SequenceClassifier` on it."
            )
        model = encoder
    else:
        raise ValueError(
            "`architectures` must be the base model, or that for masked LM, pre-training, sequence classification or "
            f"token classification. Received: {head!r} in {checkpoint.directory / 'config.json'}"
        )
    return encoder, model, settings


def _sentence_settings(checkpoint):
    """Pooling and normalisation, as sentence-transformers wrote them."""
    modules = checkpoint.read_json("modules.json", list)
    entries = [module if isinstance(module, dict) else {} for module in modules]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in entries]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{checkpoint.directory / 'modules.json'} must name a Transformer, a Pooling and at most a Normalize. "
            f"Received: {kinds}"
        )
    name = f"{entries[1].get('path', '')}/config.json"
    pooling = checkpoint.read_json(name)
    # Newer versions name the mode, older ones have a switch for each.
    chosen = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
    chosen = chosen or [pooling.get("pooling_mode")]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "mean": "mean", "cls": "cls"}
    if len(chosen) != 1 or chosen[0] not in known:
        raise ValueError(f"{checkpoint.directory / name} must choose one of {sorted(known)}. Received: {chosen}")
    return {"pooling": known[chosen[0]], "normalize": "Normalize" in kinds}


def _head_parts(model, names):
    """The parts of what is put on an encoder."""
    if isinstance(model, MaskedLM):
        return [
            Part(model.hidden_dense, names["hidden"]),
            Part(model.norm, names["norm"]),
            Part(model.bias, names["bias"]),
        ]
    if isinstance(model, SequenceClassifier):
        return [Part(model.hidden_dense, names["pooler"]), Part(model.output_dense, names["output"])]
    if isinstance(model, TokenClassifier):
        return [Part(model.output_dense, names["output"])]
    return []


def vit(checkpoint, arguments):
    """Vision Transformer (https://arxiv.org/abs/2010.11929)."""
    checkpoint.only("qkv_bias", True)
    head = architecture(checkpoint)
    classes = len(checkpoint.setting("id2label", default={"0": "", "1": ""}, kind=dict)) if head else None
    model = VisionTransformer(
        **{
            "num_classes": classes,
            "image_size": checkpoint.setting("image_size"),
            "patch_size": checkpoint.setting("patch_size"),
            "channels": checkpoint.setting("num_channels", default=3),
            "num_layers": checkpoint.setting("num_hidden_layers"),
            "d_model": checkpoint.setting("hidden_size"),
            "num_heads": checkpoint.setting("num_attention_heads"),
            "d_ff": checkpoint.setting("intermediate_size"),
            "dropout": checkpoint.setting("hidden_dropout_prob", default=0.0),
            "activation": activation(checkpoint, "hidden_act"),
            "norm_epsilon": checkpoint.setting("layer_norm_eps", default=1e-12),
            **arguments,
        }
    )
    base = prefix(checkpoint, "vit", "embeddings.cls_token")
    names = {
        "query": "attention.attention.query",
        "key": "attention.attention.key",
        "value": "attention.attention.value",
        "output": "attention.output.dense",
        "attention_norm": "layernorm_before",
        "inner": "intermediate.dense",
        "outer": "output.dense",
        "norm": "layernorm_after",
    }

    def kernel(stored):
        # (D, channels, height, width), to the order of the pixels of a patch here.
        return stored.transpose(0, 2, 3, 1).reshape(len(stored), -1)

    parts = [
        Part(model.class_token, f"{base}embeddings.cls_token"),
        Part(model.positions.embeddings, f"{base}embeddings.position_embeddings", change=lambda table: table[0]),
        Part(model.patch_embedding, f"{base}embeddings.patch_embeddings.projection", change=kernel),
    ]
    for i, block in enumerate(model.encoder.blocks):
        parts += block_parts(block, f"{base}encoder.layer.{i}", names)
    parts.append(Part(model.encoder.final_norm, f"{base}layernorm"))
    if model.output_dense is not None:
        parts.append(Part(model.output_dense, "classifier"))
    return model, parts, (r"(.*\.)?pooler\.dense\.(weight|bias)",)
