"""The layers equal `torch.nn` with the same weights, in values and gradients; and the example of the tutorials."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer.layers import (
    MultiHeadSelfAttention,
    TransformerDecoder,
    TransformerDecoderBlock,
    TransformerEncoder,
    TransformerEncoderBlock,
)
from keras_transformer.ops import attention
from tests.checks import gradients, numpy

torch = pytest.importorskip("torch")

# Sizes differ from each other, so that a mixed-up axis shows.
BATCH, LENGTH, MEMORY, HEADS, WIDTH, INNER = 2, 5, 7, 3, 12, 20
# float32 sums in another order, through up to two blocks.
TOLERANCE = 1e-5
PADDING = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
MEMORY_PADDING = np.array([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]], bool)


def states(seed, length=LENGTH):
    return np.random.default_rng(seed).normal(size=(BATCH, length, WIDTH)).astype("float32")


def module(cls, **kwargs):
    """A torch module with random weights, biases and gains."""
    torch.manual_seed(0)
    made = cls(d_model=WIDTH, nhead=HEADS, dim_feedforward=INNER, dropout=0.0, batch_first=True, **kwargs)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0))
    return made.train()  # eval() would take another code path, whose masked rows are zeros


def dense(layer, weight, bias):
    layer.kernel.assign(weight.detach().numpy().T)
    layer.bias.assign(bias.detach().numpy())


def copy_attention(layer, source):
    parts = ("query_dense", "key_dense", "value_dense")
    for name, weight, bias in zip(parts, source.in_proj_weight.chunk(3), source.in_proj_bias.chunk(3), strict=True):
        dense(getattr(layer, name), weight, bias)
    dense(layer.output_dense, source.out_proj.weight, source.out_proj.bias)


def copy_norm(layer, source):
    layer.gamma.assign(source.weight.detach().numpy())
    layer.beta.assign(source.bias.detach().numpy())


def copy_block(block, source):
    copy_attention(block.self_attention, source.self_attn)
    norms = [block.self_attention_norm, block.feed_forward_norm]
    if hasattr(source, "multihead_attn"):
        copy_attention(block.cross_attention, source.multihead_attn)
        norms.insert(1, block.cross_attention_norm)
    for number, norm in enumerate(norms):
        copy_norm(norm, getattr(source, f"norm{number + 1}"))
    dense(block.feed_forward.inner_dense, source.linear1.weight, source.linear1.bias)
    dense(block.feed_forward.output_dense, source.linear2.weight, source.linear2.bias)


def causal(length=LENGTH):
    return torch.nn.Transformer.generate_square_subsequent_mask(length).isinf()


def assert_close(actual, expected, real=None):
    actual, expected = numpy(actual), expected.detach().numpy()
    if real is not None:
        actual, expected = actual[real], expected[real]
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_self_attention(padded, is_causal):
    source = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    torch.nn.init.normal_(source.in_proj_bias)
    layer = MultiHeadSelfAttention(HEADS, causal=is_causal)
    layer.build((None, None, WIDTH))
    copy_attention(layer, source)
    x = states(1)
    expected, weights = source(
        *[torch.tensor(x)] * 3,
        key_padding_mask=torch.tensor(~PADDING) if padded else None,
        attn_mask=causal() if is_causal else None,
        average_attn_weights=False,
    )
    mask = ops.convert_to_tensor(PADDING) if padded else None
    assert_close(layer(x, padding_mask=mask), expected)
    assert_close(layer(x, padding_mask=mask, return_weights=True)[1], weights)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_block_values_and_gradients(norm_first):
    source = module(torch.nn.TransformerEncoderLayer, norm_first=norm_first)
    block = TransformerEncoderBlock(HEADS, INNER, dropout=0.0, norm_first=norm_first, layer_norm_epsilon=1e-5)
    block.build((None, None, WIDTH))
    copy_block(block, source)
    x = states(2)
    expected = source(torch.tensor(x), src_key_padding_mask=torch.tensor(~PADDING))
    assert_close(block(x, padding_mask=ops.convert_to_tensor(PADDING)), expected, PADDING)

    # Only real positions count, as in training.
    real = PADDING[..., None].astype("float32")
    (expected**2 * torch.tensor(real)).sum().backward()
    weights = ops.convert_to_tensor(real)
    found = gradients(block, lambda y: ops.sum(ops.square(y) * weights), x, padding_mask=PADDING)
    by_path = {v.path.split("/", 1)[1]: g for v, g in zip(block.trainable_variables, found, strict=True)}
    pairs = {
        "kernel": ("feed_forward/", source.linear1.weight.grad.numpy().T),
        "bias": ("feed_forward/", source.linear1.bias.grad.numpy()),
    }
    for name, (prefix, gradient) in pairs.items():
        (ours,) = [g for path, g in by_path.items() if prefix in path and "inner" in path and path.endswith(name)]
        # A relative bound on the whole tensor: single entries may be near zero.
        assert np.abs(ours - gradient).max() <= 1e-4 * np.abs(gradient).max()
    query = source.self_attn.in_proj_weight.grad.chunk(3)[0].numpy().T
    (ours,) = [g for path, g in by_path.items() if "self_attention/query" in path and path.endswith("kernel")]
    assert np.abs(ours - query).max() <= 1e-4 * np.abs(query).max()


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_block(norm_first):
    source = module(torch.nn.TransformerDecoderLayer, norm_first=norm_first)
    block = TransformerDecoderBlock(HEADS, INNER, dropout=0.0, norm_first=norm_first, layer_norm_epsilon=1e-5)
    block.build((None, None, WIDTH), (None, None, WIDTH))
    copy_block(block, source)
    x, memory = states(3), states(4, MEMORY)
    expected = source(
        torch.tensor(x),
        torch.tensor(memory),
        tgt_mask=causal(),
        tgt_key_padding_mask=torch.tensor(~PADDING),
        memory_key_padding_mask=torch.tensor(~MEMORY_PADDING),
    )
    actual = block(
        x,
        memory,
        padding_mask=ops.convert_to_tensor(PADDING),
        memory_padding_mask=ops.convert_to_tensor(MEMORY_PADDING),
    )
    assert_close(actual, expected, PADDING)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # a fast path of torch that pre-norm does not have
def test_whole_transformer():
    torch.manual_seed(0)
    source = torch.nn.Transformer(WIDTH, HEADS, 2, 2, INNER, dropout=0.0, batch_first=True, norm_first=True).train()
    options = {
        "num_layers": 2,
        "num_heads": HEADS,
        "d_ff": INNER,
        "dropout": 0.0,
        "norm_first": True,
        "layer_norm_epsilon": 1e-5,
    }
    encoder, decoder = TransformerEncoder(**options), TransformerDecoder(**options)
    encoder.build((None, None, WIDTH))
    decoder.build((None, None, WIDTH), (None, None, WIDTH))
    for stack, part in ((encoder, source.encoder), (decoder, source.decoder)):
        for block, layer in zip(stack.blocks, part.layers, strict=True):
            copy_block(block, layer)
        copy_norm(stack.final_norm, part.norm)
    x, memory = states(5), states(6, MEMORY)
    expected = source(
        torch.tensor(memory),
        torch.tensor(x),
        tgt_mask=causal(),
        src_key_padding_mask=torch.tensor(~MEMORY_PADDING),
        memory_key_padding_mask=torch.tensor(~MEMORY_PADDING),
    )
    mask = ops.convert_to_tensor(MEMORY_PADDING)
    assert_close(decoder(x, encoder(memory, padding_mask=mask), memory_padding_mask=mask), expected)


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
