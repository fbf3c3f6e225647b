"""RMS norms in one compiled call instead of six operations, on a CPU.

Which of a model's modules are RMS norms is found by what they do, not by their names: architectures
differ in whether one is added to the weight and in which precision they compute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrej_models.cpu.jobs import job_record
from specrej_models.cpu.kernels import NORM, rms_norm

# Between a module and its replacement, on values around 1.
_TOLERANCE = 1e-5


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        weight = weight.clone()  # the model's own may keep a whole file in memory
        self.register_buffer("_weight", weight, persistent=False)
        self.job = {"weight": weight.data_ptr(), "size": weight.numel(), "epsilon": epsilon}

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size] to the same, contiguous."""
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        places = {"input": rows.data_ptr(), "output": output.data_ptr()}
        count = rows.numel() // rows.shape[-1]
        rms_norm.run(job_record(NORM, rows=count, **places, **self.job), rows.numel())
        return output


def replace(model: nn.Module) -> None:
    """Replace every module that computes an RMS norm."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = replacement_of(child)
            if replacement:
                setattr(parent, name, replacement)


def replacement_of(module: nn.Module) -> RMSNorm | None:
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
