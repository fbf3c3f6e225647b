"""All decoder layers of a Llama-like model in one compiled call.

With few rows, transformers' layers spend more time between operations than in them. Layers of the
usual parts (two RMS norms, attention with rotary embedding, a gated SiLU network: Llama, Mistral,
Qwen2 and others) are replaced if the replacement gives the same results on a trial. The layers of
other models stay transformers' own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor, nn

from specrej_models.attention import PrefillSegment
from specrej_models.cpu.attention import ATTENTION, CPUAttention, attention
from specrej_models.cpu.jobs import JobRecord, Kernel, Program, job_record, layout, matrix, vector
from specrej_models.cpu.product import PRODUCT, product
from specrej_models.cpu.tiles import next_share, pointer
from specrej_models.kv import KVShape, PromptKV
from specrej_models.linear import joined

NORM = layout("shares rows input output weight size", "epsilon")
ROTATE = layout("shares rows input cosines sines columns heads dim")

_SHARE_ROWS = 8  # that a thread takes at a time

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_TRIAL_ROWS = 5
_TOLERANCE = 1e-4


def _rms_norm(address: Any) -> None:
    """output = input / sqrt(mean of squares + epsilon) * weight, row by row."""
    job = numba.carray(pointer(address), 1, NORM)[0]
    rows, size = job.rows, job.size
    source, target = matrix(job.input, rows, size), matrix(job.output, rows, size)
    weight, epsilon = vector(job.weight, size), np.float32(job.epsilon)
    first = next_share(address) * _SHARE_ROWS
    while first < rows:
        for row in range(first, min(rows, first + _SHARE_ROWS)):
            squares = np.float32(0)
            for j in range(size):
                squares += source[row, j] * source[row, j]
            factor = np.float32(1 / math.sqrt(squares / np.float32(size) + epsilon))
            for j in range(size):
                target[row, j] = source[row, j] * factor * weight[j]
        first = next_share(address) * _SHARE_ROWS


def _rotate(address: Any) -> None:
    """Rotary position embedding (Su et al. 2021) of the first `heads` heads of each row, in place.

    Halves of a head are rotated against each other, as transformers does.
    """
    job = numba.carray(pointer(address), 1, ROTATE)[0]
    rows, dim, half = job.rows, job.dim, job.dim // 2
    data = matrix(job.input, rows, job.columns)
    cosines, sines = matrix(job.cosines, rows, dim), matrix(job.sines, rows, dim)
    first = next_share(address) * _SHARE_ROWS
    while first < rows:
        for row in range(first, min(rows, first + _SHARE_ROWS)):
            cosine, sine = cosines[row], sines[row]
            for head in range(job.heads):
                low = data[row, head * dim : head * dim + half]
                high = data[row, head * dim + half : (head + 1) * dim]
                for j in range(half):
                    x, y = low[j], high[j]
                    low[j] = x * cosine[j] - y * sine[j]
                    high[j] = y * cosine[half + j] + x * sine[half + j]
        first = next_share(address) * _SHARE_ROWS


_rms_norm_kernel, _rotate_kernel = Kernel(_rms_norm), Kernel(_rotate)

# The jobs of a layer, in their order.
_NORM_IN, _QKV, _ROTATE, _ATTENTION, _O, _NORM_OUT, _GATE_UP, _DOWN, _END = range(9)
_KERNELS = (
    _rms_norm_kernel,
    product,
    _rotate_kernel,
    attention,
    product,
    _rms_norm_kernel,
    product,
    product,
)
_JOB_FIELDS = max(kind.itemsize for kind in (NORM, PRODUCT, ROTATE, ATTENTION)) // 8


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Features per row: of the residual stream, and within attention and network."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int


class _Layer(nn.Module):
    """The weights of one layer."""

    def __init__(self, layer: Any, shape: KVShape, scale: float) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.number: int = attention.layer_idx
        self.scale = scale
        self.sizes = _Sizes(
            hidden=attention.q_proj.in_features,
            heads=attention.q_proj.out_features // shape.head_dim,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            intermediate=mlp.gate_proj.out_features,
        )
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj, gates=True)
        self._down = joined(mlp.down_proj)
        products = (self._qkv, self._o, self._gate_up, self._down)
        self.multiplications_per_row = sum(p.in_features * p.out_features for p in products)
        self._norms: dict[int, dict[str, float]] = {}
        for place, norm in (
            (_NORM_IN, layer.input_layernorm),
            (_NORM_OUT, layer.post_attention_layernorm),
        ):
            # The model's own weight may keep a whole file in memory.
            weight = norm.weight.detach().clone()
            self.register_buffer(f"_norm_{place}", weight, persistent=False)
            epsilon = norm.variance_epsilon
            self._norms[place] = {
                "weight": weight.data_ptr(),
                "size": weight.numel(),
                "epsilon": epsilon,
            }

    def constants(self) -> JobRecord:
        """What does not change in its jobs, [_END, _JOB_FIELDS]."""
        jobs = np.zeros((_END, _JOB_FIELDS), np.int64)
        for place, norm in self._norms.items():
            _fill(jobs[place], NORM, **norm)
        _fill(jobs[_QKV], PRODUCT, **self._qkv.job)
        _fill(jobs[_GATE_UP], PRODUCT, **self._gate_up.job)
        _fill(jobs[_O], PRODUCT, **self._o.job, adds=1)
        _fill(jobs[_DOWN], PRODUCT, **self._down.job, adds=1)
        return jobs


def _fill(job: JobRecord, kind: np.dtype[np.void], **values: Any) -> None:
    record = job_record(kind, **values)
    job[: len(record)] = record


class CPULayers(nn.Module):
    """Takes the place of all layers in their model's forward pass."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        """`layers`: at least one, of equal sizes and scale."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._sizes, self._scale = layers[0].sizes, layers[0].scale
        self._numbers = [layer.number for layer in layers]
        self._multiplications_per_row = sum(layer.multiplications_per_row for layer in layers)
        self._program = Program(_KERNELS * len(layers), _JOB_FIELDS)
        self._records = self._program.records.reshape(len(layers), _END, _JOB_FIELDS)
        self._constants = np.stack([layer.constants() for layer in layers])

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
        jobs = np.zeros((_END, _JOB_FIELDS), np.int64)
        for place, kind, source, target in (
            (_NORM_IN, NORM, rows, normed),
            (_QKV, PRODUCT, normed, joint),
            (_O, PRODUCT, mixed, rows),
            (_NORM_OUT, NORM, rows, normed),
            (_GATE_UP, PRODUCT, normed, gated),
            (_DOWN, PRODUCT, gated, rows),
        ):
            places = {"input": source.data_ptr(), "output": target.data_ptr()}
            _fill(jobs[place], kind, rows=count, **places)
        _fill(
            jobs[_ROTATE],
            ROTATE,
            rows=count,
            input=joint.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            columns=all_heads * sizes.dim,
            heads=sizes.heads + sizes.kv_heads,
            dim=sizes.dim,
        )
        np.add(self._constants, jobs, out=self._records)
        table = decoder.jobs(self._numbers, (q, k, v), mixed, self._scale).view(np.int64)
        fields = table.reshape(len(self._numbers), -1)
        self._records[:, _ATTENTION, : fields.shape[1]] = fields
        self._program.run(self._multiplications_per_row * count)
        return hidden_states


