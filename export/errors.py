"""The errors of export, verification and the runner; free of Keras, so that the runner can raise them."""

from __future__ import annotations


class ExportError(ValueError):
    """The model cannot be exported, or the exported file is not right."""


class UnsupportedOperationError(ExportError):
    """The model uses an operation that no lowering rule covers."""


class TraceError(ExportError):
    """The model's computation cannot be generalised over its free axes."""


class VerificationError(ExportError):
    """ONNX Runtime and Keras differ by more than the tolerance.

    Attributes:
        report: the `Report` of the comparison, with every figure that led here.
    """

    def __init__(self, message: str, report=None):
        super().__init__(message)
        self.report = report


class NotAnExportError(ValueError):
    """A path that should hold an exported model holds something else, or a damaged one."""
