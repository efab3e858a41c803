"""Exports random models and compares each graph with its model in ONNX Runtime.

python -m tests.fuzz [--seed S] [--count N] [--json FILE]    on the backend that KERAS_BACKEND names

A seed alone says which model: a plan of steps is drawn, each tried on arrays of two sizes, and put together as a
functional, sequential, subclassed or nested model. The comparison shares nothing with the exporter's verification.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        os.environ.setdefault(variable, "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import keras  # noqa: E402
from keras import ops  # noqa: E402

from keras_transformer.export import export_onnx  # noqa: E402
from keras_transformer.export.errors import ExportError, TraceError, UnsupportedOperationError  # noqa: E402
from tests.checks import random_values  # noqa: E402
from tests.fuzz_steps import STEPS, VOCABULARY, Draw, Skip  # noqa: E402

# Absolute, and relative to the largest entry of an output: float32 sums in another order.
TOLERANCE = 1e-5
# Where that is exceeded: how many times as far as Keras' own results move when all weights and inputs move by an ulp.
ROUNDING = 50
# The sizes at which a plan is tried while it is drawn; no two are equal, and none is a width.
SAMPLES = ({"B": 5, "T": 17, "S": 19, "U": 29}, {"B": 9, "T": 25, "S": 33, "U": 27})
# None is a size of the tracer's but 1, and none a width that the steps draw.
LENGTHS = (1, 5, 9, 15, 25, 27, 33, 45)
BATCHES = (1, 5, 6, 9)
INPUTS = {
    "x": (("B", "T", 6), "float32"),
    "y": (("B", "T", 12), "float32"),
    "pair": (("B", "T", 6), "float32"),
    "memory": (("B", "S", 12), "float32"),
    "token_ids": (("B", "T"), "int32"),
    "mask": (("B", "T"), "bool"),
    "vector": (("B", 12), "float32"),
    "image": (("B", "U", 8, 3), "float32"),
    "heads": (("B", "T", 4, 6), "float32"),
}


@dataclasses.dataclass
class Entry:
    """A tensor of the plan: what it is at each of `SAMPLES`, and its shape in names of sizes."""

    values: list[Any]
    shape: tuple
    dtype: str
    exact: bool = True


@dataclasses.dataclass
class Step:
    """`outputs = function(*inputs)`, entries by number."""

    name: str
    function: Callable
    inputs: list[int]
    outputs: list[int]
    layers: list
    sized: bool


@dataclasses.dataclass
class Plan:
    """A model, as steps."""

    names: list[str]
    steps: list[Step]
    results: list[int]
    form: str
    lengths: tuple
    entries: list[Entry]


class Steps(keras.layers.Layer):
    """Some of the steps, as a layer of a user would have them."""

    def __init__(self, steps, wanted, outputs, **kwargs):
        super().__init__(**kwargs)
        self.held = [layer for step in steps for layer in step.layers]
        self.steps, self.wanted, self.outputs_ = list(steps), list(wanted), list(outputs)

    def build(self, shapes):
        self.built = True

    def call(self, inputs):
        values = dict(zip(self.wanted, inputs, strict=True))
        follow(self.steps, values)
        return [values[number] for number in self.outputs_]


def follow(steps, values: dict[int, Any]) -> None:
    """Does the steps on tensors, backend's or symbolic."""
    for step in steps:
        outputs = step.function(*(values[number] for number in step.inputs))
        outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        values.update(zip(step.outputs, outputs, strict=True))


class Subclassed(keras.Model):
    """A model that does not say what it takes."""

    def __init__(self, parts, names, results, arrange):
        super().__init__()
        self.parts, self.names, self.results, self.arrange = parts, names, results, arrange
        self.held = [layer for step in parts for layer in step.layers]

    def run(self, inputs):
        values = dict(enumerate(inputs))
        follow(self.parts, values)
        return self.arrange([values[number] for number in self.results])


class TakesDict(Subclassed):
    def call(self, inputs):
        return self.run([inputs[name] for name in self.names])


class TakesList(Subclassed):
    def call(self, inputs):
        return self.run(list(inputs))


def by_name(names):
    """A class whose `call` has an argument for each input."""
    arguments = ", ".join(names)
    namespace: dict[str, Any] = {}
    exec(f"def call(self, {arguments}):\n    return self.run([{arguments}])", namespace)
    return type("TakesArguments", (Subclassed,), {"call": namespace["call"]})


