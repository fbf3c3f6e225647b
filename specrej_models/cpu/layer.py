"""Decoder layers of the Llama kind in one call, on a CPU.

With few rows, transformers' layers spend more time between operations than in them. A layer made of
the usual parts (two RMS norms, attention with rotary embedding, a gated SiLU network: Llama,
Mistral, Qwen2 and many more) is replaced, if what takes its place gives the same result on a trial;
any other layer stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specrej_models import norm
from specrej_models.attention import PrefillSegment, Scaling
from specrej_models.cpu.attention import attention
from specrej_models.cpu.jobs import JobRecord, Program, job_record
from specrej_models.cpu.kernels import NORM, ROTATE, rms_norm, rotate
from specrej_models.cpu.layout import ATTENTION, CPUAttention
from specrej_models.cpu.product import MAX_COMPACT_ROWS, PRODUCT, product
from specrej_models.kv import KVShape, PromptKV
from specrej_models.linear import joined
from specrej_models.norm import RMSNorm

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_TRIAL_ROWS = 5
_TOLERANCE = 1e-4

# The jobs of a layer, in their order.
_NORM_IN, _QKV, _ROTATE, _ATTENTION, _O, _NORM_OUT, _GATE_UP, _DOWN, _END = range(9)
_KERNELS = (rms_norm, product, rotate, attention, product, rms_norm, product, product)
_JOB_WORDS = max(kind.itemsize for kind in (NORM, PRODUCT, ROTATE, ATTENTION)) // 8


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Features per row: of the residual stream, and within attention and network."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int


class CPULayer(nn.Module):
    """A layer's weights and the parts of its job records that do not change."""

    def __init__(
        self, layer: Any, norms: tuple[RMSNorm, RMSNorm], shape: KVShape, scaled: Scaling
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.number: int = attention.layer_idx
        self.scaled = scaled
        self.sizes = _Sizes(
            hidden=attention.q_proj.in_features,
            heads=attention.q_proj.out_features // shape.head_dim,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            intermediate=mlp.gate_proj.out_features,
        )
        self._norm_in, self._norm_out = norms
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj, gates=True)
        self._down = joined(mlp.down_proj)
        products = (self._qkv, self._o, self._gate_up, self._down)
        self.work = sum(p.in_features * p.out_features for p in products)  # of a row

    def job_records(self, rows: int) -> JobRecord:
        """Its jobs' constants for as many rows, [_END, _JOB_WORDS]; the number of rows is 0."""
        jobs = np.zeros((_END, _JOB_WORDS), np.int64)
        for place, normed in ((_NORM_IN, self._norm_in), (_NORM_OUT, self._norm_out)):
            jobs[place] = job_record(NORM, _JOB_WORDS, **normed.job)
        for place, layer in ((_QKV, self._qkv), (_GATE_UP, self._gate_up)):
            jobs[place] = job_record(PRODUCT, _JOB_WORDS, **(layer.job(rows) | {"rows": 0}))
        for place, layer in ((_O, self._o), (_DOWN, self._down)):
            jobs[place] = job_record(PRODUCT, _JOB_WORDS, **(layer.job(rows) | {"rows": 0}), adds=1)
        return jobs


