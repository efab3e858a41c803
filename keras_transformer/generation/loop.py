"""The compiled loop: the same rules inside `keras.ops.while_loop`, one program for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops


def loop_tokens(
    advance: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]],
    tokens: Any,
    finished: Any,
    state: Any,
    length: Any,
    slots: int,
) -> tuple[Any, Any, Any]:
    """Generates until every row has ended or has `length` tokens.

    Args:
        advance: a step, from `Rules.advance`, that keeps the shapes of its state.
        tokens: with `finished` and `state` what the first step is given, from `Rules.begin`.
        finished: see there.
        state: see there.
        length: the largest number of tokens a row gets; may be a tensor.
        slots: the number of columns of the result, at least `length`.

    Returns:
        The tokens (B, slots), int32, how many columns of them were made, and the last state.
    """
    ids = ops.zeros((tokens.shape[0], slots), dtype="int32")

    def unfinished(position, ids, tokens, finished, state):
        return ops.logical_and(ops.less(position, length), ops.logical_not(ops.all(finished)))

    def body(position, ids, tokens, finished, state):
        tokens, finished, state = advance(tokens, position, finished, state)
        ids = ops.slice_update(ids, (0, position), ops.expand_dims(tokens, 1))
        return position + 1, ids, tokens, finished, state

    position, ids, _, _, state = ops.while_loop(
        unfinished, body, (ops.convert_to_tensor(0, "int32"), ids, tokens, finished, state)
    )
    return ids, position, state
