"""The largest accepted input at real processes; invalid input is tested at each port in process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specrej.contracts import Prompt
from tests.faults.case import Case, here
from tests.faults.world import World

# Options of requests; of those with a limit, the second is one beyond it.
_SIZES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "megabyte": (
        {"prompt": Prompt(text="x" * 1_000_000), "max_tokens": 2},
        {"prompt": Prompt(text="x" * 1_000_001)},
    ),
    "context": ({"max_tokens": 4096, "n": 1, "ignore_eos": False}, {"max_tokens": 4097}),
    "n": ({"n": 1024, "max_tokens": 2}, {"n": 1025}),
    "stop-strings": ({"stop": ["x"] * 16}, {"stop": ["x"] * 17}),
}
_UNUSUAL = {
    "unicode": "a\0 \u202e \u0634 \U0001f468\u200d\U0001f469 cafe\u0301",
    "special-tokens": "<|im_start|>system\n<|im_end|></s>",
}
_DEADLINES_S = {"0": 0, "1ms": 0.001, "none": None}
_VALUES = "specrej/test_validation.py::test_bad_values"
_PORT = "test_servicer.py"
_REQUESTS = "orchestrator/test_service_requests.py"
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("prompt-empty", "alpha", "temperature", "greedy-many", "top-p"), _VALUES),
    **dict.fromkeys(("top-k", "max-tokens", "decision-tokens"), _VALUES),
    "model": f"{_REQUESTS}::test_an_unknown_model_or_reward_is_not_found",
    "enum": f"{_REQUESTS}::test_all_violations_are_reported_at_once",
    "unknown-field": f"{_REQUESTS}::test_unknown_fields_are_ignored",
    "malformed": "specrej/test_serving.py::test_malformed_message_is_an_invalid_argument",
    "message-size": "specrej/test_serving.py::test_message_above_the_limit_is_refused",
    "metadata-size": "specrej/test_serving.py::test_metadata_above_the_limit_is_refused",
    "unknown-method": f"{_REQUESTS}::test_an_unknown_method_is_unimplemented",
    "generator-port": f"generator_service/{_PORT}::test_every_violation_of_open_is_reported",
    "reward-port": f"reward_service/{_PORT}::test_every_violation_of_score_is_reported",
    "fuzz/public-port": f"{_REQUESTS}::test_any_request_gets_an_answer_or_a_client_error",
    "fuzz/internal-ports": "test_fuzz.py::test_the_generators_port",
}


async def send(options: Mapping[str, Any], world: World) -> list[str]:
    """Send a request with these options."""
    return [(await world.generate(**options)).code]


CASES: tuple[Case, ...] = (
    *(
        here(f"bad/{name}/{size}", partial(send, options), code, fast=True)
        for name, pair in _SIZES.items()
        for size, options, code in zip(
            ("limit", "over"), pair, ("OK", "INVALID_ARGUMENT"), strict=True
        )
    ),
    *(
        here(f"bad/{name}", partial(send, {"prompt": Prompt(text=text)}), "OK", fast=True)
        for name, text in _UNUSUAL.items()
    ),
    *(
        here(
            f"bad/deadline/{name}",
            partial(send, {"timeout_s": timeout_s}),
            "OK" if timeout_s is None else "DEADLINE_EXCEEDED",
            fast=True,
        )
        for name, timeout_s in _DEADLINES_S.items()
    ),
    *(Case(f"bad/{name}", elsewhere=f"tests/{test}") for name, test in _ELSEWHERE.items()),
)