def named(shape, others) -> tuple:
    """The shape at the first of `SAMPLES` with the names of sizes; "?" where it is a function of some."""
    dims = []
    for dim, other in zip(shape, others, strict=True):
        names = [n for n in SAMPLES[0] if SAMPLES[0][n] == dim and SAMPLES[1][n] == other]
        dims.append(int(dim) if dim == other else names[0] if names else "?")
    return tuple(dims)


def make_input(name, sizes, rng) -> np.ndarray:
    """Ids and masks with holes and padding, floats of several scales."""
    dims, dtype = INPUTS[name]
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
    if dtype == "bool":
        return rng.random(shape) < 0.7
    if dtype == "int32":
        return (rng.integers(0, VOCABULARY, shape) * (rng.random(shape) < 0.8)).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def draw_plan(rng: np.random.Generator) -> Plan:
    """A plan of some steps, each of which works at both of `SAMPLES`."""
    form = str(rng.choice(["functional", "functional", "dict", "list", "arguments", "nested", "sequential"]))
    count = 1 if form == "sequential" else int(rng.integers(1, 5))
    names = [str(name) for name in rng.choice(list(INPUTS), count, replace=False)]
    entries = []
    for name in names:
        values = [ops.convert_to_tensor(make_input(name, sizes, rng)) for sizes in SAMPLES]
        entries.append(Entry(values, *INPUTS[name]))
    steps: list[Step] = []
    wanted = int(rng.integers(2, 11))
    for _ in range(12 * wanted):
        if len(steps) == wanted:
            break
        # Mostly on with what was made last, which makes deep models.
        chain = form == "sequential" or bool(rng.random() < 0.4)
        draw = Draw(rng, entries[-1:] if chain else entries)
        name = str(rng.choice(list(STEPS)))
        with contextlib.suppress(Skip):
            step = _step(name, draw, entries, form == "sequential")
            steps.append(step)
    used = {number for step in steps for number in step.inputs}
    results = [n for n in range(len(names), len(entries)) if n not in used] or [len(entries) - 1]
    if len(results) > 4:
        results = sorted(rng.choice(results, 4, replace=False).tolist())
    results = [len(entries) - 1] if form == "sequential" else results
    lengths = [(None, None), (None, None), (None, 45), (4, None), (5, 33)][rng.integers(5)]
    return Plan(names, steps, results, form, lengths, entries)


def _step(name, draw, entries, layers_only) -> Step:
    """The step, which has been tried."""
    maker = STEPS[name]
    sized, exact = maker.sized, maker.exact
    if layers_only and maker.kind != "layer":
        raise Skip
    try:
        function, inputs, layers = maker.make(draw)
    except ValueError as error:
        raise Skip(str(error)) from error  # options that a layer does not take together
    if maker.sharp and not all(entry.exact for entry in inputs):
        raise Skip  # a jump that rounding decides
    if layers_only and len(inputs) > 1:
        raise Skip
    outputs: list[list] = []
    for sample in range(len(SAMPLES)):
        try:
            made = function(*(entry.values[sample] for entry in inputs))
        except Skip:
            raise
        except Exception as error:
            raise Skip(f"{type(error).__name__}: {error}") from error
        outputs.append(list(made) if isinstance(made, list | tuple) else [made])
    found = []
    for values in zip(*outputs, strict=True):
        if len(values[0].shape) != len(values[1].shape) or len(values[0].shape) > 5:
            raise Skip
        shape = named(values[0].shape, values[1].shape)
        array = ops.convert_to_numpy(values[0])
        if array.dtype.kind not in "fibu" or not array.size or array.size > 40_000:
            raise Skip
        if array.dtype.kind == "f" and not (np.isfinite(array).all() and np.abs(array).max() < 100):
            raise Skip
        if array.dtype.kind in "iu" and np.abs(array.astype("int64")).max() > 1_000_000:
            raise Skip
        dtype = keras.backend.standardize_dtype(values[0].dtype)
        found.append(Entry(list(values), shape, dtype, exact and all(entry.exact for entry in inputs)))
    numbers = [next(n for n, known in enumerate(entries) if known is entry) for entry in inputs]
    entries += found
    made = list(range(len(entries) - len(found), len(entries)))
    return Step(name, function, numbers, made, layers, sized)


