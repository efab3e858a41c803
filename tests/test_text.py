"""Text data: the tokenizer, files of lines, and the dataset of sentence pairs."""

import gzip
import json
import subprocess
import sys
import unicodedata
from collections import Counter

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_transformer.data import SentencePairs
from keras_transformer.text import END_ID, PAD_ID, START_ID, Tokenizer, read_lines

pytestmark = pytest.mark.once("tensorflow")

TEXTS = [
    f"{a} {b} läuft über die Straße, {c}." for a in ("Hund", "Katze", "Maus") for b in ("der", "die") for c in "rst"
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, vocabulary_size=307)


# --- tokenizer


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_decode_inverts_encode_up_to_nfc(texts):
    tokenizer = Tokenizer.train(TEXTS, vocabulary_size=283)
    assert tokenizer.decode(tokenizer.encode(texts)) == [unicodedata.normalize("NFC", text) for text in texts]


@pytest.mark.parametrize(
    "text", ["", " ", "<pad><start><end>", "a <end> b", "naïve\r\n\t", "漢字 🤖", "\0", "  two  spaces "]
)
def test_text_survives(tokenizer, text):
    [ids] = tokenizer.encode([text])
    assert tokenizer.decode([ids]) == [text]
    assert ids[-1] == END_ID
    assert not {PAD_ID, START_ID, END_ID} & set(ids[:-1])


def test_ids_and_sizes(tokenizer):
    assert (tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id) == (0, 1, 2)
    assert 259 < tokenizer.vocabulary_size <= 307
    rows = tokenizer.encode(TEXTS)
    assert max(max(row) for row in rows) < tokenizer.vocabulary_size
    assert sum(map(len, rows)) < sum(len(text.encode()) for text in TEXTS) / 2  # learnt something


def test_equivalent_spellings_share_ids(tokenizer):
    composed, decomposed = tokenizer.encode(["Straße über", unicodedata.normalize("NFD", "Straße über")])
    assert composed == decomposed


def test_decode_stops_at_the_end_and_takes_arrays(tokenizer):
    [ids] = tokenizer.encode(["der Hund"])
    padded = np.array([[START_ID, *ids, 50, 51, PAD_ID]], np.int32)
    assert tokenizer.decode(padded) == ["der Hund"]
    assert tokenizer.decode([[PAD_ID, PAD_ID], []]) == ["", ""]


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    texts = [*TEXTS, "<end> neu"]
    assert again.encode(texts) == tokenizer.encode(texts)
    assert again.decode(again.encode(texts)) == texts
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_training_is_deterministic_across_processes(tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS), encoding="utf-8")
    code = (
        "import sys; from keras_transformer.text import *; "
        "Tokenizer.train(read_lines(sys.argv[1]), vocabulary_size=331).save(sys.argv[2])"
    )
    saved = []
    for i in range(3):
        path = tmp_path / f"{i}.json"
        subprocess.run([sys.executable, "-c", code, str(lines), str(path)], check=True)
        saved.append(path.read_bytes())
    assert saved[0] == saved[1] == saved[2]


def test_bad_tokenizer_arguments(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="at least 259.*Received: vocabulary_size=258"):
        Tokenizer.train(TEXTS, vocabulary_size=258)
    with pytest.raises(TypeError, match="sequence of strings"):
        tokenizer.encode("one text")
    with pytest.raises(TypeError, match="sequence of strings"):
        Tokenizer.train("one text")
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(tmp_path / "absent.json")
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="broken.json is not a tokenizer"):
        Tokenizer.load(path)
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["<pad>"], vocabulary["<end>"] = 2, 0
    content["added_tokens"] = []
    content["post_processor"] = None
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"as ids 0, 1, 2. Received: ids \[2, 1, 0\]"):
        Tokenizer.load(path)


# --- lines


def test_lines_end_at_line_feeds_only(tmp_path):
    content = "eins\u2028zwei\x0bdrei\x85\r\nvier\rfünf\n\nlast"
    expected = ["eins\u2028zwei\x0bdrei\x85", "vier\rfünf", "", "last"]
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content.encode()))
    assert read_lines(tmp_path / "a.txt") == expected
    assert read_lines(str(tmp_path / "a.txt.gz")) == expected


