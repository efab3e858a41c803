"""Faults measured in other packages, held against ours: eager, functional, compiled and exported.

Each class has the fault's name for a subject, and asserts the law that the fault breaks in every form.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import onnx
import pytest
from keras import ops

import keras_transformer
from keras_transformer import layers, losses, metrics, models, schedules
from keras_transformer import ops as kt
from keras_transformer.export import (
    ExportError,
    UnsupportedOperationError,
    VerificationError,
    export_onnx,
    register_lowering,
)
from keras_transformer.layers import (
    CausalMask,
    CrossAttention,
    FeedForward,
    MultiHeadSelfAttention,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from keras_transformer.models import Transformer
from tests import reference
from tests.checks import close, gradients, implicit_mask, numpy, quick, randomize, run_onnx
from tests.forms import (
    FORMS,
    KERAS_FORMS,
    ONNX_FORMS,
    close_in_every_form,
    flat,
    functional,
    in_every_form,
    program,
)

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
REQUIRED = {"num_heads": N, "d_ff": F, "num_layers": 1, "vocabulary_size": V, "d_model": D}


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
    return randomize(built_for(cls(**{**base_of(cls), **arguments}), inputs)), inputs


def inputs_of(cls):
    """Inputs by name for a layer or model of the class."""
    if cls is Transformer:
        return {"source": MEMORY_IDS, "target": IDS}
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
    "dropout": 0.5,
    "activation": "gelu",
    "norm_first": True,
    "layer_norm_epsilon": 0.3,
    "kernel_initializer": "he_normal",
}
_STACK = {**_BLOCK, "num_layers": 2}
# For each public class every argument, with a value that differs from `base_of`.
ARGUMENTS = {
    MultiHeadSelfAttention: {**_ATTENTION, "causal": True},
    CrossAttention: _ATTENTION,
    FeedForward: {"d_ff": 7, "activation": "gelu", "kernel_initializer": "he_normal"},
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
    SinusoidalPositionalEncoding: {"max_wavelength": 500},
    CausalMask: {},
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
    required = TRANSFORMER if cls is Transformer else {}
    accepted = parameters_of(cls)
    small = {name: value for name, value in {**REQUIRED, **required}.items() if name in accepted}
    return {**small, "dropout": 0.0} if "dropout" in accepted else small


def variants(cls, name):
    """Arguments that differ in one only (and what that one needs)."""
    both, changed = TOGETHER.get(name, ({}, {}))
    both = {key: value for key, value in both.items() if key in parameters_of(cls)}
    base = {**base_of(cls), **both}
    return base, {**base, **changed, name: ARGUMENTS[cls][name]}


# What `observe` saw of the instances that several arguments are held against.
OBSERVED = {}


def observed_by(name):
    """How the effect of a constructor argument is seen."""
    if name in ("dropout", "seed"):
        return "training"
    return "generation" if name in ("start_id", "end_id", "max_length") else "inference"


def observe(cls, arguments, way):
    """What an instance does that its arguments may change: arrays, names and numbers."""
    keras.utils.set_random_seed(11)
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
    built_for(instance, inputs)
    seen = [numpy(weight.value) for weight in instance.weights]
    randomize(instance)
    call = instance if cls is Transformer else lambda given, **kwargs: instance(**given, **kwargs)
    output = call(inputs)
    seen += [numpy(output), None if (mask := implicit_mask(output)) is None else numpy(mask)]
    if way == "training":
        keras.utils.set_random_seed(12)
        seen.append(numpy(call(inputs, training=True)))
    if way == "generation":
        # What the loop of generation is given.
        instance._generator.generate = lambda source, start, length, rules, compile: [*start, length, rules.end_id]
        seen += instance.generate(MEMORY_IDS[:2])
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
        if isinstance(layer, Transformer)
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


def without_padding(ids):
    """(row, its ids without padding (1, length)) of every row that has some."""
    return [(row, ids[row : row + 1, kept]) for row, kept in enumerate(ids != 0) if kept.any()]


class TestSharedMasks:
    """Attention that clears the mask of what it is given: the next layer that shares it attends to padding."""

    @pytest.mark.parametrize("order", [1, -1])
    def test_every_layer_that_is_given_a_masked_tensor_sees_its_mask(self, order):
        embedding = randomize(built(TokenEmbedding(V, D), (None, None)))
        over_memory = [
            CrossAttention(N),
            TransformerDecoderBlock(N, F),
            CrossAttention(N),
            TransformerDecoder(1, N, F),
        ]
        over_itself = [
            MultiHeadSelfAttention(N),
            FeedForward(F),
            TransformerEncoderBlock(N, F),
            keras.layers.LayerNormalization(),
            TransformerEncoder(1, N, F),
            keras.layers.Dropout(0.3),
            TransformerDecoderBlock(N, F),
            SinusoidalPositionalEncoding(),
            TransformerDecoder(1, N, F),
        ]
        shared = [*over_memory, *over_itself]

        def function(x, ids, padding=None):
            memory = embedding(ids)
            if padding is not None:
                memory = ops.convert_to_tensor(numpy(memory))  # without its mask
            outputs = {}
            for layer in shared[::order]:
                explicit = "padding_mask" in layer._call_signature.parameters and padding is not None
                if layer in over_itself:
                    outputs[layer.name] = layer(memory, **({"padding_mask": padding} if explicit else {}))
                else:
                    name = "padding_mask" if isinstance(layer, CrossAttention) else "memory_padding_mask"
                    outputs[layer.name] = layer(x, memory=memory, **({name: padding} if explicit else {}))
            outputs = [outputs[layer.name] for layer in shared]
            return outputs if padding is not None else (outputs, implicit_mask(memory))

        function(X, MEMORY_IDS)
        for seed, layer in enumerate(shared):
            randomize(layer, seed)
        expected = flat(function(X, MEMORY_IDS, MEMORY_PADDING))
        unmasked = flat(function(X, MEMORY_IDS, np.ones_like(MEMORY_PADDING)))
        # Where no mask plays a part: the feed-forward network, the norm, dropout and positions.
        changed = [np.abs(one - other)[:2].max() > 1e-3 for one, other in zip(expected, unmasked, strict=True)]
        assert sum(changed) == len(shared) - 4
        # The order of calls is gone from a graph.
        forms = FORMS if order == 1 else ("eager", "functional")
        found = in_every_form(function, {"x": X, "ids": MEMORY_IDS}, forms)
        close_in_every_form(found, [*expected, MEMORY_PADDING])

    def test_the_attention_of_keras_sees_the_mask_that_ours_has_seen(self):
        embedding = randomize(built(TokenEmbedding(V, D), (None, None)))
        ours, cross, other = MultiHeadSelfAttention(N), CrossAttention(N), keras.layers.MultiHeadAttention(N, 3)

        def function(ids, x, explicit=False):
            memory = embedding(ids)
            padding = ops.not_equal(ids, 0) if explicit else None
            outputs = [ours(memory, padding_mask=padding), cross(x, memory, padding_mask=padding)]
            return [*outputs, other(memory, memory)]

        inputs = {"ids": MEMORY_IDS, "x": X}
        function(**inputs)
        for seed, layer in enumerate((ours, cross, other)):
            randomize(layer, seed)
        memory = numpy(embedding(MEMORY_IDS))
        expected = [
            numpy(ours(memory, padding_mask=MEMORY_PADDING)),
            numpy(cross(X, memory, padding_mask=MEMORY_PADDING)),
            numpy(other(memory, memory, attention_mask=MEMORY_PADDING[:, :, None] & MEMORY_PADDING[:, None])),
        ]
        # Eagerly it comes last. A functional model runs layers by their depth, so that Keras' attention may come first
        # and take the mask away: there it is given to ours, as the page on masks says.
        close_in_every_form(in_every_form(function, inputs, ("eager", "compiled")), expected)
        close_in_every_form(in_every_form(lambda **given: function(**given, explicit=True), inputs), expected)


class TestResiduals:
    """A mask that is lost where `x + layer(x)` makes a new tensor."""

    def embedded(self):
        embedding, encoding = TokenEmbedding(V, D), SinusoidalPositionalEncoding()
        return lambda ids: encoding(embedding(ids))

    def ours(self, norm_first):
        embed = self.embedded()
        encoder, block = TransformerEncoder(1, N, F, norm_first=norm_first), TransformerEncoderBlock(N, F)
        head = keras.layers.Dense(5)

        def function(ids):
            y = head(block(encoder(embed(ids))))
            return y, implicit_mask(y)

        return function

    def users(self, form):
        """A user's residual block around our attention, once more over it."""
        embed, head = self.embedded(), keras.layers.Dense(5)
        attentions = [MultiHeadSelfAttention(N, head_dim=4) for _ in range(2)]
        adds, norms = ([cls() for _ in range(2)] for cls in (keras.layers.Add, keras.layers.LayerNormalization))

        def function(ids):
            x = embed(ids)
            padding = ops.not_equal(ids, 0)
            for attention, add, norm in zip(attentions, adds, norms, strict=True):
                if form == "layers.Add":
                    x = norm(add([x, attention(x)]))
                else:
                    x = norm(x + attention(x, padding_mask=padding))
            y = head(x)
            return y, implicit_mask(y) if form == "layers.Add" else padding

        return function

    @pytest.mark.parametrize("kind", ["ours, post-norm", "ours, pre-norm", "layers.Add", "an explicit mask"])
    def test_padding_changes_nothing_from_embedding_to_head(self, kind):
        function = self.ours(kind.endswith("pre-norm")) if kind.startswith("ours") else self.users(kind)
        ids = np.array([[3, 1, 4, 0, 0], [5, 12, 2, 6, 7], [9, 0, 0, 0, 0], [0] * 5], "int32")
        found = in_every_form(function, {"ids": ids})
        rows = without_padding(ids)
        alone = numpy(quick(lambda rows: [function(ids)[0] for ids in rows])([real for _, real in rows]))
        for (row, real), (expected,) in zip(rows, alone, strict=True):
            for form, (output, mask) in found.items():
                close(output[row, : real.shape[1]], expected)
                np.testing.assert_array_equal(mask, ids != 0, form)
        for output, _ in found.values():
            assert np.isfinite(output).all()
        close_in_every_form(found, found["eager"])

    def test_a_sum_by_an_operator_carries_no_mask_of_itself(self):
        """What the page on masks tells users of Keras."""
        x = self.embedded()(IDS)
        assert implicit_mask(x + x) is None
        np.testing.assert_array_equal(numpy(implicit_mask(keras.layers.Add()([x, x]))), PADDING)


