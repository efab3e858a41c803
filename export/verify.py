"""Compares Keras and ONNX Runtime over a grid of sizes, masks and padded rows, and says where they differ."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import math
import os
import pathlib
import platform
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_transformer import _validation
from keras_transformer.export import runtime
from keras_transformer.export.errors import ExportError, VerificationError
from keras_transformer.export.forms import LEAST_COSINE
from keras_transformer.export.report import Comparison, Report

# batch · heads · T² attention scores of float32 stay below 0.8 GB.
LARGEST_SCORES = 2e8
# "The longest" of an axis without a limit: past the usual windows, blocks and buckets of 64 and 128.
UNLIMITED_LONGEST = 160


def verify_onnx(
    model: Callable,
    path: str | os.PathLike,
    *,
    samples: Mapping[str, Any] | Callable[[dict[str, int]], Mapping[str, Any]] | None = None,
    tolerance: tuple[float, float] = (1e-5, 1e-5),
    padded_rows: str = "exact",
    session_options=None,
    json_path: str | os.PathLike | None = None,
    name: str | None = None,
    verbose: bool = True,
    progress: bool | None = None,
) -> Report:
    """Compares `model` with the ONNX file exported from it, in ONNX Runtime as it is used in production.

    The inputs cover batches of 1, 2 and 3, lengths of 1, a prime, an even number, a multiple of 8 and the
    longest; axes that are free of each other get different sizes in the same run. Token ids and masks come
    whole, padded on either side, with holes, and with rows that are nothing but padding. Every position of
    every output is compared.

    Args:
        model: the Keras model (or any callable on the same inputs) that the file was exported from.
        path: an `.onnx` file, or the directory of an exported model. A directory whose decoder has a cache is
            compared in its parts (encoder, decoder with cache at several splits) and in the tokens it generates.
        samples: inputs to use instead of made ones: arrays by input name, of which the leading entries along
            each free axis serve for the smaller sizes; or a callable from the axes' sizes to such arrays.
        tolerance: (absolute, relative): largest error allowed is `absolute + relative · max|output|`. A smaller form is
            measured by the cosine of the outputs instead, of which `forms.LEAST_COSINE` is the least allowed.
        padded_rows: `"exact"` compares padding positions like all others; `"any"` leaves them out.
        session_options: `onnxruntime.SessionOptions`; the default has all optimisations on, as in production.
        json_path: where to write the report as JSON, also when the check fails.
        name: what the report calls the file; its path if None.
        verbose: print the report's table.
        progress: show a progress bar; default: only on a terminal.

    Returns:
        The `Report`.

    Raises:
        VerificationError: an output differs by more than the tolerance, or in shape, dtype or NaNs; either side
            does not run at a size within the file's ranges; generated tokens differ; or nothing could be compared.
            Its `report` holds every figure.
        NotAnExportError: `path` is not an ONNX file or an exported directory, or is damaged.
        ValueError: an argument is not as described, or the file does not say what range its ids have and no
            `samples` are given.
    """
    check_padded_rows(padded_rows)
    check_tolerance(tolerance)
    path = pathlib.Path(path)
    if json_path is not None and not pathlib.Path(json_path).absolute().parent.is_dir():
        raise ValueError(f"`json_path` must be in a directory that exists. Received: json_path={str(json_path)!r}")
    started = time.perf_counter()
    report = Report(name or str(path), tuple(map(float, tolerance)), padded_rows, versions=versions())
    check = Check(report, session_options, progress)
    config = runtime.read_config(path) if path.is_dir() else runtime.graph_config(check.session(path))
    if not path.is_dir() and config.get("kind", "model") != "model" and config.get("target") != "generator":
        raise ValueError(f"`path` must be the directory, not a graph, of a model with a cache. Received: {path}")
    report.form = config.get("form", "fp32")
    check.least_cosine = LEAST_COSINE.get(report.form)
    if config.get("target") == "generator":
        from keras_transformer.export.verify_generator import verify_generator

        verify_generator(model, path, check, samples)
    elif path.is_dir() and config["kind"] != "model":
        from keras_transformer.export.verify_cached import verify_cached

        verify_cached(model, path, check, samples)
    else:
        verify_graph(model, path / "model.onnx" if path.is_dir() else path, check, samples)
    report.size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    report.agreement = check.agreement
    report.seconds = time.perf_counter() - started
    if json_path is not None:
        report.to_json(json_path)
    if verbose:
        report.print()
    if not report.passed:
        raise VerificationError(report.summary(), report)
    return report


def check_padded_rows(padded_rows: str) -> None:
    """Raises ValueError unless it is one of the two choices."""
    if padded_rows not in ("exact", "any"):
        raise ValueError(f"`padded_rows` must be 'exact' or 'any'. Received: padded_rows={padded_rows!r}")


def check_tolerance(tolerance: tuple[float, float]) -> None:
    """Raises ValueError unless it is a pair of numbers of at least 0."""
    if (
        not isinstance(tolerance, tuple | list)
        or len(tolerance) != 2
        or not all(isinstance(number, int | float) and number >= 0 for number in tolerance)
    ):
        raise ValueError(
            f"`tolerance` must be (absolute, relative), two numbers of at least 0. Received: tolerance={tolerance!r}"
        )


def verify_graph(model, path, check, samples=None):
    """Compares a single graph with the callable it was exported from, into `check.report`."""
    if not callable(model):
        raise ValueError(f"`model` must be a Keras model, or a function of the same inputs. Received: model={model!r}")
    if getattr(model, "built", True) is False:
        raise ValueError(f"`model` has no weights yet, as it is not built. Received: model={model!r}")
    session = check.session(path)
    names = [output.name for output in session.get_outputs()]
    specs, axes, fixed = interface(session)
    for name in fixed:
        check.fail(names[0], {}, "signature", f"axis {name!r}, free in Keras, has a fixed size")
    run_keras = keras_function(model, [spec.name for spec in specs])
    for sizes, case, inputs in check.runs(path, specs, axes, samples, heads(path)):
        try:
            expected = run_keras(inputs)
        except Exception as error:  # whatever a model raises at a size that it cannot take
            check.fail(names[0], sizes, case, f"Keras itself cannot run: {_first_line(error)}")
            continue
        check.run(session, names, inputs, expected, sizes, case)


class Check:
    """What the parts of one verification share: the report, the sessions' options and the progress bar."""

    def __init__(self, report: Report, session_options=None, progress: bool | None = None):
        self.report = report
        self.any_padding = report.padded_rows == "any"
        self.session_options = session_options
        self.progress = progress
        self.least_cosine: float | None = None
        self._sessions: dict[pathlib.Path, Any] = {}
        self._same_ids = [0, 0]
        if self.any_padding:
            report.notes.append("Padding positions were not compared (padded_rows='any').")

    def session(self, path: pathlib.Path):
        """An ONNX Runtime session for the file at `path`, on the CPU, at the production optimisation level."""
        if path not in self._sessions:
            self._sessions[path] = self.session_of(path)
        return self._sessions[path]

    def session_of(self, path: pathlib.Path, content: bytes | None = None):
        """Such a session, opened anew, for `content` in place of the file, if it is given; see `open_session`."""
        options = self.session_options
        if options is None:
            options = runtime.default_options()
            # What fails at one of our sizes is in the report.
            options.log_severity_level = 4
            # Between our short runs Keras has the cores.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return runtime.open_session(path, options, ["CPUExecutionProvider"], content)

    def runs(self, path, specs, axes, samples, num_heads) -> Iterator[tuple[dict, str, dict]]:
        """Sizes, case and inputs of every run, behind a progress bar where that is wanted."""
        import rich.console
        import rich.progress

        source, axes = sample_source(specs, axes, samples)
        sizes_to_run, skipped = grid(axes, num_heads)
        self.report.skipped += skipped
        sizes_to_run += [sizes for sizes in source.also if sizes not in sizes_to_run]
        runs = [(number, sizes, case) for number, sizes in enumerate(sizes_to_run) for case in source.cases]
        console = rich.console.Console(stderr=True)
        show = console.is_terminal if self.progress is None else self.progress
        for number, sizes, case in rich.progress.track(
            runs, f"Verifying {path.name}", console=console, transient=True, disable=not show
        ):
            yield sizes, case, source.make(sizes, case, number)

    def run(self, session, names, inputs, expected, sizes, case) -> None:
        """Runs the session on `inputs` and compares its outputs `names` with `expected`."""
        try:
            actual = session.run(names, inputs)
        except Exception as error:  # onnxruntime raises many types, none of them documented
            self.fail(names[0], sizes, case, f"ONNX Runtime cannot run: {_first_line(error)}")
            return
        if len(expected) != len(actual):
            self.fail(names[0], sizes, case, f"Keras gives {len(expected)} outputs, the file {len(actual)}")
            return
        padded = padding(inputs) if self.any_padding else None
        for name, want, got in zip(names, expected, actual, strict=True):
            self.compare(name, want, got, sizes, case, kept_positions(want.shape, padded) if padded else None)

    def compare(self, name, expected, actual, sizes, case, keep=None) -> None:
        """Adds a comparison to the report; see `compare`."""
        bound = self.least_cosine
        self.report.comparisons.append(compare(name, expected, actual, self.report.tolerance, sizes, case, keep, bound))
        if name == "logits" and expected.shape == actual.shape:
            same = expected.argmax(-1) == actual.argmax(-1)
            same = same if keep is None else same[np.broadcast_to(keep, same.shape)]
            self._same_ids[0] += int(same.sum())
            self._same_ids[1] += same.size

    @property
    def agreement(self) -> float | None:
        """How many of the positions of the logits have the highest one at the same id, a fraction."""
        same, total = self._same_ids
        return same / total if total else None

    def fail(self, name, sizes, case, problem) -> None:
        """Adds a comparison that could not even be made."""
        self.report.comparisons.append(_failed(name, sizes, case, problem))


