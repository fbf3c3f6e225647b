"""One reading of a prompt for all candidates of a session: runs inside vLLM, as a KV connector.

vLLM's prefix cache shares whole blocks that an earlier step has computed. So each candidate would
compute the rest of the prompt, and all of it if they began in one step. Here the first request of a
session reads the prompt; the others wait for it, share its whole blocks through the prefix cache,
and receive a copy of its last, partly filled block. Each computes the prompt's last token only,
from which its first token is drawn, or the tokens that it has already.

The copy is made in the step of the request that receives it, before its forward pass; the source
belongs to a request that is alive in that step. Models whose layers have blocks of several kinds
share whole blocks only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from generator_service.stock.vllm_draw import PROMPT_TOKENS, SESSION


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks to copy before the forward pass of a step."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class SharedPrompts(KVConnectorBase_V1):  # type: ignore[misc]
    """Copies the last block of a session's prompt from the request that has read it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        # Tokens per block; 0: there are several groups of layers.
        self._block_tokens = groups[0].kv_cache_spec.block_size if len(groups) == 1 else 0
        self._readers: dict[str, Any] = {}  # the request that reads the prompt, by session
        self._copies = Copies()
        self._caches: list[Tensor] = []  # of each layer, the blocks first

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the prompt, beyond whole blocks, that can be copied; None: not read yet."""
        reader = self._readers.setdefault(_session(request), request)
        if reader is request or not self._block_tokens:
            return 0, False
        common = _common(request)
        if reader.num_computed_tokens < common:
            return None, False
        return max(0, common - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        reader = self._readers[_session(request)]
        common = _common(request)
        first = (common - num_external_tokens) // self._block_tokens
        past = -(-common // self._block_tokens)
        manager = self._kv_cache_manager
        self._copies.sources += manager.get_block_ids(reader.request_id)[0][first:past]
        self._copies.targets += blocks.get_block_ids()[0][first:past]

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        copies, self._copies = self._copies, Copies()
        return copies

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Its blocks are free: another request of the session reads the prompt, if any waits."""
        session = _session(request)
        if self._readers.get(session) is request:
            del self._readers[session]
        return False, None

    # In each worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        num_blocks = self._kv_cache_config.num_blocks
        for cache in kv_caches.values():
            self._caches.append(cache.movedim(tuple(cache.shape).index(num_blocks), 0))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        if not copies.sources:
            return
        device = self._caches[0].device
        sources, targets = (
            torch.tensor(blocks).to(device, non_blocking=True)
            for blocks in (copies.sources, copies.targets)
        )
        for cache in self._caches:
            cache[targets] = cache[sources]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Copies are made at once."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Nothing is stored elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is stored elsewhere."""


def _session(request: Any) -> str:
    return str(_arguments(request).get(SESSION, request.request_id))


def _common(request: Any) -> int:
    """Tokens to share: the prompt's, but not the last token of the request."""
    return int(min(_arguments(request)[PROMPT_TOKENS], request.num_tokens - 1))


def _arguments(request: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = request.sampling_params.extra_args or {}
    return arguments
