"""What attention and its cache call on torch in place of `keras.ops`, which copies there what need not be copied."""

from __future__ import annotations

from typing import Any


def fused_attention(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """See `ops.attention`; the mask is (B|1, N|1, T|1, S) or None, and `causal` only stands without one.

    Not `keras.ops.dot_product_attention`, which copies keys and values (of a cache: all of it, at each token), repeats
    heads that are shared, and asks for the choice of kernel in a way that breaks the graph of `torch.compile`.
    """
    import torch

    if mask is not None:
        # Finite, so that a row with every key masked has a finite value and gradient before it is set to 0.
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min / 2).to(query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return output.transpose(1, 2)


def write_slots(cache: Any, new: Any, start: Any) -> Any:
    """`cache` (B, S, K, H) with `new` (B, T, K, H) in the slots from `start`: one integer, or one a row (B,).

    Not `keras.ops.slice_update` and `scatter_update`, which make an index for each number, or row, that they write.
    """
    import torch

    steps = torch.arange(new.shape[1], device=cache.device)
    if len(getattr(start, "shape", ())) == 0:
        return cache.index_copy(1, steps + start, new)
    rows = torch.arange(new.shape[0], device=cache.device)
    return cache.index_put((rows[:, None], start[:, None] + steps), new)