# --- dataset


def make_pairs(number, longest=29, seed=5):
    rng = np.random.default_rng(seed)

    def rows(low):
        return [[*map(int, rng.integers(3, 97, n)), END_ID] for n in rng.integers(low, longest, number)]

    return rows(1), rows(0)


def strip(row):
    row = [int(i) for i in row]
    while row and row[-1] == PAD_ID:
        row.pop()
    return tuple(row)


def pairs_of(batches):
    found = Counter()
    for inputs, labels in batches:
        found.update((strip(s), strip(t)) for s, t in zip(inputs["source"], labels, strict=True))
    found.pop(((), ()), None)
    return found


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"batch_tokens": 193}, {"batch_size": 5, "lengths": (11, 29)}])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_once_an_epoch_in_fixed_shapes(options, shuffle):
    sources, targets = make_pairs(83)
    dataset = SentencePairs(sources, targets, shuffle=shuffle, **options)
    expected = Counter((tuple(s), tuple(t)) for s, t in zip(sources, targets, strict=True))
    for _ in range(3):
        batches = [dataset[i] for i in range(len(dataset))]
        assert pairs_of(batches) == expected
        assert {labels.shape for _, labels in batches} == set(dataset.shapes)
        dataset.on_epoch_end()


def test_batch_contents():
    dataset = SentencePairs([[5, 6, 2], [7, 2]], [[8, 2], [9, 3, 4, 2]], batch_size=3, lengths=(5,), shuffle=False)
    [(inputs, labels)] = list(dataset)
    assert inputs["source"].tolist() == [[5, 6, 2, 0, 0], [7, 2, 0, 0, 0], [0] * 5]
    assert inputs["target"].tolist() == [[1, 8, 0, 0, 0], [1, 9, 3, 4, 0], [0] * 5]
    assert labels.tolist() == [[8, 2, 0, 0, 0], [9, 3, 4, 2, 0], [0] * 5]
    assert {a.dtype for a in (inputs["source"], inputs["target"], labels)} == {np.dtype("int32")}


def test_few_shapes_within_the_token_budget():
    sources, targets = make_pairs(400, longest=60)
    dataset = SentencePairs(sources, targets, batch_tokens=512)
    assert 2 <= len(dataset.shapes) <= 7
    assert all(rows * length <= 512 for rows, length in dataset.shapes)
    places = sum(labels.size for _, labels in dataset)
    tokens = sum(map(len, targets))
    assert places < 2.2 * tokens  # one fixed shape of 60 would take more


def test_order_depends_on_seed_and_epoch_alone():
    pairs = make_pairs(61)

    def order(seed, epoch):
        dataset = SentencePairs(*pairs, batch_size=4, seed=seed)
        dataset.epoch = epoch
        return [labels.tolist() for _, labels in dataset]

    assert order(3, 0) == order(3, 0)
    assert order(3, 0) != order(3, 1) != order(4, 1)
    dataset = SentencePairs(*pairs, batch_size=4, seed=3)
    dataset.on_epoch_end()
    assert [labels.tolist() for _, labels in dataset] == order(3, 1)
    fixed = SentencePairs(*pairs, batch_size=4, shuffle=False)
    before = [labels.tolist() for _, labels in fixed]
    fixed.on_epoch_end()
    assert [labels.tolist() for _, labels in fixed] == before


