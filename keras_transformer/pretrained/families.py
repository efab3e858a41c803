"""What each family of published models is here: the arguments of its configuration, and the names of its tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_transformer.models import (
    CausalLM,
    Encoder,
    MaskedLM,
    SentenceEncoder,
    SequenceClassifier,
    TokenClassifier,
    Transformer,
    VisionTransformer,
)

# What published configurations call their activations.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A layer, or a weight, and where its tensors are.

    Attributes:
        target: a dense layer, a norm, an embedding, or a single weight.
        key: the name of its tensors up to `.weight` and `.bias`; of a single weight the whole name.
        stored: how a kernel is stored: `"out_in"`, as torch's Linear has it, or `"in_out"`.
        share: (i, n): the i-th of n equal parts of what is stored, along the outputs.
        change: applied to a stored weight (not to a bias).
    """

    target: Any
    key: str
    stored: str = "out_in"
    share: tuple[int, int] = (0, 1)
    change: Callable[[np.ndarray], np.ndarray] | None = None

    def weights(self) -> Iterator[tuple[Any, str, Callable]]:
        """Each weight with its tensor's name and a function that reads it from a `Checkpoint`."""
        if not isinstance(self.target, keras.Layer):
            yield self.target, self.key, lambda checkpoint: self._changed(checkpoint.take(self.key))
            return
        for weight in self.target.weights:
            key = f"{self.key}.{'bias' if weight.name in ('bias', 'beta') else 'weight'}"
            yield weight, key, lambda checkpoint, key=key: self._read(checkpoint, key)

    def _read(self, checkpoint, key):
        array = checkpoint.take(key)
        if key.endswith(".bias"):
            return np.split(array, self.share[1])[self.share[0]]
        array = self._changed(array)
        if isinstance(self.target, keras.layers.Dense):
            array = array.T if self.stored == "out_in" else array
            array = np.split(array, self.share[1], axis=1)[self.share[0]]
        return array

    def _changed(self, array):
        return array if self.change is None else self.change(array)


def activation(checkpoint, *names: str) -> str:
    """The activation that the configuration names.

    Raises:
        ValueError: an unknown one.
    """
    name = checkpoint.setting(*names)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{names[0]!r} must be one of {sorted(ACTIVATIONS)}. "
            f"Received: {names[0]}={name!r} in {checkpoint.directory / 'config.json'}"
        )
    return ACTIVATIONS[name]


def architecture(checkpoint) -> str:
    """What the weights were saved with: `"ForMaskedLM"` and the like; an empty string for the base model."""
    name = checkpoint.setting("architectures", default=[""])[0]
    found = re.search(r"For[A-Z].*", name)
    return found[0] if found else ""


def block_parts(block, prefix: str, names: dict[str, str], **options: Any) -> list[Part]:
    """The parts of an encoder's or decoder's block, by the names of a family."""
    attention, feed_forward = block.self_attention, block.feed_forward
    layers = {
        "query": attention.query_dense,
        "key": attention.key_dense,
        "value": attention.value_dense,
        "output": attention.output_dense,
        "attention_norm": block.self_attention_norm,
        "gate": feed_forward.gate_dense,
        "inner": feed_forward.inner_dense,
        "outer": feed_forward.output_dense,
        "norm": block.feed_forward_norm,
    }
    if block.cross_attention is not None:
        cross = block.cross_attention
        layers |= {
            "cross_query": cross.query_dense,
            "cross_key": cross.key_dense,
            "cross_value": cross.value_dense,
            "cross_output": cross.output_dense,
            "cross_norm": block.cross_attention_norm,
        }
    return [Part(layer, f"{prefix}.{names[name]}", **options) for name, layer in layers.items() if layer is not None]


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
    base = _prefix(checkpoint, name, "embeddings.word_embeddings.weight")
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
    base = _prefix(checkpoint, "distilbert", "embeddings.word_embeddings.weight")
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
    classes = len(checkpoint.setting("id2label", default={"0": "", "1": ""}))
    dropout = checkpoint.setting("classifier_dropout", "seq_classif_dropout", default=settings["dropout"])
    sentences = checkpoint.directory / "modules.json"
    if sentences.is_file():
        model = SentenceEncoder(encoder, **{**_sentence_settings(checkpoint), **own})
    elif head in ("ForMaskedLM", "ForPreTraining"):
        model = MaskedLM(encoder, activation=settings["activation"], **own)
    elif head == "ForSequenceClassification":
        checkpoint.only("problem_type", None, "single_label_classification")
        model = SequenceClassifier(
            encoder, **{"num_classes": classes, "hidden_activation": hidden_activation, "dropout": dropout, **own}
        )
    elif head == "ForTokenClassification":
        model = TokenClassifier(encoder, **{"num_classes": classes, "dropout": dropout, **own})
    elif not head:
        model = encoder
    else:
        raise ValueError(
            "`architectures` must be the base model, or that for masked LM, pre-training, sequence classification or "
            f"token classification. Received: {head!r} in {checkpoint.directory / 'config.json'}"
        )
    return encoder, model, settings


