"""RMS norms in one compiled call instead of six operations, on a CPU.

Which of a model's modules are RMS norms is found by what they do, not by their names: architectures
differ in whether one is added to the weight and in which precision they compute.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from inference import cpu_kernels as kernels
from inference.cpu_jobs import Job

# Between a module and its replacement, on values around 1.
_TOLERANCE = 1e-5


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        weight = weight.clone()  # the model's own may keep a whole file in memory
        self.register_buffer("_weight", weight, persistent=False)
        self._size = weight.numel()
        self._epsilon = np.array([epsilon], np.float32)
        self._constants = (weight.data_ptr(), self._epsilon.ctypes.data, self._size)
        self._job = Job(kernels.NORM_WORDS)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size] to the same, contiguous."""
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        count = rows.numel() // self._size
        words = self.words(count, rows.data_ptr(), output.data_ptr())
        kernels.rms_norm.run(self._job, words, rows.numel())
        return output

    def words(self, rows: int, data: int, output: int) -> tuple[int, ...]:
        """A job's words: from contiguous rows to rows, by their addresses."""
        return (rows, data, output, *self._constants)


def replace(model: nn.Module) -> None:
    """Replace every module that computes an RMS norm."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = equal(child)
            if replacement:
                setattr(parent, name, replacement)


def equal(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that does what `module` does, if any."""
    weights = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(weights) != ["weight"] or weights["weight"].dim() != 1 or epsilon is None:
        return None
    weight = weights["weight"].detach()
    trial = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = module(trial)
        for candidate in (RMSNorm(weight, epsilon), RMSNorm(weight + 1, epsilon)):
            if torch.allclose(candidate(trial), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return candidate
    return None
