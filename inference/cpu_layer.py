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
from numpy.typing import NDArray
from torch import Tensor, nn

from inference import cpu_kernels as kernels
from inference import norm
from inference.attention import Decoder, PrefillSegment, Scaling, Segment, attend_rows
from inference.cpu_attention import CPUAttention
from inference.cpu_jobs import Program
from inference.cpu_product import FEW, INPUT, OUTPUT, ROWS, product
from inference.cpu_words import JOB_WORDS
from inference.kv import KVShape, PromptKV
from inference.linear import joined
from inference.norm import RMSNorm

_PARTS = {
    "": {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_TRIAL_ROWS = 5
_TOLERANCE = 1e-4

# The jobs of a layer, in their order.
_NORM_IN, _QKV, _ROTATE, _ATTENTION, _O, _NORM_OUT, _GATE_UP, _DOWN, _END = range(9)
_KERNELS = (
    kernels.rms_norm,
    product,
    kernels.rotate,
    kernels.attention,
    product,
    kernels.rms_norm,
    product,
    product,
)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Features per row: of the residual stream, and within attention and network."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int


class CPULayer(nn.Module):
    """A layer's weights and the words of its jobs that do not change."""

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
        self.work = sum(each.in_features * each.out_features for each in products)  # of a row

    def words(self, rows: int) -> NDArray[np.int64]:
        """Its jobs' words that are the same in every pass of so many rows; the others are 0."""
        words = np.zeros((_END, JOB_WORDS), np.int64)
        for job, given in (
            (_NORM_IN, self._norm_in.words(0, 0, 0)),
            (_QKV, self._qkv.words(rows, 0, 0)),
            (_O, self._o.words(rows, 0, 0, adds=True)),
            (_NORM_OUT, self._norm_out.words(0, 0, 0)),
            (_GATE_UP, self._gate_up.words(rows, 0, 0)),
            (_DOWN, self._down.words(rows, 0, 0, adds=True)),
        ):
            _fill(words[job], given)
            words[job, ROWS] = 0
        return words


class CPULayers(nn.Module):
    """Takes the place of consecutive layers in their model's forward pass."""

    def __init__(self, layers: Sequence[CPULayer]) -> None:
        """`layers`: at least one, of equal sizes."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._sizes = layers[0].sizes
        self._places = [(layer.number, layer.scaled) for layer in layers]
        self._work = sum(layer.work for layer in layers)
        self._program = Program(_KERNELS * len(layers), JOB_WORDS)
        self._words = self._program.words.reshape(len(layers), _END, JOB_WORDS)
        self._constants = [
            np.stack([layer.words(rows) for layer in layers]) for rows in (FEW, FEW + 1)
        ]
        self._alike: dict[Scaling, list[int]] = {}
        for place, (_, scaled) in enumerate(self._places):
            self._alike.setdefault(scaled, []).append(place)

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
        pass_ = _Pass(self._sizes, rows, position_embeddings)
        np.add(self._constants[len(rows) > FEW], pass_.words, out=self._words)
        if isinstance(decoder, CPUAttention):
            self._run_whole(pass_, decoder, len(rows))
        else:
            self._run_apart(pass_, segments, decoder, len(rows))
        return hidden_states

    def _run_whole(self, pass_: _Pass, decoder: CPUAttention, rows: int) -> None:
        """All jobs of all layers in one call."""
        for scaled, places in self._alike.items():
            layers = [self._places[place][0] for place in places]
            words = decoder.words(layers, pass_.qkv, pass_.mixed, scaled)
            self._words[places, _ATTENTION] = words
        self._program.run(0, _END * len(self._places), self._work * rows)

    def _run_apart(
        self, pass_: _Pass, segments: list[Segment], decoder: Decoder | None, rows: int
    ) -> None:
        """Layer by layer, with torch's attention between their jobs."""
        work = self._work * rows // len(self._places)
        for place, (layer, scaled) in enumerate(self._places):
            first = _END * place
            self._program.run(first, first + _ATTENTION, work)
            attend_rows(layer, pass_.qkv, segments, scaled, decoder, out=pass_.mixed)
            self._program.run(first + _O, first + _END, work)


class _Pass:
    """What the layers of one forward pass write to, one after the other, and their jobs' words.

    All words but those that differ from layer to layer, which are 0.
    """

    def __init__(self, sizes: _Sizes, rows: Tensor, turns: tuple[Tensor, Tensor]) -> None:
        count = len(rows)
        all_heads = sizes.heads + 2 * sizes.kv_heads
        normed = torch.empty_like(rows)
        joint = rows.new_empty(count, all_heads * sizes.dim)
        gated = rows.new_empty(count, sizes.intermediate)
        self.mixed = rows.new_empty(count, sizes.heads, sizes.dim)
        heads = joint.view(count, -1, sizes.dim).transpose(0, 1)
        q, k, v = torch.split(heads, [sizes.heads, sizes.kv_heads, sizes.kv_heads])
        self.qkv = q, k, v
        self._held = rows, turns, normed, joint, gated
        stream, norm_to, gated_at = rows.data_ptr(), normed.data_ptr(), gated.data_ptr()
        self.words = np.zeros((_END, JOB_WORDS), np.int64)
        for job in (_NORM_IN, _NORM_OUT):
            _fill(self.words[job], (count, stream, norm_to))
        for job, source, target in (
            (_QKV, norm_to, joint.data_ptr()),
            (_O, self.mixed.data_ptr(), stream),
            (_GATE_UP, norm_to, gated_at),
            (_DOWN, gated_at, stream),
        ):
            self.words[job, [ROWS, INPUT, OUTPUT]] = count, source, target
        angles = [turn.data_ptr() for turn in turns]
        turned = sizes.heads + sizes.kv_heads
        rotate = (count, joint.data_ptr(), *angles, joint.shape[1], turned, sizes.dim)
        _fill(self.words[_ROTATE], rotate)


def _fill(words: NDArray[np.int64], values: Sequence[int]) -> None:
    """Set a job's words from the one after its counter on."""
    words[1 : 1 + len(values)] = values


def replace(model: nn.Module, shape: KVShape) -> None:
    """Replace every layer that a `CPULayer` can stand in for; all of them by one, if possible."""
    base: Any = model
    decoder = base.get_decoder()
    rotary, layers = getattr(decoder, "rotary_emb", None), getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or rotary is None:
        return
    found = [_equal(layer, rotary, shape) for layer in layers]
    replacements = [each for each in found if each]
    if len(replacements) == len(layers) and len({each.sizes for each in replacements}) == 1:
        decoder.layers = nn.ModuleList([CPULayers(replacements)])
        return
    # One by one: models count their layers.
    for number, replacement in enumerate(found):
        if replacement:
            layers[number] = CPULayers([replacement])


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
        found = CPULayers([candidate])(rows.clone(), **_trial(turns, shape))
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
