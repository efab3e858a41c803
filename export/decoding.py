"""The state of a batch that is decoded step by step in ONNX Runtime: its key/value cache, growing or a fixed buffer."""

from __future__ import annotations

import numpy as np

from keras_transformer.export.sessions import ort_value

_PAST, _PRESENT = "past_key_values.", "present."


class Decoding:
    """The growing cache of one batch, whose rows are padded on the left, and what the encoder gave.

    Tensors stay `OrtValue`s between the calls, so that a step copies no cache.

    Args:
        session: a decoder graph with past and present.
        batch: number of rows.
        encoded: the encoder's outputs, as the decoder's inputs of the same names.
    """

    def __init__(self, session, batch: int, encoded: dict | None = None):
        self._session = session
        self._encoded = dict(encoded or {})
        # Which of the first rows each row comes from, and the slots in which those that come from the same one agree.
        self._sources, self._common = np.arange(batch), np.inf
        self._real = np.zeros((batch, 0), bool)
        self._past = {
            node.name: ort_value(np.zeros(self._cache_shape(batch, node.shape), _dtype(node.type)))
            for node in session.get_inputs()
            if node.name.startswith(_PAST)
        }
        self._outputs = ["logits", *(name.replace(_PAST, _PRESENT) for name in self._past)]

    def extend(self, input_ids: np.ndarray, real: np.ndarray | None = None) -> np.ndarray:
        """Logits (B, T, V) of T further tokens, whose keys and values join the cache; of the last one if the graph
        gives no others.

        Args:
            input_ids: (B, T).
            real: boolean (B, T), False for padding, which stands before a row's first token; None if there is none.
        """
        real = np.ones(input_ids.shape, bool) if real is None else real
        known = self._real.sum(1, keepdims=True)
        positions = np.maximum(known + real.cumsum(1) - 1, 0)
        self._real = np.concatenate([self._real, real], 1)
        return self._run(input_ids, self._real, positions)

    def prefill(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """Fills the cache with all but the last token of each prompt, which the first step is given.

        Args:
            prompts: (B, P), padded on the right.
            lengths: (B,), the number of real tokens.
        """
        width = prompts.shape[1] - 1
        place = np.arange(width) - (width - (lengths[:, None] - 1))
        if width:
            self.extend(np.where(place >= 0, np.take_along_axis(prompts, np.maximum(place, 0), 1), 0), place >= 0)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (B, V) after `tokens` (B, 1)."""
        return self.extend(tokens)[:, -1]

    def take(self, index: np.ndarray) -> Decoding:
        """The same object, its rows those that `index` names; what would not change is not copied."""
        if np.array_equal(index, np.arange(len(self._sources))):
            return self
        before, self._sources = self._sources, self._sources[index]
        least, filled = self._take_lengths(index)
        if np.array_equal(before, self._sources):
            # Beams that change places differ in what was made since they parted, and not in what the encoder gave.
            parted = slice(self._common, filled)
            for name, value in self._past.items():
                array = value.numpy()
                array[:, :, parted] = array[index, :, parted]
                if array.ctypes.data != value.data_ptr():  # a copy, which is up to ONNX Runtime
                    self._past[name] = ort_value(array)
            return self
        self._common = min(self._common, least)
        for tensors in (self._encoded, self._past):
            tensors.update({name: ort_value(value.numpy()[index]) for name, value in tensors.items()})
        return self

    def _take_lengths(self, index):
        """Takes what is known of the rows, and says how many slots each has filled at least and at most."""
        self._real = self._real[index]
        return (self._real.shape[1],) * 2

    @property
    def cache(self) -> dict[str, np.ndarray]:
        """Keys and values (B, K, slots, H) by the names of the graph's inputs."""
        return {name: value.numpy() for name, value in self._past.items()}

    def _cache_shape(self, batch, shape):
        """The shape of an empty cache, from that of an input (batch, heads, slots, head width)."""
        return batch, shape[1], 0, shape[3]

    def _run(self, input_ids, attention_mask, position_ids):
        logits, *present = self._session.run_with_ort_values(
            self._outputs, _feeds(input_ids, attention_mask, position_ids) | self._encoded | self._past
        )
        self._past = dict(zip(self._past, present, strict=True))
        return logits.numpy()


class BufferDecoding(Decoding):
    """A cache of a fixed number of slots, written where it lies, whose rows are padded on the right.

    Args:
        session: a decoder graph exported with `target="onnxruntime"`.
        batch: number of rows.
        slots: how many tokens a row may have.
        encoded: see `Decoding`.
    """

    def __init__(self, session, batch: int, slots: int, encoded: dict | None = None):
        self._slots = slots
        super().__init__(session, batch, encoded)
        self._lengths = np.zeros(batch, np.int64)

    def extend(self, input_ids: np.ndarray, real: np.ndarray | None = None) -> np.ndarray:
        """As `Decoding.extend`; several tokens at once only into an empty cache, and padding after a row's last one."""
        lengths = self._lengths + (input_ids.shape[1] if real is None else real.sum(1))
        positions = self._lengths[:, None] + np.arange(input_ids.shape[1])
        self._lengths = lengths
        return self._run(input_ids, np.arange(positions.max() + 1) < lengths[:, None], positions)

    def prefill(self, prompts: np.ndarray, lengths: np.ndarray) -> None:
        """As `Decoding.prefill`; the first step writes each prompt's last token a second time, at its own slot."""
        if prompts.shape[1] > 1:
            self.extend(prompts, np.arange(prompts.shape[1]) < lengths[:, None])
            self._lengths -= 1

    def _take_lengths(self, index):
        self._lengths = self._lengths[index]
        return self._lengths.min(), self._lengths.max()

    def _cache_shape(self, batch, shape):
        return batch, shape[1], self._slots, shape[3]

    def _run(self, input_ids, attention_mask, position_ids):
        # Past and present are one and the same memory: without that every step would copy the whole buffer.
        binding = self._session.io_binding()
        for name, value in (_feeds(input_ids, attention_mask, position_ids) | self._encoded | self._past).items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        for name, value in self._past.items():
            binding.bind_ortvalue_output(name.replace(_PAST, _PRESENT), value)
        self._session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()


def empty_cache(session, target: str, batch: int, slots: int, encoded: dict | None = None) -> Decoding:
    """The state before the first token, in the form that `target` names; arguments as in the classes."""
    if target == "onnxruntime":
        return BufferDecoding(session, batch, slots, encoded)
    return Decoding(session, batch, encoded)


def _feeds(input_ids, attention_mask, position_ids):
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    return {name: ort_value(array.astype(np.int64)) for name, array in arrays.items()}


def _dtype(onnx_type):
    others = {"tensor(float16)": np.float16, "tensor(double)": np.float64, "tensor(int8)": np.int8}
    return others.get(onnx_type, np.float32)
