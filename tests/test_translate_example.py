"""The translation example on a toy language: trains, goes on after an interruption, exports and scores."""

import gzip
import importlib.util
import json
from pathlib import Path

import keras
import pytest

# Its parts are tested on each backend.
pytestmark = pytest.mark.once

SCRIPT = Path(__file__).parents[1] / "examples" / "translate.py"
WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}


@pytest.fixture(scope="module")
def translate():
    spec = importlib.util.spec_from_file_location("translate_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path, backend):
    pairs = [(f"{a} {b}", f"{WORDS[b]} {WORDS[a]}") for a in WORDS for b in WORDS]
    for side, name in enumerate(("source", "target")):
        text = "".join(pair[side] + "\n" for pair in pairs).encode()
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text))
        (tmp_path / name).write_bytes(text)
    files = {"source": "source.gz", "target": "target.gz"}
    files |= {f"{part}-{side}": side for part in ("validation", "test") for side in ("source", "target")}
    model = {"vocabulary-size": 300, "num-layers": 1, "d-model": 16, "num-heads": 2, "d-ff": 32, "max-length": 13}
    options = {**{k: tmp_path / v for k, v in files.items()}, **model, "backend": backend, "output": tmp_path / "run"}
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


def test_trains_resumes_exports_and_scores(translate, arguments, tmp_path, capsys, monkeypatch):
    run, write = tmp_path / "run", translate.write

    def interrupted(path, save):
        if path.name == "epoch-002.weights.h5":
            path.with_name("partial-" + path.name).write_bytes(b"half")
            raise KeyboardInterrupt
        write(path, save)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(translate, "write", interrupted)
        translate.main(arguments)
    first = json.loads((run / "history.json").read_text())
    assert len(first) == 1 and not (run / "onnx").exists()

    assert translate.main([*arguments, "--epochs", "2"]) == 0
    assert "Going on after epoch 1" in capsys.readouterr().out
    history = json.loads((run / "history.json").read_text())
    assert len(history) == 2 and history[:1] == first
    assert history[1]["val_loss"] < first[0]["val_loss"]
    assert not list(run.glob("partial-*"))
    assert keras.saving.load_model(run / "model.keras").count_params() > 0
    assert {path.name for path in (run / "onnx").iterdir()} >= {"encoder.onnx", "decoder.onnx", "tokenizer.json"}
    scores = json.loads((run / "scores.json").read_text())
    assert scores["sentences"] == 25 and scores["bleu"]["Keras"] == pytest.approx(scores["bleu"]["ONNX Runtime"])
    # Not `splitlines`: an untrained model may write characters that Python takes for ends of lines.
    assert (run / "test.onnx.txt").read_text(encoding="utf-8").count("\n") == 25


def test_a_run_goes_on_with_its_own_settings_only(translate, arguments, tmp_path):
    options = translate.parse(arguments)
    options.output.mkdir()
    translate.check_same_run(options)
    options.epochs = 7
    translate.check_same_run(options)
    options.d_model = 32
    with pytest.raises(SystemExit, match="other settings.*d_model: 16 → 32"):
        translate.check_same_run(options)


def test_bad_usage(translate, arguments, tmp_path, capsys):
    (tmp_path / "target.gz").write_bytes(gzip.compress(b"eins\n"))
    with pytest.raises(SystemExit, match="25 lines and .* has 1: they must be parallel"):
        translate.main(arguments)
    with pytest.raises(SystemExit) as stop:
        translate.main(["--source", "a", "--target", "b", "--output", str(tmp_path / "c"), "--test-source", "d"])
    assert stop.value.code == 2
    assert "belong together" in capsys.readouterr().err
