"""Text to token ids and back (byte-level BPE), and lines of text files; no Keras and no backend."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Sequence

from keras_transformer import _validation

try:
    import tokenizers
except ImportError as error:
    raise ImportError(
        "keras_transformer.text needs the package `tokenizers`: pip install keras-transformer-onnx[text]",
        name="tokenizers",
    ) from error

PAD_ID, START_ID, END_ID = 0, 1, 2
_SPECIAL_TOKENS = ("<pad>", "<start>", "<end>")


class Tokenizer:
    """Byte-level byte pair encoding (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909).

    Every text has an encoding, because every byte is a token; so there is no unknown token. Text is
    normalised to NFC first: `decode(encode([text]))` gives the NFC form of `text`. Ids 0, 1 and 2 are
    padding, start and end; in a text their names (such as `<end>`) are ordinary characters.

    Made by `Tokenizer.train` or `Tokenizer.load`. The file is the `tokenizer.json` of the `tokenizers`
    package, which other programs read too.
    """

    pad_id = PAD_ID
    start_id = START_ID
    end_id = END_ID

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        found = [tokenizer.token_to_id(token) for token in _SPECIAL_TOKENS]
        if found != [PAD_ID, START_ID, END_ID]:
            raise ValueError(
                f"`tokenizer` must have {', '.join(_SPECIAL_TOKENS)} as ids 0, 1, 2. Received: ids {found}"
            )
        # Not kept in the file: the names of special tokens in a text stay text.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary_size: int = 8000, min_frequency: int = 2) -> Tokenizer:
        """Learns a vocabulary from `texts`; the same texts in the same order give the same vocabulary.

        Args:
            texts: lines or longer texts; for a vocabulary shared by two languages, those of both.
            vocabulary_size: the most tokens to have, the special ones and the 256 bytes included.
            min_frequency: how often a pair must occur to become a token.

        Raises:
            ValueError: `vocabulary_size` has no room for the 256 bytes and the special tokens.
        """
        smallest = 256 + len(_SPECIAL_TOKENS)
        if vocabulary_size < smallest:
            raise ValueError(
                f"`vocabulary_size` must be at least {smallest}: 256 bytes and the special tokens. "
                f"Received: vocabulary_size={vocabulary_size}"
            )
        _validation.refuse_one_text(texts)
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.normalizer = tokenizers.normalizers.NFC()
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            min_frequency=min_frequency,
            special_tokens=list(_SPECIAL_TOKENS),
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        end = _SPECIAL_TOKENS[END_ID]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, END_ID)]
        )
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is no tokenizer, or one with other special tokens.
        """
        path = os.fspath(path)
        with open(path, encoding="utf-8") as file:
            content = file.read()
        try:
            return cls(tokenizers.Tokenizer.from_str(content))
        except Exception as error:  # the package raises bare Exception for a malformed file
            raise ValueError(f"{path} is not a tokenizer of this package: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer to `path`, by custom a `tokenizer.json`."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            file.write(self._tokenizer.to_str(pretty=True))

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, the special ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without a start and with the end id as the last one."""
        _validation.refuse_one_text(texts)
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def decode(self, ids: Iterable[Iterable[int]]) -> list[str]:
        """The text of each row of `ids` up to its first end id; padding and start ids are left out.

        Bytes that form no character become the replacement character U+FFFD.
        """
        rows = []
        for row in ids:
            row = [int(i) for i in row]
            rows.append(row[: row.index(END_ID)] if END_ID in row else row)
        return self._tokenizer.decode_batch(rows, skip_special_tokens=True)


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines of a UTF-8 text file, gzip-compressed if its name ends in `.gz`.

    Only a line feed ends a line (a carriage return before it goes too), so that two parallel files stay
    parallel whatever other separators Unicode has.
    """
    path = os.fspath(path)
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as file:
        return [line.removesuffix("\n").removesuffix("\r") for line in file]
