"""The learning rate schedule against equation 3 of "Attention Is All You Need"."""

import keras
import numpy as np
import pytest

from keras_transformer.schedules import InverseSqrtWarmup


@pytest.mark.parametrize("d_model, warmup_steps, scale", [(512, 4000, 1.0), (7, 13, 2.5)])
def test_formula(d_model, warmup_steps, scale):
    schedule = InverseSqrtWarmup(d_model, warmup_steps, scale)
    for step in (1, 2, 11, warmup_steps - 1, warmup_steps, warmup_steps + 1, 100_003):
        expected = scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)
        # float32 arithmetic: a few units in the last place
        np.testing.assert_allclose(float(schedule(step)), expected, rtol=1e-6)


def test_peak_of_the_base_model():
    assert float(InverseSqrtWarmup(512)(4000)) == pytest.approx(6.98771e-4, rel=1e-5)


def test_first_update_is_not_lost():
    schedule = InverseSqrtWarmup(512)
    assert float(schedule(0)) == float(schedule(1)) > 0


def test_round_trip():
    schedule = InverseSqrtWarmup(64, 10, 0.5, name="rate")
    config = keras.optimizers.schedules.serialize(schedule)
    copy = keras.optimizers.schedules.deserialize(config)
    assert copy.get_config() == schedule.get_config()
    optimizer = keras.optimizers.Adam.from_config(keras.optimizers.Adam(schedule).get_config())
    assert float(optimizer.learning_rate) == float(schedule(0))


@pytest.mark.parametrize("arguments", [{"d_model": 0}, {"d_model": 4, "warmup_steps": 0}, {"d_model": 4, "scale": 0}])
def test_bad_arguments(arguments):
    name, value = list(arguments.items())[-1]
    with pytest.raises(ValueError, match=f"`{name}`.*{name}={value}"):
        InverseSqrtWarmup(**arguments)