def _sentence_settings(checkpoint):
    """Pooling and normalisation, as sentence-transformers wrote them."""
    modules = json.loads((checkpoint.directory / "modules.json").read_text(encoding="utf-8"))
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{checkpoint.directory / 'modules.json'} must name a Transformer, a Pooling and at most a Normalize. "
            f"Received: {kinds}"
        )
    path = checkpoint.directory / modules[1]["path"] / "config.json"
    pooling = json.loads(path.read_text(encoding="utf-8"))
    chosen = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) != 1 or chosen[0] not in known:
        raise ValueError(f"{path} must choose one of {sorted(known)}. Received: {chosen}")
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


def gpt2(checkpoint, arguments):
    """GPT-2: kernels are stored as (in, out), and those of query, key and value in one."""
    checkpoint.only("scale_attn_weights", True)
    checkpoint.only("scale_attn_by_inverse_layer_idx", False)
    checkpoint.only("add_cross_attention", False)
    d_model = checkpoint.setting("n_embd", "hidden_size")
    model = CausalLM(
        **{
            "vocabulary_size": checkpoint.setting("vocab_size"),
            "num_layers": checkpoint.setting("n_layer", "num_hidden_layers"),
            "d_model": d_model,
            "num_heads": checkpoint.setting("n_head", "num_attention_heads"),
            "d_ff": checkpoint.setting("n_inner", default=4 * d_model),
            "dropout": checkpoint.setting("resid_pdrop", default=0.1),
            "activation": activation(checkpoint, "activation_function"),
            "norm_epsilon": checkpoint.setting("layer_norm_epsilon", default=1e-5),
            "max_length": checkpoint.setting("n_positions", "max_position_embeddings"),
            "tie_output": checkpoint.setting("tie_word_embeddings", default=True),
            **_ids(checkpoint),
            **arguments,
        }
    )
    base = _prefix(checkpoint, "transformer", "wte.weight")
    parts = [Part(model.embedding, f"{base}wte"), Part(model.positions, f"{base}wpe")]
    for i, block in enumerate(model.decoder.blocks):
        at, attention = f"{base}h.{i}", block.self_attention
        projections = (attention.query_dense, attention.key_dense, attention.value_dense)
        parts += [Part(dense, f"{at}.attn.c_attn", "in_out", (n, 3)) for n, dense in enumerate(projections)]
        parts += [
            Part(attention.output_dense, f"{at}.attn.c_proj", "in_out"),
            Part(block.self_attention_norm, f"{at}.ln_1"),
            Part(block.feed_forward.inner_dense, f"{at}.mlp.c_fc", "in_out"),
            Part(block.feed_forward.output_dense, f"{at}.mlp.c_proj", "in_out"),
            Part(block.feed_forward_norm, f"{at}.ln_2"),
        ]
    parts.append(Part(model.decoder.final_norm, f"{base}ln_f"))
    # Masks, which some stored as weights.
    return model, parts + _output_parts(model), (*_tied(model), r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


_LLAMA_BLOCK = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "gate": "mlp.gate_proj",
    "inner": "mlp.up_proj",
    "outer": "mlp.down_proj",
    "norm": "post_attention_layernorm",
}


