"""ONNX Runtime sessions: the installed wheel, its providers and options; imports no Keras."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
from collections.abc import Sequence

from keras_transformer import _validation
from keras_transformer.export.errors import NotAnExportError


def default_options(threads: int | None = None):
    """ONNX Runtime session options as used in production: every optimisation, no chatter."""
    onnxruntime = import_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if threads is not None:
        _validation.positive_integers(threads=threads)
        options.intra_op_num_threads = threads
    return options


def open_session(
    path: str | os.PathLike, options=None, providers: Sequence[str] | None = None, content: bytes | None = None
):
    """An `onnxruntime.InferenceSession` for the file at `path`.

    Args:
        path: the `.onnx` file.
        options: `onnxruntime.SessionOptions`; default: `default_options()`.
        providers: execution providers, the first one preferred; default: the CPU.
        content: what to read in place of the file, a changed graph; its weights may lie beside the file.

    Raises:
        NotAnExportError: there is no such file, or ONNX Runtime cannot read it.
        ValueError: a provider is not there.
    """
    onnxruntime = import_onnxruntime()
    path = pathlib.Path(path)
    if not path.is_file():
        raise NotAnExportError(f"{path} is not an ONNX file: there is no such file.")
    if isinstance(providers, str):
        raise ValueError(f"`providers` must be a list of names. Received: providers={providers!r}")
    providers = list(providers or ["CPUExecutionProvider"])
    available = onnxruntime.get_available_providers()
    for provider in providers:
        if provider not in available:
            hint = ""
            if provider in ("CUDAExecutionProvider", "TensorrtExecutionProvider"):
                hint = (
                    " It comes with the GPU wheel: pip uninstall onnxruntime, then "
                    "pip install 'keras-transformer-onnx[onnx-gpu]'."
                )
            raise ValueError(
                f"`providers` holds {provider!r}, which is not there: this installation has {', '.join(available)}."
                f"{hint}"
            )
    options = options or default_options()
    if content is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    try:
        session = onnxruntime.InferenceSession(content or str(path), options, providers=providers)
    except Exception as error:  # onnxruntime raises many types, none of them documented
        raise NotAnExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {str(error).strip()}"
        ) from error
    if providers[0] not in session.get_providers():
        raise ValueError(
            f"`providers` holds {providers[0]!r}, which is installed and could not be started: the driver or a library "
            "that it needs is missing or of another version. ONNX Runtime wrote above which one it was."
        )
    return session


@functools.cache
def import_onnxruntime():
    """The `onnxruntime` module.

    Raises:
        ImportError: it is not installed, or two wheels are, of which each overwrites files of the other.
    """
    wheels = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(wheels) > 1:
        raise ImportError(
            f"{' and '.join(wheels)} are both installed. They are two builds of one package and overwrite each "
            "other's files, so that neither is whole. Keep one: pip uninstall -y onnxruntime onnxruntime-gpu, "
            "then pip install onnxruntime (CPU) or pip install onnxruntime-gpu (CUDA)."
        )
    try:
        import onnxruntime
    except ImportError as error:
        if wheels:
            raise
        raise ImportError(
            "This needs ONNX Runtime: pip install 'keras-transformer-onnx[onnx]' (CPU) or "
            "'keras-transformer-onnx[onnx-gpu]' (CUDA)."
        ) from error
    return onnxruntime


def _is_installed(distribution):
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def ort_value(array):
    """A NumPy array as an `OrtValue` on the CPU."""
    return import_onnxruntime().OrtValue.ortvalue_from_numpy(array)
