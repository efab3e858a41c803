"""Runs exported models that generate with ONNX Runtime and NumPy alone: ids to ids, text to text."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_transformer import _validation
from keras_transformer.export.decoding import Decoding, empty_cache
from keras_transformer.export.directory import graph_config, read_config
from keras_transformer.export.errors import NotAnExportError
from keras_transformer.export.sessions import default_options, open_session, ort_value
from keras_transformer.export.texts import in_batches
from keras_transformer.generation.mixin import GenerationMixin
from keras_transformer.generation.prompts import prompt_request, prompt_rules
from keras_transformer.generation.request import Request, source_request
from keras_transformer.generation.rules import Engine, Rules
from keras_transformer.generation.stream import collect_tokens, stream_tokens


class _OnnxModel(GenerationMixin):
    """What the runners share; see their documentation."""

    kind: str

    def __init__(
        self,
        directory: str | os.PathLike,
        providers: Sequence[str] | None = None,
        threads: int | None = None,
    ):
        self.directory = pathlib.Path(directory)
        self.config = read_config(self.directory)
        if self.config["kind"] != self.kind or self.config["target"] == "generator":
            raise NotAnExportError(f"{self.directory} {_other_kind(self.config)}")
        options = default_options(threads)
        self._sessions = {
            pathlib.Path(name).stem: open_session(self.directory / name, options, providers)
            for name in self.config["files"]
            if name.endswith(".onnx")
        }
        self._generator = _Generator(self._begun)
        self.tokenizer = None
        if (self.directory / "tokenizer.json").exists():
            self.tokenizer = self._load_tokenizer(self.directory / "tokenizer.json")

    def _decoding(self, batch: int, slots: int, encoded: dict | None = None) -> Decoding:
        """An empty cache for `batch` rows of up to `slots` tokens."""
        return empty_cache(self._sessions["decoder"], self.config["target"], batch, slots, encoded)

    def _begun(self, request: Request) -> Decoding:
        """The state before the first step."""
        raise NotImplementedError

    def _load_tokenizer(self, path):
        from keras_transformer.text import Tokenizer

        return Tokenizer.load(path)

    def _texts(self, rows, max_new_tokens, batch_size, options) -> list[np.ndarray]:
        """New ids for each of `rows`; those of similar length share a batch."""
        results: list[Any] = [None] * len(rows)
        for batch in in_batches(rows, batch_size, self.config["max_length"]):
            request = self.generation_request([rows[i] for i in batch], max_new_tokens)
            request = dataclasses.replace(request, rows=np.array(batch, np.int32)).asking(**options)
            for i, ids in zip(batch, self._generator.generate(request), strict=True):
                results[i] = ids
        return results

    def _needs_tokenizer(self):
        if self.tokenizer is None:
            raise ValueError(
                f"{self.directory} holds no tokenizer.json, so it takes no text: use `generate` with token ids."
            )

    def __repr__(self):
        return f"{type(self).__name__}({str(self.directory)!r})"


class OnnxTransformer(_OnnxModel):
    """An exported encoder–decoder model. Threads may share it: each call has a state of its own.

    Args:
        directory: what `export_onnx` wrote.
        providers: ONNX Runtime execution providers, the first one preferred; default: the CPU.
        threads: threads for one operation; default: all cores.

    Attributes:
        config: what `config.json` says.
        tokenizer: the tokenizer in the directory; None if there is none.

    Raises:
        NotAnExportError: `directory` is no exported encoder–decoder model, or one of its files is damaged.
        ImportError: ONNX Runtime is not installed, or two of its wheels are.
        ValueError: a provider is not there.
    """

    kind = "encoder-decoder"

    def translate(
        self, texts: Sequence[str], max_new_tokens: int | None = None, batch_size: int = 32, **options: Any
    ) -> list[str]:
        """Text in, text out. Texts of similar length share a batch; the results keep the order of `texts`.

        Args:
            texts: what is to be translated.
            max_new_tokens: the most tokens a text gets; its batch's longest source + 50, within the model's limit, if
                None.
            batch_size: texts that are translated together. With a seed it changes nothing: a text's random draws depend
                on its place in `texts`.
            **options: `temperature`, `num_beams` and so on, as in `generate`.

        Raises:
            ValueError: the directory holds no tokenizer; else as in `generate`.
        """
        self._needs_tokenizer()
        rows = self._texts(self.tokenizer.encode(texts), max_new_tokens, batch_size, options)
        return self.tokenizer.decode(row.tolist() for row in rows)

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The sources (B, S), padded or of unequal length, once they are checked."""
        return _sources(self.config, inputs, max_new_tokens)

    def _begun(self, request):
        source = request.inputs["source"]
        return self._decoding(len(source), request.max_new_tokens, encode(self._sessions["encoder"], source))


