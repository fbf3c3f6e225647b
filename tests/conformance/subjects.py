"""All kinds of generators by name, with the properties that tests depend on."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import REGISTRY

from generator_service.loading import load_generator
from generator_service.servicer import GeneratorServicer
from generator_service.settings import GeneratorSettings
from generator_service.stock.endpoint import open_endpoint
from generator_service.toy import ToyGenerator
from specrej.client.channel import open_channel
from specrej.contracts import CandidateForm, Generator, Prompt, Sampling, TokenBias
from specrej.remote import RemoteGenerator
from specrej_models.embedded import packaged
from specrej_models.vllm_options import prepare_environment
from tests.endpoints import scrape
from tests.generator_service.completions import Completions, save_tokenizer
from tests.programs import ROOT
from tests.reward_service import endpoint as endpoints
from tests.reward_service.tiny import CONTEXT, make_config, make_tokenizer, save_language_model
from tests.servers.starting import MODEL, llama_server, vllm_server
from tests.serving import listening

# bfloat16 on CUDA: several tokens may be the most probable one, and logits differ with the batch.
IS_FLOAT32 = not torch.cuda.is_available()
CAPACITY = 1024
MAX_CANDIDATES = 32
PROMPT = Prompt.from_user("Name three uses of a brick, and say why each of them matters.")
# Of 8 candidates some end by themselves and some are cut off, with the model as with the toy.
ENDING = Sampling(max_tokens=60, seed=13)
_END_OF_TURN = 2  # of the embedded model
_STRUCTURED = ("json_object", "json_schema", "regex", "grammar")
_IDS = ("logprobs", "top_logprobs", "stop_token_ids")  # fields that need token ids


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator under test. A toy has no model: no stop texts, no context, no greedy draws.

    `form`: of its candidates where the sampling allows each. `is_exact`: equal requests draw equal
    tokens, whatever runs beside them. `lacks`: fields of the sampling, or kinds of structured
    outputs, that it refuses. `ending`: with it some candidates end by themselves, and some do not.
    `running` returns how many requests the server behind it runs.
    """

    generator: Generator
    is_toy: bool = False
    form: CandidateForm = CandidateForm.IN_PLACE
    is_exact: bool = True
    lacks: tuple[str, ...] = ()
    ending: Sampling = ENDING
    running: Callable[[], Awaitable[float]] | None = None

    def form_of(self, sampling: Sampling) -> CandidateForm:
        """The form of candidates: a continued prompt would change some draws."""
        changed = sampling.presence_penalty, sampling.frequency_penalty
        if self.form is CandidateForm.ROUNDS and any((*changed, sampling.structured_output)):
            return CandidateForm.STREAMS
        return self.form

    def can_fork(self, sampling: Sampling) -> bool:
        return self.form_of(sampling) in (CandidateForm.IN_PLACE, CandidateForm.ROUNDS)

    def draws_by_round(self, sampling: Sampling) -> bool:
        """Whether draws depend on where rounds begin."""
        return self.form_of(sampling) is CandidateForm.ROUNDS

    @property
    def has_ids(self) -> bool:
        """Whether it sends token ids; else tokens in tests are characters."""
        return self.form in (CandidateForm.IN_PLACE, CandidateForm.ROUNDS)


def save_model(directory: Path) -> Path:
    """A Llama of random weights, with bytes as tokens, and with heads that vLLM's kernels support.

    There are several end tokens, so that some answers end early.
    """
    tokenizer = make_tokenizer("<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<over>", "<out>"]})
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    ends = {"vocab_size": len(tokenizer), "eos_token_id": [2, 259, 260, 261]}
    config = make_config("llama", 0, **sizes, **ends)
    return save_language_model(directory, config, tokenizer, seed=7)


@asynccontextmanager
async def toy(_: Path) -> AsyncIterator[Subject]:
    yield Subject(ToyGenerator(CAPACITY, step_s=0.001), is_toy=True, lacks=("structured_output",))


