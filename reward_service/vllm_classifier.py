"""Sequence classifiers on vLLM's pooling runner: for models that one device cannot hold.

Texts are written and tokenised as for the own classifiers (classifier.py), and scored at their last
token. What texts have in common, a prompt or what was scored in an earlier round, vLLM finds in its
prefix cache in whole blocks, for as long as there is room; nothing is kept for a session by name.
Needs vLLM's own environment (docs/vllm.md); public interfaces of it only.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from reward_service.batching import distinct
from reward_service.causal_reward import Options
from reward_service.classifier import Transform
from reward_service.conversation import Conversation, Turns
from specrej.contracts import Candidate, FinishReason, Prompt, Scores

# Tokens of a block: on CPUs the fewest that vLLM's kernels like.
_CPU_BLOCK_TOKENS = 32

_MAX_TEXTS = 256


@dataclass(eq=False, slots=True)
class Text:
    """One text, and what the head says at its last token once that is computed."""

    token_ids: Sequence[int]
    logits: Sequence[float] = ()
    num_computed: int = 0


@dataclass(eq=False, slots=True)
class _Task:
    """A batch on its way; `where`: the place of each candidate's text among those computed."""

    texts: Sequence[Text]
    where: Sequence[int]
    reward: VLLMClassifier
    _taken: int = field(default=0, init=False)

    @property
    def next_tokens(self) -> int:
        left = self._taken < len(self.texts)
        return len(self.texts[self._taken].token_ids) if left else 0

    def take(self) -> Text:
        self._taken += 1
        return self.texts[self._taken - 1]

    def scores(self) -> Scores:
        values = [self.reward.value(text.logits) for text in self.texts]
        computed = sum(text.num_computed for text in self.texts)
        return Scores(tuple(values[place] for place in self.where), computed)


class _Session:
    """One prompt."""

    def __init__(self, reward: VLLMClassifier, turns: Turns) -> None:
        self._reward = reward
        self._turns = turns

    def begin(self, candidates: Sequence[Candidate]) -> _Task:
        closed = [self._reward.closes(candidate) for candidate in candidates]
        tokenized = self._turns.tokenize([candidate.text for candidate in candidates], closed)
        unique, where = distinct([tuple(each.token_ids) for each in tokenized])
        return _Task([Text(token_ids) for token_ids in unique], where, self._reward)

    def close(self) -> None:
        """There is nothing that is the session's own."""


class VLLMClassifier:
    """Weighted logits of a decoder-only sequence classifier, transformed.

    llm: an `AsyncLLMEngine`; raw: the `PoolingParams` of untouched logits.
    """

    description = "A reward model's logit for the response as the assistant's turn, by vLLM."

    def __init__(
        self,
        options: Options,
        llm: Any,
        raw: Any,
        conversation: Conversation,
        *,
        label_weights: Sequence[float],
        transform: Transform,
        vllm_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`vllm_options`: what `llm` was told beside the usual; some of it changes scores."""
        self.name = options.name
        self.token_budget = options.token_budget
        told = {"options": sorted(vllm_options.items())} if vllm_options else {}
        self.fingerprint = options.fingerprint(
            kind="vllm-classifier", labels=tuple(label_weights), transform=transform, **told
        )
        self._conversation = conversation
        self._closes_unfinished = options.unfinished == "closed"
        self._llm = llm
        self._raw = raw
        # That of the reward's thread, in which alone it runs, while there is something to compute.
        self._loop = asyncio.new_event_loop()
        self._names = itertools.count(1)
        self._label_weights = label_weights
        self._transform = transform

    def open(self, prompt: Prompt, *, once: bool = False) -> _Session:
        """Raises InvalidRequest: the model cannot take this prompt."""
        return _Session(self, self._conversation.turns(prompt))

    def compute(self, pieces: Sequence[Text]) -> None:
        """All at once: vLLM makes its own batches of them."""
        self._loop.run_until_complete(self._compute(pieces))

    def close(self) -> None:
        """End vLLM's processes, which otherwise end with this one."""
        self._llm.shutdown()
        # It leaves its sockets to the loop it ran in; the process could not end with one open.
        self._loop.run_until_complete(_ended())
        self._loop.close()

    async def _compute(self, pieces: Sequence[Text]) -> None:
        async with asyncio.TaskGroup() as group:
            for piece in pieces:
                group.create_task(self._read(piece))

    async def _read(self, text: Text) -> None:
        prompt = {"prompt_token_ids": list(text.token_ids)}
        async for answer in self._llm.encode(prompt, self._raw, f"{next(self._names)}"):
            text.logits = answer.outputs.data.tolist()
            text.num_computed = len(text.token_ids) - answer.num_cached_tokens

    def value(self, logits: Sequence[float]) -> float:
        pairs = zip(logits, self._label_weights, strict=True)
        return self._transform(math.fsum(logit * weight for logit, weight in pairs))

    def closes(self, candidate: Candidate) -> bool:
        """Whether its text is read as a whole turn: what was cut off did not end its turn."""
        return candidate.finish is FinishReason.STOP or self._closes_unfinished


async def _ended() -> None:
    """Whatever was left to this loop is done, and its tasks are over."""
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def load_vllm_classifier(
    options: Options,
    *,
    label_weights: Sequence[float] = (1.0,),
    transform: Transform | None = None,
    vllm_options: Mapping[str, Any] | None = None,
) -> VLLMClassifier:
    """A vLLM of a sequence classifier's directory; `vllm_options` win over all else.

    Raises:
        ValueError: it has another number of labels.
    """
    config = AutoConfig.from_pretrained(
        options.directory, local_files_only=True, trust_remote_code=options.trust_remote_code
    )
    if config.num_labels != len(label_weights):
        raise ValueError(
            f"{options.directory}: has {config.num_labels} labels, "
            f"label_weights has {len(label_weights)} of them"
        )
    conversation = options.conversation(config)
    if longest := (vllm_options or {}).get("max_model_len"):
        conversation.max_tokens = min(conversation.max_tokens, int(longest))
    told = _arguments(options, config.get_text_config(), conversation.max_tokens)
    _prepare_environment(options.threads)
    # Here, as it has an environment of its own, and reads the variables when it is imported.
    from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams

    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**told | dict(vllm_options or {})))
    return VLLMClassifier(
        options,
        llm,
        PoolingParams(task="classify", use_activation=False),
        conversation,
        label_weights=label_weights,
        transform=transform or Transform(),
        vllm_options=vllm_options,
    )


def _arguments(options: Options, config: Any, max_tokens: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(options.directory),
        "runner": "pooling",
        "max_model_len": max_tokens,
        "max_num_seqs": _MAX_TEXTS,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.device != "cpu":
        return arguments
    kept = max(options.kept_tokens, 2 * max_tokens) + _CPU_BLOCK_TOKENS
    return arguments | {
        "dtype": "float32",
        "block_size": _CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": kept * _slot_bytes(config),
    }


def _slot_bytes(config: Any) -> int:
    """Of one token's keys and values in float32."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size: int = 2 * 4 * config.num_hidden_layers * kv_heads * head_dim
    return size


def _prepare_environment(threads: int) -> None:
    """What vLLM is told by variables only; whoever has set them already knows better."""
    told = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # the service's own logging is there
        # On a CPU, one worker lives in the scheduler's process, which would spin on a core of its
        # own while it waits for another's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # gRPC's threads do not survive a fork
        # What this version stores of compiled code it cannot load again.
        "VLLM_USE_AOT_COMPILE": "0",
    }
    if threads:
        told["OMP_NUM_THREADS"] = str(threads)
    for name, value in told.items():
        os.environ.setdefault(name, value)
