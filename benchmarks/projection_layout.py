"""Training step with the query, key and value projections in one packed matrix, against one matrix each (as shipped).

    KERAS_BACKEND=jax python benchmarks/projection_layout.py [--batch 16] [--length 128] [--width 256] [--layers 4]

Needs a backend. "split" cuts the packed product (B, T, 3·D) along its last axis; "strided" views it as (B, T, 3, N, H).
The table gives the median over the rounds of packed / separate: above 1 separate matrices are faster. Saved files and
the names of the weights depend on the layout, so it is settled by measurement.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from keras import ops
from train_step import HEADS, arguments, ours, table

from keras_transformer.layers import MultiHeadSelfAttention, TransformerEncoderBlock


class Split(MultiHeadSelfAttention):
    """Self-attention of one packed product that is cut in three."""

    def build(self, input_shape):
        self.width = input_shape[-1]
        self.packed_dense = self._dense("packed", 3 * self.width, input_shape)
        self.output_dense = self._dense("output", self.width, input_shape)

    def call(self, x, training=None, **masks):
        query, key, value = (self._heads(part) for part in self._parts(x))
        return self._attend(query, key, value, None, False, False, training)[0]

    def _parts(self, x):
        return ops.split(self.packed_dense(x), 3, axis=-1)


class Strided(Split):
    """The same, with the three parts as an axis of their own."""

    def _parts(self, x):
        packed = ops.reshape(self.packed_dense(x), (-1, ops.shape(x)[1], 3, self.width))
        return (packed[:, :, i] for i in range(3))


def block_of(attention):
    """A function that applies an encoder block with this attention."""

    def block(x, width, dropout):
        made = TransformerEncoderBlock(HEADS, 4 * width, dropout=dropout)
        made.self_attention = attention(HEADS, dropout=dropout, name="self_attention")
        return made(x)

    return block


if __name__ == "__main__":
    blocks = {"separate": ours, "split": block_of(Split), "strided": block_of(Strided)}
    table(blocks, arguments(__doc__), dropouts=(0.0,))
