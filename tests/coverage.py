"""Writes docs/coverage.md: what tests/test_coverage.py finds on each backend, one row for each public layer and model.

python -m tests.coverage
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# By column, the test.
COLUMNS = {
    "fit": "test_fit",
    "generate": "test_generate",
    "save, load": "test_everything_reloads_in_a_fresh_process",
    "ONNX verified": "test_onnx",
}
HEADER = """# What works where

Made by `python -m tests.coverage` from what `tests/test_coverage.py` did on each backend: two epochs of `model.fit`;
`generate`, compiled and step by step alike; `.keras` saved and loaded; `export_onnx` with its verification in ONNX
Runtime. "TF, JAX, torch" means that it passed on all three. A row stands for all its cases in `tests/test_layers.py`.

| | fit | generate | save, load | ONNX verified |
|---|---|---|---|---|
"""
WHY_NOT = {"fit": "no weights", "generate": "makes no tokens"}


def passed(backend: str) -> dict[tuple[str, str], bool]:
    """Whether each (test, case) passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        command += [
            "--every-backend",
            "tests/test_coverage.py",
            "tests/test_layers.py",
            "-k",
            " or ".join(COLUMNS.values()),
        ]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "KERAS_BACKEND": backend}, check=False)
        found = {}
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            match = re.fullmatch(r"(test_\w+)\[(.*)\]", case.get("name"))
            if match:
                found[match[1], match[2]] = case.find("failure") is None and case.find("error") is None
    return found


def main() -> None:
    """Runs the tests and writes the page."""
    from keras_transformer import layers, models
    from tests.test_coverage import CASES, PAGE

    results = {backend: passed(backend) for backend in BACKENDS}
    names = {"tensorflow": "TF", "jax": "JAX", "torch": "torch"}
    lines = []
    for cls in [getattr(module, name) for module in (layers, models) for name in module.__all__]:
        cases = [name for name, case in CASES.items() if case.cls is cls]
        cells = []
        for column, test in COLUMNS.items():
            ran = {b: [found[test, case] for case in cases if (test, case) in found] for b, found in results.items()}
            good = [names[backend] for backend, marks in ran.items() if marks and all(marks)]
            cells.append(", ".join(good) if any(ran.values()) else WHY_NOT[column])
        lines.append(f"| `{cls.__name__}` | {' | '.join(cells)} |")
    PAGE.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