def compare(
    name: str,
    expected: np.ndarray,
    actual: np.ndarray,
    tolerance: tuple[float, float],
    sizes: dict[str, int],
    case: str,
    keep: np.ndarray | None = None,
    least_cosine: float | None = None,
) -> Comparison:
    """Compares two arrays; where `keep`, of the arrays' leading axes, is False they may differ.

    With `least_cosine` floats are compared by their direction, not by their size.
    """
    if expected.shape != actual.shape:
        return _failed(name, sizes, case, f"shape {actual.shape}, Keras {expected.shape}")
    if least_cosine is not None and {expected.dtype.kind, actual.dtype.kind} == {"f"}:
        actual = actual.astype(expected.dtype)
    if expected.dtype != actual.dtype:
        return _failed(name, sizes, case, f"dtype {actual.dtype}, Keras {expected.dtype}")
    if not expected.size:
        return Comparison(name, sizes, case, 0.0, 0.0, 0.0)
    if keep is None:
        keep = np.ones(expected.shape, bool)
    else:
        keep = np.broadcast_to(keep.reshape(keep.shape + (1,) * (expected.ndim - keep.ndim)), expected.shape)
    exact = not np.issubdtype(expected.dtype, np.inexact)
    want, got = (x.astype(np.float64) if exact or x.dtype == np.float16 else x for x in (expected, actual))
    special = ~(np.isfinite(want) & np.isfinite(got))
    wrong = special & keep & (want != got) & ~(np.isnan(want) & np.isnan(got))
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        problem = f"ONNX Runtime gives {got[place]}, Keras {want[place]} at {list(place)}"
        return _failed(name, sizes, case, problem, place, float(want[place]), float(got[place]))
    use = keep & ~special
    if least_cosine is not None and not exact:
        error = _one_minus_cosine(want[use].astype(np.float64), got[use].astype(np.float64))
        return Comparison(name, sizes, case, error, error, 1 - least_cosine, measure="1 - cosine")
    # The difference of two numbers near to each other is exact in their own precision.
    error = np.abs(np.subtract(want, got, where=use, out=np.zeros_like(want)))
    place = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
    largest = float(np.max(np.abs(want), where=use, initial=0.0))
    return Comparison(
        name,
        sizes,
        case,
        max_error=float(error[place]),
        mean_error=float(error.sum(dtype=np.float64) / max(int(use.sum()), 1)),
        allowed=0.0 if exact else tolerance[0] + tolerance[1] * largest,
        place=place,
        expected=float(want[place]),
        actual=float(got[place]),
    )