def replace(model: nn.Module, shape: KVShape, context_tokens: int) -> None:
    """Replace a model's layers by one `CPULayers`, if that computes the same."""
    base: Any = model
    decoder = base.get_decoder()
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    # Over the whole context: Ministral 3 scales the queries of late positions.
    positions = torch.linspace(0, context_tokens - 1, _TRIAL_ROWS).long()[None]
    replacements = []
    for layer in layers:
        replacement = _replacement_of(layer, rotary, positions, shape)
        if replacement is None:
            return
        replacements.append(replacement)
    if len({(layer.sizes, layer.scale) for layer in replacements}) == 1:
        decoder.layers = nn.ModuleList([CPULayers(replacements)])


def _replacement_of(
    layer: Any, rotary: nn.Module, positions: Tensor, shape: KVShape
) -> _Layer | None:
    """A layer that does what `layer` does on random rows of these positions, if there is one."""
    for name, parts in _PARTS.items():
        part = getattr(layer, name, None) if name else layer
        if part is None or {child for child, _ in part.named_children()} != parts:
            return None
    if not hasattr(layer.input_layernorm, "variance_epsilon"):
        return None
    hidden = layer.input_layernorm.weight.numel()
    rows = torch.randn(1, _TRIAL_ROWS, hidden, generator=torch.Generator().manual_seed(0))
    seen: dict[int, float] = {}
    with torch.inference_mode():
        cos_sin = rotary(rows, positions)
        if cos_sin[0].shape[-1] != shape.head_dim:  # only a part of each head is rotated
            return None
        expected = layer(rows, **_trial(cos_sin, shape), position_ids=positions, seen=seen)
        if not seen:  # its attention is not ours
            return None
        candidate = _Layer(layer, shape, *seen.values())
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