class TestRowsThatSeeNothing:
    """A query that may attend to nothing: the mean of the values on one path, zero on another, NaN on a third."""

    MASKS = {
        "padding": lambda mask: mask[:, 0, 0],
        "rank 3": lambda mask: mask[:, 0],
        "rank 4": lambda mask: mask,
        "rank 4, one for all heads and queries": lambda mask: mask[:, :1, :1],
    }
    # Every pair of these three, on every path.
    KINDS = [
        {"dropout": 0.0, "use_bias": False, "weights": False},
        {"dropout": 0.0, "use_bias": True, "weights": True},
        {"dropout": 0.5, "use_bias": False, "weights": True},
        {"dropout": 0.5, "use_bias": True, "weights": False},
    ]

    @pytest.mark.parametrize("rank", MASKS)
    @pytest.mark.parametrize("cls", [MultiHeadSelfAttention, CrossAttention])
    def test_it_gives_zero_whatever_the_dropout_the_path_and_the_rank_of_the_mask(self, cls, rank):
        cross = cls is CrossAttention
        slots = S if cross else T
        mask = np.random.default_rng(1).random((B, N, T, slots)) < 0.6
        mask[0, :, 2], mask[1] = False, False
        mask[2, ..., 0] = True
        mask = self.MASKS[rank](mask)
        allowed = {2: mask[:, None, None], 3: mask[:, None] if mask.ndim == 3 else None}.get(mask.ndim, mask)
        allowed = np.broadcast_to(allowed, (B, N, T, slots))
        sees = allowed.any((1, 3))
        name = "padding_mask" if rank == "padding" else "attention_mask"
        # One layer for each kind: Keras takes no layer whose calls differ in their number of outputs.
        attentions = [cls(N, dropout=kind["dropout"], use_bias=kind["use_bias"]) for kind in self.KINDS]

        def function(x, mask, memory=None, training=False):
            inputs = (x, memory) if cross else (x,)
            return [
                attention(*inputs, **{name: mask}, return_weights=kind["weights"], training=training)
                for attention, kind in zip(attentions, self.KINDS, strict=True)
            ]

        inputs = {"x": X, "mask": mask, **({"memory": MEMORY} if cross else {})}
        function(**inputs)
        for attention in attentions:
            randomize(attention)
        # Heads are known, and so is the 1 that stands for all queries.
        free = tuple(axis for axis in range(1, mask.ndim) if mask.shape[axis] not in (1, N))
        found = in_every_form(function, inputs, free={"mask": free})
        found["training"] = flat(function(**inputs, training=True))
        for form, outputs in found.items():
            given = iter(outputs)
            for kind in self.KINDS:
                output = next(given)
                assert np.isfinite(output).all()
                # With a bias, the projection of zero, which is the same everywhere.
                assert (output[~sees] == output[~sees][0]).all()
                assert kind["use_bias"] or not output[~sees].any()
                if form != "training":
                    assert np.abs(output[sees] - output[~sees][0]).max(-1).min() > 1e-4
                if kind["weights"]:
                    weights = next(given)
                    assert not weights[~allowed].any()
        training = found.pop("training")
        close_in_every_form(found, found["eager"])
        assert np.abs(training[-1] - found["eager"][-1]).max() > 1e-3, "dropout was active"


class TestDropoutAtInference:
    """A dropout argument that switches the fast path off although nothing is dropped."""

    @pytest.mark.parametrize("cls", with_argument("dropout"))
    def test_the_same_operations_run_and_the_same_bytes_are_exported(self, cls, tmp_path):
        programs, files = [], []
        for number, dropout in enumerate((0.0, 0.5)):
            layer, inputs = toy(cls, dropout=dropout)
            names = list(inputs)

            def run(*tensors, layer=layer, names=names):
                given = dict(zip(names, tensors, strict=True))
                return layer(given) if isinstance(layer, keras.Model) else layer(**given)

            programs.append(program(run, *inputs.values()))
            model = layer if isinstance(layer, keras.Model) else functional(layer, inputs)
            export_onnx(model, tmp_path / str(number), verify=False, verbose=False)
            files.append([path.read_bytes() for path in sorted((tmp_path / str(number)).glob("*.onnx"))])
        assert len(programs[0]) > 100 and programs[0] == programs[1]
        assert files[0] and files[0] == files[1]

    @pytest.mark.backends("torch")
    def test_the_fused_kernel_serves_every_attention_of_a_layer_with_dropout(self, monkeypatch):
        import torch

        calls = []
        kernel = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda *args, **kwargs: calls.append(0) or kernel(*args, **kwargs),
        )
        for cls, attentions in {TransformerEncoder: 2, TransformerDecoder: 4, Transformer: 6}.items():
            layer, inputs = toy(cls, dropout=0.5, num_layers=2)
            calls.clear()
            layer(inputs) if cls is Transformer else layer(**inputs)
            assert len(calls) == attentions, cls


