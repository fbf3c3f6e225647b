"""All kinds of generators by name, with the properties that tests depend on."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from generator_service.engine.commands import Step
from generator_service.loading import load_generator
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.stock.endpoint import open_endpoint
from generator_service.toy import ToyGenerator
from specrej.client.channel import open_channel
from specrej.contracts import Generator, Prompt
from specrej.remote import RemoteGenerator
from specrej_models.vllm_options import prepare_environment
from tests.reward_service import endpoint as endpoints
from tests.reward_service.tiny import make_config, make_tokenizer, save_language_model
from tests.serving import listening

# More engine arguments, such as those of `make conformance-distributed`.
VLLM_OPTIONS = json.loads(os.environ.get("SPECREJ_VLLM_OPTIONS", "{}"))
# bfloat16 on CUDA: several tokens may be the most probable one, and logits differ with the batch.
IS_FLOAT32 = not torch.cuda.is_available()
CAPACITY = 1024
MAX_CANDIDATES = 32
PROMPT = Prompt(text="Name three uses of a brick, and say why each of them matters.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator under test. A toy has no model: no stop texts, no context, no greedy draws.

    `steps`: those of vLLM.
    """

    generator: Generator
    is_toy: bool = False
    steps: list[Step] = field(default_factory=list)


def save_model(directory: Path) -> Path:
    """A Llama of random weights, with bytes as tokens, and with heads that vLLM's kernels support.

    There are several end tokens, so that some answers end early.
    """
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = make_config("llama", 0, **sizes, eos_token_id=[2, 100, 150, 200])
    return save_language_model(directory, config, make_tokenizer("<pad>"), seed=7)


@asynccontextmanager
async def toy(_: Path) -> AsyncIterator[Subject]:
    yield Subject(ToyGenerator(CAPACITY, step_s=0.001), is_toy=True)


@asynccontextmanager
async def own(directory: Path, device: str = "cpu") -> AsyncIterator[Subject]:
    """The own engine."""
    settings = GeneratorSettings(
        engine="own",
        model=str(directory),
        device=device,
        kv_slots=CAPACITY,
        max_candidates=MAX_CANDIDATES,
    )
    yield Subject(load_generator(settings))


@asynccontextmanager
async def vllm(directory: Path, **more: Any) -> AsyncIterator[Subject]:
    """As the service starts it, with `more` settings."""
    # Compiling takes minutes.
    options = {"enforce_eager": True, **VLLM_OPTIONS, **more.pop("vllm_options", {})}
    own = {"threads": 1, "kv_slots": CAPACITY, "max_candidates": MAX_CANDIDATES}
    settings = GeneratorSettings(
        engine="vllm", model=str(directory), vllm_options=options, **own | more
    )
    steps: list[Step] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM
        prepare_environment(settings.threads)
        from generator_service.stock.vllm import load_vllm

        generator = load_vllm(settings, steps.append)
    try:
        await generator.warm_up()
        yield Subject(generator, steps=steps)
    finally:
        await generator.close()


@asynccontextmanager
async def endpoint(_: Path) -> AsyncIterator[Subject]:
    """An endpoint with OpenAI's API, whose answers are whole."""
    async with endpoints.served(_answer) as server:
        settings = GeneratorSettings(engine="remote", model="m", remote_url=f"{server.url}/")
        generator = await open_endpoint(settings)
        try:
            yield Subject(generator)
        finally:
            await generator.close()


def _answer(body: Mapping[str, Any], _: int) -> endpoints.Reply:
    """Every second seed ends by itself."""
    seed, ends = body["seed"], body["seed"] % 2 == 0
    made = 3 if ends else body["max_tokens"]
    choice = {
        "text": f"seed {seed}",
        "finish_reason": "stop" if ends else "length",
        "logprobs": {"token_logprobs": [-0.5] * made},
    }
    return endpoints.Reply(
        {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": made}}
    )


@asynccontextmanager
async def remote(served: Subject) -> AsyncIterator[Subject]:
    """A generator behind a port, over real gRPC."""
    async with port(served.generator) as address, open_channel(address) as channel:
        yield Subject(RemoteGenerator(channel), served.is_toy)


def port(generator: Generator) -> AbstractAsyncContextManager[str]:
    """The address of a generator that listens."""
    servicer = GeneratorServicer(lease_s=60)
    servicer.load(generator)
    return listening(servicer.service())


SUBJECTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Subject]]] = {
    "toy": toy,
    "own": own,
    "vllm": vllm,
    "endpoint": endpoint,
}
if torch.cuda.is_available():
    SUBJECTS["own-cuda"] = partial(own, device="cuda")
REMOTE = {f"remote-{name}": name for name in ("toy", "own", "vllm")}

HAS_VLLM = importlib.util.find_spec("vllm") is not None
