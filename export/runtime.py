"""Runs an exported encoder–decoder model with ONNX Runtime and NumPy alone: ids to ids, text to text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_transformer import _validation
from keras_transformer.export.errors import NotAnExportError
from keras_transformer.generation.mixin import GenerationMixin
from keras_transformer.generation.request import Request, source_request
from keras_transformer.generation.rules import Engine, Rules
from keras_transformer.generation.stream import collect_tokens, stream_tokens

# What `config.json` says of itself: the exporter writes it, this file reads it.
FORMAT, FORMAT_VERSION = "keras_transformer", 1


class OnnxTransformer(GenerationMixin):
    """An exported encoder–decoder model.

    Args:
        directory: what `export_onnx` wrote.
        providers: ONNX Runtime execution providers, the first one preferred; default: the CPU.
        threads: threads for one operation; default: all cores.

    Attributes:
        config: what `config.json` says.
        tokenizer: the `Tokenizer` in the directory; None if there is none.

    Raises:
        NotAnExportError: `directory` is no exported encoder–decoder model, or one of its files is damaged.
        ImportError: ONNX Runtime is not installed, or two of its wheels are.
        ValueError: a provider is not there.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        providers: Sequence[str] | None = None,
        threads: int | None = None,
    ):
        self.directory = pathlib.Path(directory)
        self.config = read_config(self.directory)
        if self.config["kind"] != "encoder-decoder":
            raise NotAnExportError(
                f"{self.directory} holds a model of kind {self.config['kind']!r}, which does not generate: "
                f"run its {', '.join(self.config['files'])} with onnxruntime.InferenceSession."
            )
        options = default_options(threads)
        self._encoder = open_session(self.directory / "encoder.onnx", options, providers)
        self._decoder = open_session(self.directory / "decoder.onnx", options, providers)
        self._generator = _Generator(self._decoding)
        self.tokenizer = None
        if (self.directory / "tokenizer.json").exists():
            from keras_transformer.text import Tokenizer

            self.tokenizer = Tokenizer.load(self.directory / "tokenizer.json")

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
        if self.tokenizer is None:
            raise ValueError(
                f"{self.directory} holds no tokenizer.json, so it cannot translate text: use `generate` with token ids."
            )
        _validation.positive_integers(batch_size=batch_size)
        rows = self.tokenizer.encode(texts)
        limit = self.config["max_length"]
        for index, row in enumerate(rows):
            if limit is not None and len(row) > limit:
                raise ValueError(
                    f"`texts` must have at most the model's max_length={limit} tokens each. "
                    f"Received: {len(row)} tokens in text {index}"
                )
        results = [""] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            request = self.generation_request([rows[i] for i in batch], max_new_tokens)
            request = dataclasses.replace(request, rows=np.array(batch, np.int32)).asking(**options)
            ids = self._generator.generate(request)
            for i, text in zip(batch, self.tokenizer.decode(ids.tolist()), strict=True):
                results[i] = text
        return results

    def generation_request(self, inputs: Any, max_new_tokens: int | None) -> Request:
        """The sources (B, S), padded or of unequal length, once they are checked."""
        config = self.config
        return source_request(
            inputs,
            max_new_tokens,
            config["source_vocabulary_size"],
            config["target_vocabulary_size"],
            config["max_length"],
            config["start_id"],
            Rules(end_id=config["end_id"], pad_id=config["pad_id"]),
        )

    def _decoding(self, source):
        """The state before the first token, for valid int32 ids (B, S)."""
        return Decoding(self._decoder, self.config, encode(self._encoder, source), len(source))

    def __repr__(self):
        return f"OnnxTransformer({str(self.directory)!r})"


class _Generator:
    """Runs a `Request` in NumPy; `decoding` is the function from a source to its `Decoding`."""

    def __init__(self, decoding):
        self._decoding = decoding

    def generate(self, request, compile=None):
        ids, _, (_, notes) = collect_tokens(self._steps(request, compile))
        return request.rules.result(ids, notes)

    def stream(self, request, compile=None):
        return (tokens for tokens, _, _ in self._steps(request, compile))

    def _steps(self, request, compile):
        if compile is not None:
            raise ValueError(f"`compile` must be None: an exported model is compiled. Received: compile={compile!r}")
        rules, length = request.rules, request.max_new_tokens
        engine = Engine(lambda tokens, position, decoding: (decoding.step(tokens, position), decoding), Decoding.take)
        begun = rules.begin(engine, self._decoding(request.inputs["source"]), request.start, length)
        return stream_tokens(rules.advance(engine), *begun, range(length))


