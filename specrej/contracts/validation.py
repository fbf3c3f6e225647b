"""Checks of requests, made by every port before anything else; all violations at once.

`check_counts` and `check_lengths` bound a message before it is parsed and converted; the other
checks work on contract values. The schema has the ranges as rules for other languages; to evaluate
those takes too long per request.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from specrej import contracts as c
from specrej.contracts.errors import InvalidRequest, Violation

# Default limits of what a peer may send.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # between services
MAX_PUBLIC_MESSAGE_BYTES = 8 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024

MAX_PROMPT_CHARACTERS = 1_000_000  # of all messages
MAX_DECISION_TOKENS = 1024
MAX_REWARDS = 8
MAX_RESPONSES = 1024  # of a public request to score
MAX_DATA_BYTES = 65_536  # of a reward
MAX_BATCH = 65_536  # candidates that a service can be configured for
NAME_CHARACTERS = 256  # of a text that MAX_CHARACTERS does not name
MAX_TOKEN_CHARACTERS = 128  # of a token; the longest of common vocabularies are white space
_TEXT_CHARACTERS = 2**17 * MAX_TOKEN_CHARACTERS  # of a candidate: as many tokens as it may have

# All repeated fields of requests: how many items each may have. For public requests, these and the
# numbers of characters are rules of the schema, too.
MAX_ITEMS: Mapping[str, int] = {
    "Prompt.messages": 1024,
    "Prompt.tools": 128,
    "Message.tool_calls": 64,
    "Message.parts": 64,
    "Sampling.stop": 16,
    "Sampling.stop_token_ids": 64,
    "Sampling.logit_bias": 1024,
    "Schedule.tokens": MAX_DECISION_TOKENS,
    "Selection.rewards": MAX_REWARDS,
    "PruneSession.keep": MAX_BATCH,
    "PruneSession.forks": MAX_BATCH,
    "ScoreRequest.responses": MAX_BATCH,
    "ScoreBatch.candidates": MAX_BATCH,
    "OrchestratorServiceScoreRequest.responses": MAX_RESPONSES,
}
# Texts of requests: how many characters each may have.
MAX_CHARACTERS: Mapping[str, int] = {
    "Message.content": MAX_PROMPT_CHARACTERS,
    "TextPart.text": MAX_PROMPT_CHARACTERS,
    "Tool.name": 64,
    "Tool.description": 65_536,
    "Tool.parameters": 65_536,
    "ToolCall.name": 64,
    "ToolCall.arguments": MAX_PROMPT_CHARACTERS,
    "Prompt.text": MAX_PROMPT_CHARACTERS,
    "Prompt.tool_name": 64,
    "Sampling.stop": 256,
    "JsonSchema.schema": 65_536,
    "WeightedReward.data": MAX_DATA_BYTES,
    "Vote.argument": 1024,
    "Regex.pattern": 4096,
    "Grammar.lark": 65_536,
    "OpenSession.cache_salt": 128,
    "ScoreRequest.responses": _TEXT_CHARACTERS,
    "ScoreRequest.data": MAX_DATA_BYTES,
    "OpenScoring.data": MAX_DATA_BYTES,
    "OrchestratorServiceScoreRequest.responses": _TEXT_CHARACTERS,
    "OrchestratorServiceScoreRequest.data": MAX_DATA_BYTES,
    "ScoreCandidate.text": _TEXT_CHARACTERS,
}
# Public messages of so many bytes are looked through before they are parsed, up to so many fields.
_LARGE_BYTES, _MOST_FIELDS = 1 << 16, 1 << 14
# Of protobuf's wire format: bytes of the kinds of values that have no length; 2 has one.
_SIZES, _VARINT, _DELIMITED, _GROUP, _GROUP_END = (0, 8, 0, 0, 0, 4), 0, 2, 3, 4
_VARINT_BYTES = 10  # the most
# Its fields have the same paths in errors as those of Generate.
_WITHOUT_PATH = "GenerateStreamRequest.request"

ROLES = ("system", "user", "assistant", "tool")
IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
MAX_IMAGES = 16  # of a prompt
MAX_IMAGE_BYTES = 6 << 20  # of all images of a prompt
_TOOL_NAME = re.compile("[a-zA-Z0-9_.-]{1,64}")
# Closer to 1, computing the next decision token would take very many steps.
MIN_FACTOR = 1.01
MAX_FACTOR = 16.0
MAX_WINDOW = 4096  # tokens of a confidence
MAX_WEIGHT = 1e6
MAX_REWARD = 1e12  # thresholds
MAX_BIAS = 100.0
MAX_ALL_LOGPROBS = 2**20  # of all tokens of a request's candidates

# The kinds of schedules that use a field.
_KINDS_WITH = {"first": ("geometric", "memory"), "factor": ("geometric",), "tokens": ("tokens",)}


def check_counts(data: bytes, message: Any) -> None:
    """Refuse a large message with too many items before it is parsed.

    The parser, in C, needs up to 28 times the bytes of empty messages. `data`: a message in
    protobuf's wire format, of which only tags and lengths are read; what is not valid is left to
    the parser. `message`: its descriptor.

    Raises:
        InvalidRequest: a repeated field is too long, or there are too many fields in all.
    """
    if len(data) < _LARGE_BYTES:
        return
    counts: Counter[str] = Counter()
    parts, num_fields, depth = [(0, len(data), message, "")], 0, 0
    with suppress(IndexError):  # it ends too early
        while parts:
            at, end, message, path = parts.pop()
            while at < end:
                num_fields += 1
                if num_fields > _MOST_FIELDS:
                    raise InvalidRequest([Violation(path or "request", "has too many fields")])
                tag, at = _varint(data, at)
                field, kind = message.fields_by_number.get(tag >> 3), tag & 7
                size, at = _varint(data, at) if kind == _DELIMITED else (_SIZES[kind], at)
                at += size
                if kind == _VARINT:
                    _, at = _varint(data, at)
                # The schema has no groups: the parser skips them, whatever is in them.
                depth += (kind == _GROUP) - (kind == _GROUP_END)
                if field is None or depth:
                    continue
                name = f"{message.name}.{field.name}"
                where = path if name == _WITHOUT_PATH else f"{path}.{field.name}".lstrip(".")
                if field.is_repeated:
                    is_text = field.message_type or field.type == field.TYPE_STRING
                    is_packed = kind == _DELIMITED and not is_text
                    counts[where] += size // _VARINT_BYTES if is_packed else 1
                    if counts[where] > MAX_ITEMS[name]:
                        raise InvalidRequest([_too_many(where, name)])
                    where += f"[{counts[where] - 1}]"
                if field.message_type and kind == _DELIMITED:
                    parts.append((at, end, message, path))
                    at, end, message, path = at - size, at, field.message_type, where


def _too_many(path: str, name: str) -> Violation:
    return Violation(path, f"must have at most {MAX_ITEMS[name]} items")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError: it has no end."""
    if (number := data[at]) < 128:
        return number, at + 1
    number = 0
    for place in range(_VARINT_BYTES):
        byte = data[at + place]
        number |= (byte & 127) << 7 * place
        if byte < 128:
            return number, at + place + 1
    raise IndexError