class TestSpecs:
    """A symbolic shape of attention weights that is not that of the real ones."""

    def test_the_specs_of_cross_attention_weights_hold(self):
        """The harness holds every spec against the result; here width and length of the memory are its own."""
        cross = CrossAttention(N, head_dim=5)
        block, stack = TransformerDecoderBlock(N, F, head_dim=5), TransformerDecoder(2, N, F)

        def function(x, memory):
            return [layer(x, memory=memory, return_weights=True) for layer in (cross, block, stack)]

        found = in_every_form(function, {"x": X, "memory": MEMORY})
        own, cross = (B, N, T, T), (B, N, T, S)
        for outputs in found.values():
            shapes = [x.shape for x in outputs if x.ndim == 4]
            assert shapes == [cross, own, cross, own, cross, own, cross]
            for weights in outputs:
                assert weights.ndim == 3 or np.abs(weights.sum(-1) - 1).max() < 1e-5

    def test_values_of_another_width_than_queries(self):
        rng = np.random.default_rng(0)
        shapes = {"query": (B, T, 4, 3), "key": (B, S, 2, 3), "value": (B, S, 2, 5)}
        inputs = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
        axes = {name: {0: "batch", 1: "targets" if name == "query" else "sources"} for name in inputs}

        def function(query, key, value):
            return kt.attention(query, key, value, return_weights=True), kt.attention(query, key, value)

        found = in_every_form(function, inputs, dynamic_axes=axes)
        output, weights = reference.attention(*inputs.values())
        assert output.shape == (B, T, 4, 5) and weights.shape == (B, 4, T, S)
        close_in_every_form(found, [output, weights, output])


class TestOneKeyHead:
    """A single key/value head, or a mask with it, that fails on one backend only."""

    @pytest.mark.parametrize("key_heads", [1, 2, 4])
    def test_key_heads_and_every_mask(self, key_heads):
        rng = np.random.default_rng(0)
        shapes = {"query": (B, T, 4, 3), "key": (B, T, key_heads, 3), "value": (B, T, key_heads, 3)}
        inputs = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
        mask = rng.random((B, T, T)) < 0.6
        mask[1] = False

        def function(query, key, value, mask):
            masks = (None, mask, ops.expand_dims(mask, 1))
            return [kt.attention(query, key, value, m, causal=causal) for m in masks for causal in (False, True)]

        axes = {name: {0: "batch", 1: "length"} for name in inputs} | {"mask": {0: "batch", 1: "length", 2: "length"}}
        found = in_every_form(function, {**inputs, "mask": mask}, free={"mask": (1, 2)}, dynamic_axes=axes)
        expected = [
            reference.attention(*inputs.values(), m, causal=causal)[0]
            for m in (None, mask, mask)
            for causal in (False, True)
        ]
        close_in_every_form(found, expected)


