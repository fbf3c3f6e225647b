"""How the generator service is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from specrej.contracts.validation import MAX_BATCH
from specrej.settings import Port, Seconds, ServiceSettings
from specrej_models.hub import ModelFiles, embedded_models, find

# More candidates take a CPU minutes, whatever its memory.
_AUTO_ON_CPU = 64


class GeneratorSettings(ServiceSettings):
    """The generator service: holds the model's weights and the KV slots, makes tokens.

    Every setting is a flag (--kv-slots 20000) or an environment variable
    (SPECREJ_GENERATOR_KV_SLOTS=20000); flags win.
    """

    model_config = SettingsConfigDict(env_prefix="SPECREJ_GENERATOR_")

    port: Port = Field(50051, description="port to listen on; 0 picks a free one")
    model: str = Field(
        str(embedded_models() / "SmolLM2-135M-Instruct"),
        description="a causal language model: a directory as transformers saves it, or a name of"
        " the hub, org/name[@revision], which is fetched; or 'toy', a test double",
    )
    engine: Literal["auto", "own", "vllm", "remote"] = Field(
        "auto",
        description="vLLM in this process, a server with OpenAI's API (remote), both in"
        " docs/servers.md, or this service's own engine, on CUDA a reference without tuned kernels;"
        " auto: vLLM on CUDA, own on CPUs",
    )
    remote_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="base URL of the server, such as http://127.0.0.1:9000/v1; model is its name"
        " of the model",
    )
    remote_tokenizer: str = Field(
        "",
        description="the files of the server's model, of which the weights are not read: a"
        " directory or a name of the hub; empty: where the server has them, or the model's name;"
        " without them candidates are texts, and nothing is forked",
    )
    remote_key_file: Path | None = Field(
        None, description="file with the server's key, read again when it changes"
    )
    remote_requests: int = Field(
        64, ge=1, le=4096, description="requests to the server at the same time, one a candidate"
    )
    remote_affinity_header: str = Field(
        "X-Session-ID",
        pattern=r"^[A-Za-z0-9-]*$",
        description="header with a key that all requests of a session have in common, by which a"
        " router sends them to one server (docs/servers.md); empty: none",
    )
    vllm_options: dict[str, Any] = Field(
        default_factory=dict,
        description='vLLM engine arguments as JSON: {"tensor_parallel_size": 4}; they override'
        " other settings except kv_slots, which bounds max_model_len",
    )
    tool_format: Literal["auto", "hermes", "llama3", "mistral", "json"] = Field(
        "auto",
        description="how the model's answers call tools (docs/structured.md); auto: as its chat"
        " template writes calls, json where that takes no tools",
    )
    thinking_marks: str = Field(
        "auto",
        pattern=r"^(auto|none|\S+ \S+)$",
        description="texts around the model's reasoning, such as '<think> </think>'; auto: those of"
        " its chat template; none: it does not reason",
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="cpu (float32), cuda or cuda:N (bfloat16); auto: cuda if available, else cpu",
    )
    context_tokens: int = Field(
        0, ge=0, description="most tokens of prompt and answer together; 0: the model's"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the engine; 0: all cores")
    kv_slots: int = Field(
        0,
        ge=0,
        description="KV capacity in slots; 0: from memory; with a remote engine, the most tokens of"
        " prompts and candidates that it is sent at the same time",
    )
    memory_fraction: float = Field(
        0.5,
        gt=0,
        le=0.95,
        description="share of the device's memory for weights, workspace and KV, if kv_slots is 0",
    )
    prefix_cache: float = Field(
        0.25, ge=0, le=1, description="share of the slots for cached prompts, which no session uses"
    )
    max_candidates: int = Field(
        1024,
        ge=1,
        le=MAX_BATCH,
        description="most candidates per session, and per step of all; on CPUs a step of several"
        " sessions has 128",
    )
    max_waiting: int = Field(64, ge=0, description="sessions that may wait for slots")
    prefill_chunk: int = Field(256, ge=1, description="prompt tokens read in one step")
    # Scoring takes place between two commands; keepalive detects a dead peer sooner.
    lease_s: Seconds = Field(300, description="seconds without a command that end a session")
    deadline_s: Seconds = Field(3600, description="deadline in seconds of calls without one")

    @model_validator(mode="after")
    def _check_remote(self) -> Self:
        needed = {"remote_url", "model"}
        if self.engine == "remote" and (missing := needed - self.model_fields_set):
            raise ValueError(f"{' and '.join(sorted(missing))} must be set if engine is remote")
        return self

    @field_validator("vllm_options")
    @classmethod
    def _check_vllm_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("speculative_config"):
            raise ValueError(
                "speculative_config cannot be used: vLLM reserves blocks for drafted tokens, which"
                " the ledger of slots does not count"
            )
        return options

    @property
    def files(self) -> ModelFiles:
        """The model's files; a hub model that is not cached is fetched. Raises as `find` does."""
        return find(self.model)

    def auto_candidates_of(self, device: str) -> int:
        """Most candidates where N is left open, on a device of type "cpu" or another."""
        return min(_AUTO_ON_CPU, self.max_candidates) if device == "cpu" else self.max_candidates

    def context_of(self, model_tokens: int) -> int:
        """The context of a model that has `model_tokens`.

        Raises:
            ValueError: `context_tokens` is more.
        """
        if self.context_tokens > model_tokens:
            raise ValueError(
                f"context_tokens must be at most the model's {model_tokens}, "
                f"is {self.context_tokens}"
            )
        return self.context_tokens or model_tokens
