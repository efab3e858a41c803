"""Explains a source tree in which `keras_transformer/export` is not a link to the directory `export`."""

from __future__ import annotations

import os
import sys


class MissingLink:
    """A last import finder: it is asked for `keras_transformer.export` only after every other one failed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ImportError for `keras_transformer.export`; knows no other module."""
        if name == "keras_transformer.export":
            raise ImportError(
                "keras_transformer.export cannot be imported from this source tree: "
                "keras_transformer/export must be a link to the directory ../export, and is not (git on Windows "
                "checks links out as text files unless core.symlinks is on; archives drop them). "
                "Install the package instead: `pip install .`",
                name=name,
            )


def explain_missing_link(package_directory: str) -> None:
    """Installs `MissingLink` if `package_directory` (that of keras_transformer) has no directory `export`."""
    if not os.path.isdir(os.path.join(package_directory, "export")):
        sys.meta_path.append(MissingLink)
