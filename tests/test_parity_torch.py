"""The layers equal `torch.nn` with the same weights: outputs, attention weights, and the gradients of everything."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.layers import (
    CrossAttention,
    MultiHeadSelfAttention,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from keras_transformer.ops import attention
from tests.checks import close, named_gradients, named_weights, numpy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.once("jax")

# Sizes differ from each other, so that a mixed-up axis shows.
BATCH, LENGTH, SLOTS, HEADS, WIDTH, MEMORY_WIDTH, INNER = 2, 5, 7, 3, 12, 13, 17
# float32 sums in another order, through up to four blocks whose layer norms keep values near 1.
TOLERANCE = 1e-5
# The same for gradients, by the largest of a tensor, since single entries may be near zero.
GRADIENT_TOLERANCE = 1e-4
# The bias of keys moves all scores of a query alike, which the softmax does not see: its gradient is zero but for the
# rounding of the sums that cancel. It is measured by the largest gradient of all.
ZERO_GRADIENT, ZERO_TOLERANCE = "key/bias", 1e-6

RNG = np.random.default_rng(0)
PADDING = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 1, 0]], bool)
MEMORY_PADDING = np.array([[1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1]], bool)
CAUSAL = np.tril(np.ones((1, LENGTH, LENGTH), bool))
# Every query may attend to the first key, which is never padding: torch gives NaN where nothing may be attended to.
BY_HEAD = RNG.random((BATCH, HEADS, LENGTH, LENGTH)) < 0.5
BY_HEAD[..., 0] = True
MEMORY_BY_HEAD = RNG.random((BATCH, HEADS, LENGTH, SLOTS)) < 0.5
MEMORY_BY_HEAD[..., 0] = True
BLOCK = {"num_heads": HEADS, "d_ff": INNER, "dropout": 0.0, "norm_epsilon": 1e-5}
VARIANTS = pytest.mark.parametrize(
    "variant",
    [{"norm_first": norm_first, "activation": name} for norm_first in (False, True) for name in ("relu", "gelu")],
    ids=lambda variant: f"{'pre' if variant['norm_first'] else 'post'}-norm {variant['activation']}",
)


def states(length, width):
    return RNG.normal(size=(BATCH, length, width)).astype("float32")


X, MEMORY, NARROW_MEMORY = states(LENGTH, WIDTH), states(SLOTS, WIDTH), states(SLOTS, MEMORY_WIDTH)


def attention_weights(name, array):
    """A parameter of torch's attention, or its gradient, by the names of our weights."""
    kind = "bias" if name.endswith("bias") else "kernel"
    if name.startswith("in_proj"):
        parts = zip(("query", "key", "value"), np.split(array, 3), strict=True)
    else:
        parts = [({"q": "query", "k": "key", "v": "value"}[name[0]], array)]
    return {f"{part}/{kind}": piece.T for part, piece in parts}


def as_ours(arrays):
    """Arrays by the names of torch's parameters as arrays by the names of our weights."""
    found = {}
    for name, array in arrays.items():
        owner, _, leaf = name.rpartition(".")
        norms = ["self_attention_norm", "feed_forward_norm"]
        if re.sub(r"norm\d$", "multihead_attn.in_proj_weight", owner) in arrays:
            norms.insert(1, "cross_attention_norm")
        for pattern, ours in (
            (r"layers\.(\d+)", r"block_\1"),
            ("self_attn", "self_attention"),
            ("multihead_attn", "cross_attention"),
            ("out_proj", "output"),
            ("linear1", "feed_forward.inner"),
            ("linear2", "feed_forward.output"),
            (r"norm(\d)$", lambda match, norms=norms: norms[int(match[1]) - 1]),
            (r"\bnorm$", "final_norm"),
            (r"\.|$", "/"),
        ):
            owner = re.sub(pattern, ours, owner)
        owner = owner.removeprefix("/")
        if "proj" in leaf:
            found |= {owner + part: piece for part, piece in attention_weights(leaf, array).items()}
        elif owner.endswith("norm/"):
            found[owner + {"weight": "gamma", "bias": "beta"}[leaf]] = array
        else:
            found[owner + {"weight": "kernel", "bias": "bias"}[leaf]] = array.T
    return found


