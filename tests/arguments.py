"""Every public class with its arguments: what it is made and called with, and a changed value for each."""

import importlib
import inspect
import json

import keras
import numpy as np

import keras_transformer
from keras_transformer import layers, losses, metrics, models, schedules
from keras_transformer import ops as kt
from keras_transformer.layers import (
    CausalMask,
    CrossAttention,
    FeedForward,
    LearnedPositionalEncoding,
    MultiHeadSelfAttention,
    SelfAttention,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
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
from tests.checks import implicit_mask, numpy, randomize

B, T, S, D, E, F, N, V = 3, 5, 7, 6, 13, 11, 2, 17
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, T, D)).astype("float32")
MEMORY = RNG.normal(size=(B, S, E)).astype("float32")
# Padding at the end, in the middle and at the start; padding alone.
IDS = np.array([[3, 1, 4, 0, 0], [5, 0, 2, 6, 0], [0, 0, 0, 0, 0]], "int32")
MEMORY_IDS = np.array([[9, 2, 16, 3, 0, 0, 0], [0, 0, 8, 1, 0, 5, 7], [0] * 7], "int32")
PADDING, MEMORY_PADDING = IDS != 0, MEMORY_IDS != 0


TRANSFORMER = {"source_vocabulary_size": 17, "target_vocabulary_size": 19, "d_model": D, "num_layers": 1}
# What every public class with weights is made with, where it has no default.
REQUIRED = {"num_heads": N, "d_k": 4, "d_ff": F, "num_layers": 1, "vocabulary_size": V, "d_model": D, "num_classes": 3}
VISION = {"image_size": (6, 4), "patch_size": 2, "channels": 2}
IMAGES = RNG.normal(size=(B, 6, 4, 2)).astype("float32")


def built(layer, *shapes):
    layer.build(*shapes)
    return layer


def with_argument(name):
    """Every public layer and model whose constructor takes the argument."""
    classes = [getattr(module, each) for module in (layers, models) for each in module.__all__]
    found = [cls for cls in classes if name in inspect.signature(cls.__init__).parameters]
    assert found
    return found


def toy(cls, **arguments):
    """A small instance with random weights, and inputs by name."""
    inputs = inputs_of(cls)
    if "encoder" in parameters_of(cls):
        arguments = {"encoder": Encoder(**{**base_of(Encoder), **arguments})}
    return randomize(built_for(cls(**{**base_of(cls), **arguments}), inputs)), inputs


def inputs_of(cls):
    """Inputs by name for a layer or model of the class."""
    if cls is Transformer:
        return {"source": MEMORY_IDS, "target": IDS}
    if cls is VisionTransformer:
        return {"images": IMAGES}
    if issubclass(cls, keras.Model):
        return {"token_ids": IDS}
    if cls is TokenEmbedding:
        return {"x": IDS}
    return {"x": X, "memory": MEMORY} if "memory" in inspect.signature(cls.call).parameters else {"x": X}


def built_for(layer, inputs):
    """The layer, built as a call with the inputs would build it."""
    if layer.built:
        return layer
    return built(layer, *((None, *array.shape[1:]) for array in inputs.values()))


def public_classes():
    """Every public class that Keras saves by a config."""
    found = [getattr(module, name) for module in (layers, models) for name in module.__all__]
    for name in keras_transformer._SUBMODULES:
        if name in ("export", "layers", "models", "plot", "text"):
            continue  # ours above, or nothing that Keras saves
        module = importlib.import_module(f"keras_transformer.{name}")
        for each in vars(module).values():
            own = inspect.isclass(each) and each.__module__ == module.__name__ and not each.__name__.startswith("_")
            if own and hasattr(each, "get_config"):
                found.append(each)
    return found


