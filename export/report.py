"""What a verification found: every comparison, as an object, a table, HTML and JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One output at one set of sizes.

    Attributes:
        output: the output's name in the ONNX graph.
        sizes: size of every free axis, by its name.
        case: which inputs it was, in words.
        max_error: largest |Keras − ONNX Runtime| over the compared positions.
        mean_error: mean of the same.
        allowed: the largest error allowed, absolute + relative · max|Keras output|.
        place: index of the largest error; None where there is nothing to point at.
        expected: Keras' value at `place`.
        actual: ONNX Runtime's value at `place`.
        measure: what the errors are: `"error"`, as above, or `"1 - cosine"` of the two outputs, by which smaller forms
            are measured; the mean is then the same number.
        problem: what is wrong besides a number: a failed run, a shape, a dtype, a NaN. None if nothing is.
    """

    output: str
    sizes: dict[str, int]
    case: str
    max_error: float
    mean_error: float
    allowed: float
    place: tuple[int, ...] | None = None
    expected: float | None = None
    actual: float | None = None
    problem: str | None = None
    measure: str = "error"

    @property
    def passed(self) -> bool:
        return self.problem is None and self.max_error <= self.allowed

    def __str__(self):
        where = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        text = f"{self.output} at {where} ({self.case}): "
        if self.problem is not None:
            return text + self.problem
        text += f"{self.measure} {self.max_error:.3g}, allowed {self.allowed:.3g}"
        if self.place is not None:
            text += f", at {list(self.place)}: Keras {self.expected:.9g}, ONNX Runtime {self.actual:.9g}"
        return text


@dataclasses.dataclass
class TokenCheck:
    """Greedy tokens from Keras and from ONNX Runtime.

    Attributes:
        rows: generated rows compared.
        tokens: tokens compared.
        mismatches: tokens that differ, each with `row`, `position`, `keras`, `onnx` and `gap`, the distance
            between the two largest logits in Keras.
        excused_below: a mismatch whose gap is smaller than this is a tie, counted and let pass; infinite for a smaller
            form, whose mismatches are only counted.
    """

    rows: int = 0
    tokens: int = 0
    mismatches: list[dict] = dataclasses.field(default_factory=list)
    excused_below: float = 1e-3

    @property
    def excused(self) -> int:
        return sum(mismatch["gap"] < self.excused_below for mismatch in self.mismatches)

    @property
    def passed(self) -> bool:
        return self.excused == len(self.mismatches)