def arrangement(rng: np.random.Generator, count: int) -> Callable:
    """Puts outputs into a tensor, list, tuple, dict or nested dict."""
    kind = int(rng.integers(4))
    if kind == 0 and count == 1:
        return lambda outputs: outputs[0]
    if kind <= 1:
        return lambda outputs: tuple(outputs)
    if kind == 2:
        return lambda outputs: {f"out_{i}": output for i, output in enumerate(outputs)}
    return lambda outputs: {"first": outputs[0], "rest": list(outputs[1:])}


def assemble(plan: Plan, rng: np.random.Generator):
    """The model, and the input signature that `export_onnx` needs for it."""
    arrange = arrangement(rng, len(plan.results))
    specs = [(tuple(d if isinstance(d, int) else None for d in INPUTS[n][0]), INPUTS[n][1]) for n in plan.names]
    if plan.form == "sequential":
        layers = [step.layers[0] for step in plan.steps if len(step.layers) == 1]
        if len(layers) == len(plan.steps) and all(step.name in _PLAIN for step in plan.steps):
            return keras.Sequential([keras.Input(specs[0][0][1:], dtype=specs[0][1]), *layers]), None
    if plan.form in ("dict", "list", "arguments"):
        cls = {"dict": TakesDict, "list": TakesList}.get(plan.form) or by_name(plan.names)
        model = cls(plan.steps, plan.names, plan.results, arrange)
        values = [plan.entries[number].values[0] for number in range(len(plan.names))]
        if plan.form == "arguments":
            model(*values)
        else:
            model(dict(zip(plan.names, values, strict=True)) if plan.form == "dict" else values)
        return model, dict(zip(plan.names, specs, strict=True))
    inputs = [keras.Input(s[1:], dtype=d, name=n) for n, (s, d) in zip(plan.names, specs, strict=True)]
    values = dict(enumerate(inputs))
    for steps in _groups(plan, rng):
        known = {number for step in steps for number in step.outputs}
        wanted = sorted({number for step in steps for number in step.inputs} - known)
        if len(steps) == 1 and not steps[0].sized:
            follow(steps, values)
            continue
        outputs = sorted(known)
        if not any(step.sized for step in steps) and rng.random() < 0.5:
            # An inner functional model.
            inner = {n: keras.Input(batch_shape=values[n].shape, dtype=values[n].dtype) for n in wanted}
            starts = list(inner.values())
            follow(steps, inner)
            part = keras.Model(starts, [inner[n] for n in outputs])
        else:
            part = Steps(steps, wanted, outputs)
        made = part([values[n] for n in wanted])
        values.update(zip(outputs, made, strict=True))
    given = inputs if len(inputs) > 1 or rng.random() < 0.5 else inputs[0]
    if isinstance(given, list) and rng.random() < 0.4:
        given = {tensor.name: tensor for tensor in given}
    return keras.Model(given, arrange([values[number] for number in plan.results])), None


_PLAIN = {"layer on features", "layer on time", "ours on features"}


def _groups(plan, rng):
    """The steps one by one; nested, in runs."""
    steps = list(plan.steps)
    while steps:
        size = int(rng.integers(1, 5)) if plan.form == "nested" else 1
        yield steps[:size]
        del steps[:size]


def randomise(model) -> None:
    """Random weights, norms' scales, biases and moving statistics too."""
    for number, weight in enumerate(model.weights):
        if "float" not in str(weight.dtype):
            continue
        name = weight.path.rsplit("/", 1)[-1]
        weight.assign(random_values(weight, name, [zlib.crc32(name.encode()), number]))


def build(seed: int):
    """The plan, model and signature of a seed."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng([seed, 7])
    plan = draw_plan(rng)
    if not plan.steps:
        raise Skip("no step fits")
    try:
        model, signature = assemble(plan, rng)
    except Skip:
        raise
    except Exception as error:
        # Keras' shape inference knows less than its operations: the same steps as a subclassed model.
        plan.form = "dict"
        try:
            model, signature = assemble(plan, rng)
        except Exception:
            raise Skip(f"Keras does not build it: {type(error).__name__}: {error}") from error
    randomise(model)
    return plan, model, signature


def call_model(plan: Plan, model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Keras' own results, flat."""
    tensors = {name: ops.convert_to_tensor(inputs[name]) for name in plan.names}
    if plan.form == "arguments":
        outputs = model(*tensors.values(), training=False)
    else:
        struct, flat = getattr(model, "_inputs_struct", None), list(tensors.values())
        if struct is not None and not isinstance(struct, dict):
            value = keras.tree.pack_sequence_as(struct, flat)
        elif isinstance(model, keras.Sequential):
            value = flat[0]
        else:
            value = flat if plan.form == "list" else tensors
        # Run eagerly, JAX compiles every operation for every shape.
        compiled = keras.backend.backend() == "jax"
        outputs = model.predict_on_batch(value) if compiled else model(value, training=False)
    return [ops.convert_to_numpy(output) for output in keras.tree.flatten(outputs)]


