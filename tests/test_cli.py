import datetime
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import onnx
import pytest

from keras_transformer.export import cli, demo
from keras_transformer.models import Transformer
from tests import mutations
from tests.test_runtime import WITHOUT_KERAS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a saved model, its exported directory, and a tokenizer."""
    home = tmp_path_factory.mktemp("cli")
    tokenizer = demo.make_tokenizer()
    tokenizer.save(home / "tokenizer.json")
    size = tokenizer.vocabulary_size
    model = Transformer(size, size, num_layers=1, d_model=8, num_heads=2, d_ff=12, max_length=16, seed=2)
    model.save(home / "model.keras")
    keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, name="dense")]).save(home / "dense.keras")
    samples = {"source": np.full((1, 2), 7), "target": np.full((1, 2), 7)}
    np.savez(home / "samples.npz", **samples)
    arguments = [str(home / "model.keras"), str(home / "exported"), "--samples", str(home / "samples.npz")]
    assert cli.main(["export", *arguments, "--tokenizer", str(home / "tokenizer.json")]) == 0
    return home


def run_without_keras(*arguments, text=""):
    code = WITHOUT_KERAS.partition("from keras_transformer")[0] + (
        "from keras_transformer.export import cli\nsys.exit(cli.main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], input=text.encode(), capture_output=True, timeout=120
    )


def test_exports_and_verifies(saved, capsys):
    files = {path.name for path in (saved / "exported").iterdir()}
    assert files == {"encoder.onnx", "decoder.onnx", "tokenizer.json", "config.json", "verification.json"}
    report = json.loads((saved / "exported" / "verification.json").read_text())
    assert report["passed"] and report["path"] == str(saved / "exported")
    arguments = [str(saved / "dense.keras"), str(saved / "dense.onnx")]
    assert cli.main(["export", *arguments]) == 0
    assert f"Wrote {saved / 'dense.onnx'}" in capsys.readouterr().out
    assert cli.main(["verify", *arguments, "--json", str(saved / "report.json")]) == 0
    assert json.loads((saved / "report.json").read_text())["passed"]
    assert cli.main(["verify", *arguments, "--padded-rows", "any"]) == 0


def test_failed_verification_is_status_1(saved, tmp_path, capsys):
    path = tmp_path / "faulty.onnx"
    assert cli.main(["export", str(saved / "dense.keras"), str(path)]) == 0
    graph = onnx.load(path)
    mutations.heavier_weight(next(name for name, array in mutations.arrays(graph).items() if array.ndim == 2))(graph)
    onnx.save(graph, path)
    capsys.readouterr()
    assert cli.main(["verify", str(saved / "dense.keras"), str(path)]) == 1
    output = capsys.readouterr()
    assert "FAILED" in output.err and "over tolerance" in output.out
    assert cli.main(["verify", str(saved / "dense.keras"), str(path), "--tolerance", "1", "1"]) == 0


def test_bad_usage_is_status_2(saved, tmp_path, capsys):
    for arguments in (
        [],
        ["export"],
        ["fly"],
        ["translate", "x", "--threads", "two"],
        ["translate", "x", "--batch-size", "0"],
        ["verify", "a", "b", "--backend", "x"],
    ):
        with pytest.raises(SystemExit) as error:
            cli.main(arguments)
        assert error.value.code == 2
    model, exported = str(saved / "dense.keras"), str(saved / "exported")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    np.savez(tmp_path / "wrong.npz", x=np.ones(3))
    (tmp_path / "damaged.keras").write_bytes(b"nothing")
    capsys.readouterr()
    for arguments, message in (
        (["export", "missing.keras", "x"], "missing.keras: no such file"),
        (["export", str(tmp_path / "damaged.keras"), "x"], "damaged.keras is not a model"),
        (["export", str(tmp_path), "x"], "a directory"),
        (["export", model, "x", "--samples", str(tmp_path / "damaged.keras")], "is not an .npz file"),
        (["export", model, str(tmp_path / "damaged.keras"), "--force"], "a directory would be written"),
        (["export", model, str(tmp_path / "other")], "--force"),
        (["export", model, str(tmp_path / "x"), "--import", "no_such_module"], "no_such_module"),
        (["verify", model, str(tmp_path)], "no config.json"),
        (["verify", str(saved / "model.keras"), exported, "--samples", str(tmp_path / "wrong.npz")], "source"),
        (["info", str(tmp_path)], "no config.json"),
        (["translate", str(tmp_path)], "no config.json"),
    ):
        assert cli.main(arguments) == 2, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_import_finds_the_models_own_layers(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_layers.py").write_text(
        "import keras\n"
        "@keras.saving.register_keras_serializable(package='own')\n"
        "class Doubled(keras.layers.Layer):\n"
        "    def call(self, x):\n"
        "        return x * 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own_layers = importlib.import_module("own_layers")
    keras.Sequential([keras.Input((3,)), own_layers.Doubled()]).save("doubled.keras")
    # As in a new process: nothing of it is known.
    del sys.modules["own_layers"], keras.saving.get_custom_objects()["own>Doubled"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", "doubled.keras", "doubled"]) == 2
    assert "--import" in capsys.readouterr().err
    assert cli.main(["export", "doubled.keras", "doubled", "--import", "own_layers"]) == 0
    assert cli.main(["info", "doubled"]) == 0
    output = capsys.readouterr().out
    assert "model.onnx" in output and "nodes: " in output


def test_translate_needs_no_keras(saved):
    text = "May 3rd, 2027\n\n21.12.1956\r\nJuly — süß"
    result = run_without_keras("translate", saved / "exported", "--max-new-tokens", 4, "--threads", 1, text=text)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.decode().split("\n")
    assert len(lines) == 5 and lines[1] == lines[4] == ""


def test_translate_refuses_what_it_cannot_do(saved):
    result = run_without_keras("translate", saved / "exported", text="1 2 3 4 5 6 7 8 9 10\n")
    assert result.returncode == 2 and b"lines 1 to 1" in result.stderr and b"max_length=16" in result.stderr
    result = run_without_keras("translate", saved / "exported", "--provider", "NoSuch", text="1")
    assert result.returncode == 2 and b"NoSuch" in result.stderr


@pytest.mark.once
def test_generate_and_embed_need_no_keras(saved, tmp_path):
    from keras_transformer.export.runtime import OnnxCausalLM
    from keras_transformer.models import CausalLM, Encoder, SentenceEncoder
    from tests.test_encoder_runtime import TEXTS, WORDS, tokenizer

    tokenizer().save(str(tmp_path / "tokenizer.json"))
    sizes = {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 12, "max_length": 19}
    CausalLM(len(WORDS), **sizes, seed=1).save(tmp_path / "lm.keras")
    SentenceEncoder(Encoder(len(WORDS), **sizes, pad_id=0)).save(tmp_path / "encoder.keras")
    for name in ("lm", "encoder"):
        arguments = [f"{tmp_path / name}.keras", str(tmp_path / name), "--tokenizer", str(tmp_path / "tokenizer.json")]
        assert cli.main(["export", *arguments, "--form", "int8"]) == 0
    text = "\n".join([TEXTS[1], "", TEXTS[2]])
    drawn = ["--temperature", 1, "--seed", 3, "--max-new-tokens", 5]
    result = run_without_keras("generate", tmp_path / "lm", *drawn, text=text)
    assert result.returncode == 0, result.stderr
    expected = OnnxCausalLM(tmp_path / "lm").complete([TEXTS[1], TEXTS[2]], 5, temperature=1.0, seed=3)
    assert result.stdout.decode().split("\n") == [expected[0], "", expected[1], ""]
    result = run_without_keras("embed", tmp_path / "encoder", tmp_path / "vectors.npy", text="\n".join(TEXTS))
    assert result.returncode == 0, result.stderr
    assert np.load(tmp_path / "vectors.npy").shape == (4, 8)
    assert not list(tmp_path.glob(".*"))
    result = run_without_keras("embed", tmp_path / "lm", tmp_path / "vectors.npy", text="one")
    assert result.returncode == 2 and b"holds no SentenceEncoder" in result.stderr


def test_info_needs_no_keras(saved):
    result = run_without_keras("info", saved / "exported")
    assert result.returncode == 0, result.stderr
    output = result.stdout.decode()
    for part in (
        "encoder-decoder",
        "form                     fp32",
        "decoder.onnx",
        "past_key_values.0.key",
        "(batch, length)",
        "verified",
        "yes: ",
    ):
        assert part in output


@pytest.mark.once
def test_forms_are_checked_before_the_first_is_made(saved, tmp_path, capsys):
    model = str(saved / "model.keras")
    for arguments, message in (
        ([str(tmp_path / "x"), "--form", "int8,"], "--form must be one or several of fp32, fp16"),
        ([str(tmp_path / "x.onnx"), "--form", "int8,int4"], "Several forms need a directory"),
    ):
        assert cli.main(["export", model, *arguments]) == 1
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.once
@pytest.mark.parametrize("text, message", [("{}", "of another kind"), ("[]", "of another kind"), ("no", "damaged")])
def test_info_of_a_report_that_is_none(saved, tmp_path, capsys, text, message):
    shutil.copytree(saved / "exported", tmp_path / "copy")
    (tmp_path / "copy" / "verification.json").write_text(text)
    assert cli.main(["info", str(tmp_path / "copy")]) == 0
    assert f"verification.json is {message}" in capsys.readouterr().out


def test_info_lists_the_nodes_of_a_file(saved, capsys):
    assert cli.main(["info", str(saved / "exported" / "decoder.onnx"), "--nodes"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["in", "position_ids", "int64", "(batch,", "length)"] in rows
    assert any(row[1:3] == ["LayerNormalization", "LayerNorm"] and row[3].endswith("nn._layer_norm") for row in rows)
    result = run_without_keras("info", saved / "exported", "--nodes")
    assert result.returncode == 2 and b"onnx" in result.stderr


def test_bench_needs_no_keras(saved):
    numbers = ["--batch", 2, "--length", 7, "--new-tokens", 3, "--rounds", 2, "--threads", 1]
    result = run_without_keras("bench", saved / "exported", saved / "exported", *numbers)
    assert result.returncode == 0, result.stderr
    head, first, second = result.stdout.decode().splitlines()
    assert head.split() == ["bytes", "median", "ms", "ratio"]
    size, milliseconds, ratio, path = first.split()
    assert path == str(saved / "exported") and float(milliseconds) > 0 and float(ratio) == 1
    assert second.split()[0] == size and float(second.split()[2]) > 0


def test_help(capsys):
    for arguments in (
        [],
        ["demo"],
        ["export"],
        ["verify"],
        ["translate"],
        ["generate"],
        ["embed"],
        ["bench"],
        ["info"],
    ):
        with pytest.raises(SystemExit) as error:
            cli.main([*arguments, "--help"])
        assert error.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) > 5


def test_missing_backend_is_explained(tmp_path, backend):
    (tmp_path / "x.keras").touch()
    code = f"import sys\nsys.modules[{backend!r}] = None\n"
    code += "from keras_transformer.export import cli\nsys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "verify", str(tmp_path / "x.keras"), "x.onnx", "--backend", backend]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and f"keras-transformer-onnx[{backend}]" in result.stderr


def test_the_only_backend_installed_is_used(monkeypatch, tmp_path):
    (tmp_path / "no.keras").touch()
    find_spec = importlib.util.find_spec
    for installed, chosen in ((["jax"], "jax"), (["torch"], "torch"), (["jax", "torch"], None), ([], None)):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *package, has=installed: name in has if name in cli.BACKENDS else find_spec(name, *package),
        )
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
        assert cli.main(["verify", str(tmp_path / "no.keras"), "no.onnx"]) == 2
        assert os.environ.get("KERAS_BACKEND") == chosen
        monkeypatch.setenv("KERAS_BACKEND", "mine")
        assert cli.main(["verify", str(tmp_path / "no.keras"), "no.onnx"]) == 2
        assert os.environ["KERAS_BACKEND"] == "mine"


def test_dates_in_words():
    assert [demo.number(n) for n in (0, 7, 13, 20, 45, 99)] == [
        "zero",
        "seven",
        "thirteen",
        "twenty",
        "forty-five",
        "ninety-nine",
    ]
    assert [demo.ordinal(n) for n in (1, 2, 3, 5, 12, 20, 21, 30)] == (
        ["first", "second", "third", "fifth", "twelfth", "twentieth", "twenty-first", "thirtieth"]
    )
    assert [demo.year(n) for n in (1900, 1905, 1984, 2000, 2007, 2010, 2023)] == [
        "nineteen hundred", "nineteen oh five", "nineteen eighty-four", "two thousand", "two thousand and seven",
        "twenty ten", "twenty twenty-three",
    ]  # fmt: skip
    date = datetime.date(2022, 5, 3)
    assert [style(date) for style in demo.STYLES] == [
        "Tuesday, 3 May 2022", "May 3rd, 2022", "3.5.2022", "03-MAY-2022",
        "the third of May, twenty twenty-two", "May the third, twenty twenty-two",
    ]  # fmt: skip


def test_held_out_dates_do_not_occur_in_training():
    train, held_out = demo.make_pairs(3000, 200)
    assert len(train) == 3000 and len(held_out) == 200
    assert not {iso for _, iso in train} & {iso for _, iso in held_out}
    assert not {text for text, _ in train} & {text for text, _ in held_out}
    for text, iso in held_out:
        assert text in {style(datetime.date.fromisoformat(iso)) for style in demo.STYLES}
    assert demo.make_pairs(3000, 200) == (train, held_out)
    assert demo.look_up(train, [train[17][0]]) == [train[17][1]]
    assert len(demo.look_up(train, ["xy", "3.5.2022"])) == 2


def test_demo_tokens_fit_the_shapes():
    tokenizer = demo.make_tokenizer()
    pairs, _ = demo.make_pairs(2000, 1)
    sources, targets = (tokenizer.encode(texts) for texts in zip(*pairs, strict=True))
    assert max(map(len, sources)) <= demo.SOURCE_LENGTH and {len(row) for row in targets} == {11}
    assert tokenizer.decode(sources) == [text for text, _ in pairs]


@pytest.mark.once
def test_demo_runs(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(demo, "MODEL_SIZE", {"num_layers": 1, "d_model": 8, "num_heads": 2, "d_ff": 12})
    results = demo.run(tmp_path / "demo", train=64, held_out=demo.BATCH, epochs=2, say=lines.append)
    assert results["differing_outputs"] == 0
    assert results["keras_exact_match"] == results["onnx_exact_match"]
    assert results["max_error"] < 1e-4
    names = {"model.keras", "onnx", "loss.png", "attention.png", "results.json"}
    assert {path.name for path in pathlib.Path(tmp_path / "demo").iterdir()} == names
    assert any("ONNX Runtime" in line and "%" in line for line in lines)
