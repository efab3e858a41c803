"""Random numbers that are a function of seed, row, step and token id: the same on every engine. NumPy or `keras.ops`.

A counter-based generator keeps no state, so that a row's noise depends neither on the batch around it nor on how often
it was asked for. Everything up to the last integer is arithmetic of 32 bits that wraps around, and so is equal bit by
bit in NumPy, TensorFlow, JAX, torch and ONNX Runtime; only the logarithms after it may differ in the last place.
It is no generator for cryptography.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Weyl's step, 2**32 divided by the golden ratio, as a signed number.
_GOLDEN = np.int32(0x9E3779B9 - 2**32)
# Bits of a uniform number: with a half added to them they still fit the 24 of a float32, so that none is 0 or 1.
_BITS = 23


def gumbel(seed: Any, rows: Any, step: Any, size: int, xp: Any = np) -> Any:
    """Noise of the standard Gumbel distribution.

    The index of the largest of `logits + gumbel(…)` is a draw from `softmax(logits)` (Gumbel 1954, the "Gumbel-max
    trick"). No sum runs over the ids, whose order of addition would make engines differ.

    Args:
        seed: int32 (1,).
        rows: the number of each row, int32 (B,).
        step: the number of tokens made before, an integer or an int32 scalar.
        size: the number of ids, V.
        xp: the array namespace: `numpy` or `keras.ops`.

    Returns:
        float32 (B, V).
    """
    integers = _shifted(random_bits(seed, rows, step, size, xp), 32 - _BITS, xp)
    uniform = (as_float(integers, xp) + 0.5) * 2.0**-_BITS
    return -xp.log(-xp.log(uniform))


def random_bits(seed: Any, rows: Any, step: Any, size: int, xp: Any = np) -> Any:
    """32 random bits for each row and id, int32 (B, V); arguments as in `gumbel`."""
    # Without the constant seed 0 would give 0, which `mixed` leaves as it is. By name, as `^` is another operation in
    # Keras' symbolic tensors.
    key = mixed(xp.bitwise_xor(seed, _GOLDEN), xp)
    key = mixed(xp.bitwise_xor(key, rows), xp)
    key = mixed(xp.bitwise_xor(key, step), xp)
    return mixed(xp.bitwise_xor(key[:, None], xp.arange(size, dtype="int32") * _GOLDEN), xp)


def mixed(x: Any, xp: Any = np) -> Any:
    """A one-to-one function of int32 in which each bit of `x` changes each bit of the result in half of all cases.

    Multiply-xorshift with the constants that Wellons found for the least bias ("Prospecting for hash functions", 2018,
    there `lowbias32`).
    """
    x = xp.bitwise_xor(x, _shifted(x, 16, xp)) * 0x7FEB352D
    x = xp.bitwise_xor(x, _shifted(x, 15, xp)) * (0x846CA68B - 2**32)
    return xp.bitwise_xor(x, _shifted(x, 16, xp))


def as_float(x: Any, xp: Any) -> Any:
    """`x` as float32."""
    return np.asarray(x, "float32") if xp is np else xp.cast(x, "float32")


def _shifted(x, count, xp):
    """The bits of int32 `x` moved to the right, zeros after them: the sign's copies are masked away."""
    return xp.bitwise_and(xp.right_shift(x, count), np.int32(2 ** (32 - count) - 1))