def difference(want: np.ndarray, got: np.ndarray) -> float:
    """The largest, relative to the largest entry beyond 1; inf where shape, dtype or what is not finite differs."""
    # Keras on torch counts in int64 where its own shape inference says int32.
    same = want.dtype == got.dtype or {str(want.dtype), str(got.dtype)} == {"int32", "int64"}
    if want.shape != got.shape or not same:
        return float("inf")
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(want, got) else float("inf")
    # Of nothing, such as the entries beyond a length of 1, the mean is anything.
    want, got = want[~np.isnan(want)], got[~np.isnan(want)]
    odd = ~np.isfinite(want)
    if not np.array_equal(want[odd], got[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
        return float("inf")
    want, got = want[~odd].astype("float64"), got[~odd].astype("float64")
    return float(np.max(np.abs(want - got), initial=0) / (1 + np.max(np.abs(want), initial=0)))


def rounding(plan: Plan, model, inputs, wanted: list[np.ndarray]) -> list[float]:
    """How far each result moves when every weight and input moves by about an ulp."""
    moved = [0.0] * len(wanted)
    kept = [ops.convert_to_numpy(weight) for weight in model.weights]
    for turn in range(4):
        rng = np.random.default_rng(turn)

        def nudge(array):
            return (array * (1 + 1e-7 * rng.choice([-1, 1], array.shape))).astype(array.dtype)  # noqa: B023

        for weight, value in zip(model.weights, kept, strict=True):
            if value.dtype.kind == "f":
                weight.assign(nudge(value))
        near = {name: nudge(array) if array.dtype.kind == "f" else array for name, array in inputs.items()}
        results = call_model(plan, model, near)
        moved = [max(m, difference(a, b)) for m, a, b in zip(moved, wanted, results, strict=True)]
    for weight, value in zip(model.weights, kept, strict=True):
        weight.assign(value)
    return moved


def sizes_for(axes: list[str], lengths, rng: np.random.Generator) -> list[dict[str, int]]:
    """Sizes of the graph's axes: batch 1 and length 1, the smallest allowed, and others, unlike each other."""
    low, high = lengths[0] or 1, lengths[1] or LENGTHS[-1]
    allowed = sorted({low, *(size for size in LENGTHS if low <= size <= high)})
    free = [axis for axis in axes if axis != "batch"]
    points = [{"batch": 1} | {axis: allowed[0] for axis in free}]
    for batch in (BATCHES[1], 1, BATCHES[3]):
        chosen = rng.permutation(allowed)[: len(free)].tolist()
        points.append({"batch": batch} | dict(zip(free, chosen, strict=False)))
    return points


_LONG = 9
# What each kind of refusal must say.
_REFUSALS = {
    UnsupportedOperationError: r"Cannot export the operation \w+: (?s:.+)called by: (?s:.+)\.py:\d+(?s:.+)inputs: +\S+",
    TraceError: r"\.py:\d+|in layer '[^']+'",
    ExportError: r"runs at no sizes of its free axes that were tried: (?s:.+) At \{",
}


def _says_where(error: ExportError) -> bool:
    wanted = next(pattern for cls, pattern in _REFUSALS.items() if isinstance(error, cls))
    return re.search(wanted, str(error)) is not None


def try_out(seed: int) -> dict:
    """One seed: what became of it."""
    started = time.perf_counter()
    result: dict[str, Any] = {"seed": seed}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            plan, model, signature = build(seed)
        except Skip as reason:
            return result | {"outcome": "skipped", "why": str(reason)[:300]}
        result |= {"form": plan.form, "inputs": plan.names, "steps": [step.name for step in plan.steps]}
        try:
            try:
                result |= _compare(seed, plan, model, signature, pathlib.Path(folder) / "model.onnx")
            except ExportError as error:
                if not _says_where(error) or plan.lengths[0] == _LONG:
                    raise
                # Some steps need a few positions.
                plan.lengths = (_LONG, plan.lengths[1])
                result["at first"] = str(error)[:700]
                result |= _compare(seed, plan, model, signature, pathlib.Path(folder) / "model.onnx")
        except ExportError as error:
            outcome = "refused" if _says_where(error) else "refused without a place"
            result |= {"outcome": outcome, "why": str(error)[:700]}
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-4:]
            lines = [f"{pathlib.Path(frame.filename).name}:{frame.lineno}" for frame in place]
            result |= {"outcome": "crashed", "why": f"{type(error).__name__}: {error}"[:700], "at": lines}
    return result | {"seconds": round(time.perf_counter() - started, 2)}


def _compare(seed, plan, model, signature, path) -> dict:
    import onnxruntime

    low, high = plan.lengths
    arguments = {"input_signature": signature, "min_length": low, "max_length": high}
    export_onnx(model, path, **arguments, verify=False, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    # The file has the inputs in the model's order.
    alias = dict(zip(plan.names, shapes, strict=True)) if set(shapes) != set(plan.names) else {n: n for n in plan.names}
    axes = list(dict.fromkeys(dim for shape in shapes.values() for dim in shape if isinstance(dim, str)))
    rng = np.random.default_rng([seed, 11])
    worst, rounded = 0.0, False
    for sizes in sizes_for(axes, plan.lengths, rng):
        inputs = {}
        for name in plan.names:
            actual = [sizes[d] if isinstance(d, str) else d for d in shapes[alias[name]]]
            letters = {d: size for d, size in zip(INPUTS[name][0], actual, strict=True) if isinstance(d, str)}
            inputs[name] = make_input(name, letters, rng)
        try:
            wanted = call_model(plan, model, inputs)
        except Exception as error:
            return {"outcome": "Keras fails", "why": f"at {sizes}: {type(error).__name__}: {error}"[:500]}
        try:
            got = session.run(None, {alias[name]: array for name, array in inputs.items()})
        except Exception as error:
            return {"outcome": "WRONG", "why": f"ONNX Runtime fails at {sizes}: {error}"[:700]}
        if len(got) != len(wanted):
            return {"outcome": "WRONG", "why": f"{len(got)} outputs in place of {len(wanted)}"}
        differences = [difference(a, b) for a, b in zip(wanted, got, strict=True)]
        if not max(differences) <= TOLERANCE:
            moved = rounding(plan, model, inputs, wanted)
            excess = [d for d, m in zip(differences, moved, strict=True) if not d <= max(TOLERANCE, ROUNDING * m)]
            if excess:
                forms = [f"{a.dtype}{list(a.shape)} {b.dtype}{list(b.shape)}" for a, b in zip(wanted, got, strict=True)]
                why = f"differs by {differences} (rounding: {moved}) at {sizes}, {forms}"
                return {"outcome": "WRONG", "why": why}
            rounded = True
        worst = max(worst, *differences)
    return {"outcome": "rounded" if rounded else "equal", "difference": worst}


FAULTS = ("WRONG", "crashed", "refused without a place")


def run(seeds, show: bool = False) -> list[dict]:
    """Tries out the seeds and names each that is at fault."""
    results = []
    for seed in seeds:
        results.append(found := try_out(seed))
        if show or found["outcome"] in FAULTS:
            print(f"seed {seed}: {json.dumps(found, default=str)}", flush=True)
        if len(results) % 50 == 0:
            print(f"{len(results)} tried: {_counts(results)}", flush=True)
    return results


def _counts(results: list[dict]) -> dict[str, int]:
    return dict(collections.Counter(found["outcome"] for found in results))


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="how many, one after the other")
    parser.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    parser.add_argument("--show", action="store_true", help="print what became of every seed")
    args = parser.parse_args(arguments)
    results = run(range(args.seed, args.seed + args.count), args.show)
    counts = _counts(results)
    print(f"{keras.backend.backend()}: {counts} of {len(results)}")
    steps = collections.Counter(name for found in results for name in found.get("steps", []))
    print(f"steps: {dict(steps.most_common())}; never: {sorted(set(STEPS) - set(steps))}")
    if args.json:
        args.json.write_text(json.dumps({"backend": keras.backend.backend(), "results": results}, indent=1))
    return 1 if any(name in counts for name in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