def _one_minus_cosine(a, b) -> float:
    """1 - the cosine of the angle between two vectors; of vectors of zeros 0 if both are, else 1."""
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    if norms == 0:
        return float(a.any() or b.any())
    return float(max(0.0, 1 - a @ b / norms))


def versions() -> dict[str, str]:
    """What ran: library versions, the Keras backend and the machine."""
    import keras
    import onnx
    import onnxruntime

    import keras_transformer

    return {
        "keras_transformer": keras_transformer.__version__,
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "provider": "CPUExecutionProvider",
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One graph input: `kind` is `"ids"`, `"mask"` or `"float"`; ids run from `minimum` to `maximum`, both included."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str, ...]
    kind: str
    minimum: int = 0
    maximum: int | None = None

    def sizes(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The input's shape when the free axes have `sizes`."""
        return tuple(dim if isinstance(dim, int) else evaluate(dim, sizes) for dim in self.shape)


@dataclasses.dataclass(frozen=True)
class FreeAxis:
    """A free axis of the graph; `batch` if it leads an input."""

    name: str
    batch: bool
    minimum: int = 1
    maximum: int | None = None


def interface(session) -> tuple[list[InputSpec], list[FreeAxis], list[str]]:
    """The inputs and free axes of a graph, and the axes that its metadata calls free although they are not."""
    metadata = session.get_modelmeta().custom_metadata_map
    said = {entry["name"]: entry for entry in json.loads(metadata.get("keras_transformer.inputs", "[]"))}
    ranges = json.loads(metadata.get("keras_transformer.axes", "{}"))
    specs = []
    for node in session.get_inputs():
        dtype = np.dtype(_NUMPY_DTYPES.get(node.type, "float32"))
        shape = tuple(
            dim if isinstance(dim, int | str) else "batch" if axis == 0 else f"{node.name}_{axis}"
            for axis, dim in enumerate(node.shape)
        )
        entry = said.get(node.name, {})
        kind = entry.get("kind") or ("mask" if dtype.kind == "b" else "float" if dtype.kind == "f" else "ids")
        specs.append(InputSpec(node.name, dtype, shape, kind, entry.get("minimum", 0), entry.get("maximum")))
    names = dict.fromkeys(name for spec in specs for dim in spec.shape for name in _names(dim))
    leading = {spec.shape[0] for spec in specs if spec.shape}
    axes = [
        FreeAxis(
            name,
            batch=name in leading,
            minimum=ranges.get(name, {}).get("minimum", 1),
            maximum=ranges.get(name, {}).get("maximum"),
        )
        for name in names
    ]
    return specs, axes, sorted(set(ranges) - set(names))


_NUMPY_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


def evaluate(dim: str, sizes: dict[str, int]) -> int:
    """The value of a dimension written as an expression of axis names, such as `past_length + length`."""

    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"Cannot read the dimension {dim!r}: expected axis names, integers and + - * // %")

    return value(ast.parse(dim, mode="eval").body)


_ARITHMETIC = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def _names(dim):
    if isinstance(dim, int):
        return []
    return [node.id for node in ast.walk(ast.parse(dim, mode="eval")) if isinstance(node, ast.Name)]


def heads(path: pathlib.Path) -> int:
    """The largest number of attention heads in a file; 16 where its attention nodes do not say."""
    import onnx

    found = [
        attribute.i
        for node in onnx.load(path, load_external_data=False).graph.node
        for attribute in node.attribute
        if attribute.name in ("q_num_heads", "num_heads")
    ]
    return max(found, default=16)


def lengths(minimum: int = 1, maximum: int | None = None) -> list[int]:
    """Lengths to try within a range: the shortest, a prime, an even one, a multiple of 8, the longest."""
    longest = maximum if maximum is not None else max(minimum + UNLIMITED_LONGEST - 1, UNLIMITED_LONGEST)

    def near(start, wanted):
        start = min(max(start, minimum), longest)
        upwards = itertools.takewhile(lambda n: n <= longest and n < start + 1000, itertools.count(start))
        return next((n for n in (*upwards, *range(start, minimum - 1, -1)) if wanted(n)), start)

    prime = near(7, lambda n: n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)))
    even = near(12, lambda n: n % 4 == 0 and n % 8)
    return sorted({minimum, prime, even, near(24, lambda n: n % 8 == 0), longest})


