"""Every generator there is, under one name each, with what a test must know of it."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from generator_service.loading import load_generator
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.steps import Step
from generator_service.toy import ToyGenerator
from orchestrator.backends.fleet import Fleet, Pulse
from orchestrator.backends.generators import FleetGenerator
from orchestrator.backends.resolving import Resolver, Target
from orchestrator.remote import RemoteGenerator
from specrej.channel import open_channel
from specrej.contracts import Generator, GeneratorDescription, Prompt
from tests.reward_service.tiny import make_tokenizer
from tests.serving import listening, serving

CAPACITY = 1024
CONTEXT = 256
MAX_CANDIDATES = 32
PROMPT = Prompt(text="Name three uses of a brick, and say why each of them matters.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator under test. A toy has no model: no stop texts, no context, nothing greedy.

    A fleet has no slots of its own: sessions and refusals tell those of the members they were at.
    `is_split`: sessions of more than three candidates are in parts.
    `steps`: what vLLM has said of each of its own.
    """

    generator: Generator
    is_toy: bool = False
    is_fleet: bool = False
    is_split: bool = False
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


@asynccontextmanager
async def remote(served: Subject) -> AsyncIterator[Subject]:
    """One behind a port, over real gRPC."""
    servicer = GeneratorServicer(lease_s=60)
    servicer.load(served.generator)
    async with serving(servicer.service()) as channel:
        yield Subject(RemoteGenerator(channel), served.is_toy)


class Few(ToyGenerator):
    """Takes three candidates at most."""

    async def describe(self) -> GeneratorDescription:
        return replace(await super().describe(), max_candidates=3)


def fleet(
    make: Callable[[], ToyGenerator], num: int, *, is_split: bool = False
) -> Callable[[Path], AbstractAsyncContextManager[Subject]]:
    """Several behind ports of their own, as one: as the orchestrator has them."""

    def connect(target: Target) -> tuple[grpc.aio.Channel, RemoteGenerator]:
        channel = open_channel(target.address, retries=False)
        return channel, RemoteGenerator(channel)

    @asynccontextmanager
    async def opened(_: Path) -> AsyncIterator[Subject]:
        async with AsyncExitStack() as stack:
            servicers = [GeneratorServicer(lease_s=60) for _ in range(num)]
            ports = [listening(each.service()) for each in servicers]
            for servicer in servicers:
                servicer.load(make())
            found = Resolver([await stack.enter_async_context(port) for port in ports])
            all_of_them = Fleet("generator", found, connect, _fingerprint, Pulse(lost_s=60))
            await stack.enter_async_context(all_of_them)
            await all_of_them.surveyed()
            generator = FleetGenerator(all_of_them)
            yield Subject(generator, is_toy=True, is_fleet=True, is_split=is_split)

    return opened


def _fingerprint(description: GeneratorDescription) -> str:
    return description.fingerprint


SUBJECTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Subject]]] = {
    "toy": toy,
    "own": own,
    "placed": fleet(lambda: ToyGenerator(CAPACITY, step_s=0.001), 2),
    "split": fleet(lambda: Few(CAPACITY // 4, step_s=0.001), 4, is_split=True),
    "vllm": vllm,
}
REMOTE = {f"remote-{name}": name for name in ("toy", "own", "vllm")}

HAS_VLLM = importlib.util.find_spec("vllm") is not None
