"""The truth in NumPy float64: each function follows its formula, with no regard for speed.

Weights are dicts that map the name within a layer, such as "query/kernel", to an array; see `checks.weights_of`.
"""

import math

import numpy as np

LAYER_NORM_EPSILON = 1e-6


def softmax(scores):
    """Over the last axis; rows that are −inf throughout give 0."""
    finite = np.isfinite(scores)
    top = np.max(np.where(finite, scores, -np.inf), axis=-1, keepdims=True)
    powers = np.where(finite, np.exp(np.where(finite, scores - np.where(np.isfinite(top), top, 0), 0)), 0)
    total = powers.sum(axis=-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


def attention(query, key, value, mask=None, causal=False, scale=None):
    """query (B, T, N, H), key (B, S, K, H), value (B, S, K, W) → output (B, T, N, W), weights (B, N, T, S)."""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    (batch, length, heads, width), (slots, kv_heads) = query.shape, key.shape[1:3]
    allowed = np.ones((batch, heads, length, slots), bool)
    if mask is not None:
        allowed &= mask if mask.ndim == 4 else mask[:, None]
    if causal:
        allowed &= np.tril(np.ones((length, slots), bool))
    weights = np.zeros((batch, heads, length, slots))
    output = np.zeros((batch, length, heads, value.shape[-1]))
    for b in range(batch):
        for n in range(heads):
            k = n // (heads // kv_heads)
            scores = query[b, :, n] @ key[b, :, k].T * (width**-0.5 if scale is None else scale)
            weights[b, n] = softmax(np.where(allowed[b, n], scores, -np.inf))
            output[b, :, n] = weights[b, n] @ value[b, :, k]
    return output, weights


def dense(x, weights, name):
    return np.asarray(x, "float64") @ weights[f"{name}/kernel"] + weights.get(f"{name}/bias", 0.0)


def multi_head_attention(x, memory, weights, num_heads, mask=None, causal=False, positions=None):
    """(output (B, T, D), weights (B, N, T, S)); with `positions` (B|1, T) queries and keys are rotated."""
    query, key, value = dense(x, weights, "query"), dense(memory, weights, "key"), dense(memory, weights, "value")
    query, key, value = (y.reshape(*y.shape[:2], -1, query.shape[-1] // num_heads) for y in (query, key, value))
    if positions is not None:
        query, key = rotate(query, positions), rotate(key, positions)
    output, scores = attention(query, key, value, mask, causal)
    return dense(output.reshape(*output.shape[:2], -1), weights, "output"), scores


def layer_norm(x, weights, name):
    x = np.asarray(x, "float64")
    deviation = x - x.mean(axis=-1, keepdims=True)
    variance = (deviation**2).mean(axis=-1, keepdims=True)
    normal = deviation / np.sqrt(variance + LAYER_NORM_EPSILON)
    return normal * weights[f"{name}/gamma"] + weights[f"{name}/beta"]


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    """The exact form, by the error function."""
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def feed_forward(x, weights, activation=relu):
    return dense(activation(dense(x, weights, "inner")), weights, "output")


def encoder_block(x, weights, num_heads, mask=None, activation=relu, norm_first=False):
    def attend(y):
        return multi_head_attention(y, y, within(weights, "self_attention"), num_heads, mask)[0]

    x = _residual(x, attend, weights, "self_attention_norm", norm_first)
    return _feed_forward_residual(x, weights, activation, norm_first)


def decoder_block(x, memory, weights, num_heads, memory_mask=None, activation=relu, norm_first=False):
    """Without cross-attention if `memory` is None."""

    def attend(y):
        return multi_head_attention(y, y, within(weights, "self_attention"), num_heads, causal=True)[0]

    def attend_to_memory(y):
        return multi_head_attention(y, memory, within(weights, "cross_attention"), num_heads, memory_mask)[0]

    x = _residual(x, attend, weights, "self_attention_norm", norm_first)
    if memory is not None:
        x = _residual(x, attend_to_memory, weights, "cross_attention_norm", norm_first)
    return _feed_forward_residual(x, weights, activation, norm_first)


def _feed_forward_residual(x, weights, activation, norm_first):
    inner = within(weights, "feed_forward")
    return _residual(x, lambda y: feed_forward(y, inner, activation), weights, "feed_forward_norm", norm_first)


def _residual(x, sublayer, weights, norm, norm_first):
    if norm_first:
        return x + sublayer(layer_norm(x, weights, norm))
    return layer_norm(x + sublayer(x), weights, norm)


def sinusoidal_encoding(positions, d_model, max_wavelength=10000):
    """(…) → (…, d_model), column by column."""
    positions = np.asarray(positions, "float64")
    columns = []
    for column in range(d_model):
        angle = positions / max_wavelength ** ((column - column % 2) / d_model)
        columns.append(np.cos(angle) if column % 2 else np.sin(angle))
    return np.stack(columns, axis=-1)


def rotate(x, positions, base=10000, width=None):
    """Pairs (i, i + width/2) of each head as complex numbers, turned; x (B, T, N, H), positions (B|1, T)."""
    width = width or x.shape[-1]
    half = width // 2
    angles = np.asarray(positions, "float64")[..., None] / base ** (np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:width]) * np.exp(1j * angles)[:, :, None]
    return np.concatenate([pairs.real, pairs.imag, x[..., width:]], -1)


def within(weights, name):
    """The weights of the sub-layer called `name`."""
    return {path[len(name) + 1 :]: array for path, array in weights.items() if path.startswith(name + "/")}
