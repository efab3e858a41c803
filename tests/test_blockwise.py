"""Attention in blocks equals all scores at once, in values and gradients, and is taken for long sequences."""

import importlib

import keras
import numpy as np
import pytest
from keras import ops

from keras_transformer import ops as kt
from keras_transformer.ops import blockwise
from keras_transformer.ops.blockwise import blockwise_attention
from tests import checks, reference
from tests.checks import close, compiled, numpy

attention = importlib.import_module("keras_transformer.ops.attention")

B, T, S, N, K, H, W = 2, 13, 17, 6, 3, 5, 7
# In float32 the same sums in another order: a few units in the last place of values near 4.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Four queries of all heads in a block: the last block of 13 has one."""
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", 4 * N * S)


def arrays(length=T, slots=S, heads=(N, K), widths=(H, W), seed=0):
    rng = np.random.default_rng(seed)
    shapes = (B, length, heads[0], widths[0]), (B, slots, heads[1], widths[0]), (B, slots, heads[1], widths[1])
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def masks(length, slots):
    """Each rank-4 broadcast; where queries have rows of their own, one of them sees nothing."""
    full = np.random.default_rng(1).random((B, N, length, slots)) < 0.6
    full[0, :, 2] = False
    # One row for all queries, and a whole row of the batch that sees nothing.
    padding = full[:, :1, -1:].copy()
    padding[1] = False
    return {
        "none": None,
        "batch and heads": full,
        "heads": full[:1],
        "batch": full[:, :1],
        "one for all": full[:1, :1],
        "padding": padding,
        "padding by heads": full[:, :, -1:],
    }


class Attend(keras.layers.Layer):
    """Attention whose query, key and value are weights, so that their gradients are seen."""

    def __init__(self, tensors, attend):
        super().__init__()
        self.tensors = [self.add_weight(shape=x.shape, name=str(number)) for number, x in enumerate(tensors)]
        for weight, x in zip(self.tensors, tensors, strict=True):
            weight.assign(x)
        self.attend = attend
        self.built = True

    def call(self, mask=None):
        return self.attend(*self.tensors, mask)


def outputs_and_gradients(tensors, attend, mask, jit):
    """The output, and the gradients of a loss in which every number of it has another weight."""
    weights = ops.convert_to_tensor(np.random.default_rng(2).normal(size=(B, *tensors[0].shape[1:3], W)))
    layer = Attend(tensors, attend)
    args = [] if mask is None else [mask]
    output, gradients = checks.outputs_and_gradients(
        layer, lambda y: ops.sum(y * ops.cast(weights, y.dtype)), *args, jit=jit
    )
    return numpy(output), gradients


@pytest.mark.parametrize("name", masks(T, S))
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_of_blocks_and_of_all_scores_agree(name, causal):
    """Compiled and not; the plain path is the one that returns weights."""
    slots = T if causal else S
    tensors, mask = arrays(slots=slots), masks(T, slots)[name]

    def plain(query, key, value, mask):
        return kt.attention(query, key, value, mask, causal=causal, return_weights=True)[0]

    def blocks(query, key, value, mask):
        return blockwise_attention(*(ops.convert_to_tensor(x) for x in (query, key, value)), mask, causal, None)

    wanted, wanted_gradients = outputs_and_gradients(tensors, plain, mask, jit=None)
    close(wanted, reference.attention(*tensors, mask, causal)[0].astype("float32"))
    # JAX compiles each operation for each shape when run eagerly; one case shows that it does run so.
    for jit in (False, True) if keras.config.backend() != "jax" or name == "batch" else (True,):
        output, gradients = outputs_and_gradients(tensors, blocks, mask, jit)
        close(output, wanted, TOLERANCE)
        close(gradients, wanted_gradients, TOLERANCE)


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize("block_scores", [1, 10**9])
def test_heads_and_sizes_of_blocks(heads, block_scores, monkeypatch):
    """A query at a time, and all in one block."""
    monkeypatch.setattr(blockwise, "BLOCK_SCORES", block_scores)
    tensors = arrays(heads=heads)
    program = compiled(lambda *args: blockwise_attention(*args, None, False, 0.7))
    output = program(*(ops.convert_to_tensor(x) for x in tensors))
    close(numpy(output), reference.attention(*tensors, scale=0.7)[0].astype("float32"), TOLERANCE)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17])