class Decoding:
    """The state of one batch's decoding: what the encoder gave and the growing key/value cache.

    Tensors stay `OrtValue`s between the calls, so that a step copies no cache.
    """

    def __init__(self, session, config: dict, encoded: dict, batch: int):
        self._session = session
        self._encoded = encoded
        self._layers = config["num_layers"]
        self.past = self._empty_cache(batch, config)
        self._outputs = ["logits"] + [f"present.{i}.{part}" for i in range(self._layers) for part in _PARTS]

    def _empty_cache(self, batch, config):
        empty = np.zeros((batch, config["num_heads"], 0, config["head_dim"]), _cache_dtype(self._session))
        return {f"past_key_values.{i}.{part}": _ort_value(empty) for i in range(self._layers) for part in _PARTS}

    def step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        """Logits (B, V) after `tokens` (B, 1) at `position`."""
        batch = len(tokens)
        mask = np.ones((batch, position + 1), np.int64)
        return self.run(tokens, mask, np.full((batch, 1), position, np.int64))[:, -1]

    def take(self, index: np.ndarray) -> Decoding:
        """The same object, its rows those that `index` names."""
        for tensors in (self._encoded, self.past):
            tensors.update({name: _ort_value(value.numpy()[index]) for name, value in tensors.items()})
        return self

    def run(self, input_ids: np.ndarray, attention_mask: np.ndarray, position_ids: np.ndarray) -> np.ndarray:
        """Logits (B, T, V) of T further tokens, whose keys and values join the cache.

        Args:
            input_ids: (B, T).
            attention_mask: (B, P + T), 1 where a cached or new token is real.
            position_ids: (B, T).
        """
        feeds = {
            "input_ids": _ort_value(input_ids.astype(np.int64)),
            "attention_mask": _ort_value(attention_mask.astype(np.int64)),
            "position_ids": _ort_value(position_ids.astype(np.int64)),
        }
        logits, *present = self._session.run_with_ort_values(self._outputs, feeds | self._encoded | self.past)
        self.past = dict(zip(self.past, present, strict=True))
        return logits.numpy()


_PARTS = ("key", "value")


def _cache_dtype(session):
    types = {node.name: node.type for node in session.get_inputs()}
    wider = {"tensor(float16)": np.float16, "tensor(double)": np.float64}
    return wider.get(types.get("past_key_values.0.key"), np.float32)


def encode(session, source_ids: np.ndarray) -> dict:
    """The encoder's outputs for int32 ids (B, S), as the decoder's inputs of the same names."""
    names = [output.name for output in session.get_outputs()]
    values = session.run_with_ort_values(names, {"source": _ort_value(source_ids)})
    return dict(zip(names, values, strict=True))