class TestCachedQueries:
    """A causal mask aligned with the first key: one query over five cached keys sees only one of them."""

    LAYERS = {
        "self-attention": lambda: MultiHeadSelfAttention(N, causal=True),
        "block": lambda: TransformerDecoderBlock(N, F),
    }

    @pytest.mark.parametrize(
        "name, form",
        [("self-attention", form) for form in ("growing", "buffer", "a slot for each row")] + [("block", "growing")],
    )
    def test_one_query_with_five_keys_sees_all_five(self, name, form):
        layer = built(self.LAYERS[name](), (None, None, D))
        randomize(layer)
        whole, weights_of_all = numpy(layer(X, return_weights=True))
        empty = ops.zeros((B, 0 if form == "growing" else S, N, D // N))
        first = None if form == "growing" else 0
        _, (key, value) = layer(X[:, :4], cache=(empty, empty), start=first)
        inputs = {"x": X[:, 4:], "key": numpy(key), "value": numpy(value)}
        if form == "a slot for each row":
            inputs["start"] = np.full(B, 4, "int32")

        def function(x, key, value, start=4 if form == "buffer" else None):
            return layer(x, cache=(key, value), start=start, return_weights=True)

        axes = {"x": {0: "batch"}, "key": {0: "batch", 1: "slots"}, "value": {0: "batch", 1: "slots"}}
        axes |= {"start": {0: "batch"}} if "start" in inputs else {}
        least = {} if form == "growing" else {"min_length": 5}
        found = in_every_form(function, inputs, free={"x": ()}, dynamic_axes=axes, **least)
        for output, weights, new_key, _ in found.values():
            close(output, whole[:, 4:])
            close(weights[..., :5], weights_of_all[:, :, 4:])
            assert (weights[..., :5] > 1e-4).all() and not weights[..., 5:].any()
            assert new_key.shape[1] == (5 if form == "growing" else S)


class TestRoundTrips:
    """An argument that `get_config` forgets."""

    def test_every_public_class_is_registered_and_has_arguments_here(self):
        registered = {
            name.partition(">")[2]: cls
            for name, cls in keras.saving.get_custom_objects().items()
            if name.startswith("keras_transformer>")
        }
        assert registered == {cls.__name__: cls for cls in public_classes()}
        assert set(registered) == {cls.__name__ for cls in ARGUMENTS}
        for cls, arguments in ARGUMENTS.items():
            assert set(arguments) == set(parameters_of(cls)), cls

    @pytest.mark.parametrize("cls, name", [(cls, name) for cls in ARGUMENTS for name in ARGUMENTS[cls]])
    def test_every_argument_survives(self, cls, name):
        _, changed = variants(cls, name)
        instance = cls(**changed)
        config = instance.get_config()
        default = parameters_of(cls)[name].default if name in parameters_of(cls) else None
        assert changed[name] != default
        copies = [cls.from_config(config), keras.saving.deserialize_keras_object(json_copy(instance))]
        for copy in copies:
            assert type(copy) is cls
            assert copy.get_config() == config
            assert plain(getattr(copy, name)) == plain(getattr(instance, name))
        assert plain(config[name]) != plain(cls(**variants(cls, name)[0]).get_config()[name])

    @pytest.mark.parametrize("cls", ARGUMENTS)
    @pytest.mark.parametrize("name", ["name", "dtype", "trainable"])
    def test_so_do_those_of_keras(self, cls, name):
        if not issubclass(cls, keras.layers.Layer):
            pytest.skip("has them by name, or not at all")
        value = {"name": "another", "dtype": "mixed_bfloat16", "trainable": False}[name]
        instance = cls(**base_of(cls), **{name: value})
        copy = keras.saving.deserialize_keras_object(json_copy(instance))
        assert copy.get_config() == instance.get_config()
        for one in (instance, copy):
            found = one.dtype_policy.name if name == "dtype" else getattr(one, name)
            assert found == value
            inner = [layer for layer in one._flatten_layers() if layer is not one]
            if name == "dtype":
                assert {layer.dtype_policy.name for layer in inner} <= {value}
            if name == "trainable":
                assert not one.trainable_weights


class TestArguments:
    """An argument that is accepted and ignored."""

    @pytest.mark.parametrize("cls, name", [(cls, name) for cls in ARGUMENTS for name in ARGUMENTS[cls]])
    def test_every_argument_of_a_constructor_changes_something(self, cls, name):
        if cls is Transformer and name == "seed":
            base, changed = ({**base_of(cls), "seed": seed} for seed in (3, 4))
        else:
            base, changed = variants(cls, name)
        if (key := (cls, repr(base), observed_by(name))) not in OBSERVED:
            first, again = (observe(cls, base, observed_by(name)) for _ in range(2))
            assert same(first, again), "equal arguments give equal observations"
            OBSERVED[key] = first
        assert not same(OBSERVED[key], observe(cls, changed, observed_by(name)))

    @pytest.mark.parametrize(
        "cls, name", [(cls, name) for cls in ARGUMENTS if issubclass(cls, keras.layers.Layer) for name in calls_of(cls)]
    )
    def test_every_argument_of_a_call_changes_something(self, cls, name):
        layer, inputs = toy(cls, **({"dropout": 0.5} if name == "training" else {}))
        base, changed = CALL_ARGUMENTS[name](layer, dict(inputs))
        results = []
        for arguments in (base, changed):
            keras.utils.set_random_seed(5)
            results.append(flat(layer(arguments.pop("inputs"), **arguments) if "inputs" in arguments
                                else layer(**arguments)))  # fmt: skip
        assert not same(*results)

    @pytest.mark.parametrize("cls", ARGUMENTS)
    def test_unknown_arguments_are_refused(self, cls):
        with pytest.raises((TypeError, ValueError), match="sliding_window"):
            cls(**base_of(cls), sliding_window=3)
        if not issubclass(cls, keras.layers.Layer):
            return
        layer, inputs = toy(cls)
        symbolic = {name: keras.Input(x.shape[1:], dtype=str(x.dtype)) for name, x in inputs.items()}
        for given in (inputs, symbolic):
            with pytest.raises(TypeError, match="use_gate"):
                layer(given, use_gate=True) if cls is Transformer else layer(**given, use_gate=True)

    @pytest.mark.parametrize("cls", [TransformerDecoderBlock, TransformerDecoder])
    def test_a_mask_of_a_memory_needs_a_memory(self, cls):
        layer = built(cls(**base_of(cls)), (None, None, D))
        for x, mask in (
            (X, MEMORY_PADDING),
            (keras.KerasTensor((None, None, D)), keras.KerasTensor((None, None), "bool")),
        ):
            with pytest.raises(ValueError, match="built without a memory.*Received: a mask of a memory"):
                layer(x, memory_padding_mask=mask)


class TestHeads:
    """A width that the heads do not divide, accepted silently."""

    @pytest.mark.parametrize("heads", [4, 7])
    @pytest.mark.parametrize("cls", with_argument("num_heads"))
    def test_the_error_names_both(self, cls, heads):
        message = f"`num_heads` must divide.*num_heads={heads}, width {D}"
        arguments = {**base_of(cls), "num_heads": heads}
        if cls is Transformer:
            with pytest.raises(ValueError, match=message):
                cls(**arguments)
            return
        memory = "memory" in inspect.signature(cls.call).parameters
        shapes = [(None, None, D), (None, None, E)][: 1 + memory]
        with pytest.raises(ValueError, match=message):
            cls(**arguments).build(*shapes)
        for make in (keras.Input, keras.KerasTensor, ops.zeros):
            tensors = [make((3, 5, shape[-1])[make is keras.Input :]) for shape in shapes]
            with pytest.raises(ValueError, match=message):
                cls(**arguments)(*tensors)
        # A head width of one's own makes any number of heads right.
        assert cls(**arguments, head_dim=5)(*map(keras.KerasTensor, shapes)).shape == shapes[0]


class TestPrecedence:
    """An explicit padding mask to which the implicit one is added all the same."""

    def test_an_explicit_mask_wins_over_the_implicit_one_in_every_layer(self):
        embedding = randomize(built(TokenEmbedding(V, D), (None, None)))
        itself = [cls(**base_of(cls)) for cls in with_call_argument("padding_mask") if cls is not CrossAttention]
        cross, decoders = CrossAttention(N), [cls(**base_of(cls)) for cls in with_call_argument("memory_padding_mask")]
        assert len(itself) == 5 and len(decoders) == 2

        def function(ids, everything, other, plain=False, masks=None):
            x = embedding(ids)
            if plain:
                x = ops.convert_to_tensor(numpy(x))
            outputs = []
            for mask in (everything, other) if masks is None else masks:
                outputs += [layer(x, padding_mask=mask) for layer in itself]
                outputs.append(cross(x, x, padding_mask=mask))
                outputs += [layer(x, memory=x, padding_mask=mask, memory_padding_mask=mask) for layer in decoders]
            return outputs

        other = np.array([[0, 1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]], "int32")
        inputs = {"ids": MEMORY_IDS, "everything": np.ones_like(MEMORY_PADDING), "other": other}
        function(**inputs)
        for seed, layer in enumerate([*itself, cross, *decoders]):
            randomize(layer, seed)
        expected = flat(function(**inputs, plain=True, masks=(None, other)))
        implicit = flat(function(**inputs, masks=(None, None)))
        axes = {name: {0: "batch", 1: "length"} for name in inputs}
        close_in_every_form(in_every_form(function, inputs, dynamic_axes=axes), expected)
        # A layer that is causal has no earlier padding to see in some rows: the whole output is compared.
        for one, without in zip(implicit, expected, strict=True):
            assert np.abs(one - without).max() > 1e-3

    def test_the_implicit_mask_joins_an_attention_mask(self):
        embedding = randomize(built(TokenEmbedding(V, D), (None, None)))
        itself = [MultiHeadSelfAttention(N), TransformerEncoder(1, N, F), TransformerDecoder(1, N, F)]
        cross = CrossAttention(N)
        band = np.abs(np.arange(S)[:, None] - np.arange(S))[None] < 3

        def function(ids, band, padding=None):
            x = embedding(ids)
            if padding is not None:
                x = ops.convert_to_tensor(numpy(x))
            outputs = [layer(x, padding_mask=padding, attention_mask=band) for layer in itself]
            return [*outputs, cross(x, x, padding_mask=padding, attention_mask=band)]

        inputs = {"ids": MEMORY_IDS, "band": np.repeat(band, B, 0)}
        function(**inputs)
        for seed, layer in enumerate([*itself, cross]):
            randomize(layer, seed)
        expected = flat(function(**inputs, padding=MEMORY_PADDING))
        axes = {"ids": {0: "batch", 1: "length"}, "band": {0: "batch", 1: "length", 2: "length"}}
        close_in_every_form(in_every_form(function, inputs, free={"band": (1, 2)}, dynamic_axes=axes), expected)


class TestPositions:
    """Sinusoidal positions computed in the compute dtype, at even widths only, and without the mask."""

    # Half a unit in the last place below 1, and what float32 leaves.
    HALF = {"float32": 1e-6, "float16": 2**-12 + 1e-6, "bfloat16": 2**-9 + 1e-6}

    @pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
    def test_they_are_exact_at_every_position_under_every_policy_and_the_mask_goes_on(self, policy):
        embedding = TokenEmbedding(V, 8, embeddings_initializer="zeros", dtype=policy)
        encoding = SinusoidalPositionalEncoding(dtype=policy)
        positions = np.array([[0, 1, 2, 3, 4], [255, 256, 257, 258, 2047], [2048, 2049, 4097, 65537, 100000]], "int32")

        def function(ids, positions):
            y = encoding(embedding(ids), positions=positions)
            return ops.cast(y, "float32"), implicit_mask(y)

        half = policy.removeprefix("mixed_")
        inputs = {"ids": IDS, "positions": positions}
        axes = {name: {0: "batch", 1: "length"} for name in inputs}
        # ONNX Runtime has no bfloat16 on the CPU.
        found = in_every_form(function, inputs, KERAS_FORMS if half == "bfloat16" else FORMS, dynamic_axes=axes)
        for form, (encoded, mask) in found.items():
            close(encoded, reference.sinusoidal_encoding(positions, 8), self.HALF[half])
            np.testing.assert_array_equal(mask, PADDING, form)

    @pytest.mark.parametrize("width", [1, 3, 5, 7, 29])
    def test_odd_widths(self, width):
        encoding = SinusoidalPositionalEncoding()
        found = in_every_form(lambda x: encoding(x), {"x": np.zeros((1, 3, width), "float32")})
        close_in_every_form(found, [reference.sinusoidal_encoding(np.arange(3)[None], width)], 2e-6)
        if width == 5:
            close_in_every_form(
                {form: [output[0, :2]] for form, (output,) in found.items()},
                [np.array([[0, 1, 0, 1, 0], [0.841471, 0.540302, 0.025116, 0.999685, 0.000631]])],
                1e-5,
            )
        assert abs(found["ONNX"][0][0, 1, 0] - 0.841471) < 1e-5

    def test_an_encoder_of_odd_width_is_saved_reloaded_and_exported(self, tmp_path):
        encoding, encoder = SinusoidalPositionalEncoding(), TransformerEncoder(1, 1, 7)
        inputs = {"x": RNG.normal(size=(2, 3, 5)).astype("float32")}
        model = randomize(functional(lambda x: encoder(encoding(x)), inputs))
        expected = numpy(model(inputs))
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        found = in_every_form(lambda x: loaded({"x": x}), inputs, ("compiled", *ONNX_FORMS))
        close_in_every_form(found, [expected])


class SlicesWritten(keras.layers.Layer):
    """Writes a slice; Keras' export for TensorFlow makes an invalid graph of it."""

    def call(self, x):
        return ops.slice_update(x, (0, 1, 0), 2 * x[:, :1])

    def compute_output_shape(self, shape):
        return shape


class Applied(keras.layers.Layer):
    """A function as a layer."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class TestExportTellsTheTruth:
    """An exporter that reports success on graphs that do not run, takes any argument, and says nothing of precision."""

    RIGHT = {
        "exact GELU, an activation": lambda: keras.layers.Dense(5, activation="gelu"),
        "exact GELU, an operation": lambda: Applied(lambda x: ops.gelu(x, approximate=False)),
        "exact GELU, in our layers": lambda: TransformerEncoder(1, N, F, activation="gelu"),
        "GELU by tanh": lambda: Applied(lambda x: ops.gelu(x, approximate=True)),
        "erf": lambda: Applied(lambda x: x * ops.erf(x)),
        "slice_update": lambda: SlicesWritten(),
    }
    REFUSED = {
        "ViewAsComplex": lambda x: ops.real(ops.view_as_complex(ops.reshape(x, (-1, T, D // 2, 2)))),
        "FFT": lambda x: ops.fft((x, x))[0],
        "RFFT": lambda x: ops.rfft(x, 4)[0],
    }

    @pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
    def test_what_other_exporters_get_wrong_is_right_or_refused_by_name(self, name, tmp_path):
        layer = self.RIGHT[name]() if name in self.RIGHT else Applied(self.REFUSED[name])
        model = functional(lambda x: layer(x), {"x": X}, free={"x": ()})
        try:
            report = export_onnx(model, tmp_path / "out", verbose=False)
        except UnsupportedOperationError as error:
            assert name in self.REFUSED and f"operation {name}" in str(error)
            assert not os.listdir(tmp_path)
        else:
            assert report.passed and name in self.RIGHT
            (output,) = run_onnx(tmp_path / "out" / "model.onnx", {"x": X})
            close(output, numpy(model({"x": X})))

    def test_complex_inputs_are_refused_by_name(self, tmp_path):
        z = keras.Input((4,), dtype="complex64", name="z")
        with pytest.raises(UnsupportedOperationError, match="operation Real"):
            export_onnx(keras.Model(z, ops.real(z)), tmp_path / "out", verbose=False)
        assert not os.listdir(tmp_path)

    @pytest.mark.parametrize("verify", [True, False])
    @pytest.mark.parametrize("old", [None, "mine"])
    def test_an_invalid_graph_never_stays_on_disk(self, verify, old, tmp_path):
        """Not even unverified, and what stood there before is kept."""

        class Odd(keras.Operation):
            def call(self, x):
                return x + 1

            def compute_output_spec(self, x):
                return keras.KerasTensor(x.shape, x.dtype)

        @register_lowering(Odd)
        def lower_odd(g, node, x):
            return g.op("NoSuchOperator", x, shape=x.shape, dtype=x.dtype)

        if old is not None:
            (tmp_path / "m.onnx").write_text(old)
        x = keras.Input((None, 4), name="x")
        with pytest.raises(ExportError, match="NoSuchOperator"):
            export_onnx(keras.Model(x, Odd()(x)), tmp_path / "m.onnx", force=True, verify=verify, verbose=False)
        assert [path.read_text() for path in tmp_path.iterdir()] == ([] if old is None else [old])

    @pytest.mark.parametrize("policy", ["float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
    def test_no_half_precision_passes_without_a_word(self, policy, tmp_path):
        dense = keras.layers.Dense(F, dtype=policy)
        model = functional(lambda x: dense(x), {"x": X})
        words = "bfloat16.*verify=False" if "bfloat16" in policy else "largest error"
        with pytest.raises(VerificationError, match=words):
            export_onnx(model, tmp_path / "out", max_length=5, verbose=False)
        assert not os.listdir(tmp_path)
        if "bfloat16" not in policy:
            report = export_onnx(model, tmp_path / "out", max_length=5, tolerance=(0.03, 0.03), verbose=False)
            assert 1e-4 < report.max_error < 0.03
            said = json.loads((tmp_path / "out" / "verification.json").read_text())
            assert said["max_error"] == report.max_error

    @pytest.mark.parametrize("kind", ["functional", "sequential", "subclassed", "a layer", "Transformer"])
    def test_a_model_that_was_never_called_exports(self, kind, tmp_path):
        class Subclassed(keras.Model):
            def __init__(self):
                super().__init__()
                self.encoder = TransformerEncoder(1, N, F)

            def build(self, shape):
                self.encoder.build(shape)

            def call(self, x):
                return self.encoder(x)

        x = keras.Input((None, D), name="x")
        model = {
            "functional": lambda: keras.Model({"x": x}, TransformerEncoder(1, N, F)(x)),
            "sequential": lambda: keras.Sequential([TransformerEncoder(1, N, F), keras.layers.Dense(5)]),
            "subclassed": Subclassed,
            "a layer": lambda: TransformerEncoder(1, N, F),
            "Transformer": lambda: Transformer(**base_of(Transformer)),
        }[kind]()
        names = {"input_signature": {"x": ((None, None, D), "float32")}} if kind in ("subclassed", "a layer") else {}
        if kind in ("sequential", "subclassed", "a layer"):
            with pytest.raises(ExportError, match="not built: call it once, or `model.build"):
                export_onnx(model, tmp_path / "out", verbose=False, **names)
            assert not os.listdir(tmp_path)
            model.build((None, None, D))
        before = [numpy(weight.value) for weight in model.weights]
        assert before
        export_onnx(model, tmp_path / "out", verify=False, verbose=False, **names)
        for weight, value in zip(model.weights, before, strict=True):
            np.testing.assert_array_equal(numpy(weight.value), value)
        if kind != "Transformer":
            (output,) = run_onnx(tmp_path / "out" / "model.onnx", {"x": X, "input": X})
            close(output, numpy(model({"x": X} if kind == "functional" else X)))


@pytest.mark.backends("torch")
class TestGenerationSteps:
    """Generation that runs layer by layer from Python and waits for the device at each token."""

    def test_a_token_costs_one_recorded_graph_and_no_wait(self, monkeypatch):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        # What reads from the device, and what brings a Python number or list to it: on a GPU each waits.
        waiting = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "lift_fresh"}
        waits, calls = [], []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                name = function.overloadpacket.__name__
                moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
                waits.extend([name] * (moved or name in waiting))
                return function(*args, **(kwargs or {}))

        call = keras.layers.Layer.__call__
        monkeypatch.setattr(
            keras.layers.Layer, "__call__", lambda layer, *args, **kw: calls.append(layer) or call(layer, *args, **kw)
        )
        model, _ = toy(Transformer)
        counts = {}
        for length in (8, 24):
            model.generate(MEMORY_IDS[:2], max_length=length)  # records the step
            waits.clear(), calls.clear()
            with torch.no_grad(), Watch():
                ids = model.generate(MEMORY_IDS[:2], max_length=length)
            assert ids.shape[1] == length, "no row ends early"
            counts[length] = (len(waits), len(calls))
        # Layers run for the source only, and every eighth token it is asked whether all rows have ended.
        assert counts[8][1] == counts[24][1] > 0
        assert counts[24][0] - counts[8][0] == 2, waits

    def test_attention_does_not_wait_for_the_device(self):
        """On either path."""
        from torch.utils._python_dispatch import TorchDispatchMode

        reads = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                reads.extend([0] * (function.overloadpacket.__name__ == "_local_scalar_dense"))
                return function(*args, **(kwargs or {}))

        rng = np.random.default_rng(0)
        query, key, value = (ops.convert_to_tensor(rng.normal(size=(B, T, N, 3)).astype("float32")) for _ in range(3))
        mask = ops.convert_to_tensor(np.tril(np.ones((1, T, T), bool)))
        with Watch():
            for weights in (False, True):
                kt.attention(query, key, value, mask, return_weights=weights)
        assert not reads


def gpt(num_layers=2):
    """A decoder-only model of our layers, as one step: ids, their positions and the past in, logits and present out."""
    embedding, encoding = TokenEmbedding(V, D), SinusoidalPositionalEncoding()
    decoder = TransformerDecoder(num_layers, N, F, norm_first=True)

    def step(ids, positions, **past):
        cache = tuple((past[f"key_{i}"], past[f"value_{i}"]) for i in range(num_layers))
        x, cache = decoder(encoding(embedding(ids), positions=positions), cache=cache)
        return embedding(x, reverse=True), cache

    def whole(ids):
        return embedding(decoder(encoding(embedding(ids))), reverse=True)

    embedding.build((None, None))
    decoder.build((None, None, D))
    return randomize_all(embedding, decoder), step, whole


class GptStep(keras.Model):
    """The same as a subclassed model."""

    def __init__(self, step, owned):
        super().__init__()
        self.owned = owned
        self.step = step
        self.built = True

    def call(self, inputs):
        return self.step(**inputs)


def randomize_all(*owned):
    for seed, layer in enumerate(owned):
        randomize(layer, seed)
    return owned


class TestCachedDecoders:
    """A decoder with a key/value cache that no exporter takes."""

    @pytest.mark.parametrize("kind", ["functional", "subclassed"])
    def test_a_users_own_decoder_exports_with_its_cache_and_generates(self, kind, tmp_path):
        owned, step, whole = gpt()
        names = [f"{part}_{i}" for i in range(2) for part in ("key", "value")]
        past = {name: np.zeros((B, 3, N, D // N), "float32") for name in names}
        inputs = {"ids": IDS, "positions": np.arange(T, dtype="int32")[None].repeat(B, 0), **past}
        axes = {name: {0: "batch", 1: "past"} for name in names}
        axes |= {name: {0: "batch", 1: "length"} for name in ("ids", "positions")}
        if kind == "functional":
            model, signature = functional(step, inputs), None
        else:
            model = GptStep(step, list(owned))
            signature = {name: ((None, None, *x.shape[2:]), str(x.dtype)) for name, x in inputs.items()}
        path = tmp_path / "gpt.onnx"
        export_onnx(model, path, input_signature=signature, dynamic_axes=axes, verify=False, verbose=False)

        ids = np.array([[3, 1, 4], [9, 2, 6]], "int32")
        rows = len(ids)
        feed = {name: np.zeros((rows, 0, N, D // N), "float32") for name in names}
        new, logits = ids, []
        for _ in range(5):
            length = feed["key_0"].shape[1]
            positions = np.arange(length, length + new.shape[1], dtype="int32")[None].repeat(rows, 0)
            output, *present = run_onnx(path, {"ids": new, "positions": positions, **feed})
            logits.append(output)
            new = output[:, -1:].argmax(-1).astype("int32")
            ids = np.concatenate([ids, new], 1)
            feed = dict(zip(names, present, strict=True))
        # One pass of Keras over what was generated gives the same logits, and so the same tokens.
        expected = numpy(quick(whole)(ids[:, :-1]))
        close(np.concatenate(logits, 1), expected)
        np.testing.assert_array_equal(ids[:, 3:], expected[:, 2:].argmax(-1))


@keras.saving.register_keras_serializable("tests")
class TutorialBlock(keras.layers.Layer):
    """The block of the best-known tutorials, of our layers: neither `build` nor `get_config`."""

    def __init__(self, num_heads, d_ff, rate=0.1, **kwargs):
        super().__init__(**kwargs)
        self.attention = MultiHeadSelfAttention(num_heads)
        self.feed_forward = FeedForward(d_ff)
        self.norms = [keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [keras.layers.Dropout(rate) for _ in range(2)]

    def call(self, x, training=None):
        x = self.norms[0](x + self.dropouts[0](self.attention(x), training=training))
        return self.norms[1](x + self.dropouts[1](self.feed_forward(x), training=training))


@keras.saving.register_keras_serializable("tests")
class BuiltBlock(TutorialBlock):
    """The same with the `build` that Keras asks for."""

    def build(self, shape):
        for layer in (self.attention, self.feed_forward, *self.norms):
            layer.build(shape)


@keras.saving.register_keras_serializable("tests")
class LouderBlock(TransformerEncoderBlock):
    """A user's subclass of ours, with an argument of its own."""

    def __init__(self, *args, gain=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = gain

    def call(self, x, **kwargs):
        return self.gain * super().call(x, **kwargs)

    def get_config(self):
        return {**super().get_config(), "gain": self.gain}


@keras.saving.register_keras_serializable("tests")
class QuietAttention(MultiHeadSelfAttention):
    """A user's subclass of ours with nothing but a call."""

    def call(self, x, padding_mask=None, mask=None):
        return super().call(x, padding_mask=padding_mask, mask=mask) / 3


@keras.saving.register_keras_serializable("tests")
class Gpt(keras.layers.Layer):
    """A whole decoder-only model as a part of another."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding, self.encoding = TokenEmbedding(V, D), SinusoidalPositionalEncoding()
        self.decoder = TransformerDecoder(2, N, F)

    def build(self, shape):
        self.embedding.build(shape)
        self.decoder.build((*shape, D))

    def call(self, ids):
        return self.embedding(self.decoder(self.encoding(self.embedding(ids))), reverse=True)


def twin_stacks():
    """Two separately made stacks of the same sizes, each for an input of its own."""
    inputs = {name: keras.Input((None, D), name=name) for name in "ab"}
    return keras.Model(inputs, [TransformerEncoder(2, N, F)(x) for x in inputs.values()])


def twin_models():
    """Two whole decoder-only models of the same sizes in one parent."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    return keras.Model({"ids": ids}, [Gpt()(ids) for _ in range(2)])


def blocks_of_users():
    x = keras.Input((None, D), name="x")
    layers_ = (TutorialBlock(N, F), BuiltBlock(N, F), LouderBlock(N, F, gain=3.0), QuietAttention(N))
    return keras.Model({"x": x}, [layer(x) for layer in layers_])


def blocks_of_ours():
    """Every layer of ours that takes and gives a sequence."""
    x, memory = keras.Input((None, D), name="x"), keras.Input((None, E), name="memory")
    outputs = [cls(**base_of(cls))(x) for cls in with_call_argument("padding_mask") if cls is not CrossAttention]
    outputs += [cls(**base_of(cls))(x, memory=memory) for cls in with_call_argument("memory_padding_mask")]
    return keras.Model({"x": x, "memory": memory}, [*outputs, CrossAttention(N)(x, memory), FeedForward(F)(x)])


SAVED = {make.__name__: make for make in (twin_stacks, twin_models, blocks_of_users, blocks_of_ours)}
SAVED_INPUTS = {"a": X, "b": 2 * X, "x": X, "memory": MEMORY, "ids": IDS}

FRESH_PROCESS = """
import sys, warnings
import numpy as np
import keras, keras_transformer
from tests import test_known_faults as known
from tests.forms import flat
folder = sys.argv[1]
# Other layers first, so that automatic numbers differ.
for _ in range(3):
    known.TransformerEncoder(3, 2, 5).build((None, None, 4)), keras.layers.Dense(3).build((None, 2))
warnings.filterwarnings("ignore", ".build... was called on layer", UserWarning)
result = {}
for name, make in known.SAVED.items():
    for kind in ("keras", "weights.h5") if name.startswith("twin") else ("keras",):
        if kind == "keras":
            model = keras.saving.load_model(f"{folder}/{name}.keras")
        else:
            model = make()
            model.load_weights(f"{folder}/{name}.weights.h5")
        if kind == "keras":
            outputs = flat(model({x.name: known.SAVED_INPUTS[x.name] for x in model.inputs}))
            result |= {f"{name} {number}": array for number, array in enumerate(outputs)}
        for number, weight in enumerate(model.weights):
            result[f"{name} {kind} weight {number}"] = keras.ops.convert_to_numpy(weight.value)
np.savez(f"{folder}/result.npz", **result)
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """The saved models, and what a fresh process makes of their files."""
    folder = tmp_path_factory.mktemp("saved")
    saved = {}
    for seed, (name, make) in enumerate(SAVED.items()):
        model = saved[name] = randomize(make(), seed)
        model.save(folder / f"{name}.keras")
        model.save_weights(folder / f"{name}.weights.h5")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    subprocess.run([sys.executable, "-c", FRESH_PROCESS, str(folder)], check=True, env=environment)
    with np.load(folder / "result.npz") as result:
        return saved, dict(result)


class TestReloading:
    """Blocks that do not reload, and twin blocks that overwrite each other's weights."""

    @pytest.mark.parametrize(
        "name, kind",
        [*((name, "keras") for name in SAVED), ("twin_stacks", "weights.h5"), ("twin_models", "weights.h5")],
    )
    def test_a_fresh_process_finds_every_weight_in_its_place(self, fresh, name, kind):
        model, result = fresh[0][name], fresh[1]
        weights = [result[f"{name} {kind} weight {number}"] for number in range(len(model.weights))]
        assert f"{name} {kind} weight {len(weights)}" not in result
        for weight, value in zip(model.weights, weights, strict=True):
            np.testing.assert_array_equal(numpy(weight.value), value)
        if kind == "keras":
            expected = flat(model({x.name: SAVED_INPUTS[x.name] for x in model.inputs}))
            close([result[f"{name} {number}"] for number in range(len(expected))], expected, 1e-6)

    @pytest.mark.parametrize("make", [twin_stacks, twin_models])
    def test_twins_keep_their_own_weights_in_onnx(self, make, tmp_path):
        model = randomize(make())
        inputs = {x.name: SAVED_INPUTS[x.name] for x in model.inputs}
        expected = flat(model(inputs))
        assert np.abs(expected[0] - expected[1]).max() > 0.1
        for optimised in (True, False):
            export_onnx(model, tmp_path / "m.onnx", force=True, verify=False, verbose=False)
            close(run_onnx(tmp_path / "m.onnx", inputs, optimised), expected)
        graph = onnx.load(tmp_path / "m.onnx").graph
        names = [tensor.name for tensor in graph.initializer]
        assert len(set(names)) == len(names)
        stored = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
        # Every weight of either twin, once. A kernel that is only used transposed is stored so.
        for weight in model.weights:
            value = numpy(weight.value)
            found = [x for x in stored if any(same([x], [value_]) for value_ in (value, value.T))]
            assert len(found) == 1, weight.path

    def test_a_block_without_build_reloads_with_the_warning_of_keras_and_with_build_without(self, tmp_path):
        x = keras.Input((None, D))
        for cls, warned in ((TutorialBlock, True), (BuiltBlock, False)):
            model = randomize(keras.Model(x, cls(N, F)(x)))
            model.save(tmp_path / "model.keras")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                loaded = keras.saving.load_model(tmp_path / "model.keras")
            assert any("does not have a `build()` method" in str(w.message) for w in caught) == warned
            close(numpy(loaded(X)), numpy(model(X)), 1e-6)


class TestWholePadding:
    """A row of nothing but padding that makes outputs and gradients NaN, or changes the other rows."""

    @pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
    def test_it_is_finite_and_without_effect(self, policy):
        x = np.random.default_rng(3).normal(size=(2, 4, 8)).astype("float32")
        mask = np.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)
        encoder = TransformerEncoder(1, 2, F, dropout=0.0, dtype=policy)
        encoder.build(x.shape)

        def function(x, mask):
            return ops.cast(encoder(x, padding_mask=mask), "float32")

        axes = {name: {0: "batch", 1: "length"} for name in ("x", "mask")}
        # Eagerly: tests/test_layers_blocks.py. ONNX Runtime has no bfloat16 on the CPU.
        forms = ("functional", "compiled", *(ONNX_FORMS if "bfloat16" not in policy else ()))
        found = in_every_form(function, {"x": x, "mask": mask}, forms, dynamic_axes=axes)
        for (output,) in found.values():
            assert np.isfinite(output).all()
        if policy == "float32":
            alone = numpy(quick(lambda x: encoder(x))(x[:1, :3]))[0]
            for (output,) in found.values():
                close(output[0, :3], alone, 1e-5)
        if policy in ("float16", "bfloat16") or policy == "float32" and keras.config.backend() != "tensorflow":
            return  # tests/test_layers_blocks.py has these gradients, on JAX compiled

        def loss(y):
            return ops.mean(ops.square(ops.cast(y, "float32")[0, :3]))

        both = gradients(encoder, loss, x, padding_mask=mask, jit=True)
        assert all(np.isfinite(gradient).all() for gradient in both)
        if policy != "float32":
            return
        expected = gradients(encoder, loss, x[:1], padding_mask=mask[:1], jit=True)
        largest = max(np.abs(gradient).max() for gradient in expected)
        for one, two in zip(both, expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6 * largest)


class TestCrossMask:
    """Cross-attention masked by the target's padding, or made causal: wrong where the lengths differ."""

    def test_queries_see_the_memory_by_its_own_mask_alone(self):
        x, memory = np.repeat(X[:1], 3, 0), np.repeat(MEMORY[:1], 3, 0)
        memory[1, 4:] += RNG.normal(size=(3, E)) * 50
        memory[2, 3] += 1
        mask = np.repeat(np.array([[1, 1, 1, 1, 0, 0, 0]], "int32"), 3, 0)
        cross, block, stack = CrossAttention(N), TransformerDecoderBlock(N, F), TransformerDecoder(2, N, F)

        def function(x, memory, mask):
            output, weights = cross(x, memory, padding_mask=mask, return_weights=True)
            return weights, output, *(layer(x, memory=memory, memory_padding_mask=mask) for layer in (block, stack))

        inputs = {"x": x, "memory": memory, "mask": mask}
        function(**inputs)
        randomize_all(cross, block, stack)
        axes = {"x": {0: "batch", 1: "target"}} | {name: {0: "batch", 1: "source"} for name in ("memory", "mask")}
        for weights, *outputs in in_every_form(function, inputs, dynamic_axes=axes).values():
            assert weights.shape == (3, N, T, S) and not weights[..., 4:].any()
            assert np.abs(weights.sum(-1) - 1).max() < 1e-6
            for output in outputs:
                # Noise in the padding changes nothing; another third entry changes every target position.
                assert np.abs(output[1] - output[0]).max() <= 1e-6
                assert np.abs(output[2] - output[0]).max(-1).min() > 1e-3

    def test_an_encoder_and_decoder_of_different_lengths(self):
        embedding, encoder, decoder = TokenEmbedding(V, D), TransformerEncoder(1, N, F), TransformerDecoder(1, N, F)
        source = np.array([[4, 9, 3, 5, 0, 0, 0], [8, 1, 2, 7, 0, 0, 0], [16, 5, 5, 6, 0, 0, 0]], "int32")
        target = np.array([[1, 6, 7, 2, 8], [1, 3, 2, 9, 9], [1, 12, 4, 4, 5]], "int32")

        def function(source, target):
            return embedding(decoder(embedding(target), memory=encoder(embedding(source))), reverse=True)

        inputs = {"source": source, "target": target}
        function(**inputs)
        randomize_all(embedding, encoder, decoder)
        alone = numpy(quick(lambda source: function(source, target))(source[:, :4]))
        assert alone.shape == (3, 5, V)
        close_in_every_form(in_every_form(function, inputs), [alone], 1e-5)


class TestMaskConstants:
    """A large negative number for "masked" that overflows in half precision."""

    @pytest.mark.parametrize("policy", ["float32", "float16", "mixed_float16", "bfloat16", "mixed_bfloat16"])
    def test_scores_of_forty_and_every_key_masked(self, policy):
        """Scores -40 and -41, the third key masked; then every key masked."""
        weighing, plain_ = (CrossAttention(1, kernel_initializer="ones", dtype=policy) for _ in range(2))
        inputs = {
            "x": np.full((2, 1, 1), -10, "float32"),
            "memory": np.tile(np.array([[4], [4.1], [7]], "float32"), (2, 1, 1)),
            "mask": np.array([[1, 1, 0], [0, 0, 0]], bool),
        }

        def function(x, memory, mask):
            output, weights = weighing(x, memory, padding_mask=mask, return_weights=True)
            return weights, output, plain_(x, memory, padding_mask=mask)

        axes = {"x": {0: "batch", 1: "target"}} | {name: {0: "batch", 1: "source"} for name in ("memory", "mask")}
        # Eagerly: tests/test_layers_attention.py. ONNX Runtime has no bfloat16 on the CPU.
        forms = ("functional", "compiled", *(ONNX_FORMS if "bfloat16" not in policy else ()))
        tolerance = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.05}[policy.removeprefix("mixed_")]
        for weights, *outputs in in_every_form(function, inputs, forms, dynamic_axes=axes).values():
            close(weights[:, 0, 0], np.array([[0.7311, 0.2689, 0], [0, 0, 0]]), tolerance)
            assert not weights[0, ..., 2].any() and not weights[1].any()
            for output in outputs:
                close(output[:, 0, 0], np.array([4.0269, 0]), tolerance)
                assert output[1] == 0

        def loss(y):
            return ops.sum(ops.cast(y[0], "float32"))

        given = {"memory": inputs["memory"], "padding_mask": inputs["mask"], "return_weights": True}
        found = gradients(weighing, loss, inputs["x"], **given, jit=True)
        assert all(np.isfinite(gradient).all() for gradient in found)


class TestEqualSizes:
    """A mask broadcast along the wrong axis, which shows only where batch, heads and length are equal."""

    def test_every_rank_means_the_same_for_a_batch_of_four_and_of_three(self):
        x = np.random.default_rng(1).normal(size=(4, 4, 16)).astype("float32")
        lengths = [4, 3, 2, 1]
        padding = np.arange(4)[None] < np.array(lengths)[:, None]
        attentions = [MultiHeadSelfAttention(4), TransformerEncoder(1, 4, F)]

        def function(x, padding, rank_3, rank_4, full):
            outputs = []
            for layer in attentions:
                outputs.append(layer(x, padding_mask=padding))
                outputs += [layer(x, attention_mask=mask) for mask in (rank_3, rank_4, full)]
            return outputs

        inputs = {
            "x": x,
            "padding": padding,
            "rank_3": np.repeat(padding[:, None], 4, 1),
            "rank_4": np.repeat(padding[:, None, None], 4, 2),
            "full": np.tile(padding[:, None, None], (1, 4, 4, 1)),
        }
        function(**inputs)
        randomize_all(*attentions)
        alone = quick(lambda x: [[layer(x[i : i + 1, :n]) for i, n in enumerate(lengths)] for layer in attentions])
        alone = numpy(alone(ops.convert_to_tensor(x)))
        lengths_of = {"padding": (1,), "rank_3": (1, 2), "rank_4": (2, 3), "full": (2, 3), "x": (1,)}
        axes = {name: {0: "batch", **dict.fromkeys(free, "length")} for name, free in lengths_of.items()}
        four = in_every_form(function, inputs, free=lengths_of, dynamic_axes=axes)
        three = flat(
            quick(lambda given: function(**given))({name: ops.convert_to_tensor(x[:3]) for name, x in inputs.items()})
        )
        for outputs in four.values():
            for number, output in enumerate(outputs):
                for row, length in enumerate(lengths):
                    close(output[row, :length], alone[number // 4][row][0], 1e-5)
            close([output[:3] for output in outputs], three, 1e-5)

    @pytest.mark.parametrize("symbolic", [False, True])
    @pytest.mark.parametrize("cls", with_call_argument("attention_mask"))
    def test_a_mask_that_could_mean_either_is_refused(self, cls, symbolic):
        layer = cls(4, **({"d_ff": F} if "d_ff" in parameters_of(cls) else {})) if "num_layers" not in parameters_of(
            cls
        ) else cls(1, 4, F)  # fmt: skip
        layer.build(*[(None, None, 16)] * (1 + (cls is CrossAttention)))
        make = (lambda shape, dtype: keras.KerasTensor(shape, dtype)) if symbolic else ops.ones
        tensors = [make((4, 4, 16), "float32")] * (1 + (cls is CrossAttention))
        # The un-batched (T, T) has the shape of a (B, T) one.
        for shape in ((4, 4), (4,), (4, 4, 4, 4, 4), (3, 4, 4), (4, 3, 4, 4)):
            with pytest.raises(ValueError, match=r"\(1, T, S\).*attention_mask.shape=" + re.escape(str(shape))):
                layer(*tensors, attention_mask=make(shape, "bool"))
        for shape in ((4,), (1, 4, 4), (4, 1, 1, 4), (3, 4), (4, 3)):
            with pytest.raises(ValueError, match=r"padding_mask.shape=" + re.escape(str(shape))):
                layer(*tensors, padding_mask=make(shape, "bool"))