def grid(axes: list[FreeAxis], num_heads: int = 16) -> tuple[list[dict[str, int]], list[str]]:
    """The sizes to compare at, and what had to be left out.

    Each length is taken at the smallest batch and at a larger one. Axes other than the first length walk
    through their own lengths at an offset, so that no two of them are equal where they need not be.
    """
    batches = [axis for axis in axes if axis.batch]
    free = [axis for axis in axes if not axis.batch]
    choices = [lengths(axis.minimum, axis.maximum) for axis in free]
    rounds = max(map(len, choices), default=1)
    points, skipped = [], []
    for step in range(rounds):
        for batch in (1, 2 + step % 2) if free else (1, 2, 3):
            sizes = {axis.name: _within(batch + order, axis) for order, axis in enumerate(batches)}
            offset = step + (batch > 1 and rounds > 2)
            for order, (axis, choice) in enumerate(zip(free, choices, strict=True)):
                # The first axis pairs every length with both batches; the others meet other partners each
                # time.
                index = step if order == 0 else offset + order
                sizes[axis.name] = choice[index % len(choice)]
            rows = math.prod(sizes[axis.name] for axis in batches)
            for axis in free:
                limit = max(int(math.sqrt(LARGEST_SCORES / (rows * num_heads))), axis.minimum)
                if sizes[axis.name] > limit:
                    skipped.append(
                        f"{axis.name}={sizes[axis.name]} at batch {rows}: its {num_heads} heads need more than "
                        f"{LARGEST_SCORES:g} attention scores; {axis.name}={limit} compared instead"
                    )
                    sizes[axis.name] = limit
            points.append(sizes)
    unique = list({tuple(sizes.items()): sizes for sizes in points}.values())
    return unique, list(dict.fromkeys(skipped))


