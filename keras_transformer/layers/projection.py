"""The dense layer that attention projects with: what is trained of it by LoRA is saved and goes on where it was."""

from __future__ import annotations

import keras
from keras import ops


class Projection(keras.layers.Dense):
    """A dense layer that saves its low-rank weights (LoRA, arXiv:2106.09685) beside the kernel.

    Keras saves the kernel with what they add folded in, which is what a layer without LoRA loads; a layer with LoRA
    would begin anew with both of them zero, where no gradient passes and nothing is ever learned again. This one takes
    them out of the kernel again.
    """

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.built and self.lora_enabled and self.quantization_mode is None:
            store["lora_kernel_a"], store["lora_kernel_b"] = self.lora_kernel_a, self.lora_kernel_b

    def load_own_variables(self, store):
        stored = {name: store[name] for name in store.keys()}  # noqa: SIM118, a file's group
        low_rank = {name: stored.pop(name) for name in ("lora_kernel_a", "lora_kernel_b") if name in stored}
        if not self.lora_enabled:
            super().load_own_variables(stored)
            return
        a = ops.copy(self.lora_kernel_a.value)
        super().load_own_variables(stored)
        self.lora_kernel_a.assign(a)  # with zero for the other, what is loaded is what was saved, and can be trained
        if low_rank and self.quantization_mode is None:
            for name, value in low_rank.items():
                getattr(self, name).assign(value)
            added = (self.lora_alpha / self.lora_rank) * ops.matmul(self.lora_kernel_a, self.lora_kernel_b)
            self._kernel.assign(ops.subtract(self._kernel, ops.cast(added, self._kernel.dtype)))

    def quantize(self, mode=None, type_check=True, config=None):
        # Keras refuses its subclasses, whose calls it does not know; the call of this one is Keras'.
        super().quantize(mode, type_check=False, config=config)
