"""Training step with the attention's projections in other layouts, against the one that this package has.

    KERAS_BACKEND=jax python benchmarks/projection_layout.py [--batch 16] [--length 128] [--width 256] [--layers 4]

Needs a backend. Shipped is one matrix for each projection, used on JAX as a kernel (D, N, H) in a product by heads,
elsewhere in a plain product. The others: "plain" and "by heads" everywhere; one packed matrix for query, key and value,
whose product (B, T, 3·D) is cut along its last axis ("split") or viewed as (B, T, 3, D) ("strided"). The table gives
the median over the rounds of theirs / ours: above 1 the shipped layout is faster. Saved files and the names of the
weights depend on the layout, so it is settled by measurement. `--attention` leaves the feed-forward networks out.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras import layers, ops
from train_step import HEADS, arguments, table

from keras_transformer.layers import MultiHeadSelfAttention, TransformerEncoderBlock


class Plain(MultiHeadSelfAttention):
    """Products of matrices on every backend."""

    def _by_heads(self, dense, x):
        return False


class ByHeads(MultiHeadSelfAttention):
    """Products by heads on every backend."""

    def _by_heads(self, dense, x):
        return True


class Split(Plain):
    """One packed product that is cut in three."""

    def build(self, input_shape):
        self.width = input_shape[-1]
        self.packed_dense = self._dense("packed", 3 * self.width, input_shape)
        self.output_dense = self._dense("output", self.width, input_shape)

    def call(self, x, training=None, **masks):
        shape = (-1, ops.shape(x)[1], *self.kv_shape)
        query, key, value = (ops.reshape(part, shape) for part in self._parts(x))
        return self._attend(query, key, value, None, False, False, training)[0]

    def _parts(self, x):
        return ops.split(self.packed_dense(x), 3, axis=-1)


class Strided(Split):
    """The same, with the three parts as an axis of their own."""

    def _parts(self, x):
        packed = ops.reshape(self.packed_dense(x), (-1, ops.shape(x)[1], 3, self.width))
        return (packed[:, :, i] for i in range(3))


def block_of(attention, whole: bool):
    """A function that applies an encoder block with this attention, or the attention with a residual alone."""

    def block(x, width, dropout):
        made = attention(HEADS, dropout=dropout, name="self_attention" if whole else None)
        if not whole:
            return layers.Add()([x, made(x)])
        block = TransformerEncoderBlock(HEADS, 4 * width, dropout=dropout)
        block.self_attention = made
        return block(x)

    return block


def blocks(whole: bool) -> dict:
    """The blocks by the names of their layouts."""
    return {name: block_of(layout, whole) for name, layout in LAYOUTS.items()}


LAYOUTS = {
    "shipped": MultiHeadSelfAttention,
    "plain": Plain,
    "by heads": ByHeads,
    "split": Split,
    "strided": Strided,
}

if __name__ == "__main__":
    options = arguments(__doc__, attention="leave the feed-forward networks out")
    table(blocks(whole=not options.attention), options, dropouts=(0.0,))
