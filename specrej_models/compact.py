"""Finds the form with the fewest bytes that holds weights to the last bit; see `cpu_product`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from specrej_models.cpu.product import BFLOAT16, FLOAT32, GROUP, INT4, INT8

# Divisors by which block formats compute a group's scale, stored as float16: of the range of its
# weights (GGUF's Q4_1, Q5_1), or of the largest weight (Q8_0, Q4_0, Q5_0).
_SCALES_OF_RANGE = (15, 31)
_SCALES_OF_LARGEST = (127, 8, 16)

# Panels that are tried at once: this takes several times their memory.
_AT_ONCE = 8


def compact(panels: Tensor) -> tuple[int, Tensor]:
    """A form, and panels in it; as `FLOAT32`, the same tensor.

    panels: float32 [panels, inputs, PANEL].
    """
    for form, turn in _FORMS.items():
        converted: list[Tensor] = []
        for part in torch.split(panels, _AT_ONCE):
            compacted = turn(part)
            if compacted is None:
                break
            converted.append(compacted)
        else:
            return form, torch.cat(converted)
    return FLOAT32, panels


def _bfloat16(panels: Tensor) -> Tensor | None:
    """int16 [panels, inputs, PANEL], if no weight has anything in its lower half."""
    lower, upper = torch.unflatten(panels.view(torch.int16), -1, (-1, 2)).unbind(-1)
    return None if lower.any() else upper.contiguous()


def _grouped(panels: Tensor, form: int) -> Tensor | None:
    """uint8 [panels, groups, bytes], if there is a scale for each group."""
    if panels.shape[1] % GROUP:
        return None
    groups = torch.unflatten(panels, 1, (-1, GROUP))  # [panels, groups, GROUP, PANEL]
    minima = groups.amin(dim=2, keepdim=True)
    scales = torch.zeros_like(minima)
    counts = torch.zeros_like(groups)
    missing = torch.ones_like(minima, dtype=torch.bool)
    for guess in _scales(groups, minima):
        some = ((groups - minima) / torch.where(guess > 0, guess, 1)).round()
        # Rounded once: a product of 8 bits with float16's 11 is exact.
        equal = (some * guess + minima == groups) & (some < (16 if form == INT4 else 256))
        fits = equal.all(dim=2, keepdim=True) & missing
        scales, counts = torch.where(fits, guess, scales), torch.where(fits, some, counts)
        missing &= ~fits
        if not missing.any():
            break
    else:
        return None
    heads = torch.cat([scales, minima], dim=2).flatten(2).view(torch.uint8)
    whole = counts.to(torch.uint8)
    if form == INT4:
        first, last = whole.chunk(2, dim=2)
        whole = first | last << 4
    return torch.cat([heads, whole.flatten(2)], dim=-1)


def _scales(groups: Tensor, minima: Tensor) -> Iterator[Tensor]:
    """Guesses, [panels, groups, 1, PANEL]."""
    highest = groups.amax(dim=2, keepdim=True)
    largest = torch.maximum(highest, -minima)
    for size, counts in ((highest - minima, _SCALES_OF_RANGE), (largest, _SCALES_OF_LARGEST)):
        for count in counts:
            yield (size / count).half().float()


# The fewest bytes first.
_FORMS: dict[int, Callable[[Tensor], Tensor | None]] = {
    INT4: partial(_grouped, form=INT4),
    INT8: partial(_grouped, form=INT8),
    BFLOAT16: _bfloat16,
}
