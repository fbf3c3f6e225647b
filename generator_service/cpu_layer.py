"""A decoder layer of the Llama kind in a few calls, on a CPU.

With few rows, transformers' layers spend more time between operations than in them. A layer made of
the usual parts (two RMS norms, attention with rotary embedding, a gated SiLU network: Llama,
Mistral, Qwen2 and many more) is replaced, if what takes its place gives the same result on a trial;
any other layer stays transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from generator_service import cpu_kernels as kernels
from generator_service import norm
from generator_service.attention import (
    Decoder,
    PrefillSegment,
    Scaling,
    Segment,
    attend_rows,
)
from generator_service.cpu_jobs import Job
from generator_service.kv import KVShape, PromptKV
from generator_service.linear import joined
from generator_service.norm import RMSNorm

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_TRIAL_ROWS = 5
_TOLERANCE = 1e-4


class CPULayer(nn.Module):
    """Takes a transformers layer's place in its model's forward pass."""

    def __init__(
        self, layer: Any, norms: tuple[RMSNorm, RMSNorm], shape: KVShape, scaled: Scaling
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._layer: int = attention.layer_idx
        self._scaled = scaled
        self._kv_heads, self._dim = shape.kv_heads, shape.head_dim
        self._heads = attention.q_proj.out_features // self._dim
        self._size: int = mlp.gate_proj.out_features
        self._norm_in, self._norm_out = norms
        self._qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._o = joined(attention.o_proj)
        self._gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self._down = joined(mlp.down_proj)
        self._rotate_job = Job(kernels.ROTATE_WORDS)
        self._gate_job = Job(kernels.GATE_WORDS)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        segments: list[Segment],
        decoder: Decoder | None = None,
        **_: Any,
    ) -> Tensor:
        """[1, R, hidden] to the same, in place."""
        rows = hidden_states[0]
        qkv = self._qkv(self._norm_in(rows))
        self._rotate(qkv, position_embeddings)
        heads = qkv.view(len(rows), -1, self._dim).transpose(0, 1)
        q, k, v = torch.split(heads, [self._heads, self._kv_heads, self._kv_heads])
        mixed = attend_rows(self._layer, (q, k, v), segments, self._scaled, decoder)
        self._o.add_to(rows, mixed.view(len(rows), -1))
        self._down.add_to(rows, self._gated(self._gate_up(self._norm_out(rows))))
        return hidden_states

    def _rotate(self, qkv: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> None:
        """Turn queries and keys by their positions, in place."""
        cosines, sines = position_embeddings
        rows, stride = qkv.shape
        words = (
            rows,
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            stride,
            self._heads + self._kv_heads,
            self._dim,
        )
        kernels.rotate.run(self._rotate_job, words, qkv.numel())

    def _gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, [R, size]."""
        output = gate_up.new_empty(len(gate_up), self._size)
        words = (len(gate_up), gate_up.data_ptr(), output.data_ptr(), self._size)
        kernels.gated_silu.run(self._gate_job, words, 16 * output.numel())
        return output


def replace(model: nn.Module, shape: KVShape) -> None:
    """Replace every layer that a `CPULayer` can stand in for."""
    base: Any = model
    decoder = base.get_decoder()
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    for number, layer in enumerate(layers):
        replacement = _equal(layer, rotary, shape)
        if replacement:
            layers[number] = replacement


def _equal(layer: Any, rotary: nn.Module, shape: KVShape) -> CPULayer | None:
    """A layer that does what `layer` does on a few random rows, if there is one."""
    for name, parts in _PARTS.items():
        part = getattr(layer, name, None) if name else layer
        if part is None or {child for child, _ in part.named_children()} != parts:
            return None
    norms = norm.equal(layer.input_layernorm), norm.equal(layer.post_attention_layernorm)
    if not norms[0] or not norms[1]:
        return None
    hidden = layer.input_layernorm.weight.numel()
    rows = torch.randn(1, _TRIAL_ROWS, hidden, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(_TRIAL_ROWS)[None]
    seen: list[Scaling] = []
    with torch.inference_mode():
        turns = rotary(rows, positions)
        if turns[0].shape[-1] != shape.head_dim:  # only a part of each head is rotated
            return None
        expected = layer(rows, **_trial(turns, shape), seen=seen)
        if not seen:  # its attention is not ours
            return None
        candidate = CPULayer(layer, (norms[0], norms[1]), shape, seen[0])
        found = candidate(rows.clone(), **_trial(turns, shape))
    # transformers' layers return tensors or tuples that begin with one, depending on the version.
    expected = expected[0] if isinstance(expected, tuple) else expected
    close = torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    return candidate if close else None


def _trial(turns: tuple[Tensor, Tensor], shape: KVShape) -> dict[str, Any]:
    prompt = PromptKV(shape, _TRIAL_ROWS)
    return {
        "position_embeddings": turns,
        "segments": [PrefillSegment((prompt,), 0, 0, _TRIAL_ROWS)],
        "attention_mask": None,
    }
