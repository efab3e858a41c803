"""Runs exported encoders with ONNX Runtime and NumPy alone: texts to vectors, texts to classes."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from keras_transformer import _validation
from keras_transformer.export.directory import read_config
from keras_transformer.export.errors import NotAnExportError
from keras_transformer.export.sessions import default_options, open_session
from keras_transformer.export.texts import in_batches


class OnnxEncoder:
    """An exported `SentenceEncoder` or `SequenceClassifier`. Threads may share it: no call changes it.

    Args:
        directory: what `export_onnx` wrote.
        providers: ONNX Runtime execution providers, the first one preferred; default: the CPU.
        threads: threads for one operation; default: all cores.

    Attributes:
        config: what `config.json` says.
        tokenizer: the `tokenizers.Tokenizer` in the directory; None if there is none.

    Raises:
        NotAnExportError: `directory` is no exported encoder, or one of its files is damaged.
        ImportError: ONNX Runtime is not installed, or two of its wheels are.
        ValueError: a provider is not there.
    """

    def __init__(
        self, directory: str | os.PathLike, providers: Sequence[str] | None = None, threads: int | None = None
    ):
        self.directory = pathlib.Path(directory)
        self.config = read_config(self.directory)
        if "task" not in self.config:
            raise NotAnExportError(f"{self.directory} holds no SentenceEncoder or SequenceClassifier.")
        self._session = open_session(self.directory / "model.onnx", default_options(threads), providers)
        self.tokenizer = None
        if (self.directory / "tokenizer.json").exists():
            import tokenizers

            self.tokenizer = tokenizers.Tokenizer.from_file(str(self.directory / "tokenizer.json"))
            self.tokenizer.no_padding()  # rows are padded here, each batch as far as it needs

    def embed(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """A vector for each text, float32 (number of texts, width).

        Args:
            texts: any number of texts; those of similar length share a batch.
            batch_size: how many.

        Raises:
            ValueError: the model classifies, the directory holds no tokenizer, or a text is too long for the model.
        """
        return self._run("embed", texts, batch_size)

    def classify(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """The probability of each class for each text, float32 (number of texts, number of classes); see `embed`."""
        logits = self._run("classify", texts, batch_size).astype(np.float32)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def _run(self, task, texts, batch_size):
        if self.config["task"] != task:
            raise ValueError(
                f"{self.directory} holds a model for `{self.config['task']}`. Received: a call of `{task}`"
            )
        if self.tokenizer is None:
            raise ValueError(f"{self.directory} holds no tokenizer.json, so it takes no text.")
        _validation.refuse_one_text(texts)
        encodings = self.tokenizer.encode_batch(list(texts))
        results: list[np.ndarray | None] = [None] * len(encodings)
        for batch in in_batches([encoding.ids for encoding in encodings], batch_size, self.config["max_length"]):
            (rows,) = self._session.run(None, self._feeds([encodings[i] for i in batch]))
            for i, row in zip(batch, rows, strict=True):
                results[i] = row
        if not results:
            return np.zeros((0, self._session.get_outputs()[0].shape[-1]), np.float32)
        return np.stack(results)

    def _feeds(self, encodings):
        length = max(1, max(len(encoding.ids) for encoding in encodings))
        ids = np.full((len(encodings), length), self.config["pad_id"], np.int32)
        types = np.zeros_like(ids)
        for row, encoding in enumerate(encodings):
            ids[row, : len(encoding.ids)] = encoding.ids
            types[row, : len(encoding.ids)] = encoding.type_ids
        given = {"token_ids": ids, "token_types": types}
        return {node.name: given[node.name] for node in self._session.get_inputs()}

    def __repr__(self):
        return f"OnnxEncoder({str(self.directory)!r})"
