"""Answer a question from a folder of documents: shared words find passages, specrej answers.

The reward `relevance` compares each candidate with its prompt, which has the passages and the
question. A candidate below a threshold is vetoed, and if all are, there is no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specrej import Client, Generation, SpecrejError, WeightedReward

DOCUMENTS = Path(__file__).parent / "documents"
INSTRUCTION = "Answer the question in one or two sentences. Use the passages only."
STOP_WORDS = {"and", "are", "for", "how", "the", "what", "when", "where", "who", "why", "with"}


class Passage(NamedTuple):
    """A paragraph and its file."""

    source: str
    text: str


def search(passages: Sequence[Passage], question: str, limit: int = 3) -> list[Passage]:
    """The passages that share the most and the rarest words with a question, the best first;
    without those that share none."""
    words_of = [set(words(passage.text)) for passage in passages]
    num_with = Counter(word for own in words_of for word in own)
    scores = [
        sum(math.log(1 + len(passages) / num_with[word]) for word in own & set(words(question)))
        for own in words_of
    ]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [passages[index] for index in ranked[:limit] if scores[index] > 0]


def words(text: str) -> list[str]:
    """In lower case, of three letters or more, without the s of a plural."""
    found = re.findall(r"\w{3,}", text.lower())
    return [word.removesuffix("s") for word in found if word not in STOP_WORDS]


def read_passages(folder: Path) -> list[Passage]:
    """The paragraphs of all Markdown files, in order."""
    return [
        Passage(path.name, " ".join(paragraph.split()))
        for path in sorted(folder.glob("*.md"))
        for paragraph in path.read_text("utf-8").split("\n\n")
        if words(paragraph)
    ]


async def answer(
    client: Client, question: str, passages: Sequence[Passage], veto_below: float
) -> Generation | None:
    """The best of 32 candidates; None without passages, or if every candidate is vetoed.

    Raises:
        SpecrejError: the request failed.
    """
    if not passages:
        return None
    text = "\n\n".join(passage.text for passage in passages)
    generation = await client.generate(
        f"{INSTRUCTION}\n\n{text}\n\nQuestion: {question}",
        n=32,
        max_tokens=96,
        temperature=0.5,
        stop=["Question:"],
        rewards=[WeightedReward("relevance", veto_below=veto_below)],
    )
    return None if generation.best.vetoed else generation


async def run(options: argparse.Namespace) -> None:
    passages = search(read_passages(options.documents), options.question)
    async with Client(options.address, timeout_s=120) as client:
        generation = await answer(client, options.question, passages, options.veto_below)
    if generation:
        print(f"{generation.best.text.strip()}\n\nrelevance {generation.best.score:.2f}; passages:")
    else:
        print("The documents do not answer this. The nearest passages:")
    print("\n".join(f"  {passage.source}: {passage.text}" for passage in passages) or "  none")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question", nargs="?", default="When does the library close on Thursday?")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS)
    parser.add_argument("--veto-below", type=float, default=0.6)
    parser.add_argument("--address", default=os.environ.get("SPECREJ_ADDRESS", "127.0.0.1:50050"))
    try:
        asyncio.run(run(parser.parse_args()))
    except SpecrejError as error:
        sys.exit(f"rag: {error}")


if __name__ == "__main__":
    main()
