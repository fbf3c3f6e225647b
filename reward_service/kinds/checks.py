"""A reward for instructions that a program can check, in the vocabulary of IFEval and IFBench.

Ids and arguments are those of Zhou et al. 2023 (arXiv 2311.07911) and Pyatkin et al. 2025 (arXiv
2507.02833); `max_line_length` and `start_checker` are additions. The checkers are our own: the
published ones search with regular expressions from the request, download models when they run, and
do not know which violations are final. So sentences end at . ! or ? before white space, keywords
are texts rather than patterns, and no language is detected.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from reward_service.kinds.schema import extract_json, is_json, may_become_json
from reward_service.verifier import Data, Judge, Verifier, invalid, violations_of
from specrej.contracts.errors import InvalidRequest
from specrej.isolated import compile_pattern, escape_pattern

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"""[.!?]["')\]*]*\s""")
_PLACEHOLDER = re.compile(r"\[[^\[\]]*\]")
_HIGHLIGHT = re.compile(r"\*[^\n*]+\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
_BULLET = re.compile(r"^[ \t]*[*-][ \t]", re.MULTILINE)
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BOUNDARY = r"[^\p{L}\p{M}\p{N}_]"


@dataclass(frozen=True, slots=True)
class Check:
    """holds: whether a final text has what is required. is_broken: whether no text that begins with
    this one can have it."""

    holds: Callable[[str], bool]
    is_broken: Callable[[str], bool] = lambda text: False


def _lasting(is_broken: Callable[[str], bool]) -> Check:
    """A check that fails as soon as it is broken, and only then."""
    return Check(lambda text: not is_broken(text), is_broken)


def _counted(
    count: Callable[[str], int],
    relation: str,
    number: float,
    settled: Callable[[str], int] | None = None,
) -> Check:
    """Bounds of a count. settled: the part that no further text takes back, by default all."""
    least, most = {
        "less than": (0, number - 1),
        "at most": (0, number),
        "exactly": (number, number),
        "at least": (number, math.inf),
        "more than": (number + 1, math.inf),
    }[relation]
    settled = settled or count
    return Check(lambda text: least <= count(text) <= most, lambda text: settled(text) > most)


def _num_words(text: str) -> int:
    return len(_WORD.findall(text))


def _num_capital(text: str) -> int:
    return sum(map(str.isupper, _WORD.findall(text)))


def _with_words(parts: list[str]) -> list[str]:
    return [part for part in parts if _WORD.search(part)]


# `casefold` treats every character by itself, unlike `lower`.
def _begins(text: str, beginning: str) -> bool:
    return text.lstrip().casefold().startswith(beginning.strip().casefold())


def _start_checker(phrase: str) -> Check:
    return Check(
        lambda text: _begins(text, phrase),
        lambda text: not (_begins(text, phrase) or _begins(phrase, text)),
    )


def _existence(keywords: list[str]) -> Check:
    folded = [word.casefold() for word in keywords]
    return Check(lambda text: all(map(text.casefold().__contains__, folded)))


def _frequency(keyword: str, frequency: int, relation: str) -> Check:
    return _counted(lambda text: text.casefold().count(keyword.casefold()), relation, frequency)


def _forbidden_words(forbidden_words: list[str]) -> Check:
    words = f"(?i)(?:^|{_BOUNDARY})(?:{'|'.join(map(escape_pattern, forbidden_words))})"
    found, is_settled = (compile_pattern(words + end) for end in (f"(?:{_BOUNDARY}|$)", _BOUNDARY))
    return Check(lambda text: not found.search(text), lambda text: bool(is_settled.search(text)))


def _number_paragraphs(
    num_paragraphs: int, relation: str = "exactly", separator: str = "***"
) -> Check:
    return _counted(lambda text: len(_with_words(text.split(separator))), relation, num_paragraphs)


def _nth_paragraph_first_word(num_paragraphs: int, nth_paragraph: int, first_word: str) -> Check:
    wanted = first_word.casefold()

    def first_words(text: str) -> list[str]:
        paragraphs = _with_words(text.split("\n\n"))
        return [_WORD.findall(paragraph)[0].casefold() for paragraph in paragraphs]

    def holds(text: str) -> bool:
        words = first_words(text)
        return len(words) == num_paragraphs and words[nth_paragraph - 1 :][:1] == [wanted]

    def is_broken(text: str) -> bool:
        words = first_words(text)
        so_far = words[nth_paragraph - 1 :][:1]  # it may go on
        return len(words) > num_paragraphs or not all(map(wanted.startswith, so_far))

    return Check(holds, is_broken)


def _postscript(postscript_marker: str) -> Check:
    letters = map(escape_pattern, "".join(postscript_marker.split()))
    marked = compile_pattern(r"(?im)^[ \t]*" + r"[ \t]*".join(letters))
    return Check(lambda text: bool(marked.search(text)))


def _multiple_sections(section_spliter: str, num_sections: int) -> Check:
    section = compile_pattern(rf"(?i){escape_pattern(section_spliter)}\s?\d")
    return Check(lambda text: len(section.findall(text)) >= num_sections)


def _json(text: str) -> str:
    return extract_json(text, "fence" if text.lstrip().startswith("`") else "whole")[0]


def _two_responses() -> Check:
    def responses(text: str) -> list[str]:
        return [part.strip() for part in _with_words(text.split("******"))]

    return Check(
        lambda text: len(responses(text)) == len(set(responses(text))) == 2,
        lambda text: len(responses(text)) > 2,
    )


_Number = Annotated[int, Field(ge=0)]
_Text = Annotated[str, Field(min_length=1)]
_Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=32)]
_Relation = Literal["less than", "at most", "exactly", "at least", "more than"]
# The types of arguments; all others are numbers.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("keywords", "forbidden_words"), _Words),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _Relation),
    **dict.fromkeys(("keyword", "postscript_marker", "section_spliter"), _Text),
    **dict.fromkeys(("prompt_to_repeat", "start_phrase", "end_phrase"), _Text),
    "letter": Annotated[str, Field(min_length=1, max_length=1)],
    "first_word": Annotated[str, Field(pattern=r"^\w+$")],
    "nth_paragraph": Annotated[int, Field(ge=1)],
    "separator": Literal["***", "\n\n"],
}
CHECKS: dict[str, Callable[..., Check]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": lambda letter, let_frequency, let_relation: _frequency(
        letter, let_frequency, let_relation
    ),
    "length_constraints:number_words": lambda num_words, relation: _counted(
        _num_words, relation, num_words
    ),
    "length_constraints:number_sentences": lambda num_sentences, relation: _counted(
        lambda text: len(_with_words(_SENTENCE_END.split(text))), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "length_constraints:max_line_length": lambda num_characters: _lasting(
        lambda text: max(map(len, text.split("\n"))) > num_characters
    ),
    "count:word_count_range": lambda min_words, max_words: Check(
        lambda text: min_words <= _num_words(text) <= max_words,
        lambda text: _num_words(text) > max_words,
    ),
    "count:unique_word_count": lambda N: Check(  # noqa: N803
        lambda text: len(set(_WORD.findall(text.casefold()))) >= N
    ),
    "change_case:capital_word_frequency": lambda capital_frequency, capital_relation: _counted(
        _num_capital,
        capital_relation,
        capital_frequency,
        lambda text: _num_capital(text[:-1] if text[-1:].isspace() else text.rpartition(" ")[0]),
    ),
    "change_case:english_capital": lambda: Check(
        str.isupper, lambda text: not f"{text}A".isupper()
    ),
    "change_case:english_lowercase": lambda: Check(
        str.islower, lambda text: not f"{text}a".islower()
    ),
    "punctuation:no_comma": lambda: _lasting(lambda text: "," in text),
    "format:no_whitespace": lambda: _lasting(lambda text: len(text.split()) > 1),
    "detectable_content:number_placeholders": lambda num_placeholders: Check(
        lambda text: len(_PLACEHOLDER.findall(text)) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda num_bullets: _counted(
        lambda text: len(_BULLET.findall(text)), "exactly", num_bullets
    ),
    "detectable_format:constrained_response": lambda: Check(
        lambda text: any(map(text.__contains__, _OPTIONS))
    ),
    "detectable_format:number_highlighted_sections": lambda num_highlights: Check(
        lambda text: len(_HIGHLIGHT.findall(text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": lambda: Check(
        lambda text: is_json(_json(text)), lambda text: not may_become_json(_json(text))
    ),
    "detectable_format:title": lambda: Check(
        lambda text: any(map(str.strip, _TITLE.findall(text)))
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda prompt_to_repeat: _start_checker(prompt_to_repeat),
    "startend:start_checker": lambda start_phrase: _start_checker(start_phrase),
    "startend:end_checker": lambda end_phrase: Check(
        lambda text: text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())
    ),
    "startend:quotation": lambda: Check(
        lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
        lambda text: text.strip()[:1] not in ("", '"'),
    ),
}


class Instruction(Data):
    """`id` of `CHECKS`, and its arguments; those that are null count as absent."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ChecksData(Data):
    """checks: instructions; all: score 1 if all of them hold and else 0, rather than the share."""

    checks: Annotated[list[Instruction], Field(min_length=1, max_length=32)]
    all: bool = False


class ChecksReward(Verifier):
    """The share of the request's instructions that a text follows."""

    description = "The share of the instructions in the request's data that the text follows."
    sample_data = '{"checks": [{"id": "punctuation:no_comma"}]}'
    data_type = ChecksData
    is_cheap = True

    def prepare(self, data: ChecksData) -> Judge:
        checks = [_make(item, f"data.checks[{n}]") for n, item in enumerate(data.checks)]

        def judge(text: str, is_final: bool) -> float:
            if is_final:
                results = [check.holds(text) for check in checks]
            else:
                results = [not check.is_broken(text) for check in checks]
            return float(all(results)) if data.all else sum(results) / len(results)

        return judge


def _make(item: Instruction, path: str) -> Check:
    if item.id not in CHECKS:
        raise invalid(f"{path}.id", f"is unknown; available: {', '.join(CHECKS)}")
    make, path = CHECKS[item.id], f"{path}.kwargs"
    arguments: dict[str, Any] = {
        name: (_TYPES.get(name, _Number), ... if value.default is value.empty else value.default)
        for name, value in inspect.signature(make).parameters.items()
    }
    given = {name: value for name, value in item.kwargs.items() if value is not None}
    try:
        return make(**dict(create_model("Arguments", __base__=Data, **arguments)(**given)))
    except ValidationError as error:
        raise InvalidRequest(violations_of(error, path)) from None
    except ValueError:
        raise invalid(path, "has too long texts") from None
