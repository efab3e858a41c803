"""Random models of a few seeds export and equal Keras; `make fuzz` tries many."""

import pytest

from tests import fuzz

# Each of these becomes a graph; between them they are of every form.
SEEDS = (0, 2, 3, 4, 6, 7, 8, 11)


@pytest.mark.once
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_equals_keras(seed):
    found = fuzz.try_out(seed)
    assert found["outcome"] == "equal", found