def llama(checkpoint, arguments):
    """Llama (https://arxiv.org/abs/2302.13971), and Mistral (https://arxiv.org/abs/2310.06825)."""
    bias = checkpoint.setting("attention_bias", default=False)
    checkpoint.only("mlp_bias", bias)
    # Newer files have all that concerns rotation in one place.
    rotary = {
        "rope_theta": checkpoint.setting("rope_theta", default=10000.0),
        "partial_rotary_factor": checkpoint.setting("partial_rotary_factor", default=1.0),
        **checkpoint.setting("rope_parameters", "rope_scaling", default={}),
    }
    d_model, num_heads = checkpoint.setting("hidden_size"), checkpoint.setting("num_attention_heads")
    head_dim = checkpoint.setting("head_dim", default=d_model // num_heads)
    model = CausalLM(
        **{
            "vocabulary_size": checkpoint.setting("vocab_size"),
            "num_layers": checkpoint.setting("num_hidden_layers"),
            "d_model": d_model,
            "num_heads": num_heads,
            "num_kv_heads": checkpoint.setting("num_key_value_heads", default=num_heads),
            "head_dim": head_dim,
            "d_ff": checkpoint.setting("intermediate_size"),
            "dropout": checkpoint.setting("attention_dropout", default=0.0),
            "activation": activation(checkpoint, "hidden_act"),
            "gated": True,
            "norm": "rms",
            "norm_epsilon": checkpoint.setting("rms_norm_eps", default=1e-6),
            "use_bias": bias,
            "sliding_window": checkpoint.setting("sliding_window", default=None),
            "position_encoding": "rotary",
            "rotary_base": rotary["rope_theta"],
            "rotary_width": int(head_dim * rotary["partial_rotary_factor"]),
            "rotary_scaling": None if rotary.get("rope_type", rotary.get("type", "default")) == "default" else rotary,
            "tie_output": checkpoint.setting("tie_word_embeddings", default=False),
            "max_length": checkpoint.setting("max_position_embeddings"),
            **_ids(checkpoint),
            **arguments,
        }
    )
    base = _prefix(checkpoint, "model", "embed_tokens.weight")
    parts = [Part(model.embedding, f"{base}embed_tokens")]
    for i, block in enumerate(model.decoder.blocks):
        parts += block_parts(block, f"{base}layers.{i}", _LLAMA_BLOCK)
    parts.append(Part(model.decoder.final_norm, f"{base}norm"))
    return model, parts + _output_parts(model), (*_tied(model), r"(.*\.)?rotary_emb\.inv_freq")


_BART_BLOCK = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross_query": "encoder_attn.q_proj",
    "cross_key": "encoder_attn.k_proj",
    "cross_value": "encoder_attn.v_proj",
    "cross_output": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
    "inner": "fc1",
    "outer": "fc2",
    "norm": "final_layer_norm",
}


def bart(checkpoint, arguments):
    """BART (https://arxiv.org/abs/1910.13461): learned positions, whose first two are not used.

    What `forced_bos_token_id` and `forced_eos_token_id` ask for in generation is not followed.
    """
    return _bart_like(checkpoint, {"position_encoding": "learned", "embedding_norm": True, **arguments})


def marian(checkpoint, arguments):
    """Marian's translation models (https://arxiv.org/abs/1804.00344, as `transformers` has them)."""
    return _bart_like(checkpoint, {"position_encoding": "sinusoidal_halves", **arguments})


