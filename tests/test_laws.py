"""What holds of attention whatever the numbers: laws, at sizes and with inputs that hypothesis draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_transformer import layers
from keras_transformer import ops as kt
from keras_transformer.ops import blockwise
from tests.checks import close, numpy, quick, randomize

# Both sides of a law are sums of the same few numbers of size 1, in another order or with zeros between them.
TOLERANCE = 1e-5
D, N = 6, 2
LAYERS = {
    "attention": lambda **options: layers.MultiHeadSelfAttention(N, **options),
    "grouped attention": lambda **options: layers.MultiHeadSelfAttention(N, num_kv_heads=1, **options),
    "encoder": lambda **options: Layered(layers.TransformerEncoder(2, N, 11), **options),
}
# JAX compiles every operation for every shape that is drawn.
few = settings()
seeds = st.integers(0, 2**31)
lengths = st.integers(1, 5)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


class Layered:
    """A stack of blocks, called as attention is; `causal` by mask."""

    def __init__(self, stack, causal=False):
        self.stack, self.causal = stack, causal

    def build(self, shape):
        self.stack.build(shape)

    @property
    def weights(self):
        return self.stack.weights

    def __call__(self, x, **masks):
        if self.causal:
            masks["attention_mask"] = kt.square_causal_mask(ops.convert_to_tensor(x))
        return self.stack(x, **masks)


@pytest.fixture(scope="module", params=LAYERS)
def make(request):
    """Makes a layer with random weights, the same one each time."""
    made = {}

    def layer(**options):
        key = tuple(options.items())
        if key not in made:
            made[key] = LAYERS[request.param](**options)
            made[key].build((None, None, D))
            randomize(made[key])
        return made[key]

    return layer


@few
@given(seed=seeds, length=lengths, data=st.data())
def test_causality(make, seed, length, data):
    """A token that changes leaves the outputs before it alone, and changes its own."""
    changed = data.draw(st.integers(0, length - 1))
    x = normal(seed, 2, length, D)
    other = x.copy()
    other[:, changed] = normal(seed + 1, 2, D)
    one, two = (numpy(make(causal=True)(each)) for each in (x, other))
    close(one[:, :changed], two[:, :changed], TOLERANCE)
    assert np.abs(one[:, changed] - two[:, changed]).max() > 1e-3


@few
@given(seed=seeds, length=lengths, left=st.integers(0, 2), right=st.integers(0, 2))
def test_padding_changes_nothing(make, seed, length, left, right):
    """On either side, whatever it holds."""
    x = normal(seed, 2, length, D)
    padded = np.concatenate([normal(seed + 1, 2, left, D), x, normal(seed + 2, 2, right, D)], axis=1)
    mask = np.zeros((2, left + length + right), bool)
    mask[:, left : left + length] = True
    inside = numpy(make()(padded, padding_mask=mask))[:, left : left + length]
    close(inside, numpy(make()(x)), TOLERANCE)


@few
@given(seed=seeds, length=lengths, data=st.data())
def test_permutations_go_through(make, seed, length, data):
    """Without positions, the outputs of permuted tokens are the permuted outputs."""
    order = np.array(data.draw(st.permutations(range(length))))
    x = normal(seed, 2, length, D)
    close(numpy(make()(x[:, order])), numpy(make()(x))[:, order], TOLERANCE)


@few
@given(seed=seeds, distance=st.integers(0, 50), start=st.integers(0, 2000), shift=st.integers(1, 2000))
def test_rotary_scores_depend_on_distances_alone(seed, distance, start, shift):
    query, key = normal(seed, 1, 1, 1, 8), normal(seed + 1, 1, 1, 1, 8)

    def score(first):
        query_at, key_at = (
            kt.rotary_encoding(ops.convert_to_tensor([[position]], dtype="int32"), kt.rotary_frequencies(8))
            for position in (first + distance, first)
        )
        return np.sum(numpy(kt.rotate(query, query_at)) * numpy(kt.rotate(key, key_at)))

    # Products of 8 numbers up to 4, whose angles are known to a few units in the last place.
    close(score(start), score(start + shift), 1e-4)


@few
@given(
    seed=seeds,
    length=lengths,
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_grouped_heads_are_repeated_heads(seed, length, kv_heads, groups, causal, masked):
    query = normal(seed, 2, length, kv_heads * groups, 5)
    key, value = normal(seed + 1, 2, length, kv_heads, 5), normal(seed + 2, 2, length, kv_heads, 7)
    mask = normal(seed + 3, 2, length, length) < 0.5 if masked else None
    output = kt.attention(query, key, value, mask, causal)
    repeated = kt.attention(query, *(np.repeat(x, groups, axis=2) for x in (key, value)), mask, causal)
    close(numpy(output), numpy(repeated), TOLERANCE)


@pytest.mark.parametrize("kv_heads", [1, 2])
@few
@given(seed=seeds, length=st.integers(2, 5), data=st.data())
def test_cached_attention_is_uncached_attention(kv_heads, seed, length, data):
    """However the tokens are split in two calls; appended, and written to a buffer that is longer than they are."""
    split = data.draw(st.integers(1, length - 1))
    layer = layers.MultiHeadSelfAttention(N, causal=True, num_kv_heads=kv_heads)
    layer.build((None, None, D))
    randomize(layer)
    x = normal(seed, 2, length, D)
    whole = numpy(layer(x))
    for slots, starts in ((0, (None, None)), (length + 1, (0, split))):
        cache = tuple(np.zeros((2, slots, kv_heads, D // N), "float32") for _ in range(2))
        first, cache = layer(x[:, :split], cache=cache, start=starts[0])
        second, _ = layer(x[:, split:], cache=cache, start=starts[1])
        close(np.concatenate([numpy(first), numpy(second)], axis=1), whole, TOLERANCE)


@few
@given(seed=seeds, length=st.integers(2, 5), data=st.data())
def test_cached_decoder_is_uncached_decoder(seed, length, data):
    """With a memory, projected once or not."""
    split = data.draw(st.integers(1, length - 1))
    projected = data.draw(st.booleans())
    decoder = layers.TransformerDecoder(2, N, 11)
    decoder.build((None, None, D), (None, None, 7))
    randomize(decoder)
    x, memory = normal(seed, 2, length, D), normal(seed + 1, 2, 3, 7)
    given_memory = {"memory_cache": decoder.project_memory(memory)} if projected else {"memory": memory}
    whole = numpy(decoder(x, memory))
    for slots, starts in ((0, (None, None)), (length + 1, (0, split))):
        pair = tuple(np.zeros((2, slots, N, D // N), "float32") for _ in range(2))
        first, cache = decoder(x[:, :split], cache=(pair, pair), start=starts[0], **given_memory)
        second, _ = decoder(x[:, split:], cache=cache, start=starts[1], **given_memory)
        close(np.concatenate([numpy(first), numpy(second)], axis=1), whole, TOLERANCE)


@few
@given(
    seed=seeds,
    length=lengths,
    slots=lengths,
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 2),
    block_scores=st.integers(1, 60),
    causal=st.booleans(),
    mask_shape=st.sampled_from([None, "BNTS", "B11S", "1NTS", "11TS"]),
)
def test_blocks_are_the_whole(seed, length, slots, kv_heads, groups, block_scores, causal, mask_shape):
    """With blocks of any size; queries that see nothing are drawn too."""
    slots = length if causal else slots
    sizes = {"B": 2, "N": kv_heads * groups, "T": length, "S": slots, "1": 1}
    query = normal(seed, 2, length, kv_heads * groups, 3)
    key, value = normal(seed + 1, 2, slots, kv_heads, 3), normal(seed + 2, 2, slots, kv_heads, 5)
    mask = None
    if mask_shape is not None:
        mask = normal(seed + 3, *(sizes[letter] for letter in mask_shape)) < 0
    whole, _ = kt.attention(query, key, value, mask, causal, return_weights=True)
    tensors = [ops.convert_to_tensor(x) for x in (query, key, value, *([] if mask is None else [mask]))]
    in_blocks = quick(lambda *args: blockwise.blockwise_attention(*args[:3], (*args, None)[3], causal, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "BLOCK_SCORES", block_scores)
        blocks = in_blocks(*tensors)
    close(numpy(blocks), numpy(whole), TOLERANCE)