@asynccontextmanager
async def own(
    directory: Path, device: str = "cpu", kv_slots: int = CAPACITY
) -> AsyncIterator[Subject]:
    """The own engine."""
    settings = GeneratorSettings(
        engine="own",
        model=str(directory),
        device=device,
        kv_slots=kv_slots,
        max_candidates=MAX_CANDIDATES,
    )
    yield Subject(load_generator(settings))


@asynccontextmanager
async def vllm(directory: Path, **more: Any) -> AsyncIterator[Subject]:
    """As the service starts it, with `more` settings."""
    # Compiling takes minutes.
    options = {"enforce_eager": True, "disable_log_stats": False}
    options |= more.pop("vllm_options", {})
    own: dict[str, Any] = {"threads": 1, "kv_slots": CAPACITY, "max_candidates": MAX_CANDIDATES}
    settings = GeneratorSettings(
        engine="vllm", model=str(directory), vllm_options=options, **own | more
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM
        prepare_environment(settings.threads)
        from generator_service.stock.vllm import load_vllm

        generator = load_vllm(settings)

    async def running() -> float:
        return metric("vllm:num_requests_running") + metric("vllm:num_requests_waiting")

    try:
        yield Subject(generator, form=CandidateForm.ROUNDS, running=running)
    finally:
        await generator.close()


def metric(name: str) -> float:
    """A metric of the vLLM in this process that was started last, summed over its labels."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    values = [sample.value for sample in samples if sample.name == name]
    assert values, f"there is no {name}"
    return sum(values)


@asynccontextmanager
async def stock(url: str, model: str, tokenizer: str = "", **about: Any) -> AsyncIterator[Subject]:
    """The stock engine on a server; `about`: of the subject."""
    settings = GeneratorSettings(
        engine="remote",
        model=model,
        remote_url=f"{url}/v1/",
        remote_tokenizer=tokenizer,
        context_tokens=CONTEXT,
        kv_slots=CAPACITY,
        max_candidates=MAX_CANDIDATES,
    )
    generator = await open_endpoint(settings)
    try:
        subject = Subject(generator, **about)
        description = await generator.describe()
        assert (description.form, description.can_fork) == (subject.form, subject.has_ids)
        assert description.ignores_seeds != subject.is_exact
        yield subject
    finally:
        await generator.close()


@asynccontextmanager
async def at_vllm(directory: Path) -> AsyncIterator[Subject]:
    """On an unmodified vLLM that listens, without the white space that its JSON may have."""
    flags = ("--max-model-len", f"{CONTEXT}", "--structured-outputs-config")
    compact = json.dumps({"backend": "guidance", "disable_any_whitespace": True})
    async with vllm_server(*flags, compact, model=directory) as url:
        running = partial(sums, url, "vllm:num_requests_running", "vllm:num_requests_waiting")
        about: dict[str, Any] = {"form": CandidateForm.ROUNDS, "running": running}
        async with stock(url, f"{directory}", **about) as subject:
            yield subject


@asynccontextmanager
async def at_llama(_: Path, name: str = "") -> AsyncIterator[Subject]:
    """On llama.cpp's server, with the embedded model; by a `name` without its tokenizer."""
    async with llama_server(name=name) as url:
        running = partial(sums, url, "llamacpp:requests_processing", "llamacpp:requests_deferred")
        lacks = ("min_tokens", "regex", "grammar")
        about: dict[str, Any] = {
            "form": CandidateForm.STREAMS if name else CandidateForm.ROUNDS,
            "lacks": (*lacks, *_IDS) if name else lacks,
            "is_exact": False,
            "running": running,
            # The model seldom ends within 60 tokens.
            "ending": replace(ENDING, logit_bias=(TokenBias(_END_OF_TURN, 2.5),)),
        }
        files = (name, "") if name else (f"{packaged(MODEL.name)}", f"{MODEL}")
        async with stock(url, *files, **about) as subject:
            yield subject


async def sums(url: str, *names: str) -> float:
    """The sum of some metrics of a server."""
    metrics = await scrape([f"{url}/metrics"])
    return sum(metrics.sum(name) for name in names)


@asynccontextmanager
async def gateway(directory: Path) -> AsyncIterator[Subject]:
    """The gateway, before an orchestrator whose generator is the own engine: a server of text."""
    from tests.world import world

    # Each request has candidates of its own; what is cut for want of slots depends on the others.
    async with own(directory, kv_slots=MAX_CANDIDATES * CAPACITY) as subject:
        own_engine = subject.generator
        generator: Any = SimpleNamespace(
            open=own_engine.open, check=own_engine.check, describe=own_engine.describe, is_idle=True
        )
        async with world(generator, gateway=True, max_running=MAX_CANDIDATES) as services:

            async def running() -> float:
                return services.admission.running + services.admission.queued

            about: dict[str, Any] = {
                "form": CandidateForm.WHOLE_ANSWERS,  # it sends text early without logprobs only
                "lacks": _IDS,
                "running": running,
            }
            async with stock(services.gateway_url, directory.name, **about) as subject:
                yield subject


@asynccontextmanager
async def scripted(
    _: Path, kind: str = "vllm", form: CandidateForm = CandidateForm.ROUNDS
) -> AsyncIterator[Subject]:
    """A scripted server that continues token ids as vLLM does, or of chats; with short answers."""
    streams = form is not CandidateForm.WHOLE_ANSWERS
    with TemporaryDirectory() as directory:
        completions = Completions(save_tokenizer(Path(directory)), kind, streams)
        completions.behave(ends=True)
        async with endpoints.served(completions.reply) as server:

            async def running() -> float:
                return server.running

            ids = _IDS if kind == "chat" else ()
            about: dict[str, Any] = {
                "form": form,
                "ending": replace(ENDING, max_tokens=8),
                "lacks": (*_STRUCTURED, *ids) if streams else ids,
                "running": running,
            }
            async with stock(server.url.removesuffix("/v1"), "m", **about) as subject:
                yield subject


@asynccontextmanager
async def remote(served: Subject) -> AsyncIterator[Subject]:
    """A generator behind a port, over real gRPC."""
    async with port(served.generator) as address, open_channel(address) as channel:
        yield replace(served, generator=RemoteGenerator(channel))


def port(generator: Generator) -> AbstractAsyncContextManager[str]:
    """The address of a generator that listens."""
    servicer = GeneratorServicer(lease_s=60)
    servicer.load(generator)
    return listening(servicer.service())


SUBJECTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Subject]]] = {
    "toy": toy,
    "own": own,
    "vllm": vllm,
    "vllm-server": at_vllm,
    "llama": at_llama,
    "llama-text": partial(at_llama, name="smollm"),
    "gateway": gateway,
    "endpoint": partial(scripted, kind="chat", form=CandidateForm.WHOLE_ANSWERS),
    "rounds": scripted,
    "streams": partial(scripted, kind="chat", form=CandidateForm.STREAMS),
}
if torch.cuda.is_available():
    SUBJECTS["own-cuda"] = partial(own, device="cuda")
REMOTE = {f"remote-{name}": name for name in ("toy", "own", "vllm")}
# They do not stop at texts or tokens, nor draw from what they report.
SCRIPTED = ("rounds", "streams")
SERVERS = ("vllm-server", "llama", "llama-text")
# Whether what a subject needs is installed, and the target that runs it. Servers are not run beside
# vLLM in process.
_HAS_VLLM = importlib.util.find_spec("vllm") is not None
_SERVED = {
    name: (not _HAS_VLLM and (ROOT / f".{name}/.installed").exists(), "conformance-servers")
    for name in ("vllm", "llama")
}
NEEDED = {
    "vllm": (_HAS_VLLM, "conformance"),
    "vllm-server": _SERVED["vllm"],
    "llama": _SERVED["llama"],
    "llama-text": _SERVED["llama"],
    "gateway": (importlib.util.find_spec("redis") is not None, "setup"),
}
