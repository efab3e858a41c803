"""Published configurations, by name: arguments of the models, without weights."""

from __future__ import annotations

# "Attention Is All You Need", table 3; the vocabulary of its English-German model.
TRANSFORMER = {
    "base": {
        "source_vocabulary_size": 37000,
        "target_vocabulary_size": 37000,
        "share_embeddings": True,
        "num_layers": 6,
        "d_model": 512,
        "num_heads": 8,
        "d_ff": 2048,
        "dropout": 0.1,
    },
    "big": {
        "source_vocabulary_size": 37000,
        "target_vocabulary_size": 37000,
        "share_embeddings": True,
        "num_layers": 6,
        "d_model": 1024,
        "num_heads": 16,
        "d_ff": 4096,
        "dropout": 0.3,
    },
}


def _gpt2(num_layers, d_model, num_heads):
    return {
        "vocabulary_size": 50257,
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": 4 * d_model,
        "end_id": 50256,
    }


def _llama(vocabulary_size, num_layers, d_model, num_heads, num_kv_heads, d_ff, **arguments):
    return {
        "vocabulary_size": vocabulary_size,
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "d_ff": d_ff,
        "dropout": 0.0,
        "activation": "silu",
        "gated": True,
        "norm": "rms",
        "use_bias": False,
        "position_encoding": "rotary",
        "tie_output": False,
        **arguments,
    }


def _llama3_2(num_layers, d_model, num_heads, d_ff):
    return _llama(
        128256,
        num_layers,
        d_model,
        num_heads,
        8,
        d_ff,
        rotary_base=500000.0,
        rotary_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_output=True,
        max_length=131072,
        end_id=128001,
    )


CAUSAL_LM = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _llama(32000, 32, 4096, 32, 32, 11008, max_length=4096, end_id=2),
    "llama-3.2-1b": _llama3_2(16, 2048, 32, 8192),
    "llama-3.2-3b": _llama3_2(28, 3072, 24, 8192),
    "mistral-7b": _llama(32000, 32, 4096, 32, 8, 14336, sliding_window=4096, max_length=32768, end_id=2),
}


def _bert(num_layers, d_model, num_heads, vocabulary_size=30522, **arguments):
    return {
        "vocabulary_size": vocabulary_size,
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": 4 * d_model,
        **arguments,
    }


ENCODER = {
    "bert-base-uncased": _bert(12, 768, 12, num_token_types=2),
    "bert-large-uncased": _bert(24, 1024, 16, num_token_types=2),
    "bert-base-cased": _bert(12, 768, 12, vocabulary_size=28996, num_token_types=2),
    "distilbert-base-uncased": _bert(6, 768, 12),
    "roberta-base": _bert(12, 768, 12, vocabulary_size=50265, norm_epsilon=1e-5, pad_id=1),
    "roberta-large": _bert(24, 1024, 16, vocabulary_size=50265, norm_epsilon=1e-5, pad_id=1),
    "all-minilm-l6-v2": _bert(6, 384, 12, num_token_types=2),
}


def _vit(patch_size, num_layers, d_model, num_heads):
    return {
        "patch_size": patch_size,
        "num_layers": num_layers,
        "d_model": d_model,
        "num_heads": num_heads,
        "d_ff": 4 * d_model,
    }


VISION = {
    "vit-tiny-16": _vit(16, 12, 192, 3),
    "vit-small-16": _vit(16, 12, 384, 6),
    "vit-base-16": _vit(16, 12, 768, 12),
    "vit-base-32": _vit(32, 12, 768, 12),
    "vit-large-16": _vit(16, 24, 1024, 16),
    "vit-huge-14": _vit(14, 32, 1280, 16),
}
