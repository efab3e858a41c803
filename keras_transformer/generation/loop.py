"""The compiled loop: the same rules inside `keras.ops.while_loop`, one program for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_transformer.generation.rules import Rules


def loop_tokens(
    step: Callable[[Any, Any, Any], tuple[Any, Any]],
    cache: Any,
    start: Any,
    max_length: Any,
    buffer_length: int,
    rules: Rules,
) -> Any:
    """Generates until every row has ended or has `max_length` tokens.

    Args:
        step: `(tokens (B, 1), position, cache) -> (logits (B, V), cache)`.
        cache: the state that `step` passes on: tensors in any nesting, of unchanging shapes.
        start: the tokens (B,) at position 0, int32.
        max_length: the largest number of tokens a row gets; may be a tensor.
        buffer_length: the number of columns of the result, at least `max_length`.
        rules: the token rules.

    Returns:
        The tokens (B, buffer_length), int32, padded after each row's end.
    """
    finished = ops.zeros_like(start, dtype="bool")
    ids = ops.full((start.shape[0], buffer_length), rules.pad_id, dtype="int32")

    def unfinished(position, tokens, finished, ids, cache):
        return ops.logical_and(ops.less(position, max_length), ops.logical_not(ops.all(finished)))

    def body(position, tokens, finished, ids, cache):
        logits, cache = step(ops.expand_dims(tokens, 1), position, cache)
        tokens, finished = rules.next_tokens(logits, finished, ops)
        ids = ops.slice_update(ids, (0, position), ops.expand_dims(tokens, 1))
        return position + 1, tokens, finished, ids, cache

    state = (ops.convert_to_tensor(0, "int32"), start, finished, ids, cache)
    return ops.while_loop(unfinished, body, state)[3]