def parameters_of(cls):
    """The parameters of a constructor, without those that it hands to Keras."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name not in ("self", "kwargs")
    }


_ATTENTION = {
    "num_heads": 3,
    "head_dim": 5,
    "dropout": 0.5,
    "use_bias": False,
    "kernel_initializer": "he_normal",
    "bias_initializer": "ones",
    "seed": 7,
    "num_kv_heads": 1,
}
_BLOCK = {
    "num_heads": 3,
    "d_ff": 7,
    "head_dim": 5,
    "num_kv_heads": 1,
    "dropout": 0.5,
    "activation": "gelu",
    "gated": True,
    "norm_first": True,
    "norm": "rms",
    "norm_epsilon": 0.3,
    "use_bias": False,
    "sliding_window": 2,
    "kernel_initializer": "he_normal",
}
_STACK = {**_BLOCK, "num_layers": 2}
_MODEL = {
    **{name: value for name, value in _STACK.items() if name != "kernel_initializer"},
    "head_dim": 4,
    "vocabulary_size": 19,
    "d_model": 10,
    "max_length": 8,
    "pad_id": 3,
    "seed": 5,
}
# For each public class every argument, with a value that differs from `base_of`.
ARGUMENTS = {
    MultiHeadSelfAttention: {**_ATTENTION, "causal": True, "sliding_window": 2},
    CrossAttention: _ATTENTION,
    SelfAttention: {"d_k": 5, "d_v": 3, "causal": True, "use_bias": True, "kernel_initializer": "he_normal"},
    FeedForward: {
        "d_ff": 7,
        "activation": "gelu",
        "gated": True,
        "use_bias": False,
        "kernel_initializer": "he_normal",
    },
    TransformerEncoderBlock: _BLOCK,
    TransformerDecoderBlock: _BLOCK,
    TransformerEncoder: _STACK,
    TransformerDecoder: _STACK,
    TokenEmbedding: {
        "vocabulary_size": 19,
        "d_model": 5,
        "scale": False,
        "mask_zero": False,
        "embeddings_initializer": "he_normal",
    },
    SinusoidalPositionalEncoding: {"max_wavelength": 500, "interleaved": False},
    LearnedPositionalEncoding: {"max_length": 8, "embeddings_initializer": "he_normal"},
    CausalMask: {},
    CausalLM: {
        **_MODEL,
        "norm_first": False,
        "position_encoding": "sinusoidal",
        "rotary_base": 300,
        "rotary_width": 2,
        "rotary_scaling": {"rope_type": "linear", "factor": 3.0},
        "scale_embedding": True,
        "tie_output": False,
        "end_id": 4,
        "pad_id": 11,
    },
    Encoder: {
        **_MODEL,
        "activation": "relu",
        "position_encoding": "sinusoidal",
        "num_token_types": 2,
        "embedding_norm": False,
    },
    MaskedLM: {"encoder": None, "activation": "relu"},
    TokenClassifier: {"encoder": None, "num_classes": 5, "dropout": 0.5},
    SequenceClassifier: {
        "encoder": None,
        "num_classes": 5,
        "pooling": "mean",
        "hidden_activation": "relu",
        "dropout": 0.5,
    },
    SentenceEncoder: {"encoder": None, "pooling": "cls", "normalize": False},
    VisionTransformer: {
        **{
            name: value
            for name, value in _MODEL.items()
            if name not in ("vocabulary_size", "max_length", "pad_id", "sliding_window")
        },
        "activation": "relu",
        "norm_first": False,
        "num_classes": 5,
        "image_size": (6, 8),
        "patch_size": (3, 2),
        "channels": 1,
        "pooling": "mean",
    },
    Transformer: {
        "source_vocabulary_size": 23,
        "target_vocabulary_size": 23,
        "num_layers": 2,
        "d_model": 10,
        "num_heads": 3,
        "d_ff": 7,
        "dropout": 0.5,
        "activation": "gelu",
        "norm_first": True,
        "share_embeddings": True,
        "tie_output": False,
        "max_length": 8,
        "start_id": 3,
        "end_id": 4,
        "pad_id": 9,
        "num_decoder_layers": 2,
        "norm_epsilon": 0.3,
        "position_encoding": "sinusoidal_halves",
        "scale_embedding": False,
        "embedding_norm": True,
        "output_bias": True,
        "seed": 5,
    },
    losses.MaskedCrossentropy: {
        "label_smoothing": 0.3,
        "ignore_id": 1,
        "normalizer": "constant",
        "token_count": 7,
        "name": "another",
    },
    metrics.MaskedAccuracy: {"ignore_id": 1, "name": "another", "dtype": "float16"},
    metrics.Perplexity: {"ignore_id": 1, "name": "another", "dtype": "float16"},
    schedules.InverseSqrtWarmup: {"d_model": 7, "warmup_steps": 5, "scale": 2.0, "name": "another"},
}
# What an argument needs beside it to have a meaning: (in both, with the changed value only).
TOGETHER = {
    "seed": ({"dropout": 0.5}, {}),
    "share_embeddings": ({"source_vocabulary_size": 19}, {}),
    "normalizer": ({}, {"token_count": 5}),
    "token_count": ({"normalizer": "constant", "token_count": 5}, {}),
}


def base_of(cls):
    """The smallest set of arguments that makes an instance."""
    required = {
        Transformer: TRANSFORMER,
        VisionTransformer: VISION,
        LearnedPositionalEncoding: {"max_length": 11},
    }.get(cls, {})
    accepted = parameters_of(cls)
    small = {name: value for name, value in {**REQUIRED, **required}.items() if name in accepted}
    if "encoder" in accepted:
        small["encoder"] = Encoder(**base_of(Encoder))
    return {**small, "dropout": 0.0} if "dropout" in accepted else small


def variants(cls, name):
    """Arguments that differ in one only (and what that one needs)."""
    both, changed = TOGETHER.get(name, ({}, {}))
    if name == "encoder":
        return base_of(cls), {**base_of(cls), "encoder": Encoder(**{**base_of(Encoder), "d_ff": 7})}
    if cls is CausalLM and name.startswith("rotary"):
        both = {"position_encoding": "rotary", "num_heads": 1}
    both = {key: value for key, value in both.items() if key in parameters_of(cls)}
    base = {**base_of(cls), **both}
    return base, {**base, **changed, name: ARGUMENTS[cls][name]}


# What `observe` saw of the instances that several arguments are held against.
OBSERVED = {}


def observed_by(cls, name):
    """How the effect of a constructor argument is seen."""
    if name in ("dropout", "seed"):
        return "training"
    if cls is Transformer and name == "pad_id":
        return "inference"
    if cls in (Transformer, CausalLM) and name in ("start_id", "end_id", "max_length", "pad_id"):
        return "generation"
    return "inference"


def observe(cls, arguments, way):
    """What an instance does that its arguments may change: arrays, names and numbers."""
    keras.utils.set_random_seed(11)
    if "encoder" in arguments:  # a new one, with weights of its own
        arguments = {**arguments, "encoder": Encoder.from_config(arguments["encoder"].get_config())}
    instance = cls(**arguments)
    rng = np.random.default_rng(3)
    labels, logits = rng.integers(0, 5, (3, 7)), rng.normal(size=(3, 7, 5)).astype("float32")
    if isinstance(instance, keras.losses.Loss):
        return [instance.name, numpy(instance(labels, logits))]
    if isinstance(instance, keras.metrics.Metric):
        instance.update_state(labels, logits)
        return [instance.name, numpy(instance.result()), *(str(v.dtype) for v in instance.variables)]
    if isinstance(instance, keras.optimizers.schedules.LearningRateSchedule):
        return [instance.name, *(numpy(instance(step)) for step in (0, 3, 11))]
    inputs = inputs_of(cls)
    if cls is VisionTransformer:
        inputs = {"images": rng.normal(size=(B, *instance.image_size, instance.channels)).astype("float32")}
    built_for(instance, inputs)
    seen = [numpy(weight.value) for weight in instance.weights]
    randomize(instance)
    call = instance if issubclass(cls, keras.Model) else lambda given, **kwargs: instance(**given, **kwargs)
    outputs = keras.tree.flatten(call(inputs))
    seen += [*numpy(outputs), None if (mask := implicit_mask(outputs[0])) is None else numpy(mask)]
    if way == "training":
        keras.utils.set_random_seed(12)
        seen.append(numpy(call(inputs, training=True)))
    if way == "generation":
        # What the loop of generation is asked for.
        request = instance.generation_request(MEMORY_IDS[:2], None)
        seen += [*request.start, request.max_new_tokens, request.rules.end_id, request.rules.pad_id]
    return seen


def same(one, other):
    """Whether two observations agree."""
    return len(one) == len(other) and all(
        np.shape(a) == np.shape(b) and (np.allclose(a, b, atol=1e-6) if isinstance(a, np.ndarray) else a == b)
        for a, b in zip(one, other, strict=True)
    )


def json_copy(instance):
    """A serialized instance, as it is read from a file."""
    return json.loads(json.dumps(keras.saving.serialize_keras_object(instance)))


def plain(value):
    """A value of a config or an attribute, in a form that compares."""
    if isinstance(value, keras.initializers.Initializer):
        return keras.initializers.serialize(value)
    if isinstance(value, keras.Model):
        return plain(value.get_config())
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != "shared_object_id"}
    return value


IMPLICIT = {"x", "inputs", "memory", "mask", "x_mask", "memory_mask"}


def calls_of(cls):
    """The arguments of a call, without its tensors and the masks that Keras fills in."""
    return [name for name in inspect.signature(cls.call).parameters if name not in IMPLICIT | {"self"}]


def with_call_argument(name):
    return [cls for cls in ARGUMENTS if issubclass(cls, keras.layers.Layer) and name in calls_of(cls)]


def _cached(layer, inputs, start):
    """A call with a cache of other numbers than zero."""
    rng = np.random.default_rng(7)
    pair = tuple(rng.normal(size=(B, S, N, D // N)).astype("float32") for _ in range(2))
    cache = (pair,) if isinstance(layer, TransformerDecoder) else pair
    if isinstance(layer, CrossAttention):
        return {"x": inputs["x"], "cache": cache}
    return {**inputs, "cache": cache, "start": start}


def _attention_mask(layer, inputs):
    slots = S if isinstance(layer, CrossAttention) else T
    return np.abs(np.arange(T)[:, None] - np.arange(slots))[None] < 2


# By name, what a call is given without an argument and with it.
CALL_ARGUMENTS = {
    "padding_mask": lambda layer, given: (
        given,
        {**given, "padding_mask": MEMORY_PADDING if isinstance(layer, CrossAttention) else PADDING},
    ),
    "memory_padding_mask": lambda layer, given: (given, {**given, "memory_padding_mask": MEMORY_PADDING}),
    "attention_mask": lambda layer, given: (given, {**given, "attention_mask": _attention_mask(layer, given)}),
    "cache": lambda layer, given: (given, _cached(layer, given, 0)),
    "start": lambda layer, given: (_cached(layer, given, 0), _cached(layer, given, 2)),
    "rotary": lambda layer, given: (
        given,
        {**given, "rotary": numpy(kt.rotary_encoding(kt.positions(T, 3), kt.rotary_frequencies(2)))},
    ),
    "memory_cache": lambda layer, given: (
        given,
        {"x": given["x"], "memory_cache": layer.project_memory(2 * given["memory"])},
    ),
    "return_weights": lambda layer, given: (given, {**given, "return_weights": True}),
    "training": lambda layer, given: (
        ({"inputs": given}, {"inputs": given, "training": True})
        if isinstance(layer, keras.Model)
        else (given, {**given, "training": True})
    ),
    "reverse": lambda layer, given: ({"x": X}, {"x": X, "reverse": True}),
    "positions": lambda layer, given: (
        given,
        {
            **given,
            "positions": np.arange(T, dtype="int32")[None] + 3,
            **({"key_positions": np.arange(S)[None]} if isinstance(layer, CausalMask) else {}),
        },
    ),
    "key_positions": lambda layer, given: tuple(
        {**given, "positions": np.arange(T)[None], "key_positions": np.arange(T)[None] + shift} for shift in (0, 1)
    ),
}
