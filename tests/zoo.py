"""Exports KerasHub's backbones, built small, and compares each graph with its model in ONNX Runtime.

python -m tests.zoo [--names BERT T5 ...] [--others | --applications] [--json FILE]    on KERAS_BACKEND
python -m tests.zoo --docs FILE FILE FILE ...                         writes docs/zoo.md from what these runs gave

The comparison is the zoo's own and shares nothing with the exporter's verification: other sizes, other masks, the
model called as it is.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
import zlib
from collections import Counter
from unittest import mock

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "zoo.md"
BACKENDS = {"tensorflow": "TF", "jax": "JAX", "torch": "torch"}
# Absolute, and relative to the largest entry of an output: float32 sums in another order, over two blocks.
TOLERANCE = 1e-5
# What marks a graph in which attention and norms were recognised, and what marks one in which something was not.
COUNTED = (
    *("Attention", "RotaryEmbedding", "LayerNormalization", "RMSNormalization", "Gelu", "MatMul"),
    *("Einsum", "Where", "ScatterND", "Softmax"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: its class in `library`, the arguments, and the longest and shortest input."""

    cls: str
    arguments: dict
    longest: int | None = None
    shortest: int = 1
    library: str = "keras_hub.models"

    def make(self):
        """The backbone, with weights that are the same on every backend."""
        arguments = {name: x.make() if isinstance(x, Case) else x for name, x in self.arguments.items()}
        model = getattr(importlib.import_module(self.library), self.cls)(**arguments)
        randomise(model)
        return model


def _text(cls, longest, vocabulary="vocabulary_size", **arguments):
    return Case(cls, {vocabulary: 61, "num_layers": 2, **arguments}, longest)


_BERT = {"num_heads": 3, "hidden_dim": 24, "intermediate_dim": 40, "max_sequence_length": 21}
_GROUPED = {"num_query_heads": 6, "num_key_value_heads": 2, "hidden_dim": 48, "intermediate_dim": 40}

