"""Random models of a few seeds export and equal Keras; `make fuzz` tries many."""

import pytest

from tests import fuzz

# Each of these becomes a graph; between them they are of every form.
SEEDS = (5002, 5023, 5038, 5039, 5041, 5046, 5050, 5052)


@pytest.mark.once
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_equals_keras(seed):
    found = fuzz.try_out(seed)
    assert found["outcome"] == "equal", found
