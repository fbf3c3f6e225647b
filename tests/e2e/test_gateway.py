"""The gateway on the embedded models: the printed examples run."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.programs import ROOT, run
from tests.serving import need
from tests.telemetry.observed import Observed

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

URL = "http://127.0.0.1:8000"
NODE_CLIENT = ROOT / ".tools" / "node"
PROGRAMS = {
    "python": (sys.executable, "-c"),
    "sh": ("bash", "-euc"),
    "js": ("node", "--input-type=module", "--eval"),
}
EXAMPLES = [
    pytest.param(language, code, id=f"{page.name}-{number}", marks=marks)
    for page, marks in ((ROOT / "README.md", ()), (ROOT / "docs" / "gateway.md", pytest.mark.long))
    for number, (language, code) in enumerate(
        re.findall(r"^```(python|sh|js)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
    if URL in code
]


def small(code: str) -> str:
    """The example with fewer tokens; one round still ends before the last."""
    if "max_tokens" not in code:
        return code.replace('"messages":', '"max_tokens": 18, "messages":')
    return re.sub(r'(max_tokens"?[:=] ?)64', r"\g<1>18", code)


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
async def test_printed_examples_run(service: Observed, language: str, code: str) -> None:
    if language == "js":
        need(NODE_CLIENT / "node_modules", "the client for Node")
    program = small(code).replace(URL, service.stack.gateway_url)
    folder = NODE_CLIENT if language == "js" else ROOT
    output = await run(*PROGRAMS[language], program, folder=folder, bound_s=240)
    assert output.strip() and '"error"' not in output, output
    if language == "js":
        assert re.search(r"as an object: (wall|step)$", output, re.MULTILINE)
    elif "json_schema" in code:
        answer = json.loads(output.rpartition("as an object: ")[2])
        assert answer.keys() == {"use"} and answer["use"] in ("wall", "step")
    elif "/chat/completions" in code:  # and then the events of another request
        answer, _ = json.JSONDecoder().raw_decode(output)
        assert answer["specrej"]["n"] == 16
        assert output.count("event: round_completed") >= 1
        assert output.count("event: finished") == 1
