"""Sequence classifiers: Bradley-Terry models, and regression heads with several labels.

The score is the head's output at the end of the conversation, one label's logit. The head is the
linear layer `score`, or one in a file of its own. An unfinished text is scored as if it ended
there: these models were trained on whole conversations, and their reward is read at the tokens that
close the last turn.

On CPUs they run on the own network. On CUDA they run on vLLM's pooling, if it reads the head and is
installed: its prefix cache keeps beginnings that texts share, in whole blocks while there is room,
and sessions keep nothing. Of vLLM, public interfaces only.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from reward_service.checkpoint import load_model
from reward_service.conversation import Conversation, Turns, load_conversation
from reward_service.kinds.causal import CausalReward, num_read
from reward_service.reward import Reward, RewardLost, Task, Text, distinct, text_task
from reward_service.specs import ClassifierSpec, Resources
from specrej import fingerprint
from specrej.contracts import Candidate, Prompt
from specrej_models.probe import check_tensors, load_config, one_sentence, weights_of
from specrej_models.sizes import ModelSizes
from specrej_models.vllm_options import BLOCK_TOKENS, end_children_with_us, prepare_environment

log = logging.getLogger(__name__)

# The tensor in the file of a head, [hidden].
HEAD_TENSOR = "head"

_MAX_TEXTS = 256

# vLLM divides a call into passes itself. On CPUs a call is one, for the heartbeat.
_PASSES_PER_CALL = {"cpu": 1, "cuda": 32}

# vLLM keeps one block, of at most so many tokens, to itself.
_SPARE_TOKENS = 256


def load_classifier(spec: ClassifierSpec, resources: Resources) -> Reward:
    """A decoder-only model with a head: the checkpoint's, or one in a file of its own.

    Raises:
        ValueError: the directory does not hold such a model, or not one for the spec's engine; the
            message says why.
    """
    if spec.engine == "own" or (spec.engine == "auto" and resources.device == "cpu"):
        return _load_own(spec, resources)
    if not (reason := _refusal(spec)):
        return _load_on_vllm(spec, resources)
    if spec.engine == "vllm":
        raise ValueError(f"{spec.directory}: {reason}")
    log.warning("reward %s does not run on vLLM: %s", spec.name, reason)
    return _load_own(spec, resources)


def _refusal(spec: ClassifierSpec) -> str:
    """Why vLLM does not compute a classifier; empty if it does."""
    if find_spec("vllm") is None:
        return "vLLM is not installed: pip install 'specrej-server[models,vllm]'"
    if spec.head_file:
        return "vLLM does not read head_file"
    heads: set[str] = set()
    for path in weights_of(spec.directory):
        with one_sentence(str(path)), safe_open(path, framework="pt") as tensors:
            heads |= {name for name in tensors.keys() if name.startswith("score.")}  # noqa: SIM118
    others = sorted(heads - {"score.weight"})
    return f"vLLM reads score.weight alone, not {others[0]}" if others else ""


def _load_own(spec: ClassifierSpec, resources: Resources) -> CausalReward:
    spec = spec.model_copy(update={"engine": "own"})  # for the fingerprint
    if not spec.head_file:
        whole: Any = load_model(spec, resources, AutoModelForSequenceClassification)
        if not hasattr(whole, "score"):
            raise ValueError(f"{spec.directory}: must be decoder-only: its head is not score")
        _check_label(spec, whole.config)
        pad_id = whole.config.get_text_config().pad_token_id
        return CausalReward(spec, resources, whole.base_model, whole.score.weight, pad_id)
    model = load_model(spec, resources, spare=("score.",))
    with one_sentence(str(spec.head_file)):
        head = load_file(spec.head_file, resources.device)[HEAD_TENSOR].reshape(1, -1)
    num_inputs, hidden = head.shape[1], model.config.get_text_config().hidden_size
    if num_inputs != hidden:
        reason = f"the head has {num_inputs} inputs, the backbone {hidden}"
        raise ValueError(f"{spec.head_file}: {reason}")
    digest = fingerprint.of_file(spec.head_file)
    # It was fitted to the last token, of whatever kind.
    return CausalReward(spec, resources, model, head, None, digest)


def _check_label(spec: ClassifierSpec, config: Any) -> None:
    """Raises ValueError unless the label is there, or there is one and none is named."""
    if (spec.label or 0) >= config.num_labels or (spec.label is None and config.num_labels > 1):
        has = f"has {config.num_labels} labels, label must be the index of one"
        raise ValueError(f"{spec.directory}: {has}")


class VLLMClassifier(Reward):
    """A label's logit of a decoder-only sequence classifier.

    llm: an `AsyncLLMEngine`; raw: the `PoolingParams` of untouched logits.
    """

    description = "A reward model's logit for the response as the assistant's turn, by vLLM."

    def __init__(
        self,
        spec: ClassifierSpec,
        resources: Resources,
        llm: Any,
        raw: Any,
        conversation: Conversation,
        pad_id: int | None,
    ) -> None:
        self.name = spec.name
        device, _, _ = resources.device.partition(":")
        self.token_budget = resources.token_budget * _PASSES_PER_CALL[device]
        reads = {"images": "read"} if spec.images == "read" else {}
        self.fingerprint = spec.fingerprint(resources, padding=str(pad_id), **reads)
        self._label = spec.label or 0
        self._conversation = conversation
        self._pad_id = pad_id
        self._llm = llm
        self._raw = raw
        # Used by the reward's thread alone, and running only during `compute`.
        self._runner = asyncio.Runner()
        self._request_ids = map(str, itertools.count(1))

    def open(self, prompt: Prompt, *, once: bool = False) -> Turns:
        if not prompt.images:
            return Turns(self._conversation, prompt)
        # Here, as vLLM is installed where images are read.
        from specrej_models.vllm_images import PromptImages

        images = PromptImages(self._llm, prompt.images)

        def count(token_ids: Sequence[int]) -> int:
            return len(self._runner.run(images.counted(token_ids)))

        return Turns(self._conversation, prompt, count, images)

    def begin(self, session: Turns, candidates: Sequence[Candidate]) -> Task:
        """A task of the batch's different texts."""
        tokenized = session.tokenize([self._conversation.response(c) for c in candidates])
        texts = [tokens.token_ids for tokens in tokenized]
        unique, where = distinct([tuple(ids[: num_read(ids, self._pad_id)]) for ids in texts])
        texts_of_task = [Text(token_ids, session.images) for token_ids in unique]
        return text_task(texts_of_task, where, lambda all_: [one[self._label] for one in all_])

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
        prompt: Any = {"prompt_token_ids": list(text.token_ids)}
        if text.images:
            prompt = await text.images.rendered(text.token_ids)
        async for answer in self._llm.encode(prompt, self._raw, next(self._request_ids)):
            text.result = answer.outputs.data.tolist()
            text.num_computed = len(answer.prompt_token_ids) - answer.num_cached_tokens