@keras.saving.register_keras_serializable("tests")
class Recorder(keras.Model):
    """Keeps what each training step was given, whatever the backend does with it."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(97, 1)
        self.seen = []

    def build(self, input_shape):
        self.embedding.build(input_shape["source"])

    def call(self, inputs):
        return self.embedding(inputs["source"]) + self.embedding(inputs["target"])

    def train_step(self, *args):
        data = args[-1]
        inputs, labels = data
        self.seen.append(({k: np.asarray(v) for k, v in inputs.items()}, np.asarray(labels)))
        return super().train_step(*args)


@pytest.mark.parametrize(
    "workers",
    [{"workers": 1}, {"workers": 2}, {"workers": 2, "use_multiprocessing": True}],
    ids=["1", "threads", "processes"],
)
@pytest.mark.filterwarnings("ignore:.*(fork|multi-threaded).*")  # Keras forks its pool in a process that has threads
def test_fit_sees_every_pair_with_workers(workers):
    sources, targets = make_pairs(41)
    dataset = SentencePairs(sources, targets, batch_tokens=128, seed=2, **workers)
    reference = SentencePairs(sources, targets, batch_tokens=128, seed=2)
    model = Recorder()
    model.compile(optimizer="sgd", loss=lambda y, p: keras.ops.mean(p), run_eagerly=True)
    model.test_on_batch(*dataset[0])  # see SentencePairs on workers
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: setattr(dataset, "epoch", epoch))
    model.fit(dataset, epochs=2, verbose=0, shuffle=False, callbacks=[count])
    number = len(dataset)
    seen = list(model.seen)
    assert len(seen) == 2 * number
    for epoch in range(2):
        for i, (inputs, labels) in enumerate(seen[epoch * number : (epoch + 1) * number]):
            expected_inputs, expected_labels = reference[i]
            np.testing.assert_array_equal(labels, expected_labels)
            np.testing.assert_array_equal(inputs["source"], expected_inputs["source"])
            np.testing.assert_array_equal(inputs["target"], expected_inputs["target"])
        reference.on_epoch_end()


def test_compiled_fit_and_evaluate_take_all_shapes():
    """On TensorFlow the first two batches stand for all shapes: fit stops at one that fits neither."""
    sources, targets = make_pairs(90, longest=40)
    for seed in range(2):
        dataset = SentencePairs(sources, targets, batch_tokens=97, seed=seed)
        model = keras.Sequential([keras.layers.Embedding(97, 3), keras.layers.Dense(97)])
        source = keras.Input((None,), dtype="int32", name="source")
        target = keras.Input((None,), dtype="int32", name="target")
        model = keras.Model(
            {"source": source, "target": target}, model(target) + keras.ops.cast(source[..., None], "float32")
        )
        model.compile(
            optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        )
        model.fit(dataset, epochs=1, verbose=0)
        assert np.isfinite(model.evaluate(dataset, verbose=0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": [[4, 2]]}, "same number. Received: 2 sources, 1 targets"),
        ({"batch_tokens": 64}, "exactly one of `batch_size` and `batch_tokens`"),
        ({"batch_size": None}, "exactly one of `batch_size` and `batch_tokens`"),
        ({"batch_size": 0}, "batch_size"),
        ({"lengths": (2, 3)}, "longest of `lengths`, 3. Received: pair 1 of length 4"),
        ({"lengths": (0, 8)}, r"lengths\[0\]"),
        ({"lengths": ()}, "lengths"),
        (
            {"source_vocabulary_size": 8},
            "`sources` must be ids from 0 to 7. Received: 9 in row 1, position 1",
        ),
        ({"targets": [[3, 2], [-4, 2]], "target_vocabulary_size": 8}, "Received: -4 in row 1, position 0"),
        ({"sources": [[], [3, 2]]}, "Received: row 0 of sources"),
        ({"sources": [[3, 2], [3.5, 2]]}, "must hold integers"),
        ({"sources": [[3, 2], [-5, 2]]}, "Received: -5 in row 1, position 0"),
        ({"targets": [[4, 2], [3, 0, 2]]}, "`targets` may hold padding.*Received: 0 in row 1, position 1"),
        ({"start_id": -1}, "start_id=-1"),
        ({"start_id": 8, "target_vocabulary_size": 8}, "`start_id` must be ids from 0 to 7"),
        ({"seed": -1}, "seed=-1"),
        ({"source_vocabulary_size": "a"}, "source_vocabulary_size='a'"),
    ],
)
def test_bad_dataset_arguments(change, message):
    arguments = {"sources": [[5, 2], [5, 9, 5, 2]], "targets": [[4, 2], [3, 2]], "batch_size": 3, **change}
    with pytest.raises(ValueError, match=message):
        SentencePairs(**arguments)


def test_index_out_of_range():
    dataset = SentencePairs([[5, 2]], [[4, 2]], batch_size=1)
    with pytest.raises(IndexError, match="Received: index=1"):
        dataset[1]