class OnnxCausalLM(_OnnxModel):
    """An exported decoder-only model. Threads may share it: each call has a state of its own.

    Args:
        directory: what `export_onnx` wrote.
        providers: ONNX Runtime execution providers, the first one preferred; default: the CPU.
        threads: threads for one operation; default: all cores.

    Attributes:
        config: what `config.json` says.
        tokenizer: the tokenizer in the directory; None if there is none.

    Raises:
        NotAnExportError: `directory` is no exported decoder-only model, or one of its files is damaged.
        ImportError: ONNX Runtime is not installed, or two of its wheels are.
        ValueError: a provider is not there.
    """

    kind = "decoder"

    def complete(
        self, texts: Sequence[str], max_new_tokens: int | None = None, batch_size: int = 32, **options: Any
    ) -> list[str]:
        """What follows each text. Texts of similar length share a batch; the results keep the order of `texts`.

        Args:
            texts: the prompts.
            max_new_tokens: the most tokens a text gets; 50, within the model's limit, if None.
            batch_size: texts that are continued together. With a seed it changes nothing: a text's random draws depend
                on its place in `texts`.
            **options: `temperature`, `num_beams` and so on, as in `generate`.

        Raises:
            ValueError: the directory holds no tokenizer, or a text has no tokens; else as in `generate`.
        """
        self._needs_tokenizer()
        _validation.refuse_one_text(texts)
        prompts = [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]
        # A tokenizer may end every text, which a prompt must not.
        prompts = [row[:-1] if row and row[-1] in self._end_ids else row for row in prompts]
        for index, row in enumerate(prompts):
            if not row:
                raise ValueError(f"`texts` must have at least one token each. Received: none in text {index}")
        rows = self._texts(prompts, max_new_tokens, batch_size, options)
        ends = [np.flatnonzero(np.isin(row, self._end_ids)) for row in rows]
        rows = [row[: end[0]] if len(end) else row for row, end in zip(rows, ends, strict=True)]
        return self.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The prompts (B, P), padded or of unequal length, once they are checked."""
        return _prompts(self.config, inputs, max_new_tokens)

    @property
    def _end_ids(self):
        return [] if self.config["end_id"] is None else np.atleast_1d(self.config["end_id"]).tolist()

    def _begun(self, request):
        prompts, lengths = request.inputs["prompt"], request.inputs["lengths"]
        decoding = self._decoding(len(prompts), prompts.shape[1] + request.max_new_tokens)
        decoding.prefill(prompts, lengths)
        return decoding

    def _load_tokenizer(self, path):
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # As published files may have it: prompts are padded here, and one that is too long is refused, not cut.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer


class OnnxGenerator:
    """An exported graph that generates by itself.

    Args:
        path: what `export_onnx(target="generator")` wrote, a file or a directory.
        providers: ONNX Runtime execution providers, the first one preferred; default: the CPU.
        threads: threads for one operation; default: all cores.

    Attributes:
        config: what the exporter noted.

    Raises:
        NotAnExportError: `path` is no such graph, or is damaged.
        ImportError: ONNX Runtime is not installed, or two of its wheels are.
        ValueError: a provider is not there.
    """

    def __init__(self, path: str | os.PathLike, providers: Sequence[str] | None = None, threads: int | None = None):
        self.path = pathlib.Path(path)
        file = self.path
        if self.path.is_dir():
            config = read_config(self.path)
            if config.get("target") != "generator":
                raise NotAnExportError(f"{self.path} {_other_kind(config)}")
            file = self.path / "model.onnx"
        self._session = open_session(file, default_options(threads), providers)
        self.config = graph_config(self._session)
        if self.config.get("target") != "generator":
            raise NotAnExportError(f"{self.path} holds no graph that generates by itself.")

    def generate(
        self,
        inputs: Any,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> np.ndarray:
        """As the `generate` of the other runners and of the model in Keras, with the arguments that the graph takes."""
        request = self.generation_request(inputs, max_new_tokens).asking(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        return self._session.run(None, generator_feeds(self.config, request))[0].astype(np.int32)

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The prompts or sources, once they are checked."""
        return generator_request(self.config, inputs, max_new_tokens)

    def __repr__(self):
        return f"OnnxGenerator({str(self.path)!r})"


