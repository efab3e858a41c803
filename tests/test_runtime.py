import concurrent.futures
import importlib.metadata
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from keras_transformer.export import sessions
from keras_transformer.export.errors import NotAnExportError
from keras_transformer.export.exporter import export_onnx
from keras_transformer.export.runtime import OnnxTransformer
from keras_transformer.models import Transformer
from keras_transformer.text import Tokenizer

# The runner is NumPy and ONNX Runtime; tests/test_decoder_export.py compares it on each backend.
pytestmark = pytest.mark.once

TEXTS = ["one two three", "two three", "three one one two", "two"] * 3


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model and its directory."""
    tokenizer = Tokenizer.train(TEXTS, vocabulary_size=263)
    size = tokenizer.vocabulary_size
    model = Transformer(size, size, num_layers=2, d_model=12, num_heads=3, d_ff=17, max_length=19, seed=5)
    directory = tmp_path_factory.mktemp("exported") / "model"
    export_onnx(model, directory, tokenizer=tokenizer, verify=False)
    return model, directory


@pytest.fixture(scope="module")
def runner(exported):
    return OnnxTransformer(exported[1])


SOURCE = np.array([[5, 6, 7, 8, 9], [11, 12, 0, 0, 0], [0, 0, 13, 5, 4]])


def test_generates_what_keras_generates(exported, runner):
    model, _ = exported
    expected = model.generate(SOURCE, max_new_tokens=11)
    ids = runner.generate(SOURCE, max_new_tokens=11)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(runner.generate(SOURCE.astype("int64"), max_new_tokens=11), expected)
    np.testing.assert_array_equal(runner.generate(SOURCE.astype("int32"), max_new_tokens=11), expected)
    # A second source does not see the first one's cache.
    runner.generate([[7, 7]], max_new_tokens=3)
    np.testing.assert_array_equal(runner.generate(SOURCE, max_new_tokens=11), expected)


def test_ragged_rows(runner):
    rows = [[5, 6, 7, 8, 9], [11, 12]]
    np.testing.assert_array_equal(
        runner.generate(rows, max_new_tokens=6), runner.generate(SOURCE[:2], max_new_tokens=6)
    )


def test_streams_the_same_tokens(runner):
    stream = runner.stream(SOURCE, max_new_tokens=7)
    assert np.shape(next(stream)) == (3,)
    tokens = np.stack(list(runner.stream(SOURCE, max_new_tokens=7)), axis=1)
    np.testing.assert_array_equal(tokens, runner.generate(SOURCE, max_new_tokens=7))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.9, "seed": 2**32 - 1, "top_k": 40, "top_p": 0.8, "min_p": 0.001, "repetition_penalty": 1.5},
        {"min_new_tokens": 5, "stop_sequences": [[262, 3], [17]], "repetition_penalty": 1.2},
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 0.5, "repetition_penalty": 1.3, "min_new_tokens": 3},
    ],
)
def test_draws_and_searches_what_keras_does(exported, runner, options):
    ids = runner.generate(SOURCE, 11, **options)
    np.testing.assert_array_equal(ids, exported[0].generate(SOURCE, 11, **options))
    assert ids.dtype == np.int32
    if "num_beams" not in options:
        told = []
        np.testing.assert_array_equal(runner.generate(SOURCE, 11, on_tokens=told.append, **options), ids)
        np.testing.assert_array_equal(np.stack(told, axis=1), ids)
        np.testing.assert_array_equal(np.stack(list(runner.stream(SOURCE, 11, **options)), axis=1), ids)


def in_threads(calls, times=3):
    """What each of `calls` gives, one at a time, and what all give `times` times over in eight threads."""
    alone = [call() for call in calls]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda call: call(), calls * times))
    return alone * times, together


def test_threads_share_a_runner(runner):
    requests = [
        ([[5, 6, 7, 8, 9], [11]], {}),
        ([[12]], {"temperature": 1.0, "seed": 3}),
        ([[4, 3], [7, 7, 7], [5, 6, 9, 10, 11, 12, 13]], {"num_beams": 3}),
        ([[8, 200, 100], [9, 4]], {"repetition_penalty": 1.5, "stop_sequences": [[17]]}),
    ]
    calls = [lambda rows=rows, options=options: runner.generate(rows, 11, **options) for rows, options in requests]
    calls += [lambda: np.stack(list(runner.stream([[5, 6], [7]], 9)), 1)]
    for expected, ids in zip(*in_threads(calls), strict=True):
        np.testing.assert_array_equal(ids, expected)
    texts = ["one two three", "two", "", "three one one", "one two two one three two", "two three"]
    calls = [lambda chosen=texts[i:]: runner.translate(chosen, 9, batch_size=1 + len(chosen) % 3) for i in range(6)]
    expected, results = in_threads(calls)
    assert results == expected


def test_streams_take_turns(runner):
    sources = [SOURCE, [[8, 8, 8], [5]], [[7]]]
    streams = [runner.stream(source, 9) for source in sources]
    columns = [[] for _ in streams]
    for _ in range(9):
        for column, stream in zip(columns, streams, strict=True):
            column += [tokens] if (tokens := next(stream, None)) is not None else []
    for source, column in zip(sources, columns, strict=True):
        np.testing.assert_array_equal(np.stack(column, 1), runner.generate(source, 9))


def test_default_length_and_limit(runner):
    assert runner.generate(SOURCE).shape[1] <= 19
    assert len(list(runner.stream([[3]], max_new_tokens=1))) == 1


def test_translates_text_in_any_batch(runner):
    texts = ["one two", "three", "two three one one", ""]
    results = runner.translate(texts, max_new_tokens=6)
    assert len(results) == 4 and all(isinstance(text, str) for text in results)
    assert runner.translate(texts, max_new_tokens=6, batch_size=1) == results
    assert runner.translate([]) == []


def test_a_text_draws_by_its_place_in_any_batch(runner):
    texts = ["two", "one two", "two", "three"]
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 5}
    results = runner.translate(texts, **options)
    assert (
        runner.translate(texts, batch_size=1, **options) == runner.translate(texts, batch_size=3, **options) == results
    )
    assert results[0] != results[2]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([[5, 6], [7, 263]], {}, "Received: 263 in row 1"),
        ([[5, -6], [7, 1]], {}, "Received: -6 in row 0"),
        ([[5, 6], [0, 0]], {}, "wholly padding.*row 1"),
        ([[]], {}, "at least one row"),
        ([5, 6], {}, "rank 2"),
        (np.ones((2, 3)), {}, "integers"),
        ([[5] * 20], {}, "max_length=19"),
        ([[5]], {"max_new_tokens": 20}, "max_length=19"),
        ([[5]], {"max_new_tokens": 0}, "at least 1"),
        ([[5]], {"top_p": 2}, "`top_p`.*top_p=2"),
        ([[5]], {"stop_sequences": [[263]]}, "from 0 to 262. Received: 263"),
        ([[5]], {"compile": True}, "`compile` must be None.*compile=True"),
    ],
)
def test_bad_input(runner, source, options, message):
    with pytest.raises(ValueError, match=message):
        runner.generate(source, **options)
    with pytest.raises(ValueError, match=message):
        runner.stream(source, **options)


def test_bad_batch_size_and_threads(runner, exported):
    with pytest.raises(ValueError, match="batch_size=0"):
        runner.translate(["one"], batch_size=0)
    with pytest.raises(ValueError, match="threads=0"):
        OnnxTransformer(exported[1], threads=0)
    assert OnnxTransformer(exported[1], threads=1).generate([[5]], max_new_tokens=2).shape == (1, 2)


def copy(exported, tmp_path):
    return shutil.copytree(exported[1], tmp_path / "copy")


def test_no_tokenizer(exported, tmp_path):
    directory = copy(exported, tmp_path)
    (directory / "tokenizer.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    del config["files"]["tokenizer.json"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no tokenizer.json"):
        OnnxTransformer(directory).translate(["one"])


def test_not_an_export(exported, tmp_path):
    with pytest.raises(NotAnExportError, match="no such directory"):
        OnnxTransformer(tmp_path / "missing")
    with pytest.raises(NotAnExportError, match="holds no config.json"):
        OnnxTransformer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(NotAnExportError, match="not an exported model"):
        OnnxTransformer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(NotAnExportError, match="damaged"):
        OnnxTransformer(tmp_path)
    with pytest.raises(NotAnExportError, match="a file"):
        OnnxTransformer(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "value", "message"), [("format_version", 99, "version 99"), ("kind", "model", "'model'")]
)
def test_other_kinds_and_versions(exported, tmp_path, key, value, message):
    directory = copy(exported, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(NotAnExportError, match=message):
        OnnxTransformer(directory)


@pytest.mark.parametrize("file", ["encoder.onnx", "decoder.onnx", "tokenizer.json"])
def test_damaged_files(exported, tmp_path, file):
    path = copy(exported, tmp_path) / file
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    with pytest.raises(NotAnExportError, match=f"{file} is damaged: it has {len(data) - 5} bytes, {len(data)} were"):
        OnnxTransformer(path.parent)
    path.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    with pytest.raises(NotAnExportError, match=f"{file} is damaged"):
        OnnxTransformer(path.parent)
    path.unlink()
    with pytest.raises(NotAnExportError, match=f"{file} is missing"):
        OnnxTransformer(path.parent)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": None},
        {"start_id": "2"},
        {"max_length": "19"},
        {"files": {}},
        {"files": {"../encoder.onnx": {"size": 1, "sha256": ""}}},
        {"files": {"encoder.onnx": {}, "decoder.onnx": {}}},
    ],
)
def test_a_damaged_config(exported, tmp_path, change):
    directory = copy(exported, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(NotAnExportError, match=f"config.json is damaged.*{next(iter(change))}"):
        OnnxTransformer(directory)


def test_a_text_that_is_too_long_is_named(runner):
    with pytest.raises(ValueError, match="max_length=19.*tokens in text 1"):
        runner.translate(["one", "1234567890" * 3])


def test_a_provider_that_is_installed_and_does_not_start(exported, monkeypatch):
    """Without a word of installing what is there."""
    onnxruntime = sessions.import_onnxruntime()
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    session = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime,
        "InferenceSession",
        lambda path, options, providers: session(path, options, providers=["CPUExecutionProvider"]),
    )
    with pytest.raises(ValueError, match="installed and could not be started") as error:
        OnnxTransformer(exported[1], providers=["CUDAExecutionProvider"])
    assert "pip" not in str(error.value)
    with pytest.raises(ValueError, match="must be a list of names"):
        OnnxTransformer(exported[1], providers="CUDAExecutionProvider")


def test_missing_provider_is_explained(exported):
    with pytest.raises(ValueError, match=r"'CUDAExecutionProvider', which is not there.*\[onnx-gpu\]"):
        if "CUDAExecutionProvider" in sessions.import_onnxruntime().get_available_providers():
            pytest.skip("this machine has the GPU wheel")
        OnnxTransformer(exported[1], providers=["CUDAExecutionProvider"])
    with pytest.raises(ValueError, match="'NoSuchProvider'"):
        OnnxTransformer(exported[1], providers=["NoSuchProvider"])


@pytest.fixture
def fresh_import():
    sessions.import_onnxruntime.cache_clear()
    yield
    sessions.import_onnxruntime.cache_clear()


def test_two_wheels_are_explained(monkeypatch, fresh_import):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")
    with pytest.raises(ImportError, match="onnxruntime and onnxruntime-gpu are both installed"):
        sessions.import_onnxruntime()


def test_gpu_wheel_alone_is_enough(monkeypatch, fresh_import):
    def version(name):
        if name == "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert sessions.import_onnxruntime().InferenceSession


def test_missing_onnxruntime_is_explained(monkeypatch, fresh_import):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"keras-transformer-onnx\[onnx\]"):
        sessions.import_onnxruntime()


WITHOUT_KERAS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("keras", "tensorflow", "jax", "torch", "onnx", "onnx_ir", "rich"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
from keras_transformer.export.runtime import OnnxTransformer
print(OnnxTransformer(sys.argv[1]).translate(["one two"], max_new_tokens=3))
"""


def test_runs_without_keras(exported):
    command = [sys.executable, "-c", WITHOUT_KERAS, str(exported[1])]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("['")