ZOO = {
    "BERT": _text("BertBackbone", 21, **_BERT, num_segments=2),
    "GPT-2": _text("GPT2Backbone", 21, **_BERT),
    # Its 32 buckets reach 128 positions.
    "T5": _text("T5Backbone", 150, num_heads=3, hidden_dim=24, intermediate_dim=40, key_value_dim=10),
    "BART": _text("BartBackbone", 21, **_BERT),
    "Llama": _text("LlamaBackbone", 67, **_GROUPED),
    "Gemma": _text("GemmaBackbone", 67, **_GROUPED, head_dim=10),
    "OPT": _text("OPTBackbone", 21, **_BERT),
    "ViT": Case(
        "ViTBackbone",
        {"image_shape": (20, 28, 3), "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 40},
    ),
    "DistilBERT": _text("DistilBertBackbone", 21, **_BERT),
    "RoBERTa": _text("RobertaBackbone", 21, **_BERT),
    "DeBERTaV3": _text("DebertaV3Backbone", 41, **_BERT | {"max_sequence_length": 41}, bucket_size=8),
    "ALBERT": _text("AlbertBackbone", 21, **_BERT, embedding_dim=10, num_segments=2),
    "Whisper": _text(
        "WhisperBackbone",
        26,
        num_heads=3,
        hidden_dim=24,
        intermediate_dim=40,
        num_mels=10,
        max_encoder_sequence_length=26,
        max_decoder_sequence_length=26,
    ),
    "Bloom": _text("BloomBackbone", 67, num_heads=3, hidden_dim=24, intermediate_dim=40),
    "FNet": _text("FNetBackbone", 21, hidden_dim=24, intermediate_dim=40, max_sequence_length=21, num_segments=2),
    "Mistral": _text("MistralBackbone", 67, **_GROUPED, sliding_window=5),
    "GPT-NeoX": _text("GPTNeoXBackbone", 67, **_BERT | {"hidden_dim": 48}, rotary_percentage=0.25),
    "ELECTRA": _text("ElectraBackbone", 21, "vocab_size", **_BERT, embedding_dim=10, num_segments=2),
    "Qwen": _text("QwenBackbone", 67, **_GROUPED, use_sliding_window_attention=True, sliding_window_size=5),
    "Phi-3": _text("Phi3Backbone", 67, **_GROUPED),
}

_IMAGE = (40, 40, 3)
_VISION = {"num_layers": 2, "num_heads": 3, "hidden_dim": 24, "intermediate_dim": 40, "patch_size": 8}
_CLIP = {"num_layers": 2, "num_heads": 3, "hidden_dim": 24, "intermediate_dim": 40, "max_sequence_length": 21}
_EXPERTS = {"num_experts": 5, "top_k": 2}

OTHERS = {
    "XLM-RoBERTa": _text("XLMRobertaBackbone", 21, **_BERT),
    "Llama 3": _text(
        "Llama3Backbone",
        67,
        **_GROUPED,
        rope_frequency_adjustment_factor=8.0,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_pretraining_sequence_length=32,
    ),
    "Gemma 2": _text(
        "GemmaBackbone",
        67,
        **_GROUPED,
        head_dim=10,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=5,
    ),
    "Gemma 3": _text(
        "Gemma3Backbone",
        67,
        **_GROUPED,
        head_dim=10,
        image_size=16,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=5,
        local_rope_scaling_factor=2.0,
        global_rope_scaling_factor=3.0,
    ),
    "Gemma 4": _text("Gemma4Backbone", 67, **_GROUPED, head_dim=10, image_size=16, sliding_window_size=5),
    "Qwen 3": _text("Qwen3Backbone", 67, **_GROUPED, head_dim=10, sliding_window_size=5),
    "Qwen 3.5": _text(
        "Qwen3_5Backbone",
        # Beyond, its code goes another way.
        63,
        **_GROUPED,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Qwen MoE": _text(
        "QwenMoeBackbone",
        67,
        **_GROUPED,
        **_EXPERTS,
        moe_intermediate_dim=14,
        shared_expert_intermediate_dim=22,
        use_sliding_window_attention=True,
        sliding_window_size=5,
    ),
    "Qwen 3 MoE": _text(
        "Qwen3MoeBackbone", 67, **_GROUPED, **_EXPERTS, head_dim=10, moe_intermediate_dim=14, sliding_window_size=5
    ),
    "Mixtral": _text("MixtralBackbone", 67, **_GROUPED, **_EXPERTS, sliding_window=5),
    "gpt-oss": _text("GptOssBackbone", 67, **_GROUPED, **_EXPERTS, sliding_window=5, head_dim=10),
    "SmolLM 3": _text(
        "SmolLM3Backbone",
        67,
        hidden_dim=48,
        intermediate_dim=40,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=False,
        attention_dropout=0.0,
        rope_layer_enabled_list=[True, False],
        layer_types=["full_attention", "full_attention"],
        mlp_bias=False,
        layer_norm_epsilon=1e-6,
        max_position_embeddings=67,
        rope_theta=10000.0,
        partial_rotary_factor=1.0,
    ),
    "Falcon": _text("FalconBackbone", 67, num_attention_heads=3, hidden_dim=24, intermediate_dim=40),
    "Moonshine": Case(
        "MoonshineBackbone",
        {
            "vocabulary_size": 61,
            "filter_dim": 24,
            "encoder_num_layers": 2,
            "decoder_num_layers": 2,
            "hidden_dim": 24,
            "intermediate_dim": 40,
            "encoder_num_heads": 3,
            "decoder_num_heads": 3,
            "max_position_embeddings": 67,
        },
        2600,
        2000,
    ),
    "ESM": _text("ESMBackbone", 67, num_heads=3, hidden_dim=24, intermediate_dim=40, max_sequence_length=67),
    "RoFormer V2": _text("RoformerV2Backbone", 67, num_heads=3, hidden_dim=24, intermediate_dim=40, head_size=8),
    "XLNet": _text("XLNetBackbone", 67, num_heads=3, hidden_dim=24, intermediate_dim=40),
    "RWKV 7": Case(
        "RWKV7Backbone",
        {"vocabulary_size": 61, "num_layers": 2, "hidden_size": 24, "head_size": 8, "intermediate_dim": 40}
        | {"gate_lora": 6, "mv_lora": 4, "aaa_lora": 5, "decay_lora": 7},
        67,
    ),
    "T5Gemma": Case(
        "T5GemmaBackbone",
        {"vocabulary_size": 61, "query_pre_attn_scalar": 10.0, "sliding_window": 5, "attn_logit_softcapping": 50.0}
        | {"cross_attention_hidden_size": 48}
        | {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in {
                "hidden_dim": 48,
                "intermediate_dim": 40,
                "num_layers": 2,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 10,
                "layer_types": ["sliding_attention", "full_attention"],
            }.items()
        },
        67,
    ),
    "CLIP": Case(
        "CLIPBackbone",
        {
            "vision_encoder": Case("CLIPVisionEncoder", _VISION | {"image_shape": _IMAGE}),
            "text_encoder": Case("CLIPTextEncoder", _CLIP | {"vocabulary_size": 61, "embedding_dim": 24}),
            "projection_dim": 14,
        },
        21,
    ),
    "SigLIP": Case(
        "SigLIPBackbone",
        {
            "vision_encoder": Case("SigLIPVisionEncoder", _VISION | {"image_shape": _IMAGE}),
            "text_encoder": Case("SigLIPTextEncoder", _CLIP | {"vocabulary_size": 61, "embedding_dim": 24}),
        },
        # Its position table is used whole.
        21,
        21,
    ),
    "DINOv2": Case(
        "DINOV2Backbone",
        _VISION | {"image_shape": _IMAGE, "position_embedding_shape": (64, 64, 3), "num_register_tokens": 3},
    ),
    "DINOv3": Case("DINOV3Backbone", _VISION | {"image_shape": _IMAGE}),
    "DeiT": Case("DeiTBackbone", _VISION | {"image_shape": _IMAGE}),
    "Swin": Case(
        "SwinTransformerBackbone",
        {"image_shape": (32, 32, 3), "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4},
    ),
    "ViTDet": Case(
        "ViTDetBackbone",
        {"hidden_size": 24, "num_layers": 2, "intermediate_dim": 40, "num_heads": 3, "window_size": 2}
        | {
            "global_attention_layer_indices": [1],
            "image_shape": (48, 48, 3),
            "patch_size": 8,
            "num_output_channels": 10,
        },
    ),
    "MiT (SegFormer)": Case(
        "MiTBackbone",
        {"layerwise_depths": [1, 2], "num_layers": 2, "layerwise_num_heads": [1, 2], "layerwise_sr_ratios": [4, 2]}
        | {"max_drop_path_rate": 0.1, "layerwise_patch_sizes": [7, 3], "layerwise_strides": [4, 2]}
        | {"image_shape": (64, 64, 3), "hidden_dims": [8, 12]},
    ),
    "ResNet": Case(
        "ResNetBackbone",
        {"input_conv_filters": [6], "input_conv_kernel_sizes": [7], "stackwise_num_filters": [64, 80]}
        | {"stackwise_num_blocks": [2, 2], "stackwise_num_strides": [1, 2], "block_type": "bottleneck_block"}
        | {"image_shape": _IMAGE},
    ),
    "ResNet, any size": Case(
        "ResNetBackbone",
        {"input_conv_filters": [6, 6], "input_conv_kernel_sizes": [3, 3], "stackwise_num_filters": [64, 80]}
        | {"stackwise_num_blocks": [2, 2], "stackwise_num_strides": [1, 2], "block_type": "basic_block_vd"},
        67,
    ),
    "Xception": Case(
        "XceptionBackbone",
        {"stackwise_conv_filters": [[6, 8], [10, 10], [12, 12]], "stackwise_pooling": [False, True, False]}
        | {"image_shape": _IMAGE},
    ),
    "DenseNet": Case("DenseNetBackbone", {"stackwise_num_repeats": [2, 2], "growth_rate": 6, "image_shape": _IMAGE}),
    "VGG": Case(
        "VGGBackbone", {"stackwise_num_repeats": [2, 2], "stackwise_num_filters": [6, 10], "image_shape": _IMAGE}
    ),
    "HGNetV2": Case(
        "HGNetV2Backbone",
        {"depths": [1, 2], "embedding_size": 8, "hidden_sizes": [12, 16], "stem_channels": [3, 6, 8]}
        | {"hidden_act": "relu", "use_learnable_affine_block": True, "apply_downsample": [False, True]}
        | {"use_lightweight_conv_block": [False, True], "image_shape": _IMAGE}
        | {"stackwise_stage_filters": [[8, 6, 12, 1, 3, 3], [12, 8, 16, 1, 3, 3]]},
    ),
    "CSPNet": Case(
        "CSPNetBackbone",
        {"stem_filters": 8, "stem_kernel_size": 3, "stem_strides": 1, "stackwise_depth": [1, 2]}
        | {
            "stackwise_strides": [1, 2],
            "stackwise_num_filters": [8, 12],
            "block_type": "dark_block",
            "stage_type": "dark",
        }
        | {"image_shape": _IMAGE},
    ),
}

APPLICATIONS = {
    name: Case(name, {"weights": None, "classes": 13, "input_shape": (80, 96, 3)}, library="keras.applications")
    for name in (
        *("ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3"),
        *(
            "MobileNet",
            "MobileNetV2",
            "MobileNetV3Small",
            "NASNetMobile",
            "ResNet50",
            "ResNet50V2",
            "VGG16",
            "Xception",
        ),
    )
}


def randomise(model) -> None:
    """Random weights, norms' scales and biases too: from NumPy, so that every backend has the same."""
    from tests.checks import random_values

    seen = Counter()
    # Not by their order, which is not the same on every backend.
    for weight in model.weights:
        name = weight.path.rsplit("/", 1)[-1]
        seen[weight.path] += 1
        if "float" not in str(weight.dtype):
            continue
        weight.assign(random_values(weight, name, [zlib.crc32(weight.path.encode()), seen[weight.path]]))


def make_inputs(shapes: dict[str, list], dtypes: list[str], sizes: dict[str, int], wholly: bool, seed: int) -> dict:
    """Ids anywhere, padded places included; masks with holes, whose last row is empty if `wholly`."""
    inputs = {}
    for order, ((name, dims), dtype) in enumerate(zip(shapes.items(), dtypes, strict=True)):
        rng = np.random.default_rng([seed, order])
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
        if "mask" in name:
            value = rng.random(shape) < 0.7
            value[:, -1] |= ~value.any(1)
            if wholly:
                value[-1] = False
        elif "float" in dtype:
            value = rng.normal(size=shape)
        else:
            value = rng.integers(0, 2 if "segment" in name else 61, shape)
        inputs[name] = value.astype(dtype)
    return inputs


def grid(axes: list[str], longest: int | None, shortest: int = 1) -> list[dict[str, int]]:
    """Sizes to compare at; a second length differs from the first."""
    lengths = [axis for axis in axes if axis != "batch"]
    points = [(1, 1), (2, 8), (3, 13), (2, longest or 67)] if lengths else [(1, 1), (2, 1), (5, 1)]
    found = []
    for turn, (batch, length) in enumerate(points):
        length = min(length if length >= shortest else shortest + length - 1, longest or length)
        others = [max(other, shortest) for other in (length, length * 2 // 3, length // 2)]
        sizes = {name: others[(index + turn) % len(lengths)] for index, name in enumerate(lengths)}
        found.append({"batch": batch} | sizes)
    return found


def compare(want: np.ndarray, got: np.ndarray) -> tuple[float, int]:
    """The largest difference, in units of what is allowed, and how many entries are not finite; inf if they differ."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return float("inf"), 0
    odd = ~np.isfinite(want)
    if not np.array_equal(odd, ~np.isfinite(got)) or not np.array_equal(want[odd], got[odd], equal_nan=True):
        return float("inf"), int(odd.sum())
    want, got = want[~odd].astype("float64"), got[~odd].astype("float64")
    if not want.size:
        return 0.0, int(odd.sum())
    return float(np.max(np.abs(want - got)) / (1 + np.max(np.abs(want)))), int(odd.sum())


def check(model, path, case: Case) -> dict:
    """What ONNX Runtime makes of the file, beside what the model gives."""
    import keras
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    axes = list(dict.fromkeys(dim for shape in shapes.values() for dim in shape if isinstance(dim, str)))
    worst, undefined, runs = 0.0, 0, 0
    # The file has the inputs in the model's order.
    dtypes = [tensor.dtype for tensor in model.inputs]
    for number, sizes in enumerate(grid(axes, case.longest, case.shortest)):
        for wholly in (False, True) if any("mask" in name for name in shapes) else (False,):
            inputs = make_inputs(shapes, dtypes, sizes, wholly, number)
            given = keras.tree.pack_sequence_as(model.input, list(inputs.values()))
            # JAX, run eagerly, compiles every operation for every shape.
            compiled = keras.backend.backend() == "jax"
            outputs = keras.tree.flatten(model.predict_on_batch(given) if compiled else model(given, training=False))
            expected = [keras.ops.convert_to_numpy(x) for x in outputs]
            actual = session.run(None, inputs)
            for want, got in zip(expected, actual, strict=True):
                difference, odd = compare(want, got)
                if not difference <= TOLERANCE:
                    raise AssertionError(f"differs by {difference:.2g} at {sizes}, an empty row: {wholly}")
                worst, undefined, runs = max(worst, difference), undefined + odd, runs + 1
    return {"axes": axes, "difference": worst, "undefined": undefined, "runs": runs}


def try_out(case: Case, folder: pathlib.Path) -> dict:
    """Exports and compares one backbone."""
    import keras
    import onnx

    from keras_transformer.export import export_onnx, exporter

    started = time.perf_counter()
    traced = []
    lower = exporter.lower
    result: dict = {}
    try:
        # Automatic names are counted from the start.
        keras.backend.clear_session()
        model = case.make()
        path = folder / "model.onnx"
        with mock.patch.object(exporter, "lower", lambda graph, *args: (traced.append(graph), lower(graph, *args))[1]):
            export_onnx(model, path, min_length=case.shortest, max_length=case.longest, force=True, verbose=False)
        result |= check(model, path, case)
        graph = onnx.load(path).graph
        counts = Counter(node.op_type for node in graph.node)
        result |= {"nodes": len(graph.node), "counts": {name: counts[name] for name in COUNTED if counts[name]}}
        result["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        text = onnx.printer.to_text(onnx.load(path))
        result["text"] = hashlib.sha256(text.encode()).hexdigest()
        result["verified"] = True
    except Exception as error:
        trace = [line for line in traceback.format_exc().splitlines() if str(ROOT) in line][-3:]
        result |= {"verified": False, "error": f"{type(error).__name__}: {error}", "trace": trace}
    for graph in traced:
        kinds = {node.kind for node in graph.nodes if isinstance(node.kind, type)}
        named = {kind.__name__ for kind in kinds if not kind.__module__.startswith("keras.src.ops.")}
        result["rules"] = sorted(named | {"DotProductAttention"} & {kind.__name__ for kind in kinds})
    result["seconds"] = round(time.perf_counter() - started, 1)
    return result


def run(names: list[str], cases: dict[str, Case]) -> dict[str, dict]:
    """Tries out the named backbones and says how it went."""
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = found = try_out(cases[name], pathlib.Path(folder))
        if found["verified"]:
            counts = " ".join(f"{key}:{count}" for key, count in found["counts"].items())
            print(
                f"{name:14s} ok  {found['difference']:.1e} {found['nodes']:4d} nodes {found['seconds']:5.1f} s {counts}"
            )
        else:
            print(f"{name:14s} --  {found['seconds']:5.1f} s {found['error'][:1500]}", *found["trace"], sep="\n    ")
        sys.stdout.flush()
    print(f"{sum(found['verified'] for found in results.values())} of {len(results)} verified")
    return results


HEADER = """# KerasHub's backbones

Made by `python -m tests.zoo --docs` from what the zoo did on each backend (`make zoo` does both).
Each backbone has two layers, sizes that differ from each other, random weights (biases and the
scales of norms too), tables and windows short enough to be outgrown, and fewer key heads than query heads where it
can. `export_onnx` exports it with a free batch and free lengths and verifies it. Then it is compared a second time,
without the exporter's verification: ONNX Runtime beside the model itself, at (batch, length) = (1, 1), (2, 8), (3, 13)
and the longest, with ids in padded places and holes in every mask, and again with a row that is all padding. Nothing
is left out of the comparison; an entry that is not finite in Keras must be the same in the graph. A model passes if no
entry differs by more than 1e-5 · (1 + max|output|).

"Difference" is the largest on any backend, in units of 1 + max|output|; "nodes" counts those of the graph; "marks" are
its nodes that stand for several operations, and each `Softmax`, `Where` and `Einsum`; "seconds" are those of export and
both comparisons, on two cores that others used as well.
"""
OTHERS_HEADING = """
## Others that are tried

In the same way, on torch.
"""
APPLICATIONS_HEADING = """
## keras.applications

One of each family, with random weights, images of 80 × 96 and a free batch, compared in the same way, on torch;
NASNet, which Keras does not offer there, on TensorFlow.
"""
COLUMNS = """
| | verified on | difference | nodes | marks | seconds ({names}) |
|---|---|---|---|---|---|
"""
# Where the backends' files differ: KerasHub asks for the backend, and computes otherwise.
_FUSED = "KerasHub calls `ops.dot_product_attention` on JAX and torch, and computes it in steps on TensorFlow"
_GATHER = "KerasHub calls `tf.gather` on TensorFlow, and the graph has what it does on other backends"
WHY = dict.fromkeys(("Llama", "Mistral", "GPT-NeoX", "Qwen", "Phi-3"), _FUSED) | {"DeBERTaV3": _GATHER}


def table(cases: dict[str, Case], found: dict[str, dict]) -> str:
    """One row a backbone; `found` are the results by backend."""
    lines = []
    for name in cases:
        rows = {backend: results[name] for backend, results in found.items() if name in results}
        good = [backend for backend, row in rows.items() if row["verified"]]
        if not rows:
            continue
        cells = [", ".join(BACKENDS[backend] for backend in good) or "none"]
        if good:
            nodes = sorted({rows[backend]["nodes"] for backend in good})
            counts = rows[good[-1]]["counts"]
            cells += [f"{max(rows[backend]['difference'] for backend in good):.0e}", "–".join(map(str, nodes))]
            cells += [", ".join(f"{count} {key}" for key, count in counts.items() if key not in ("MatMul",))]
        else:
            cells += ["", "", ""]
        cells += [", ".join(f"{row['seconds']:.0f}" for row in rows.values())]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    backends = [backend for backend, results in found.items() if set(cases) & set(results)]
    return COLUMNS.format(names=", ".join(BACKENDS[backend] for backend in backends)) + "\n".join(lines) + "\n"


def write_page(files: list[pathlib.Path]) -> None:
    """Writes docs/zoo.md from what several runs found."""
    found: dict[str, dict] = {backend: {} for backend in BACKENDS}
    for file in files:
        content = json.loads(file.read_text())
        found[content["backend"]] |= content["results"]
    runs = [row for name in ZOO for results in found.values() if (row := results.get(name))]
    page = HEADER + table(ZOO, found)
    page += f"\n{sum(row['verified'] for row in runs)} of {len(runs)} pass.\n"
    equal = [
        name
        for name in ZOO
        if len({results.get(name, {}).get("sha256", backend) for backend, results in found.items()}) == 1
    ]
    page += f"\nThe file is the same, byte for byte, on all backends for {len(equal)} of {len(ZOO)}."
    reasons: dict[str, list[str]] = {}
    for name in ZOO:
        if name not in equal:
            reasons.setdefault(WHY.get(name, "it differs"), []).append(name)
    page += "".join(f" {', '.join(names)}: {reason}." for reason, names in reasons.items()) + "\n"
    undefined = [name for name in ZOO if any(results.get(name, {}).get("undefined") for results in found.values())]
    page += f"\nKeras gives numbers that are not finite in: {', '.join(undefined) or 'none of them'}.\n"
    for cases, heading in ((OTHERS, OTHERS_HEADING), (APPLICATIONS, APPLICATIONS_HEADING)):
        rows = [(name, results[name]) for results in found.values() for name in cases if name in results]
        others = dict(sorted(rows, key=lambda row: row[1]["verified"]))  # the last of a name stays: one that passed
        if not others:
            continue
        page += heading + table(cases, found)
        page += f"\n{sum(row['verified'] for row in others.values())} of {len(others)} pass.\n"
        for name, row in others.items():
            if not row["verified"]:
                # Where it was installed is nobody's business.
                said = re.sub(r"/\S*site-packages/", "", row["error"].splitlines()[0])
                page += f"\n{name}: `{textwrap.shorten(said, 240)}`\n"
    PAGE.write_text(page, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", help="these only")
    parser.add_argument("--others", action="store_true", help="the models that are tried beside the zoo")
    parser.add_argument("--applications", action="store_true", help="the families of keras.applications")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    parser.add_argument("--docs", nargs="+", type=pathlib.Path, help="write docs/zoo.md from these files")
    args = parser.parse_args(arguments)
    if args.docs:
        write_page(args.docs)
        return 0
    cases = OTHERS if args.others else APPLICATIONS if args.applications else ZOO
    names = args.names or list(cases)
    results = run(names, ZOO | OTHERS | APPLICATIONS)
    if args.json:
        import keras

        args.json.write_text(json.dumps({"backend": keras.backend.backend(), "results": results}, indent=1))
    return 0 if all(found["verified"] for found in results.values()) else 1


if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # Softmax over one key, masks that layers do not take: what a model of someone else's says of itself.
    warnings.simplefilter("ignore")
    sys.exit(main())
