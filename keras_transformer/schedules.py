"""The learning rate schedule of "Attention Is All You Need"."""

from __future__ import annotations

import keras
from keras import ops

from keras_transformer._validation import positive_integers, positive_numbers


@keras.saving.register_keras_serializable(package="keras_transformer")
class InverseSqrtWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for `warmup_steps` steps, then falls with the inverse square root of the step.

    Equation 3 of "Attention Is All You Need" (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), times `scale`:

        rate(step) = scale · d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)

    The paper counts steps from 1, Keras from 0: step 0 gets the rate of step 1, so that the first update is not lost.

    Args:
        d_model: the model's width.
        warmup_steps: the step at which the rate is highest.
        scale: multiplies the rate.

    Example:
        ```python
        optimizer = keras.optimizers.Adam(InverseSqrtWarmup(512), beta_2=0.98, epsilon=1e-9)
        ```
    """

    def __init__(self, d_model: int, warmup_steps: int = 4000, scale: float = 1.0, name: str | None = None):
        super().__init__()
        positive_integers(d_model=d_model, warmup_steps=warmup_steps)
        positive_numbers(scale=scale)
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.scale = scale
        self.name = name or "inverse_sqrt_warmup"

    def __call__(self, step):
        """The learning rate, a float32 scalar, at `step`, an integer scalar or tensor."""
        step = ops.maximum(ops.cast(step, "float32"), 1.0)
        peak = self.scale * (self.d_model * self.warmup_steps) ** -0.5
        return peak * ops.minimum(step / self.warmup_steps, ops.sqrt(self.warmup_steps / step))

    def get_config(self):
        return {
            "d_model": self.d_model,
            "warmup_steps": self.warmup_steps,
            "scale": self.scale,
            "name": self.name,
        }
