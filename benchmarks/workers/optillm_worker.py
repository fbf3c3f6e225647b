"""optillm's Best-of-N against a vLLM server, by the function that its proxy calls.

One request makes the candidates; then the model rates each in a request of its own.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from openai import OpenAI
from optillm.bon import best_of_n_sampling

if TYPE_CHECKING:
    from benchmarks.workers.serve import Score


class Worker:
    """A client of the server at `url`; optillm sends no seeds."""

    def __init__(self, url: str, threads: int) -> None:
        self.versions = {"optillm": version("optillm")}
        self._client = OpenAI(base_url=url, api_key="none", max_retries=0)

    def answer(
        self, score: Score, turns: list[dict[str, str]], n: int, max_tokens: int, seed: int
    ) -> tuple[str, int]:
        """The candidate with the highest rating; ratings count as tokens."""
        system, *conversation = (turn["content"] for turn in turns)
        text, tokens = best_of_n_sampling(
            system, "\n".join(conversation), self._client, "model", n, {"max_tokens": max_tokens}
        )
        if not tokens:
            raise RuntimeError(text)
        return text, tokens
