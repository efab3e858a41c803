"""Tests; a package of its own name, because other distributions install a top-level `tests` too."""