def check_lengths(message: Any, path: str = "") -> Iterator[Violation]:
    """Every repeated field and text of a protobuf message that is too long.

    Nothing is converted, and no item of a long list is visited, before this check: as an object, an
    empty message takes a hundred times its bytes.
    """
    for field, value in message.ListFields():
        name = f"{message.DESCRIPTOR.name}.{field.name}"
        where = path if name == _WITHOUT_PATH else f"{path}.{field.name}".lstrip(".")
        if field.is_repeated and len(value) > MAX_ITEMS[name]:
            yield _too_many(where, name)
        elif field.message_type or field.type == field.TYPE_STRING:
            for index, item in enumerate(value if field.is_repeated else (value,)):
                here = f"{where}[{index}]" if field.is_repeated else where
                if field.message_type:
                    yield from check_lengths(item, here)
                elif len(item) > (most := MAX_CHARACTERS.get(name, NAME_CHARACTERS)):
                    accepted = f"at most {most} characters"
                    yield Violation(here, f"must have {accepted}, has {len(item)}")


def check_prompt(prompt: c.Prompt, path: str = "prompt") -> Iterator[Violation]:
    """Exactly one of messages and text, neither too long; special tokens in text only. Texts and
    users' messages are not blank; other messages may be: an answer can be empty."""
    if bool(prompt.messages) == bool(prompt.text):
        yield Violation(path, "must have exactly one of messages and text")
    if prompt.messages and prompt.allow_special_tokens:
        yield Violation(f"{path}.allow_special_tokens", "must be false with messages")
    if prompt.text and not prompt.text.strip():
        yield Violation(f"{path}.text", "must not be blank")
    for index, message in enumerate(prompt.messages):
        where = f"{path}.messages[{index}]"
        if message.role not in ROLES:
            yield Violation(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        yield from _check_message(message, where)
    if prompt.messages or prompt.continue_final:
        yield from _check_last_turns(prompt, path)
    size = len(prompt.text) + sum(len(message.text) for message in prompt.messages)
    if size > MAX_PROMPT_CHARACTERS:
        yield Violation(path, f"must have at most {MAX_PROMPT_CHARACTERS} characters, has {size}")
    yield from check_images(prompt.images, path)
    yield from _check_tools(prompt, path)


def _check_message(message: c.Message, where: str) -> Iterator[Violation]:
    if message.role == "user" and not message.text.strip() and not message.images:
        yield Violation(f"{where}.content", "must not be blank")
    if message.parts and (message.role != "user" or message.content):
        yield Violation(f"{where}.parts", "must be in a user's turn, in place of content")
    if message.tool_calls and message.role != "assistant":
        yield Violation(f"{where}.tool_calls", "must be in an assistant's turn")
    if message.role in ROLES and bool(message.tool_call_id) != (message.role == "tool"):
        yield Violation(f"{where}.tool_call_id", "must be set in a tool's turn, and in no other")
    for number, call in enumerate(message.tool_calls):
        if not _is_object(call.arguments):
            yield Violation(f"{where}.tool_calls[{number}].arguments", "must be an object in JSON")
    for number, part in enumerate(message.parts):
        yield from _check_part(part, f"{where}.parts[{number}]")


def _check_part(part: c.TextPart | c.Image, where: str) -> Iterator[Violation]:
    if isinstance(part, c.TextPart):
        if not part.text:
            yield Violation(f"{where}.text.text", "must not be empty")
        return
    if not part.data:
        yield Violation(f"{where}.image.data", "must not be empty")
    if part.media_type not in IMAGE_TYPES:
        accepted = f"must be one of {', '.join(IMAGE_TYPES)}"
        yield Violation(f"{where}.image.media_type", accepted)


def _check_tools(prompt: c.Prompt, path: str) -> Iterator[Violation]:
    names = [tool.name for tool in prompt.tools]
    if names and not prompt.messages:
        yield Violation(f"{path}.tools", "must be empty without messages")
    if names and prompt.continue_final:
        yield Violation(f"{path}.continue_final", "must be false with tools")
    for number, tool in enumerate(prompt.tools):
        where = f"{path}.tools[{number}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            accepted = "must be 1 .. 64 letters, digits, underscores, dots and hyphens"
            yield Violation(f"{where}.name", accepted)
        if tool.name in names[:number]:
            yield Violation(f"{where}.name", "must differ from those of other tools")
        if tool.parameters and not _is_object(tool.parameters):
            yield Violation(f"{where}.parameters", "must be an object in JSON")
    if prompt.tool_choice != "auto" and not names:
        yield Violation(f"{path}.tool_choice", "must be absent without tools")
    if prompt.tool_name and (prompt.tool_choice != "required" or prompt.tool_name not in names):
        text = 'must be the name of a tool, with the choice "required"'
        yield Violation(f"{path}.tool_name", text)


def check_images(images: Mapping[str, c.Image], path: str = "prompt") -> Iterator[Violation]:
    """Not too many, nor of too many bytes together; their files are `specrej.images`'s."""
    if len(images) > MAX_IMAGES:
        yield Violation(path, f"must have at most {MAX_IMAGES} images, has {len(images)}")
    if (size := sum(len(image.data) for image in images.values())) > MAX_IMAGE_BYTES:
        yield Violation(path, f"must have at most {MAX_IMAGE_BYTES} bytes in images, has {size}")


def refuse_images(prompt: c.Prompt) -> None:
    """For models that take none. Raises InvalidRequest: the prompt has images."""
    if violations := [Violation(path, "the model takes no images") for path in prompt.images]:
        raise InvalidRequest(violations)


def prompt_bytes(prompt: c.Prompt) -> int:
    """Bytes that are surely part of the tokens: a chat template may drop other turns than users',
    and white space around them."""
    turns = [turn.text for turn in prompt.messages if turn.role == "user"]
    return sum(len(text.strip().encode(errors="surrogatepass")) for text in (prompt.text, *turns))


def check_prompt_bytes(prompt: c.Prompt, most: int, context_tokens: int) -> None:
    """Before a prompt is tokenized; `most`: 0 if the tokenizer has no longest token.

    Raises:
        InvalidRequest: it exceeds the context, whatever its tokens are.
    """
    if most and (size := prompt_bytes(prompt)) > most:
        text = f"has {size} bytes; the context of {context_tokens} tokens holds at most {most}"
        raise InvalidRequest(
            [Violation("prompt", text)],
            reason="CONTEXT_EXCEEDED",
            metadata={"prompt_bytes": str(size), "context_tokens": str(context_tokens)},
        )


def _check_last_turns(prompt: c.Prompt, path: str) -> Iterator[Violation]:
    *before, last = [""] + [turn.role for turn in prompt.messages[-2:]]
    asked, answered = ("user", "tool"), ("assistant",)
    fits = last in answered and before[-1] in asked if prompt.continue_final else last in asked
    if not fits:
        number = max(0, len(prompt.messages) - 1)
        accepted = "assistant after user or tool" if prompt.continue_final else "user or tool"
        yield Violation(f"{path}.messages[{number}].role", f"must be {accepted} (last turn)")


def check_sampling(
    sampling: c.Sampling, n: int, context_tokens: int, vocabulary: int, path: str = "sampling"
) -> Iterator[Violation]:
    """Every field of Sampling; `n`, because greedy candidates would all be equal."""
    longest = sampling.max_tokens
    yield from _within(f"{path}.max_tokens", longest, 1, context_tokens)
    # A negative max_tokens does not make the default of 0 a violation, too.
    if not 0 <= sampling.min_tokens <= max(longest, 0):
        yield _out_of(f"{path}.min_tokens", sampling.min_tokens, f"0 .. max_tokens ({longest})")
    if sampling.temperature == 0 and n != 1:
        yield Violation(f"{path}.temperature", f"0 is greedy: n must be 1, is {n}")
    yield from _check_ranges(sampling, path)
    if sampling.top_logprobs > 0 and not sampling.logprobs:
        yield Violation(f"{path}.top_logprobs", "must be 0 without logprobs")
    for index, text in enumerate(sampling.stop):
        if not text:
            yield Violation(f"{path}.stop[{index}]", "must not be empty")
    yield from _check_token_ids(sampling, vocabulary, path)
    yield from _check_structured_output(sampling, path)


def _check_structured_output(sampling: c.Sampling, path: str) -> Iterator[Violation]:
    """The generator checks the rest, as it depends on the tokenizer."""
    where = f"{path}.structured_output"
    match sampling.structured_output:
        case None:
            return
        case c.JsonSchema(schema) if not _is_object(schema):
            yield Violation(f"{where}.json_schema.schema", "must be an object in JSON")
        case c.Regex(pattern) if not pattern:
            yield Violation(f"{where}.regex.pattern", "must not be empty")
        case c.Grammar(lark) if not lark.strip():
            yield Violation(f"{where}.grammar.lark", "must not be blank")
    for name in ("stop", "stop_token_ids", "ignore_eos"):
        if getattr(sampling, name):
            yield Violation(f"{path}.{name}", "must be absent: structured_output decides the end")


def _parsed(text: str) -> Any:
    """The value of JSON. Raises ValueError, RecursionError: it is none, or has what other programs
    and tokenizers refuse: NaN, infinite numbers, single surrogates."""
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _is_object(text: str) -> bool:
    try:
        return isinstance(_parsed(text), dict)
    except (ValueError, RecursionError):
        return False


def check_logprobs(
    sampling: c.Sampling, candidates: int, path: str = "sampling"
) -> Iterator[Violation]:
    """Not too many over all candidates: each takes about 70 bytes."""
    tokens = candidates * sampling.max_tokens
    each = sampling.logprobs + sampling.top_logprobs
    if tokens * each > MAX_ALL_LOGPROBS:
        yield Violation(
            f"{path}.{'top_logprobs' if sampling.top_logprobs else 'logprobs'}",
            f"{candidates:,} candidates of {sampling.max_tokens:,} tokens have"
            f" {tokens * each:,} log-probabilities, at most {MAX_ALL_LOGPROBS:,} are allowed",
        )


def _check_token_ids(sampling: c.Sampling, vocabulary: int, path: str) -> Iterator[Violation]:
    for index, token_id in enumerate(sampling.stop_token_ids):
        yield from _within(f"{path}.stop_token_ids[{index}]", token_id, 0, vocabulary - 1)
    biased = [item.token_id for item in sampling.logit_bias]
    if len(set(biased)) < len(biased):
        yield Violation(f"{path}.logit_bias", "must have each token once")
    for index, item in enumerate(sampling.logit_bias):
        where = f"{path}.logit_bias[{index}]"
        yield from _within(f"{where}.token_id", item.token_id, 0, vocabulary - 1)
        yield from _within(f"{where}.bias", item.bias, -MAX_BIAS, MAX_BIAS)


def check_candidates(n: int, max_candidates: int, path: str) -> Iterator[Violation]:
    """N within the generator's hard limit."""
    if not 0 <= n <= max_candidates:
        yield _out_of(path, n, f"0 (as many as fit) .. {max_candidates}")


def check_schedule(schedule: c.Schedule, path: str) -> Iterator[Violation]:
    """Decision tokens ascend, a geometric schedule grows; no field of another kind is set."""
    kind, default = schedule.kind, c.Schedule()
    if kind == "tokens":
        tokens = schedule.tokens
        if not 1 <= len(tokens) <= MAX_DECISION_TOKENS:
            yield Violation(f"{path}.tokens", f"must have 1 .. {MAX_DECISION_TOKENS} tokens")
        if any(later <= earlier for earlier, later in zip((0, *tokens), tokens, strict=False)):
            yield Violation(f"{path}.tokens", "must be 1 or more and strictly ascending")
    elif not 1 <= schedule.first <= c.MAX_INT32:
        yield _out_of(f"{path}.first", schedule.first, "1 or more")
    if kind == "geometric":
        yield from _within(f"{path}.factor", schedule.factor, MIN_FACTOR, MAX_FACTOR)
    for name, kinds in _KINDS_WITH.items():
        if kind not in kinds and getattr(schedule, name) != getattr(default, name):
            yield Violation(f"{path}.{name}", f"requires kind = {' or '.join(kinds)}, is {kind}")


def check_selection(
    selection: c.Selection, max_candidates: int, path: str = "selection"
) -> Iterator[Violation]:
    """Every field of Selection; the orchestrator checks that the rewards exist."""
    yield from check_candidates(selection.n, max_candidates, f"{path}.n")
    yield from _check_ranges(selection, path)
    yield from check_schedule(selection.schedule, f"{path}.schedule")
    yield from check_rewards(selection.rewards, f"{path}.rewards")
    yield from _check_min_answers(selection, max_candidates, f"{path}.min_answers")
    if selection.branching:
        yield from _check_branching(selection, max_candidates, f"{path}.branching")
    yield from _check_stops(selection, max_candidates, path)


def _check_min_answers(
    selection: c.Selection, max_candidates: int, path: str
) -> Iterator[Violation]:
    most, name = max_candidates, ""
    if 1 <= selection.n < most:
        most, name = selection.n, "n"
    if selection.branching and 1 <= selection.branching.keep < most:
        most, name = selection.branching.keep, "branching.keep"
    if not 1 <= selection.min_answers <= most:
        accepted = f"1 .. {name} ({most})" if name else f"1 .. {most}"
        yield _out_of(path, selection.min_answers, accepted)


def _check_branching(selection: c.Selection, max_candidates: int, path: str) -> Iterator[Violation]:
    assert selection.branching
    width, keep = selection.branching.width, selection.branching.keep
    if selection.vote:
        yield Violation(path, "must be absent with vote: forks of one candidate agree")
    if not selection.cuts_by_rank:
        yield Violation(path, "requires a reward that counts in cuts")
    if selection.algorithm is c.Algorithm.BEST_OF_N:
        yield Violation(path, "must be absent with Best-of-N, which rejects nothing")
    yield from _within(f"{path}.width", width, 2, max_candidates)
    if not 1 <= keep < max(2, width):
        yield _out_of(f"{path}.keep", keep, f"1 .. width - 1 ({width - 1})")
    yield from _within(f"{path}.taper", selection.branching.taper, 0, 1)


def _check_stops(selection: c.Selection, max_candidates: int, path: str) -> Iterator[Violation]:
    """What ends a request early, waves and votes."""
    if selection.stop_at is not None:
        yield from _within(f"{path}.stop_at", selection.stop_at, -MAX_REWARD, MAX_REWARD)
        if any(reward.normalization.kind == "batch" for reward in selection.rewards):
            text = "must be absent: rewards normalized by the batch do not compare over rounds"
            yield Violation(f"{path}.stop_at", text)
    most, name = (selection.n, f"n ({selection.n})") if selection.n else (max_candidates, "")
    if not 0 <= selection.first <= most:
        yield _out_of(f"{path}.first", selection.first, f"0 .. {name or most}")
    yield from _check_waves(selection, max_candidates, path)
    if selection.vote:
        yield from _check_vote(selection.vote, f"{path}.vote")


def _check_waves(selection: c.Selection, max_candidates: int, path: str) -> Iterator[Violation]:
    if not 0 <= selection.waves <= max_candidates:
        yield _out_of(f"{path}.waves", selection.waves, f"0 .. {max_candidates}")
    elif selection.waves and (selection.branching or not selection.n):
        other = "branching" if selection.branching else "n = 0 (as many as fit)"
        yield Violation(f"{path}.waves", f"must be 0 with {other}")
    elif 0 < selection.waves < selection.min_answers:
        accepted = f"min_answers ({selection.min_answers}) or more"
        yield _out_of(f"{path}.waves", selection.waves, accepted)
    if cut := selection.confidence_cut:
        if not selection.waves:
            yield Violation(f"{path}.confidence_cut", "requires waves: the first one is compared")
        if not 0 < cut.keep < 1:
            yield _out_of(f"{path}.confidence_cut.keep", cut.keep, "above 0 and below 1")
        yield from _within(f"{path}.confidence_cut.window", cut.window, 1, MAX_WINDOW)


def _check_vote(vote: c.Vote, path: str) -> Iterator[Violation]:
    """The orchestrator checks that the expression, pointer or function can be used."""
    takes = vote.extractor in ("regex", "json", "function")
    if takes and not vote.argument and vote.extractor != "json":  # "" points to all of it
        yield Violation(f"{path}.argument", f"must not be empty with extractor {vote.extractor}")
    if not takes and vote.argument:
        yield Violation(f"{path}.argument", f"must be empty with extractor {vote.extractor}")
    yield from _within(f"{path}.stop_probability", vote.stop_probability, 0.5, 1)


def check_rewards(rewards: Sequence[c.WeightedReward], path: str) -> Iterator[Violation]:
    """Not too many, each once, and every field of each; one of them chooses the answer."""
    if rewards and all(reward.stage == "cuts" for reward in rewards):
        yield Violation(path, "must have one with stage both or end, which chooses the answer")
    names = [reward.name for reward in rewards]
    if len(names) > MAX_REWARDS or len(set(names)) < len(names):
        yield Violation(path, f"must have at most {MAX_REWARDS}, each name once")
    for index, reward in enumerate(rewards):
        yield from _check_reward(reward, f"{path}[{index}]")


def _check_reward(reward: c.WeightedReward, path: str) -> Iterator[Violation]:
    if not reward.name:
        yield Violation(f"{path}.name", "must not be empty")
    if not 0 < abs(reward.weight) <= MAX_WEIGHT:
        accepted = f"-{MAX_WEIGHT:g} .. {MAX_WEIGHT:g} and not 0"
        yield _out_of(f"{path}.weight", reward.weight, accepted)
    if reward.veto_below is not None:
        yield from _within(f"{path}.veto_below", reward.veto_below, -MAX_REWARD, MAX_REWARD)
    yield from check_data(reward.data, f"{path}.data")


def check_data(data: str, path: str) -> Iterator[Violation]:
    """JSON, not too long; the reward checks the rest. Errors do not quote it."""
    if (size := len(data.encode(errors="surrogatepass"))) > MAX_DATA_BYTES:
        yield Violation(path, f"must have at most {MAX_DATA_BYTES} bytes, has {size}")
    elif data:
        try:
            _parsed(data)
        except (ValueError, RecursionError):
            yield Violation(path, "must be JSON")


def check_request(
    request: c.GenerationRequest, context_tokens: int, max_candidates: int, vocabulary: int
) -> Iterator[Violation]:
    """Every field of a public request."""
    yield from check_prompt(request.prompt)
    yield from check_sampling(request.sampling, request.selection.n, context_tokens, vocabulary)
    yield from check_selection(request.selection, max_candidates)
    if request.sampling.temperature == 0 and request.selection.branching:
        yield Violation("selection.branching", "must be absent at temperature 0: forks are equal")


def _check_ranges(value: c.Sampling | c.Selection, path: str) -> Iterator[Violation]:
    """Every option with an accepted range in the contract."""
    for name, option in c.declared_options().items():
        if option.accepted and hasattr(value, name):
            number = getattr(value, name)
            if not option.accepted.contains(number):
                yield _out_of(f"{path}.{name}", number, option.accepted.text)


def _out_of(field: str, value: float, accepted: str) -> Violation:
    return Violation(field, f"must be {accepted}, is {value}")


def _within(field: str, value: float, least: float, most: float) -> Iterator[Violation]:
    if not least <= value <= most:
        texts = (f"{end:g}" if isinstance(end, float) else str(end) for end in (least, most))
        yield _out_of(field, value, " .. ".join(texts))