def _bart_like(checkpoint, arguments):
    checkpoint.only("share_encoder_decoder_embeddings", True)
    for name in ("ffn_dim", "attention_heads"):
        checkpoint.only(f"decoder_{name}", checkpoint.setting(f"encoder_{name}"))
    size = checkpoint.setting("vocab_size")
    tied = checkpoint.setting("tie_word_embeddings", default=True)
    model = Transformer(
        **{
            "source_vocabulary_size": size,
            "target_vocabulary_size": size,
            "share_embeddings": True,
            "num_layers": checkpoint.setting("encoder_layers"),
            "num_decoder_layers": checkpoint.setting("decoder_layers"),
            "d_model": checkpoint.setting("d_model"),
            "num_heads": checkpoint.setting("encoder_attention_heads"),
            "d_ff": checkpoint.setting("encoder_ffn_dim"),
            "dropout": checkpoint.setting("dropout", default=0.1),
            "activation": activation(checkpoint, "activation_function"),
            "norm_epsilon": 1e-5,
            "tie_output": tied,
            "max_length": checkpoint.setting("max_position_embeddings"),
            "scale_embedding": checkpoint.setting("scale_embedding", default=False),
            "output_bias": "final_logits_bias" in checkpoint,
            "start_id": checkpoint.setting("decoder_start_token_id"),
            "end_id": checkpoint.setting("eos_token_id"),
            "pad_id": checkpoint.setting("pad_token_id"),
            **arguments,
        }
    )
    base = _prefix(checkpoint, "model", "encoder.layers.0.fc1.weight")
    names = (f"{base}shared", f"{base}encoder.embed_tokens", f"{base}decoder.embed_tokens", "lm_head")
    stored = next((name for name in names if f"{name}.weight" in checkpoint), names[0])
    parts = [Part(model.source_embedding, stored)]
    for side, stack, positions, norm in (
        ("encoder", model.encoder, model.source_positions, model.source_norm),
        ("decoder", model.decoder, model.target_positions, model.target_norm),
    ):
        if model.position_encoding == "learned":
            parts.append(Part(positions, f"{base}{side}.embed_positions", change=lambda table: table[2:]))
        if norm is not None:
            parts.append(Part(norm, f"{base}{side}.layernorm_embedding"))
        for i, block in enumerate(stack.blocks):
            parts += block_parts(block, f"{base}{side}.layers.{i}", _BART_BLOCK)
    if model.logits_bias is not None:
        parts.append(Part(model.logits_bias, "final_logits_bias", change=lambda bias: bias[0]))
    # The one table is stored again under each of its names by some, as is what can be computed.
    ignored = [re.escape(f"{name}.weight") for name in names[: 4 if tied else 3]]
    if model.position_encoding != "learned":
        ignored.append(r".*embed_positions\.weight")
    return model, parts + _output_parts(model), ignored


def _ids(checkpoint):
    """The ids of padding and end."""
    end = checkpoint.setting("eos_token_id", default=None)
    return {
        "end_id": tuple(end) if isinstance(end, list) else end,
        "pad_id": checkpoint.setting("pad_token_id", default=None),
    }


def _output_parts(model):
    return [] if model.output_projection is None else [Part(model.output_projection, "lm_head")]


def _tied(model):
    return (r"lm_head\.weight",) if model.tie_output else ()


def vit(checkpoint, arguments):
    """Vision Transformer (https://arxiv.org/abs/2010.11929)."""
    checkpoint.only("qkv_bias", True)
    head = architecture(checkpoint)
    classes = len(checkpoint.setting("id2label", default={"0": "", "1": ""})) if head else None
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
    base = _prefix(checkpoint, "vit", "embeddings.cls_token")
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


def _prefix(checkpoint, name, key):
    """What stands before the names of the base model's tensors: nothing, where it was saved by itself."""
    return "" if key in checkpoint else f"{name}."


FAMILIES = {
    "bart": bart,
    "bert": bert,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "llama": llama,
    "marian": marian,
    "mistral": llama,
    "roberta": roberta,
    "vit": vit,
}