def _within(size, axis):
    return max(axis.minimum, size if axis.maximum is None else min(size, axis.maximum))


def sample_source(specs: list[InputSpec], axes: list[FreeAxis], samples) -> tuple[Any, list[FreeAxis]]:
    """What makes the inputs, and the axes within the sizes that it can make."""
    if samples is None:
        return MadeSamples(specs), axes
    if callable(samples):
        return CalledSamples(specs, samples), axes
    source = GivenSamples(specs, samples)
    return source, source.limit(axes)


class MadeSamples:
    """Inputs made for the purpose: whole ones, and ones with padding of every kind."""

    cases = ("whole", "padded")
    also = ()

    def __init__(self, specs: list[InputSpec]):
        for spec in specs:
            if spec.kind == "ids" and spec.maximum is None:
                raise ExportError(
                    f"The file does not say which values its integer input {spec.name!r} may take, so none can "
                    "be made: pass `samples`, arrays by input name."
                )
        self.specs = specs

    def make(self, sizes: dict[str, int], case: str, number: int) -> dict[str, np.ndarray]:
        """The inputs of run `number` at `sizes`; the same ones every time."""
        inputs = {}
        for order, spec in enumerate(self.specs):
            rng = np.random.default_rng([zlib.crc32(spec.name.encode()), number])
            shape = spec.sizes(sizes)
            # Runs come in pairs, a batch of one row and a larger one: both go through all patterns.
            keep = pad_pattern(shape, number // 2 + order, rng) if case == "padded" else np.ones(shape, bool)
            if spec.kind == "mask":
                value = keep
            elif spec.kind == "ids":
                low = spec.minimum + (spec.maximum > spec.minimum)
                value = np.where(keep, rng.integers(low, spec.maximum + 1, shape), spec.minimum)
            else:
                # Rows of small numbers show what large ones hide, such as a wrong epsilon.
                scale = np.where(np.arange(shape[0] if shape else 1) % 2 == (case == "padded"), 1, 1 / 32)
                value = rng.normal(size=shape) * scale.reshape((-1,) + (1,) * (len(shape) - 1))
            inputs[spec.name] = value.astype(spec.dtype)
        return inputs


def pad_pattern(shape: tuple[int, ...], number: int, rng: np.random.Generator) -> np.ndarray:
    """True where an array is real: its rows take turns at no real entry, holes, padding right, padding left."""
    if not shape:
        return np.ones(shape, bool)
    length = shape[-1]
    rows = []
    for row in range(math.prod(shape[:-1])):
        kept = math.ceil(0.6 * length)
        turn = (row + number) % 4
        if turn == 0:
            real = np.zeros(length, bool)
        elif turn == 1:
            real = rng.random(length) < 0.6
        else:
            real = np.arange(length) < kept if turn == 2 else np.arange(length) >= length - kept
        rows.append(real)
    return np.array(rows).reshape(shape)


class CalledSamples:
    """The user's function of the axes' sizes."""

    cases = ("samples",)
    also = ()

    def __init__(self, specs, function):
        self.specs = specs
        self.function = function

    def make(self, sizes, case, number):
        """What the function returns, checked against the graph's inputs."""
        inputs = checked_inputs(self.specs, self.function(dict(sizes)))
        for spec in self.specs:
            if inputs[spec.name].shape != spec.sizes(sizes):
                raise ValueError(
                    f"`samples` must return {spec.name!r} of shape {spec.sizes(sizes)} for sizes {sizes}. "
                    f"Received: shape {inputs[spec.name].shape}"
                )
        return inputs


class GivenSamples:
    """The user's arrays, in whole and cut to smaller sizes."""

    cases = ("samples",)

    def __init__(self, specs, arrays):
        self.specs = specs
        self.arrays = checked_inputs(specs, arrays)
        self.also = []

    def limit(self, axes: list[FreeAxis]) -> list[FreeAxis]:
        """The axes, none longer than the arrays."""
        sizes = {}
        for spec in self.specs:
            for dim, size in zip(spec.shape, self.arrays[spec.name].shape, strict=True):
                if isinstance(dim, int) and dim != size:
                    raise ValueError(
                        f"`samples[{spec.name!r}]` must have shape {spec.shape}. "
                        f"Received: shape {self.arrays[spec.name].shape}"
                    )
                if isinstance(dim, str) and dim.isidentifier() and sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"`samples` must agree on the size of {dim!r}. Received: {size} in {spec.name!r} and "
                        f"{sizes[dim]} before it"
                    )
        for axis in axes:
            if axis.name in sizes and not axis.minimum <= sizes[axis.name] <= (axis.maximum or math.inf):
                raise ValueError(
                    f"`samples` must have {axis.name} between {axis.minimum} and {axis.maximum}. "
                    f"Received: {sizes[axis.name]}"
                )
        if all(axis.name in sizes for axis in axes):
            self.also = [{axis.name: sizes[axis.name] for axis in axes}]
        return [dataclasses.replace(axis, maximum=sizes.get(axis.name, axis.maximum)) for axis in axes]

    def make(self, sizes, case, number):
        """The leading part of each array."""
        return {
            spec.name: self.arrays[spec.name][tuple(slice(size) for size in spec.sizes(sizes))] for spec in self.specs
        }


