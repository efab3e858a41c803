"""The checks of `export_onnx`'s arguments, which come before any work."""

from __future__ import annotations

from typing import Any

import keras

from keras_transformer.export.errors import ExportError
from keras_transformer.export.forms import FORMS


def check_converter(converter: str, opset: int | None, opsets: dict[str, tuple[int, ...]], **traced: Any) -> int:
    """The opset, once it and `converter` are found to go together; refuses what only traced graphs have.

    Args:
        converter: one of `opsets`.
        opset: None for the newest.
        opsets: those of each converter.
        **traced: arguments that are for traced graphs, each with its default.
    """
    if not isinstance(converter, str) or converter not in opsets:
        raise ExportError(f"`converter` must be one of {tuple(opsets)}. Received: converter={converter!r}")
    own = opsets[converter]
    if opset is not None and (type(opset) is not int or opset not in own):
        by = "" if converter == "trace" else f" with converter={converter!r}"
        raise ExportError(f"`opset` must be from {own[0]} to {own[-1]}{by}. Received: opset={opset!r}")
    for name, (value, default) in traced.items():
        if converter != "trace" and value != default:
            raise ExportError(
                f"`{name}` is for graphs that are traced, not for converter={converter!r}. Received: {name}={value!r}"
            )
    return own[-1] if opset is None else opset


def check_arguments(model, family, logits, target, **described: Any) -> None:
    """Refuses what is no model, and arguments that its kind does not take."""
    if not isinstance(model, keras.Layer):
        raise ExportError(f"`model` must be a Keras model. Received: model={model!r}")
    for name, value in described.items():
        if family is not None and value is not None:
            raise ExportError(
                f"`{name}` is for other models: the graphs of a {type(model).__name__} have names and axes of their "
                f"own. Received: {name}={value!r}"
            )
    for name, (value, default) in (("logits", logits), ("target", target)):
        if family is None and value != default:
            raise ExportError(
                f"`{name}` is for graphs with a cache: a Transformer's, or a CausalLM's that becomes a directory. "
                f"Received: {name}={value!r}"
            )
    if target[0] == "generator" and logits[0] != logits[1]:
        raise ExportError(
            f"`logits` is for graphs that have them as an output, not for target='generator'. Received: "
            f"logits={logits[0]!r}"
        )
    names = described["output_names"]
    if names is not None and (
        isinstance(names, str) or not names or not all(isinstance(name, str) and name for name in names)
    ):
        raise ExportError(f"`output_names` must be a list of names. Received: output_names={names!r}")


def check_form(form: str, model) -> None:
    """Refuses an unknown form, and one that `model` has not."""
    if form not in FORMS:
        raise ExportError(f"`form` must be one of {FORMS}. Received: form={form!r}")
    if form == "fp32":
        return
    if (dtype := getattr(model, "compute_dtype", "float32")) != "float32":
        raise ExportError(
            f"`form` must be 'fp32', which keeps what there is, for a model that computes in {dtype}. "
            f"Received: form={form!r}"
        )


def check_cache(cache: str | None, model, target: str) -> None:
    """Refuses an unknown cache, and one that `model` or `target` has not."""
    if cache not in (None, "int8"):
        raise ExportError(f"`cache` must be None or 'int8'. Received: cache={cache!r}")
    if cache is None:
        return
    if target != "onnxruntime":
        raise ExportError(
            f"`cache` must be None for target={target!r}: only ONNX Runtime's GroupQueryAttention reads a cache of "
            f"int8, which is target='onnxruntime'. Received: cache={cache!r}"
        )
    if (dtype := getattr(model, "compute_dtype", "float32")) not in ("float32", "float16"):
        raise ExportError(
            f"`cache` must be None for a model that computes in {dtype}: GroupQueryAttention takes float32 and "
            f"float16. Received: cache={cache!r}"
        )


def check_sizes(model, cached: bool, min_length: int | None, max_length: int | None) -> int | None:
    """The largest size, that of the model if `max_length` is None, once the range is found to be one.

    Args:
        model: the model.
        cached: whether its graphs have a cache.
        min_length: as for `export_onnx`.
        max_length: the same.
    """
    for name, value in (("min_length", min_length), ("max_length", max_length)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ExportError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if cached and min_length not in (None, 1):
        raise ExportError(
            "`min_length` is for other models: graphs with a cache take texts from one token on. "
            f"Received: min_length={min_length}"
        )
    limit, usual = longest(model)
    if limit is not None and max_length is not None and max_length > limit:
        raise ExportError(f"`max_length` must be within the model's own, {limit}. Received: max_length={max_length}")
    largest = usual if max_length is None else max_length
    if (min_length or 0) < 0 or largest is not None and largest < max(min_length or 0, 1):
        own = "" if max_length is not None or largest is None else f" (the model's own limit is {largest})"
        raise ExportError(
            "`min_length` and `max_length` must be a range of sizes. "
            f"Received: min_length={min_length}, max_length={max_length}{own}"
        )
    return largest


def check_tokenizer(tokenizer, model, takes_text: bool) -> None:
    """Refuses what is no tokenizer, or one whose ids are not those of `model`."""
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "save"):
        raise ExportError(f"`tokenizer` must be a tokenizer, with `save`. Received: tokenizer={tokenizer!r}")
    if not takes_text:
        raise ExportError(
            "`tokenizer` is for models that a runner feeds with text: Transformer, CausalLM, SentenceEncoder and "
            f"SequenceClassifier. Received: a {type(model).__name__}"
        )
    # Ours, or one of the package `tokenizers`.
    count = tokenizer.vocabulary_size if hasattr(tokenizer, "vocabulary_size") else tokenizer.get_vocab_size()
    sizes = ("source_vocabulary_size", "target_vocabulary_size", "vocabulary_size")
    owner = getattr(model, "encoder", model) if not hasattr(model, "target_vocabulary_size") else model
    size = min(getattr(owner, name) for name in sizes if hasattr(owner, name))
    if count > size:
        raise ExportError(f"`tokenizer` must have no more ids than the model, {size}. Received: {count} ids")
    for name in ("start_id", "end_id", "pad_id"):
        own, other = getattr(tokenizer, name, None), getattr(model, name, None)
        if None not in (own, other) and own not in (other if isinstance(other, tuple) else (other,)):
            raise ExportError(f"`tokenizer` and model must have the same `{name}`. Received: {own} and {other}")


def longest(model) -> tuple[int | None, int | None]:
    """The smallest `max_length` of the model and its layers, and the smallest limit of any name; None if there is none.

    Other names are `max_sequence_length`, and the `sequence_length` of a layer that has a table of so many rows: those
    of KerasHub. They need not be a limit of what the model takes, as `max_length` is.
    """
    own, others = [], []
    for layer in model._flatten_layers() if isinstance(model, keras.Layer) else ():
        own.append(getattr(layer, "max_length", None))
        others.append(getattr(layer, "max_sequence_length", None))
        rows = getattr(layer, "sequence_length", None)
        others += [rows for weight in layer._trainable_variables if weight.shape and weight.shape[0] == rows]
    own, others = ([limit for limit in limits if isinstance(limit, int)] for limits in (own, others))
    return min(own, default=None), min([*own, *others], default=None)