def test_causal_at_every_length_of_bands(length):
    tensors = arrays(length, length)
    program = compiled(lambda *args: blockwise_attention(*args, None, True, None))
    output = program(*(ops.convert_to_tensor(x) for x in tensors))
    close(numpy(output), reference.attention(*tensors, causal=True)[0].astype("float32"), TOLERANCE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    """Scores of 200 are within float16, but not the exponentials of an unshifted softmax or 1e9 as a mask."""
    tensors = [numpy(ops.cast(x, dtype)) for x in arrays()]
    tensors[0] *= 16  # exact in half precision
    mask = masks(T, S)["batch"]

    def blocks(query, key, value, mask):
        return blockwise_attention(*(ops.cast(x, dtype) for x in (query, key, value)), mask, False, None)

    output, gradients = outputs_and_gradients(tensors, blocks, mask, jit=None)
    exact, _ = reference.attention(*tensors, mask)
    # Scores are computed in float32, so only the output is rounded: half a unit in the last place of values below 4.
    close(output, exact.astype("float32"), {"float16": 2**-10, "bfloat16": 2**-7}[dtype])
    assert all(np.isfinite(gradient).all() and np.abs(gradient).max() > 0 for gradient in gradients)


class TestChoice:
    """Which computation `ops.attention` takes."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        """The calls of `blockwise_attention`, which is taken from 4 · N · S scores up."""
        found = []

        def noted(*args):
            found.append(args)
            return blockwise_attention(*args)

        monkeypatch.setattr(attention, "blockwise_attention", noted)
        monkeypatch.setattr(attention, "BLOCKWISE_FROM", 4 * N * S)
        return found

    @pytest.mark.backends("tensorflow", "jax")
    def test_long_sequences_are_cut(self, calls):
        for length, times in ((3, 0), (4, 1)):
            tensors = arrays(length)
            output = numpy(kt.attention(*tensors, masks(length, S)["batch"][:, 0]))
            assert len(calls) == times
            close(output, reference.attention(*tensors, masks(length, S)["batch"])[0].astype("float32"), TOLERANCE)

    @pytest.mark.parametrize("options", [{"dropout": 0.5, "seed": 0}, {"return_weights": True}])
    def test_not_where_weights_are_needed(self, calls, options):
        kt.attention(*arrays(), **options)
        assert not calls

    @pytest.mark.backends("torch")
    def test_not_on_torch(self, calls):
        kt.attention(*arrays())
        kt.attention(*arrays(widths=(H, H)))
        assert not calls

    @pytest.mark.backends("tensorflow")
    @pytest.mark.parametrize("jit", [False, True])
    def test_batch_and_length_unknown(self, calls, jit):
        """With a batch of unknown size, and not with an unknown length."""
        import tensorflow as tf

        tensors = arrays(slots=T)
        wanted = reference.attention(*tensors, masks(T, T)["batch"], causal=True)[0].astype("float32")
        for length, times in ((None, 0), (T, 1)):
            specs = [tf.TensorSpec((None, length, *x.shape[2:])) for x in tensors]
            mask = tf.TensorSpec((None, 1, length, length), tf.bool)
            program = tf.function(lambda *args: kt.attention(*args, causal=True), [*specs, mask], jit_compile=jit)
            output = program(*tensors, masks(T, T)["batch"])
            assert len(calls) == times
            close(numpy(output), wanted, TOLERANCE)

    @pytest.mark.backends("jax")
    def test_under_the_transformations_of_jax(self, calls):
        import jax

        query, key, value = (x[None] for x in arrays(slots=T, widths=(H, H)))
        mask = masks(T, T)["batch"][None]

        def loss(query, key, value, mask):
            return ops.sum(ops.square(kt.attention(query, key, value, mask, causal=True)))

        gradient = jax.grad(loss)
        wanted = jax.jit(gradient)(query[0], key[0], value[0], mask[0])
        for function in (gradient, jax.grad(jax.checkpoint(loss))):
            close(numpy(jax.jit(jax.vmap(function))(query, key, value, mask)[0]), numpy(wanted), TOLERANCE)
        assert len(calls) == 3
