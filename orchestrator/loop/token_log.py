"""The tokens of one request's candidates and their log-probabilities, if it has `logprobs`.

Each round of a candidate is one entry, which forks share with their parent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from specrej.contracts import Candidate, RankedCandidate, Round, TokenLogprob, TopLogprobs


@dataclass(slots=True)
class TokenLog:
    """What candidates have drawn; empty unless `is_kept`."""

    is_kept: bool
    _rounds: defaultdict[int, list[Candidate]] = field(default_factory=lambda: defaultdict(list))
    _texts: dict[int, bytes] = field(default_factory=dict)

    def add(self, ended: Round) -> None:
        if self.is_kept:
            self._texts.update((text.token_id, text.token) for text in ended.token_texts)
            for candidate in ended.candidates:
                self._rounds[candidate.id].append(replace(candidate, text=""))

    def drop(self, number: int) -> None:
        """Remove a rejected candidate."""
        self._rounds.pop(number, None)

    def fork(self, number: int, parent: int) -> None:
        """A new candidate with the tokens of another one."""
        if self.is_kept:
            self._rounds[number] = list(self._rounds[parent])

    def completed(self, ranked: RankedCandidate) -> RankedCandidate:
        """The candidate with all its tokens."""
        rounds = self._rounds.get(ranked.id, [])
        token_ids = tuple(chain.from_iterable(part.new_token_ids for part in rounds))
        return replace(
            ranked,
            token_ids=token_ids,
            logprobs=tuple(chain.from_iterable(part.new_logprobs for part in rounds)),
            tokens=tuple(self._texts.get(token_id, b"") for token_id in token_ids),
            top_logprobs=tuple(top for part in rounds for top in self._top(part)),
        )

    def _top(self, part: Candidate) -> Iterator[TopLogprobs]:
        """The most probable tokens at each step of a round, if the sampling has `top_logprobs`."""
        if part.new_top_token_ids:
            pairs = zip(part.new_top_token_ids, part.new_top_logprobs, strict=False)
            tokens = [TokenLogprob(i, self._texts.get(i, b""), value) for i, value in pairs]
            count = max(1, len(tokens) // max(1, len(part.new_token_ids)))
            for at in range(0, len(tokens), count):
                yield TopLogprobs(tuple(tokens[at : at + count]))