def read_config(directory: str | os.PathLike) -> dict:
    """What an exported directory says of itself, once each of its files is found whole.

    Raises:
        NotAnExportError: it is no exported directory, a file is missing or damaged, or a newer version wrote
            it.
    """
    directory = pathlib.Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        what = "a file, not a directory" if directory.exists() else "no such directory"
        raise NotAnExportError(f"{directory} is not an exported model: {what}.")
    if not path.is_file():
        raise NotAnExportError(f"{directory} is not an exported model: it holds no config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAnExportError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise NotAnExportError(f"{directory} is not an exported model: its config.json is of another kind.")
    if config.get("format_version") != FORMAT_VERSION:
        raise NotAnExportError(
            f"{directory} has format version {config.get('format_version')}; this version of "
            f"keras_transformer reads {FORMAT_VERSION}."
        )
    _check_config(config, path)
    for name, expected in config["files"].items():
        _check_file(directory / name, expected)
    return config


_NUMBERS = (
    "num_layers",
    "num_heads",
    "head_dim",
    "source_vocabulary_size",
    "target_vocabulary_size",
    "start_id",
    "end_id",
    "pad_id",
)


def _check_config(config, path):
    """Raises NotAnExportError where an entry that the runner needs is missing, or of another type."""
    files = config.get("files")
    wrong = []
    if config.get("kind") not in ("model", "encoder-decoder"):
        wrong.append("kind")
    if config.get("kind") == "encoder-decoder":
        wrong += [name for name in _NUMBERS if not isinstance(config.get(name), int)]
        if not isinstance(config.get("max_length"), int | None) or "max_length" not in config:
            wrong.append("max_length")
    needed = {"encoder.onnx", "decoder.onnx"} if config.get("kind") == "encoder-decoder" else set()
    if (
        not isinstance(files, dict)
        or not needed <= set(files)
        or not all(
            name == pathlib.PurePath(name).name and isinstance(entry, dict) and {"size", "sha256"} <= set(entry)
            for name, entry in files.items()
        )
    ):
        wrong.append("files")
    if wrong:
        raise NotAnExportError(f"{path} is damaged: its {', '.join(wrong)} are missing or of another type.")


def _check_file(path, expected):
    if not path.is_file():
        raise NotAnExportError(f"{path.parent} is not complete: {path.name} is missing.")
    if path.stat().st_size != expected["size"]:
        raise NotAnExportError(
            f"{path} is damaged: it has {path.stat().st_size} bytes, {expected['size']} were written."
        )
    if file_sha256(path) != expected["sha256"]:
        raise NotAnExportError(f"{path} is damaged: its contents are not those that were written.")


def file_sha256(path: pathlib.Path) -> str:
    """SHA-256 of a file's contents, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def default_options(threads: int | None = None):
    """ONNX Runtime session options as used in production: every optimisation, no chatter."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if threads is not None:
        _validation.positive_integers(threads=threads)
        options.intra_op_num_threads = threads
    return options


def open_session(path: str | os.PathLike, options=None, providers: Sequence[str] | None = None):
    """An `onnxruntime.InferenceSession` for the file at `path`.

    Args:
        path: the `.onnx` file.
        options: `onnxruntime.SessionOptions`; default: `default_options()`.
        providers: execution providers, the first one preferred; default: the CPU.

    Raises:
        NotAnExportError: there is no such file, or ONNX Runtime cannot read it.
        ValueError: a provider is not there.
    """
    onnxruntime = import_onnxruntime()
    path = pathlib.Path(path)
    if not path.is_file():
        raise NotAnExportError(f"{path} is not an ONNX file: there is no such file.")
    if isinstance(providers, str):
        raise ValueError(f"`providers` must be a list of names. Received: providers={providers!r}")
    providers = list(providers or ["CPUExecutionProvider"])
    available = onnxruntime.get_available_providers()
    for provider in providers:
        if provider not in available:
            hint = ""
            if provider in ("CUDAExecutionProvider", "TensorrtExecutionProvider"):
                hint = (
                    " It comes with the GPU wheel: pip uninstall onnxruntime, then "
                    "pip install 'keras-transformer-onnx[onnx-gpu]'."
                )
            raise ValueError(
                f"`providers` holds {provider!r}, which is not there: this installation has {', '.join(available)}."
                f"{hint}"
            )
    try:
        session = onnxruntime.InferenceSession(str(path), options or default_options(), providers=providers)
    except Exception as error:  # onnxruntime raises many types, none of them documented
        raise NotAnExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {str(error).strip()}"
        ) from error
    if providers[0] not in session.get_providers():
        raise ValueError(
            f"`providers` holds {providers[0]!r}, which is installed and could not be started: the driver or a library "
            "that it needs is missing or of another version. ONNX Runtime wrote above which one it was."
        )
    return session


@functools.cache
def import_onnxruntime():
    """The `onnxruntime` module.

    Raises:
        ImportError: it is not installed, or two wheels are, of which each overwrites files of the other.
    """
    wheels = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(wheels) > 1:
        raise ImportError(
            f"{' and '.join(wheels)} are both installed. They are two builds of one package and overwrite each "
            "other's files, so that neither is whole. Keep one: pip uninstall -y onnxruntime onnxruntime-gpu, "
            "then pip install onnxruntime (CPU) or pip install onnxruntime-gpu (CUDA)."
        )
    try:
        import onnxruntime
    except ImportError as error:
        if wheels:
            raise
        raise ImportError(
            "This needs ONNX Runtime: pip install 'keras-transformer-onnx[onnx]' (CPU) or "
            "'keras-transformer-onnx[onnx-gpu]' (CUDA)."
        ) from error
    return onnxruntime


def _is_installed(distribution):
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _ort_value(array):
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)
