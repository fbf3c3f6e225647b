"""Sequence classifiers on vLLM's pooling runner, for models that one device cannot hold.

Texts are written and tokenized as for classifier.py, and scored at the same token. vLLM's prefix
cache keeps beginnings that texts share, such as the prompt, in whole blocks while there is room;
sessions keep nothing. Needs vLLM's own environment (docs/vllm.md); uses its public interfaces only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig

from reward_service.checkpoint import load_head
from reward_service.conversation import Conversation, Turns, load_conversation, single_token
from reward_service.kinds.classifier import check_labels, num_read, weighted
from reward_service.reward import Reward, RewardLost, Task, Text, distinct, text_task
from reward_service.specs import Resources, VLLMClassifierSpec
from specrej.contracts import Candidate, Prompt
from specrej_models.probe import check_tensors
from specrej_models.sizes import ModelSizes
from specrej_models.vllm_options import BLOCK_TOKENS, end_children_with_us, prepare_environment

_MAX_TEXTS = 256


class VLLMClassifier(Reward):
    """Weighted logits of a decoder-only sequence classifier, transformed.

    llm: an `AsyncLLMEngine`; raw: the `PoolingParams` of untouched logits.
    """

    description = "A reward model's logit for the response as the assistant's turn, by vLLM."

    def __init__(
        self,
        spec: VLLMClassifierSpec,
        resources: Resources,
        llm: Any,
        raw: Any,
        conversation: Conversation,
        pad_id: int | None,
    ) -> None:
        self.name = spec.name
        self.token_budget = resources.token_budget
        self.fingerprint = spec.fingerprint(resources, padding=str(pad_id))
        self.probe = conversation.probe
        self._spec = spec
        self._conversation = conversation
        self._pad_id = pad_id
        self._llm = llm
        self._raw = raw
        # Used by the reward's thread alone, and running only during `compute`.
        self._runner = asyncio.Runner()
        self._request_ids = map(str, itertools.count(1))

    def open(self, prompt: Prompt, *, once: bool = False) -> Turns:
        """Raises InvalidRequest: the model cannot take this prompt."""
        return Turns(self._conversation, prompt)

    def begin(self, session: Turns, candidates: Sequence[Candidate]) -> Task:
        """A task of the batch's different texts."""
        tokenized = session.tokenize([self._conversation.turn(c) for c in candidates])
        texts = [tokens.token_ids for tokens in tokenized]
        unique, where = distinct([tuple(ids[: num_read(ids, self._pad_id)]) for ids in texts])

        def to_scores(logits: list[list[float]]) -> list[float]:
            return [weighted(self._spec, of_text) for of_text in logits]

        return text_task([Text(token_ids) for token_ids in unique], where, to_scores)

    def compute(self, pieces: Sequence[Text]) -> None:
        """All at once: vLLM makes its own batches of them."""
        self._runner.run(self._compute(pieces))

    def close(self) -> None:
        """End vLLM's processes, which otherwise end with this one."""
        self._llm.shutdown()
        self._runner.close()  # cancels what vLLM leaves in its loop

    async def _compute(self, pieces: Sequence[Text]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for piece in pieces:
                    group.create_task(self._read(piece))
        except ExceptionGroup as failed:
            if self._llm.errored:
                raise RewardLost("vLLM has ended") from failed
            raise failed.exceptions[0] from None

    async def _read(self, text: Text) -> None:
        prompt = {"prompt_token_ids": list(text.token_ids)}
        async for answer in self._llm.encode(prompt, self._raw, next(self._request_ids)):
            text.result = answer.outputs.data.tolist()
            text.num_computed = len(text.token_ids) - answer.num_cached_tokens


def load_vllm_classifier(spec: VLLMClassifierSpec, resources: Resources) -> VLLMClassifier:
    """A vLLM of a sequence classifier's directory; the spec's vllm_options override all else.

    Raises:
        ValueError: it has another number of labels, or a head that vLLM does not read.
    """
    config = AutoConfig.from_pretrained(
        spec.directory, local_files_only=True, trust_remote_code=spec.trust_remote_code
    )
    check_tensors(spec.directory, reads_quantized=True)
    conversation = load_conversation(spec, config)
    text_config = config.get_text_config()
    if spec.logit_of is None:
        check_labels(spec, config.num_labels)
        if others := load_head(spec.directory, "score").keys() - {"weight"}:
            reason = f"vLLM reads score.weight alone, not score.{min(others)}: use kind classifier"
            raise ValueError(f"{spec.directory}: {reason}")
    elif getattr(text_config, "final_logit_softcapping", None):
        raise ValueError(f"{spec.directory}: vLLM does not bound logit_of: use kind classifier")
    if longest := spec.vllm_options.get("max_model_len"):
        conversation.max_tokens = min(conversation.max_tokens, int(longest))
    arguments: dict[str, Any] = {
        "model": str(spec.directory),
        "runner": "pooling",
        "max_model_len": conversation.max_tokens,
        "max_num_seqs": _MAX_TEXTS,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "trust_remote_code": spec.trust_remote_code,
    }
    if spec.logit_of is not None:
        token = single_token(conversation.tokenizer, spec.logit_of, "logit_of")
        arguments["hf_overrides"] = {
            "architectures": [
                name.replace("ForCausalLM", "ForSequenceClassification")
                for name in config.architectures
            ],
            "classifier_from_token": [conversation.tokenizer.convert_ids_to_tokens(token)],
            "method": "no_post_processing",
            "num_labels": 1,
        }
    _, _, number = resources.device.partition(":")
    if number:
        arguments["device_ids"] = [int(number)]
    if resources.device == "cpu":
        block = BLOCK_TOKENS["cpu"]
        sizes = ModelSizes.of(text_config)
        kept = max(resources.kept_tokens, 2 * conversation.max_tokens) + block
        arguments |= {"dtype": "float32", "block_size": block}
        arguments["kv_cache_memory_bytes"] = kept * sizes.slot_bytes(4)
    end_children_with_us()
    prepare_environment(resources.threads)
    # Here, as it has an environment of its own, and reads the variables when it is imported.
    from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams

    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments | spec.vllm_options))
    raw = PoolingParams(task="classify", use_activation=False)
    reads_last = conversation.appended or spec.logit_of is not None
    pad_id = None if reads_last else text_config.pad_token_id
    return VLLMClassifier(spec, resources, llm, raw, conversation, pad_id)
