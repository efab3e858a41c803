"""Who may import what: the arrows of docs/architecture.md, read from the source and seen in fresh processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# Files whose subject is a backend; they import it inside functions.
BACKEND_FILES = {
    "keras_transformer/generation/backends.py",
    "keras_transformer/ops/torch_kernels.py",
    "export/backends.py",
    "export/tf2onnx_route.py",
}
# Each part may import those before it.
LAYERS = ("ops", "layers", "generation", "models", "pretrained", "export")
EXTRAS = ("onnx", "onnx_ir", "onnxruntime", "tf2onnx", "tokenizers", "sacrebleu", "matplotlib", "safetensors")


def sources():
    package = [p for p in (ROOT / "keras_transformer").rglob("*.py") if "export" not in p.relative_to(ROOT).parts]
    return sorted({*package, *(ROOT / "export").rglob("*.py")})


def imports(path):
    """(imported module, whether at module level, line) of each import statement of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in inner, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield f"{module}.{alias.name}", node not in inner, node.lineno


def all_imports():
    return [
        (path.relative_to(ROOT).as_posix(), line, module, top)
        for path in sources()
        for module, top, line in imports(path)
    ]


def run(code, block=()):
    """Runs `code` in a fresh interpreter in which the modules `block` cannot be imported."""
    # An import of what is None fails, while a mere look-up (torch makes some) finds nothing.
    # scikit-learn, which Keras imports where it is installed, looks closer at what is None.
    block = (*block, "sklearn") if block else ()
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({block!r}))\n"
    result = subprocess.run([sys.executable, "-c", blocked + code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_there_are_sources_to_look_at():
    names = [path.relative_to(ROOT).as_posix() for path in sources()]
    assert "keras_transformer/__init__.py" in names and "export/ir.py" in names
    assert not any(name.startswith("keras_transformer/export/") for name in names)


def test_the_package_never_imports_export():
    wrong = [
        row
        for row in all_imports()
        if not row[0].startswith("export/") and row[2].startswith("keras_transformer.export")
    ]
    assert not wrong


def test_imports_follow_the_arrows():
    rank = {name: i for i, name in enumerate(LAYERS)}
    wrong = []
    for file, line, module, _ in all_imports():
        part = "export" if file.startswith("export/") else file.split("/")[1]
        imported = module.removeprefix("keras_transformer.").split(".")[0]
        if module.startswith("keras_transformer.") and rank.get(imported, -1) > rank.get(part, len(LAYERS)):
            wrong.append((file, line, module))
    assert not wrong


def test_imports_in_export_are_absolute():
    wrong = [
        row
        for row in all_imports()
        if row[0].startswith("export/") and (row[2].startswith(".") or row[2].partition(".")[0] == "export")
    ]
    assert not wrong


def test_backends_are_imported_in_their_own_files_and_inside_functions():
    found = [row for row in all_imports() if row[2].partition(".")[0] in BACKENDS]
    assert not [row for row in found if row[0] not in BACKEND_FILES or row[3]]


@pytest.mark.parametrize(
    "module",
    [
        "keras_transformer",
        "keras_transformer.text",
        "keras_transformer.generation",
        "keras_transformer.generation.rules",
        "keras_transformer.generation.stream",
        "keras_transformer.export",
        "keras_transformer.export.runtime",
        "keras_transformer.export.cli",
    ],
)
def test_light_modules_load_neither_keras_nor_a_backend(module):
    loaded = run(f"import {module}, sys; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))")
    assert not {"keras", *BACKENDS} & set(loaded.split())


def test_the_package_needs_its_backend_only(backend):
    """Neither another backend nor an extra is needed to import what trains and generates."""
    modules = [
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in sources()
        if not path.is_relative_to(ROOT / "export")
        and path.name not in ("text.py", "plot.py")
        and path.parent.name != "pretrained"
    ]
    assert len(modules) > 10
    others = [name for name in BACKENDS if name != backend]
    code = f"""
import importlib, keras
for module in {modules!r}:
    importlib.import_module(module)
assert keras.backend.backend() == {backend!r}
"""
    run(code, block=[*others, *EXTRAS])


def test_export_needs_its_backend_and_its_extra_only(backend):
    modules = [
        "keras_transformer."
        + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in sources()
        if path.is_relative_to(ROOT / "export")
    ]
    others = [name for name in BACKENDS if name != backend]
    run(
        f"import importlib\nfor module in {modules!r}: importlib.import_module(module)",
        block=[*others, "tf2onnx", "tokenizers", "sacrebleu", "matplotlib"],
    )


def test_a_missing_extra_is_explained():
    code = """
try:
    import keras_transformer.text
except ImportError as error:
    print(error)
"""
    assert "pip install keras-transformer-onnx[text]" in run(code, block=["tokenizers"])


@pytest.mark.once
def test_what_verification_lacks_is_said_before_any_work(tmp_path):
    code = f"""
import keras
from keras_transformer.export import export_onnx, sessions
sessions._is_installed = lambda distribution: False
class Watched(keras.layers.Layer):
    def call(self, x):
        print("at work")
        return x * 2.0
x = keras.Input((3,))
model = keras.Model(x, Watched()(x))
print("exporting")
try:
    export_onnx(model, {str(tmp_path / "m.onnx")!r})
except ImportError as error:
    print(error)
export_onnx(model, {str(tmp_path / "m.onnx")!r}, verify=False)
"""
    _, _, exported = run(code, block=["onnxruntime"]).partition("exporting")
    said, _, _ = exported.partition("at work")
    assert "This needs ONNX Runtime: pip install 'keras-transformer-onnx[onnx]'" in said
    assert (tmp_path / "m.onnx").is_file()


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "module",
    ["layers.blocks", "losses", "generation.backends", "export.exporter"],
)
def test_any_module_can_be_the_first_that_is_imported(module):
    """And whichever it is, all that a saved model may name is known once Keras is."""
    run(
        f"import keras_transformer.{module}, keras, sys\n"
        "known = {name for name in keras.saving.get_custom_objects() if name.startswith('keras_transformer>')}\n"
        "assert known >= {'keras_transformer>Transformer', 'keras_transformer>Perplexity'}, known\n"
        "assert not any(getattr(finder, '__name__', '') == '_Finder' for finder in sys.meta_path)"
    )
