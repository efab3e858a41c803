"""The `genai_config.json` by which onnxruntime-genai serves the directory of a decoder-only model as it is.

Its format: https://onnxruntime.ai/docs/genai/reference/config.html.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

# "No such id": the library needs numbers.
_NO_ID = -1
# The library allocates buffers of this length where a model has no limit of its own.
_UNLIMITED = 4096


def write_genai_files(model: Any, folder: pathlib.Path, config: dict[str, Any]) -> None:
    """Writes the description of `decoder.onnx`, and, beside a `tokenizer.json`, what the library asks for to read it.

    Args:
        model: a `models.CausalLM`.
        folder: where the graph lies.
        config: the runner's.
    """
    heads, head_dim = model.decoder.blocks[0].self_attention.kv_shape
    context = config["max_length"] or _UNLIMITED
    pad_id = _NO_ID if config["pad_id"] is None else config["pad_id"]
    end_id = _NO_ID if config["end_id"] is None else config["end_id"]
    description = {
        "model": {
            "type": "decoder",
            "bos_token_id": _NO_ID,
            "eos_token_id": end_id,
            "pad_token_id": pad_id,
            "vocab_size": config["vocabulary_size"],
            "context_length": context,
            "decoder": {
                "filename": "decoder.onnx",
                "session_options": {},
                "head_size": head_dim,
                "hidden_size": model.d_model,
                "num_attention_heads": model.decoder.num_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": model.decoder.num_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "max_length": context,
            "do_sample": False,
            "past_present_share_buffer": config["target"] == "onnxruntime",
        },
    }
    (folder / "genai_config.json").write_text(json.dumps(description, indent=2) + "\n")
    if (folder / "tokenizer.json").exists():
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')
