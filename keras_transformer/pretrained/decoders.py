"""Models that generate: GPT-2, Llama, Mistral, Qwen2, BART and Marian."""

from __future__ import annotations

import re

from keras_transformer._validation import positive_integers
from keras_transformer.models import CausalLM, Transformer
from keras_transformer.pretrained.parts import Part, activation, block_parts, output_parts, prefix


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
    base = prefix(checkpoint, "transformer", "wte.weight")
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
    return model, parts + output_parts(model), (*_tied(model), r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")


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


def qwen2(checkpoint, arguments):
    """Qwen2 (https://arxiv.org/abs/2407.10671): Llama with biases of queries, keys and values alone."""
    checkpoint.only("use_sliding_window", False)
    return llama(checkpoint, {"use_bias": True, "sliding_window": None, **arguments})


def llama(checkpoint, arguments):
    """Llama (https://arxiv.org/abs/2302.13971), and Mistral (https://arxiv.org/abs/2310.06825).

    Biases that only some of the projections have are zero in the others.
    """
    bias = any(checkpoint.setting(name, default=False) for name in ("attention_bias", "mlp_bias"))
    # Newer files have all that concerns rotation in one place.
    rotary = {
        "rope_theta": checkpoint.setting("rope_theta", default=10000.0),
        "partial_rotary_factor": checkpoint.setting("partial_rotary_factor", default=1.0),
        **checkpoint.setting("rope_parameters", "rope_scaling", default={}, kind=dict),
    }
    d_model, num_heads = checkpoint.setting("hidden_size"), checkpoint.setting("num_attention_heads")
    positive_integers(hidden_size=d_model, num_attention_heads=num_heads)
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
    base = prefix(checkpoint, "model", "embed_tokens.weight")
    parts = [Part(model.embedding, f"{base}embed_tokens")]
    for i, block in enumerate(model.decoder.blocks):
        parts += block_parts(block, f"{base}layers.{i}", _LLAMA_BLOCK, biased=False)
    parts.append(Part(model.decoder.final_norm, f"{base}norm"))
    return model, parts + output_parts(model), (*_tied(model), r"(.*\.)?rotary_emb\.inv_freq")


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
    checkpoint.only("tie_word_embeddings", True)
    for name in ("ffn_dim", "attention_heads"):
        checkpoint.only(f"decoder_{name}", checkpoint.setting(f"encoder_{name}"))
    size = checkpoint.setting("vocab_size")
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
            "max_length": checkpoint.setting("max_position_embeddings"),
            "scale_embedding": checkpoint.setting("scale_embedding", default=False),
            "output_bias": "final_logits_bias" in checkpoint,
            "start_id": checkpoint.setting("decoder_start_token_id"),
            "end_id": checkpoint.setting("eos_token_id"),
            "pad_id": checkpoint.setting("pad_token_id"),
            **arguments,
        }
    )
    base = prefix(checkpoint, "model", "encoder.layers.0.fc1.weight")
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
    ignored = [re.escape(f"{name}.weight") for name in names]
    if model.position_encoding != "learned":
        ignored.append(r".*embed_positions\.weight")
    return model, parts + output_parts(model), ignored


def _ids(checkpoint):
    """The ids of padding and end; a negative one, as the first Llamas have, stands for none."""
    end = checkpoint.setting("eos_token_id", default=None, kind=(int, list))
    pad = checkpoint.setting("pad_token_id", default=None, kind=int)
    return {
        "end_id": (tuple(end) or None) if isinstance(end, list) else end,
        "pad_id": None if pad is None or pad < 0 else pad,
    }


def _tied(model):
    return (r"lm_head\.weight",) if model.tie_output else ()