class CPULayers(nn.Module):
    """Takes the place of consecutive layers in their model's forward pass."""

    def __init__(self, layers: Sequence[CPULayer]) -> None:
        """`layers`: at least one, of equal sizes."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._sizes = layers[0].sizes
        self._places = [(layer.number, layer.scaled) for layer in layers]
        self._work = sum(layer.work for layer in layers)
        self._program = Program(_KERNELS * len(layers), _JOB_WORDS)
        self._records = self._program.records.reshape(len(layers), _END, _JOB_WORDS)
        self._constants = [
            np.stack([layer.job_records(rows) for layer in layers])
            for rows in (MAX_COMPACT_ROWS, MAX_COMPACT_ROWS + 1)
        ]
        self._alike: dict[Scaling, list[int]] = {}
        for place, (_, scaled) in enumerate(self._places):
            self._alike.setdefault(scaled, []).append(place)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        decoder: CPUAttention,
        **_: Any,
    ) -> Tensor:
        """[1, R, hidden] to the same, in place."""
        sizes, rows = self._sizes, hidden_states[0]
        count, all_heads = len(rows), sizes.heads + 2 * sizes.kv_heads
        # What all layers write to, one after the other.
        normed, gated = torch.empty_like(rows), rows.new_empty(count, sizes.intermediate)
        joint = rows.new_empty(count, all_heads, sizes.dim)
        mixed = rows.new_empty(count, sizes.heads, sizes.dim)
        by_head = joint.transpose(0, 1)
        q, k, v = torch.split(by_head, [sizes.heads, sizes.kv_heads, sizes.kv_heads])
        cosines, sines = position_embeddings
        jobs = np.zeros((_END, _JOB_WORDS), np.int64)
        for place, kind, source, target in (
            (_NORM_IN, NORM, rows, normed),
            (_QKV, PRODUCT, normed, joint),
            (_O, PRODUCT, mixed, rows),
            (_NORM_OUT, NORM, rows, normed),
            (_GATE_UP, PRODUCT, normed, gated),
            (_DOWN, PRODUCT, gated, rows),
        ):
            places = {"input": source.data_ptr(), "output": target.data_ptr()}
            jobs[place] = job_record(kind, _JOB_WORDS, rows=count, **places)
        jobs[_ROTATE] = job_record(
            ROTATE,
            _JOB_WORDS,
            rows=count,
            input=joint.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            columns=all_heads * sizes.dim,
            heads=sizes.heads + sizes.kv_heads,
            dim=sizes.dim,
        )
        np.add(self._constants[count > MAX_COMPACT_ROWS], jobs, out=self._records)
        for scaled, places_alike in self._alike.items():
            numbers = [self._places[place][0] for place in places_alike]
            table = decoder.jobs(numbers, (q, k, v), mixed, scaled).view(np.int64)
            self._records[places_alike, _ATTENTION, : ATTENTION.itemsize // 8] = table.reshape(
                len(numbers), -1
            )
        self._program.run(self._work * count)
        return hidden_states


def replace(model: nn.Module, shape: KVShape, context_tokens: int) -> None:
    """Replace every layer that a `CPULayer` can stand in for; all of them by one, if possible."""
    base: Any = model
    decoder = base.get_decoder()
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    # Over the whole context: Ministral 3 scales the queries of late positions.
    positions = torch.linspace(0, context_tokens - 1, _TRIAL_ROWS).long()[None]
    candidates = [_replacement_of(layer, rotary, positions, shape) for layer in layers]
    replacements = [layer for layer in candidates if layer]
    if len(replacements) == len(layers) and len({layer.sizes for layer in replacements}) == 1:
        decoder.layers = nn.ModuleList([CPULayers(replacements)])
        return
    # One by one: models count their layers.
    for number, replacement in enumerate(candidates):
        if replacement:
            layers[number] = CPULayers([replacement])


def _replacement_of(
    layer: Any, rotary: nn.Module, positions: Tensor, shape: KVShape
) -> CPULayer | None:
    """A layer that does what `layer` does on random rows of these positions, if there is one."""
    for name, parts in _PARTS.items():
        part = getattr(layer, name, None) if name else layer
        if part is None or {child for child, _ in part.named_children()} != parts:
            return None
    norms = (
        norm.replacement_of(layer.input_layernorm),
        norm.replacement_of(layer.post_attention_layernorm),
    )
    if not norms[0] or not norms[1]:
        return None
    hidden = layer.input_layernorm.weight.numel()
    rows = torch.randn(1, _TRIAL_ROWS, hidden, generator=torch.Generator().manual_seed(0))
    seen: dict[int, Scaling] = {}
    with torch.inference_mode():
        cos_sin = rotary(rows, positions)
        if cos_sin[0].shape[-1] != shape.head_dim:  # only a part of each head is rotated
            return None
        expected = layer(rows, **_trial(cos_sin, shape), position_ids=positions, seen=seen)
        if not seen:  # its attention is not ours
            return None
        candidate = CPULayer(layer, (norms[0], norms[1]), shape, *seen.values())
        options = _trial(cos_sin, shape)
        options["decoder"] = CPUAttention(shape, candidate.sizes.heads, options["segments"])
        actual = CPULayers([candidate])(rows.clone(), **options)
    # transformers' layers return tensors or tuples that begin with one, depending on the version.
    expected = expected[0] if isinstance(expected, tuple) else expected
    close = torch.allclose(actual, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    return candidate if close else None


def _trial(cos_sin: tuple[Tensor, Tensor], shape: KVShape) -> dict[str, Any]:
    prompt = PromptKV(shape, _TRIAL_ROWS)
    return {
        "position_embeddings": cos_sin,
        "segments": [PrefillSegment((prompt,), 0, 0, _TRIAL_ROWS)],
        "attention_mask": None,
    }