@dataclasses.dataclass
class Report:
    """The result of `verify_onnx`.

    Attributes:
        path: the verified file or directory.
        tolerance: (absolute, relative to the largest output).
        padded_rows: `"exact"` or `"any"`.
        form: one of `forms.FORMS`.
        size: bytes of the file, or of all files of the directory.
        agreement: how many of the positions compared have their highest logit at the same id, a fraction; None where
            nothing is called logits.
        comparisons: one entry for each output, size and kind of input.
        tokens: the check of generated tokens; None for a model that does not generate.
        skipped: what was not compared, and why.
        notes: what a reader should know about how it was compared.
        versions: versions of the libraries and the backend.
        seconds: how long the comparison took.
    """

    path: str
    tolerance: tuple[float, float]
    padded_rows: str = "exact"
    form: str = "fp32"
    size: int = 0
    agreement: float | None = None
    comparisons: list[Comparison] = dataclasses.field(default_factory=list)
    tokens: TokenCheck | None = None
    skipped: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return (
            bool(self.comparisons)
            and all(comparison.passed for comparison in self.comparisons)
            and (self.tokens is None or self.tokens.passed)
        )

    @property
    def max_error(self) -> float:
        return max((comparison.max_error for comparison in self.comparisons), default=0.0)

    @property
    def worst(self) -> Comparison | None:
        """The comparison furthest over, or nearest to, what is allowed; a problem comes first."""
        return max(self.comparisons, key=_severity, default=None)

    @property
    def failures(self) -> list[Comparison]:
        return sorted((c for c in self.comparisons if not c.passed), key=_severity, reverse=True)

    def summary(self) -> str:
        """What was found, in one or a few lines."""
        if not self.comparisons:
            return f"Nothing could be compared for {self.path}: {'; '.join(self.skipped) or 'no output'}"
        verdict = "passed" if self.passed else "FAILED"
        lines = [
            f"Verification {verdict}: {len(self.comparisons)} comparisons, "
            f"largest error {self.max_error:.3g}; worst: {self.worst}"
        ]
        if self.form != "fp32":
            same = "" if self.agreement is None else f", highest logit at the same id in {self.agreement:.2%}"
            cosines = [comparison.max_error for comparison in self.comparisons if comparison.measure != "error"]
            worst = f"1 - cosine {max(cosines, default=0):.3g} at most"
            lines.append(f"Form {self.form}: {self.size:,} bytes, {worst}{same}.")
        if len(self.failures) > 1:
            lines.append(f"{len(self.failures)} comparisons failed.")
        if self.tokens is not None:
            t = self.tokens
            lines.append(
                f"Generated tokens: {t.tokens} in {t.rows} rows, {len(t.mismatches)} differ"
                + (
                    f", of which {t.excused} are ties (top-2 logit gap below {t.excused_below:g})."
                    if t.excused_below < float("inf")
                    else " after the same tokens."
                )
            )
            unexcused = [m for m in t.mismatches if m["gap"] >= t.excused_below]
            if unexcused:
                lines.append(
                    "First: row {row}, position {position}: Keras {keras}, ONNX Runtime {onnx}, gap {gap:.3g}.".format(
                        **unexcused[0]
                    )
                )
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, str, str, str, str, str, str]]:
        """The printed table: one row for each output, its worst comparison and its mean error."""
        rows = []
        for output in dict.fromkeys(comparison.output for comparison in self.comparisons):
            mine = [comparison for comparison in self.comparisons if comparison.output == output]
            worst = max(mine, key=_severity)
            rows.append(
                (
                    output,
                    str(len(mine)),
                    f"{max(c.max_error for c in mine):.2e}",
                    f"{sum(c.mean_error for c in mine) / len(mine):.2e}",
                    f"{worst.allowed:.2e}",
                    " ".join(f"{name}={size}" for name, size in worst.sizes.items()),
                    "ok" if all(c.passed for c in mine) else worst.problem or "over tolerance",
                )
            )
        return rows

    HEADER = ("output", "cases", "max error", "mean error", "allowed", "worst at", "result")

    def print(self, file=None) -> None:
        """Prints the table, what was skipped, and the summary."""
        import rich.box
        import rich.console
        import rich.table
        from rich.markup import escape

        console = rich.console.Console(file=file)
        if not console.is_terminal:
            console = rich.console.Console(file=file, width=140)
        table = rich.table.Table(title=escape(f"Keras and ONNX Runtime: {self.path}"), box=rich.box.SIMPLE_HEAD)
        for name, justify in zip(self.HEADER, ("left", *["right"] * 4, "left", "left"), strict=True):
            table.add_column(name, justify=justify, overflow="fold")
        for row in self.rows():
            table.add_row(*map(escape, row), style=None if row[-1] == "ok" else "red")
        console.print(table)
        for line in [f"skipped: {line}" for line in self.skipped] + self.notes:
            console.print(escape(line), highlight=False)
        console.print(escape(self.summary()), style="green" if self.passed else "red", highlight=False)
        console.print(f"Compared in {self.seconds:.1f} s.", highlight=False)

    def to_dict(self) -> dict:
        """The whole report as plain Python values."""
        return {
            "passed": self.passed,
            "max_error": self.max_error,
            "worst": None if self.worst is None else str(self.worst),
            **dataclasses.asdict(self),
        }

    def to_json(self, path=None) -> str:
        """The whole report as JSON, written to `path` too if given."""
        text = json.dumps(_finite(self.to_dict()), indent=1, default=str)
        if path is not None:
            pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def __repr__(self):
        return f"<Report of {self.path}\n{self.summary()}>"

    def _repr_html_(self):
        def line(cells, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        table = line(self.HEADER, "th") + "".join(line(row, "td") for row in self.rows())
        notes = "".join(f"<br>{html.escape(f'skipped: {s}')}" for s in self.skipped)
        return f"<p>{html.escape(self.summary())}{notes}</p><table>{table}</table>"


def _severity(comparison):
    if comparison.problem is not None:
        return float("inf")
    return comparison.max_error / comparison.allowed if comparison.allowed else comparison.max_error


def _finite(value):
    """JSON has no NaN and no infinity: they are written as strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not (abs(value) < float("inf")):
        return str(value)
    return value
