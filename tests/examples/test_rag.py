"""Retrieval, and the veto on texts and scores of toys."""

from __future__ import annotations

import pytest

from examples.rag.rag import DOCUMENTS, answer, read_passages, search
from specrej import Client

pytestmark = pytest.mark.asyncio(loop_scope="session")

PASSAGES = read_passages(DOCUMENTS)


@pytest.mark.parametrize(
    ("question", "source"),
    [
        ("How long can I keep a book?", "loans.md"),
        ("When does the library close on Thursday?", "opening-hours.md"),
        ("What does a page in colour cost?", "printing.md"),
        ("What is the fee for a lost card?", "fees.md"),
    ],
)
async def test_the_best_passage_has_the_answer(question: str, source: str) -> None:
    assert search(PASSAGES, question)[0].source == source


async def test_an_answer_is_given_unless_every_candidate_is_vetoed(client: Client) -> None:
    """Guards the threshold: a toy's scores are above -1 and below 1."""
    passages = search(PASSAGES, "library card")
    generation = await answer(client, "library card", passages, veto_below=-1)
    assert generation
    assert -1 < generation.best.score < 1
    assert await answer(client, "library card", passages, veto_below=1) is None
