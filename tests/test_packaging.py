"""The built distribution: what the wheel holds, and that an installed copy is whole without the source tree."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that nothing is written into the source tree."""
    pytest.importorskip("setuptools", minversion="77")
    directory = tmp_path_factory.mktemp("wheel")
    code = (
        "import os, shutil, sys; root, work, out = sys.argv[1:]\n"
        "for name in ('keras_transformer', 'export'):\n"
        "    shutil.copytree(f'{root}/{name}', f'{work}/{name}', symlinks=True)\n"
        "for name in ('pyproject.toml', 'README.md', 'LICENSE'):\n"
        "    shutil.copy(f'{root}/{name}', work)\n"
        "os.chdir(work)\n"
        "from setuptools import build_meta; build_meta.build_wheel(out)\n"
    )
    (directory / "work").mkdir()
    result = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(directory / "work"), str(directory)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [path] = directory.glob("*.whl")
    return path


@pytest.mark.backends("jax")
def test_wheel_holds_every_module_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = set()
    for path in (ROOT / "keras_transformer").rglob("*.py"):
        if "export" not in path.relative_to(ROOT).parts:
            expected.add(path.relative_to(ROOT).as_posix())
    for path in (ROOT / "export").rglob("*.py"):
        expected.add("keras_transformer/" + path.relative_to(ROOT).as_posix())
    modules = [name for name in names if name.endswith(".py")]
    assert sorted(modules) == sorted(expected)
    assert "keras_transformer/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.backends("jax")
def test_installed_copy_works_without_the_source_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import keras_transformer.export.runtime as runtime\n"
        f"assert runtime.__file__.startswith({str(tmp_path)!r}), runtime.__file__\n"
        "assert runtime.__name__ == runtime.OnnxTransformer.__module__ == 'keras_transformer.export.runtime'\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd=tmp_path)


def test_link_to_export():
    link = ROOT / "keras_transformer" / "export"
    assert link.is_symlink() and str(link.readlink()) == "../export"


def test_a_source_tree_without_the_link_explains_itself(tmp_path):
    package = tmp_path / "keras_transformer"
    package.mkdir()
    for path in (ROOT / "keras_transformer").glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    (package / "export").write_text("../export")  # what git leaves where links are not supported
    # An editable install of this tree would find the subpackage in any other.
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
        f"sys.path.insert(0, {str(tmp_path)!r}); import keras_transformer.export.runtime"
    )
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode != 0
    assert "must be a link to the directory ../export" in result.stderr and "pip install ." in result.stderr


def test_version_is_written_once():
    import keras_transformer

    assert PROJECT["project"]["version"] == keras_transformer.__version__


def test_listed_packages_are_the_ones_that_exist():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts).replace("export", "keras_transformer.export", 1)
        if path.is_relative_to(ROOT / "export")
        else ".".join(path.parent.relative_to(ROOT).parts)
        for path in [*(ROOT / "keras_transformer").rglob("__init__.py"), *(ROOT / "export").rglob("__init__.py")]
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def test_constraints_pin_every_direct_dependency_within_its_range():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"(\S+)==(\S+)", line).groups()
            pins[canonicalize_name(name)] = version
    project = PROJECT["project"]
    requirements = [
        Requirement(text) for text in sum(project["optional-dependencies"].values(), project["dependencies"])
    ]
    for requirement in requirements:
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
