"""Faults measured in other packages, held against ours: eager, functional, compiled and exported.

Each class has the fault's name for a subject, and asserts the law that the fault breaks in every form.
"""

import json
import os
import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import ops as kt
from keras_transformer.export import (
    ExportError,
    UnsupportedOperationError,
    VerificationError,
    export_onnx,
    register_lowering,
)
from keras_transformer.layers import (
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
from tests.arguments import (
    IDS,
    MEMORY,
    MEMORY_IDS,
    MEMORY_PADDING,
    PADDING,
    RNG,
    B,
    D,
    E,
    F,
    N,
    S,
    T,
    V,
    X,
    base_of,
    built,
    parameters_of,
    toy,
    with_argument,
    with_call_argument,
)
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

# Run eagerly, JAX compiles each operation of each form at each shape, for minutes.
pytestmark = pytest.mark.once("tensorflow")


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


class TestPrecedence:
    """An explicit padding mask to which the implicit one is added all the same."""

    def test_an_explicit_mask_wins_over_the_implicit_one_in_every_layer(self):
        embedding = randomize(built(TokenEmbedding(V, D), (None, None)))
        itself = [cls(**base_of(cls)) for cls in with_call_argument("padding_mask") if cls is not CrossAttention]
        cross, decoders = CrossAttention(N), [cls(**base_of(cls)) for cls in with_call_argument("memory_padding_mask")]
        assert len(itself) == 6 and len(decoders) == 2

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
        assert all(abs(output[0, 1, 0] - 0.841471) < 1e-5 for (output,) in found.values())

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
        "FFT": lambda: Applied(lambda x: ops.fft((x, x))[0]),
        "exact GELU, an operation": lambda: Applied(lambda x: ops.gelu(x, approximate=False)),
        "exact GELU, in our layers": lambda: TransformerEncoder(1, N, F, activation="gelu"),
        "GELU by tanh": lambda: Applied(lambda x: ops.gelu(x, approximate=True)),
        "erf": lambda: Applied(lambda x: x * ops.erf(x)),
        "slice_update": lambda: SlicesWritten(),
    }
    REFUSED = {
        "ViewAsComplex": lambda x: ops.real(ops.view_as_complex(ops.reshape(x, (-1, T, D // 2, 2)))),
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
            model.generate(MEMORY_IDS[:2], max_new_tokens=length)  # records the step
            waits.clear(), calls.clear()
            with torch.no_grad(), Watch():
                ids = model.generate(MEMORY_IDS[:2], max_new_tokens=length)
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