def generator_request(config: dict, inputs: Any, max_new_tokens: int | None) -> Request:
    """The prompts or sources for a graph that generates, once they are checked; `config` is what it says of itself."""
    return {"encoder-decoder": _sources, "decoder": _prompts}[config["kind"]](config, inputs, max_new_tokens)


def generator_feeds(config: dict, request: Request) -> dict[str, np.ndarray]:
    """The inputs of such a graph."""
    given, settings = request.inputs, request.rules.settings
    if config["kind"] == "decoder":
        prompt, lengths = given["prompt"], given["lengths"]
        mask = np.arange(prompt.shape[1]) < lengths[:, None]
        given = {"input_ids": prompt.astype(np.int64), "attention_mask": mask.astype(np.int64)}
    seed = settings.get("seed", np.zeros(1, np.int32)).view(np.uint32)
    return given | {
        "max_new_tokens": np.array(request.max_new_tokens, np.int64),
        "temperature": np.array(settings.get("temperature", 0), np.float32),
        "top_k": np.array(settings.get("top_k", 0), np.int64),
        "top_p": np.array(settings.get("top_p", 1), np.float32),
        "seed": np.array(seed[0], np.int64),
    }


class _Generator:
    """Runs a `Request` in NumPy; `begun` is the function from it to the `Decoding` before the first step."""

    def __init__(self, begun):
        self._begun = begun

    def generate(self, request, compile=None):
        ids, _, (_, notes) = collect_tokens(self._steps(request, compile))
        return request.rules.result(ids, notes)

    def stream(self, request, compile=None):
        return (tokens for tokens, _, _ in self._steps(request, compile))

    def _steps(self, request, compile):
        if compile is not None:
            raise ValueError(f"`compile` must be None: an exported model is compiled. Received: compile={compile!r}")
        rules, length = request.rules, request.max_new_tokens
        engine = Engine(
            lambda tokens, position, decoding: (decoding.step(tokens), decoding),
            lambda decoding, index: decoding.take(index),
        )
        begun = rules.begin(engine, self._begun(request), request.start, length)
        return stream_tokens(rules.advance(engine), *begun, range(length))


def _sources(config, inputs, max_new_tokens):
    return source_request(
        inputs,
        max_new_tokens,
        config["source_vocabulary_size"],
        config["target_vocabulary_size"],
        config["max_length"],
        config["start_id"],
        Rules(end_id=config["end_id"], pad_id=config["pad_id"]),
    )


def _prompts(config, inputs, max_new_tokens):
    rules = prompt_rules(config["end_id"], config["pad_id"])
    return prompt_request(
        inputs, max_new_tokens, config["vocabulary_size"], config["max_length"], rules, pad_id=config["pad_id"]
    )


def encode(session, source_ids: np.ndarray) -> dict:
    """The encoder's outputs for int32 ids (B, S), as the decoder's inputs of the same names."""
    names = [output.name for output in session.get_outputs()]
    values = session.run_with_ort_values(names, {"source": ort_value(source_ids)})
    return dict(zip(names, values, strict=True))


def _other_kind(config):
    runner = {"encoder-decoder": "OnnxTransformer", "decoder": "OnnxCausalLM"}.get(config["kind"])
    if config.get("target") == "generator":
        return "holds one graph that generates by itself: run it with OnnxGenerator."
    if runner:
        return f"holds a model of kind {config['kind']!r}: run it with {runner}."
    return (
        f"holds a model of kind {config['kind']!r}, which does not generate: "
        f"run its {', '.join(config['files'])} with onnxruntime.InferenceSession."
    )