def _load_on_vllm(spec: ClassifierSpec, resources: Resources) -> VLLMClassifier:
    """A vLLM of a sequence classifier's directory; the spec's vllm_options override all else."""
    spec = spec.model_copy(update={"engine": "vllm"})  # for the fingerprint
    config = load_config(spec.directory)
    check_tensors(spec.directory, reads_quantized=True)
    conversation = load_conversation(spec, config)
    text_config = config.get_text_config()
    _check_label(spec, config)
    if longest := spec.vllm_options.get("max_model_len"):
        conversation.max_tokens = min(conversation.max_tokens, int(longest))
    arguments: dict[str, Any] = {
        "model": str(spec.directory),
        "runner": "pooling",
        "max_model_len": conversation.max_tokens,
        "max_num_seqs": _MAX_TEXTS,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": not hasattr(config, "vision_config"),  # a processor needs it
        "disable_log_stats": True,
    }
    device, _, number = resources.device.partition(":")
    if number:
        arguments["device_ids"] = [int(number)]
    # As on the own network, the service's setting sizes what is kept, and other models may share
    # the device: vLLM would take most of it, or require most of it to be free.
    kept = max(resources.kept_tokens, conversation.max_tokens) + _SPARE_TOKENS
    slot_bytes = ModelSizes.of(text_config).slot_bytes(4 if device == "cpu" else 2)
    if "gpu_memory_utilization" not in spec.vllm_options:
        arguments |= {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": kept * slot_bytes}
    if device == "cpu":
        arguments |= {"dtype": "float32", "block_size": BLOCK_TOKENS["cpu"]}
    end_children_with_us()
    prepare_environment(resources.threads)
    # Here, as it has an environment of its own, and reads the variables when it is imported.
    from vllm import AsyncEngineArgs, AsyncLLMEngine, PoolingParams

    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments | spec.vllm_options))
    if spec.images == "read":
        from specrej_models.vllm_images import takes_images

        if not (conversation.takes_images and takes_images(llm)):
            llm.shutdown()
            raise ValueError(f"{spec.directory}: the model, or its chat template, has no images")
    raw = PoolingParams(task="classify", use_activation=False)
    return VLLMClassifier(spec, resources, llm, raw, conversation, text_config.pad_token_id)
