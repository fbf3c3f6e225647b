"""its_hub's Best-of-N against a vLLM server: a request per candidate, all at once."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from its_hub import BestOfN, LMOrchestrator, OpenAICompatibleLanguageModel
from its_hub.api import ChatMessage

if TYPE_CHECKING:
    from benchmarks.workers.serve import Score


class _Reward:
    """its_hub's `AbstractOutcomeRewardModel`, as far as `BestOfN` calls it."""

    def __init__(self, score: Score) -> None:
        self._score = score

    async def ascore(self, conversations: list[list[Any]], **_: Any) -> list[float]:
        return self._score([conversation[-1].content for conversation in conversations])


class Worker:
    """A client of the server at `url`; its_hub sends no seeds."""

    def __init__(self, url: str, threads: int) -> None:
        self.versions = {"its_hub": version("its_hub")}
        self._model = OpenAICompatibleLanguageModel(url, "none", "model", temperature=1.0)

    def answer(
        self, score: Score, turns: list[dict[str, str]], n: int, max_tokens: int, seed: int
    ) -> tuple[str, int]:
        self._model.max_completion_tokens = max_tokens
        messages = [ChatMessage.from_dict(turn) for turn in turns]
        best_of_n = BestOfN(_Reward(score), LMOrchestrator(max_concurrency=-1))
        result = best_of_n.infer(self._model, messages, n, return_response_only=False)
        return result.the_one["content"], result.usage.completion_tokens