class WithInputs(keras.layers.Layer):
    """A layer whose inputs are weights, so that what gives gradients of weights gives those of the inputs too."""

    def __init__(self, layer, inputs, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer
        self.states = {
            name: self.add_weight(shape=array.shape, initializer="zeros", name=name) for name, array in inputs.items()
        }
        for name, array in inputs.items():
            self.states[name].assign(array)

    def call(self, **arguments):
        return self.layer(**{name: weight.value for name, weight in self.states.items()}, **arguments)


class EncoderDecoder(keras.layers.Layer):
    """What `torch.nn.Transformer` is, made of our stacks."""

    def __init__(self, **arguments):
        super().__init__()
        self.encoder = TransformerEncoder(**arguments, name="encoder")
        self.decoder = TransformerDecoder(**arguments, name="decoder")

    def build(self, x_shape, memory_shape):
        self.encoder.build(memory_shape)
        self.decoder.build(x_shape, memory_shape)

    def call(self, x, memory, memory_padding_mask=None, source_mask=None, return_weights=False, **masks):
        memory = self.encoder(
            memory, padding_mask=memory_padding_mask, attention_mask=source_mask, return_weights=return_weights
        )
        memory, *weights = memory if return_weights else (memory,)
        masks["memory_padding_mask"] = memory_padding_mask
        output = self.decoder(x, memory, return_weights=return_weights, **masks)
        return (output[0], weights, output[1]) if return_weights else output


def torch_mask(mask):
    """A mask as torch wants it: True = left out, (T, S) if it is one for all rows, (B·N, T, S) if one for each head."""
    if mask.ndim == 4:
        mask = mask.reshape(-1, *mask.shape[2:])
    return torch.tensor(~(mask[0] if len(mask) == 1 else mask))


def ask_for_weights(module, args, kwargs):
    """Has torch's attention return the weights of each head also where it stands in a block."""
    return args, {**kwargs, "need_weights": True, "average_attn_weights": False}


def compare(source, layer, inputs, call, names, masks, torch_masks=None):
    """Holds that `layer` equals `source`, a module of torch.

    Args:
        source: the module; it gets random weights, biases and gains.
        layer: ours, not yet built.
        inputs: arrays by argument name of `layer`.
        call: the names of inputs in the order in which the module takes them.
        names: the module's names of masks by ours, one or several each.
        masks: masks for `layer` by argument name: boolean, True = may attend.
        torch_masks: masks for the module alone, by its own names.
    """
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0))
    source.train()  # eval() would take another code path, whose masked rows are zeros

    expected_weights = []
    for module in source.modules():
        if isinstance(module, torch.nn.MultiheadAttention):
            module.register_forward_pre_hook(ask_for_weights, with_kwargs=True)
            module.register_forward_hook(lambda m, args, outputs: expected_weights.append(outputs[1]))
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in inputs.items()}
    left_out = {name: torch_mask(mask) for name, mask in (torch_masks or {}).items()}
    for name, mask in masks.items():
        left_out |= dict.fromkeys(names[name], torch_mask(mask))
    expected = source(*(tensors[name] for name in call), **left_out)
    expected = expected[0] if isinstance(expected, tuple) else expected
    target = np.random.default_rng(1).normal(size=X.shape).astype("float32")
    ((expected - torch.tensor(target)) ** 2).sum().backward()
    parameters = dict(source.named_parameters())

    layer.build(*((None, *array.shape[1:]) for array in inputs.values()))
    holder = WithInputs(layer, inputs)
    values = as_ours({name: parameter.detach().numpy() for name, parameter in parameters.items()})
    assert {name: tuple(weight.shape) for name, weight in named_weights(layer).items()} == {
        name: value.shape for name, value in values.items()
    }
    for name, weight in named_weights(layer).items():
        weight.assign(values[name])
    goal = ops.convert_to_tensor(target)
    # Not compiled: the cases have their shapes in common, so that JAX compiles few operations.
    output, found = named_gradients(holder, lambda y: ops.sum(ops.square(y - goal)), jit=False, **masks)
    close(numpy(output), expected.detach().numpy(), TOLERANCE)

    gradients = {name: tensor.grad.numpy() for name, tensor in tensors.items()}
    for name, gradient in as_ours({name: parameter.grad.numpy() for name, parameter in parameters.items()}).items():
        gradients[f"{layer.name}/{name}"] = gradient
    assert set(found) == set(gradients)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        bound = GRADIENT_TOLERANCE * np.abs(gradient).max()
        if name.endswith(ZERO_GRADIENT):
            bound = ZERO_TOLERANCE * largest
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=bound, err_msg=name)

    output, *weights = layer(**inputs, **masks, return_weights=True)
    close(numpy(output), expected.detach().numpy(), TOLERANCE)
    weights, expected_weights = keras.tree.flatten(numpy(weights)), [w.detach().numpy() for w in expected_weights]
    close(weights, expected_weights, TOLERANCE)


MASKS_OF_ATTENTION = {"padding_mask": ["key_padding_mask"], "attention_mask": ["attn_mask"]}


@pytest.mark.parametrize(
    "causal, masks",
    [
        (False, {}),
        (True, {}),
        (False, {"padding_mask": PADDING}),
        (True, {"padding_mask": PADDING}),
        (False, {"padding_mask": PADDING, "attention_mask": BY_HEAD}),
    ],
    ids=["no mask", "causal", "padding", "causal and padding", "by head and padding"],
)
def test_self_attention(causal, masks):
    source = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    layer = MultiHeadSelfAttention(HEADS, causal=causal)
    compare(source, layer, {"x": X}, "xxx", MASKS_OF_ATTENTION, masks, {"attn_mask": CAUSAL} if causal else None)