def checked_inputs(specs: list[InputSpec], arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`arrays` by input name, in the graph's dtypes, each id within its range."""
    wanted = {spec.name for spec in specs}
    if not isinstance(arrays, Mapping) or wanted != set(arrays):
        received = sorted(arrays) if isinstance(arrays, Mapping) else type(arrays).__name__
        raise ValueError(f"`samples` must map the input names {sorted(wanted)} to arrays. Received: {received}")
    inputs = {}
    for spec in specs:
        array = np.asarray(arrays[spec.name])
        if array.ndim != len(spec.shape):
            raise ValueError(
                f"`samples[{spec.name!r}]` must have rank {len(spec.shape)}, shape {spec.shape}. "
                f"Received: shape {array.shape}"
            )
        if spec.kind == "ids" and spec.maximum is not None:
            _validation.check_ids(array, spec.maximum + 1, spec.name)
        inputs[spec.name] = array.astype(spec.dtype)
    return inputs


def padding(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """For each ids or mask input of rank 2 or more: (B, T), True where the position is padding."""
    found = []
    for array in inputs.values():
        if array.dtype.kind in "iub" and array.ndim >= 2:
            empty = array == 0
            found.append(empty if array.ndim == 2 else empty.reshape(*array.shape[:2], -1).all(-1))
    return found


def kept_positions(shape: tuple[int, ...], padded: list[np.ndarray]) -> np.ndarray:
    """(B, T) or (B,): True where an output of `shape` must be right although padding may be anything."""
    keep = np.ones(shape[:2], bool)
    for empty in padded:
        if shape and shape[0] == empty.shape[0]:
            keep &= ~empty.all(1).reshape((-1,) + (1,) * (keep.ndim - 1))
        if shape[:2] == empty.shape:
            keep &= ~empty
    return keep


def keras_function(model: Callable, names: list[str]) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    """`model` in inference as a function from NumPy inputs by name to its flattened NumPy outputs."""
    import keras

    from keras_transformer.export.signature import call_by_name

    return numpy_function(
        call_by_name(model, names), names, model.variables if isinstance(model, keras.Layer) else None
    )


def numpy_function(function: Callable, names: list[str], variables: list | None) -> Callable:
    """A function of tensors as one from NumPy inputs by name to flattened NumPy outputs.

    With `variables`, all that it reads, it runs in the way that is fastest on the backend.
    """
    import keras

    from keras_transformer.export.backends import inference

    run = function if variables is None else inference(function, variables)

    def call(arrays):
        tensors = [keras.ops.convert_to_tensor(_narrow(arrays[name])) for name in names]
        with warnings.catch_warnings():
            # A length of 1 is our choice, so what Keras has to say about it is not for the user.
            warnings.simplefilter("ignore")
            outputs = run(*tensors)
        return [to_numpy(output) for output in keras.tree.flatten(outputs) if output is not None]

    return call


def to_numpy(tensor) -> np.ndarray:
    """A backend's tensor as a NumPy array; bfloat16, which NumPy lacks, as float32."""
    import keras

    array = keras.ops.convert_to_numpy(tensor)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _narrow(array):
    """Keras counts in int32, and JAX has nothing wider."""
    return array.astype(np.int32) if array.dtype == np.int64 else array


def _failed(name, sizes, case, problem, *place):
    return Comparison(name, sizes, case, math.inf, math.inf, 0.0, *place, problem=problem)


def _first_line(error):
    """The first line that says something: Keras puts where it happened before what happened, in colours."""
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).split("\n")]
    lines = [line for line in lines if line and not line.startswith("Exception encountered when calling")]
    return lines[0][:300] if lines else type(error).__name__
