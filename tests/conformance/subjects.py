"""Every generator there is, under one name each, with what a test must know of it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from generator_service.loading import load_generator
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.steps import Step
from generator_service.toy import ToyGenerator
from orchestrator.remote import RemoteGenerator
from specrej.contracts import Generator, Prompt
from tests.reward_service.tiny import make_tokenizer
from tests.serving import serving

CAPACITY = 1024
CONTEXT = 256
MAX_CANDIDATES = 32
PROMPT = Prompt(text="Name three uses of a brick, and say why each of them matters.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator under test. A toy has no model: no stop texts, no context, nothing greedy.

    `steps`: what vLLM has said of each of its own.
    """

    generator: Generator
    is_toy: bool = False
    steps: list[Step] = field(default_factory=list)


def save_model(directory: Path) -> Path:
    """A Llama of random weights, wide enough apart that tokens differ, with bytes as tokens.

    Its heads are of a size that vLLM's kernels take.
    """
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=[2, 100, 150, 200],  # several, so that some answers end early
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(directory)
    make_tokenizer("<pad>").save_pretrained(directory)
    return directory


@asynccontextmanager
async def toy(_: Path) -> AsyncIterator[Subject]:
    yield Subject(ToyGenerator(CAPACITY, step_s=0.001), is_toy=True)


@asynccontextmanager
async def own(directory: Path) -> AsyncIterator[Subject]:
    """The own engine."""
    settings = GeneratorSettings(
        model=str(directory), device="cpu", kv_slots=CAPACITY, max_candidates=MAX_CANDIDATES
    )
    yield Subject(load_generator(settings))


@asynccontextmanager
async def vllm(directory: Path) -> AsyncIterator[Subject]:
    """As the service starts it."""
    settings = GeneratorSettings(
        engine="vllm",
        model=str(directory),
        threads=1,
        kv_slots=CAPACITY,
        max_candidates=MAX_CANDIDATES,
        vllm_options={"enforce_eager": True},  # compiling takes minutes
    )
    steps: list[Step] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        from generator_service.vllm_generator import load_vllm

        generator = load_vllm(settings, steps.append)
    try:
        await generator.warm_up()
        yield Subject(generator, steps=steps)
    finally:
        generator.close()


def remote(
    served: Callable[[Path], AbstractAsyncContextManager[Subject]],
) -> Callable[[Path], AbstractAsyncContextManager[Subject]]:
    """One behind a port, over real gRPC."""

    @asynccontextmanager
    async def opened(directory: Path) -> AsyncIterator[Subject]:
        servicer = GeneratorServicer(lease_s=60)
        async with served(directory) as subject, serving(servicer.service()) as channel:
            servicer.load(subject.generator)
            yield Subject(RemoteGenerator(channel), subject.is_toy)

    return opened


SUBJECTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Subject]]] = {
    "toy": toy,
    "own": own,
    "remote-toy": remote(toy),
    "remote-own": remote(own),
    "vllm": vllm,
}

HAS_VLLM = importlib.util.find_spec("vllm") is not None