@pytest.mark.parametrize("memory", [MEMORY, NARROW_MEMORY], ids=["one width", "two widths"])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"padding_mask": MEMORY_PADDING},
        {"attention_mask": MEMORY_BY_HEAD[:1, 0]},
        {"padding_mask": MEMORY_PADDING, "attention_mask": MEMORY_BY_HEAD},
    ],
    ids=["no mask", "padding", "one for all", "by head and padding"],
)
def test_cross_attention(memory, masks):
    width = memory.shape[-1]
    source = torch.nn.MultiheadAttention(WIDTH, HEADS, kdim=width, vdim=width, batch_first=True)
    inputs = {"x": X, "memory": memory}
    compare(source, CrossAttention(HEADS), inputs, ["x", "memory", "memory"], MASKS_OF_ATTENTION, masks)


@VARIANTS
@pytest.mark.parametrize(
    "masks",
    [{}, {"attention_mask": CAUSAL}, {"padding_mask": PADDING}, {"attention_mask": CAUSAL, "padding_mask": PADDING}],
    ids=["no mask", "causal", "padding", "causal and padding"],
)
def test_encoder_block(variant, masks):
    source = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True, **variant)
    names = {"padding_mask": ["src_key_padding_mask"], "attention_mask": ["src_mask"]}
    compare(source, TransformerEncoderBlock(**BLOCK, **variant), {"x": X}, "x", names, masks)


@VARIANTS
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"padding_mask": PADDING},
        {"memory_padding_mask": MEMORY_PADDING},
        {"padding_mask": PADDING, "memory_padding_mask": MEMORY_PADDING, "attention_mask": CAUSAL & BY_HEAD},
    ],
    ids=["no padding", "padding", "padded memory", "all"],
)
def test_decoder_block(variant, masks):
    source = torch.nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, 0.0, batch_first=True, **variant)
    names = {
        "padding_mask": ["tgt_key_padding_mask"],
        "memory_padding_mask": ["memory_key_padding_mask"],
        "attention_mask": ["tgt_mask"],
    }
    inputs = {"x": X, "memory": MEMORY}
    layer = TransformerDecoderBlock(**BLOCK, **variant)
    # Our decoder is causal by itself.
    compare(source, layer, inputs, ["x", "memory"], names, masks, {"tgt_mask": CAUSAL})


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # a fast path of torch that pre-norm does not have
@VARIANTS
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"padding_mask": PADDING, "memory_padding_mask": MEMORY_PADDING},
        {"memory_padding_mask": MEMORY_PADDING, "source_mask": np.tril(np.ones((1, SLOTS, SLOTS), bool))},
    ],
    ids=["no padding", "padding", "causal and padded source"],
)
@pytest.mark.once  # its parts have been compared on every backend
def test_whole_transformer(variant, masks):
    source = torch.nn.Transformer(WIDTH, HEADS, 2, 2, INNER, 0.0, batch_first=True, **variant)
    if not variant["norm_first"]:
        # torch ends post-norm stacks, which end in a norm already, with one more; the paper does not, nor do we.
        source.encoder.norm = source.decoder.norm = None
    names = {
        "padding_mask": ["tgt_key_padding_mask"],
        "memory_padding_mask": ["src_key_padding_mask", "memory_key_padding_mask"],
        "source_mask": ["src_mask"],
    }
    inputs = {"x": X, "memory": MEMORY}
    layer = EncoderDecoder(num_layers=2, **BLOCK, **variant)
    compare(source, layer, inputs, ["memory", "x"], names, masks, {"tgt_mask": CAUSAL})


def test_the_worked_example_of_tutorials():
    """Q = K, d_k = 4: the first word's weights are softmax([1, 0, 0.5])."""
    words = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]], "float32")[None, :, None, :]
    values = np.array([[10, 20], [30, 40], [50, 60]], "float32")[None, :, None, :]
    words, values = ops.convert_to_tensor(words), ops.convert_to_tensor(values)
    output, weights = attention(words, words, values, return_weights=True)
    scores = np.exp([1, 0, 0.5])
    np.testing.assert_allclose(numpy(weights)[0, 0, 0], scores / scores.sum(), atol=1e-6)
    np.testing.assert_allclose(numpy(weights)[0, 0, 0], [0.5065, 0.1863, 0.3072], atol=5e-5)
    np.testing.assert_allclose(numpy(output)[0, 0, 0], scores @ numpy(values)[0, :, 0] / scores.sum(), rtol=1e-6)
    only_third = np.ones((1, 3, 3), bool)
    only_third[0, 0] = [False, False, True]
    masked = attention(words, words, values, mask=ops.convert_to_tensor(only_third))
    np.testing.assert_array_equal(numpy(masked)[0, 0, 0], [50, 60])
    assert keras.backend.standardize_dtype(masked.dtype) == "float32"
