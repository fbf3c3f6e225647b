"""The services use vLLM by public names, which its versions keep."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("generator_service", "reward_service", "specrej_models", "deploy", "gateway")

# Of vLLM's top level, or in its documentation; no more than are used.
PUBLIC = {
    ("vllm", ""),  # for its version
    ("vllm", "AsyncEngineArgs"),
    ("vllm", "AsyncLLMEngine"),
    ("vllm", "PoolingParams"),
    ("vllm", "SamplingParams"),
    ("vllm.inputs", "TokensPrompt"),
    ("vllm.inputs", "tokens_input"),
    ("vllm.platforms", "current_platform"),
    ("vllm.sampling_params", "RequestOutputKind"),
    ("vllm.sampling_params", "StructuredOutputsParams"),
}


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_few_names_of_vllm_are_imported() -> None:
    """Guards against a release of vLLM that ends a service, and against its first model runner."""
    paths = [path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")]
    imported = {pair for path in paths for pair in _imported(path)}
    of_vllm = {(module, name) for module, name in imported if module.split(".")[0] == "vllm"}
    assert of_vllm == PUBLIC
    assert len(PUBLIC) <= 12
