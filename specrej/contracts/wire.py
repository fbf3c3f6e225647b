"""Contract values to protobuf messages and back; the only module that imports both.

A dataclass corresponds to its message field by field: fields of the same name, or of the alias in
`_ALIASES`; enum values by name, for literal texts in lower case; `None` for an absent field; a
union of dataclasses for a oneof; milliseconds for a Duration. A new field of a contract and its
message needs no code here. Contract fields without a message field are not sent. `Generation` and
`Event` have functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from specrej import contracts as c
from specrej.backend.v1 import generator_pb2
from specrej.contracts.errors import Violation
from specrej.v1 import orchestrator_pb2 as pb

# Contract field -> message field, for messages that have no field of the contract's name.
_ALIASES = {
    "id": "candidate_id",
    "finish": "finish_reason",
    "logprob": "cumulative_logprob",
    "cache": "cache_control",
    "candidates": "prefixes",
    "trace": "round",
    "total_ms": "total_duration",
    "queue_ms": "queue_duration",
    "open_ms": "open_duration",
    "extend_ms": "extend_duration",
    "score_ms": "score_duration",
    "prune_ms": "prune_duration",
    "first_round_ms": "first_round_duration",
}
# The contracts' names of Durations, which have the unit.
_TIMES = {wire: name for name, wire in _ALIASES.items() if name.endswith("_ms")}
_NANOSECONDS = 1e6  # of a millisecond

M = TypeVar("M", bound=Message)
T = TypeVar("T")
R = TypeVar("R")
Violations = list[Violation] | None
# From a field's value to the message's. None in place of one: the value is sent as it is.
Encode = Callable[[Any], Any]
# From a message field's value, its path, and the list that receives violations.
Decode = Callable[[Any, str, Violations], Any]


def to_message(value: Any, message: type[M]) -> M:
    """The message for a contract value.

    Raises:
        ValueError: a value that the message cannot hold, such as a number beyond 64 bits.
    """
    encoded: M = _encoder(type(value), message)(value)
    return encoded


def part_to_message(contract: Any, values: Mapping[str, Any], message: type[M]) -> M:
    """The message with only these of a contract's fields; all others stay absent.

    Raises:
        ValueError: as `to_message` does.
    """
    encoders = _field_encoders(contract, message)
    return message(
        **{
            wire: encode(values[name]) if encode else values[name]
            for name, wire, encode in encoders
            if name in values
        }
    )


def from_message(
    message: Message, contract: type[T], violations: Violations = None, path: str = ""
) -> T:
    """The contract value of a message; an absent field has the contract's default.

    An unknown enum number is added to `violations` under its field path, which `path` begins.

    Raises:
        ValueError: an unknown enum number, where `violations` is None or there is no default.
    """
    decoded: T = _decoder(contract, type(message))(message, path, violations)
    return decoded


# Values that do not correspond field by field


def request_from_message(
    message: pb.GenerateRequest, violations: list[Violation]
) -> c.GenerationRequest:
    """The request, and what it leaves to the server; unknown enum numbers are violations, too."""
    request = from_message(message, c.GenerationRequest, violations)
    selection, sampling = message.selection, message.sampling
    of_selection = ("n", "alpha", "schedule", "prefer_complete")
    parts: list[tuple[str, Any]] = [(name, selection) for name in of_selection]
    parts.append(("max_tokens", sampling))
    absent = tuple(name for name, part in parts if not part.HasField(name))
    return replace(request, absent=absent)


def generation_to_message(generation: c.Generation) -> pb.GenerateResponse:
    message = to_message(generation, pb.GenerateResponse)
    best = message.candidates[0]
    message.text, message.score, message.finish_reason = best.text, best.score, best.finish_reason
    message.fingerprints.generator = generation.generator_fingerprint
    message.fingerprints.reward = generation.reward_fingerprint
    return message


def generation_from_message(message: pb.GenerateResponse) -> c.Generation:
    return replace(
        from_message(message, c.Generation),
        generator_fingerprint=message.fingerprints.generator,
        reward_fingerprint=message.fingerprints.reward,
    )


def event_to_message(event: c.Event) -> pb.GenerateStreamResponse:
    if isinstance(event, c.Finished):
        return pb.GenerateStreamResponse(finished=generation_to_message(event.generation))
    return to_message(event, pb.GenerateStreamResponse)


def event_from_message(message: pb.GenerateStreamResponse) -> c.Event:
    """Raises ValueError for an event of no known kind."""
    match message.WhichOneof("event"):
        case "admitted":
            return from_message(message.admitted, c.Admitted)
        case "round_completed":
            return from_message(message.round_completed, c.RoundCompleted)
        case "progress":
            return from_message(message.progress, c.Progress)
        case "text_delta":
            return from_message(message.text_delta, c.TextDelta)
        case "finished":
            return c.Finished(generation_from_message(message.finished))
        case _:
            raise ValueError("an event of no known kind")


class StreamedTexts:
    """The latest texts of a session's candidates, kept at both ends of its stream: a prefix on it
    has only what follows."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fork(self, forks: c.Forks) -> None:
        self._texts |= {n: self._texts.get(parent, "") for n, parent in forks.items()}

    def to_message(self, ended: c.Round) -> generator_pb2.PrefixBatch:
        """The message of a round or a part of one."""
        candidates, starts = [], []
        for candidate in ended.candidates:
            known, text = self._texts.get(candidate.id, ""), candidate.text
            start = min(len(known), len(text))  # a stop text may take back the end of the known one
            starts.append(start if text[:start] == known[:start] else 0)
            candidates.append(replace(candidate, text=text[starts[-1] :]))
        self._keep(ended.candidates)
        message = to_message(
            replace(ended, candidates=tuple(candidates)), generator_pb2.PrefixBatch
        )
        for prefix, start in zip(message.prefixes, starts, strict=True):
            prefix.text_start = start
        return message

    def from_message(self, message: generator_pb2.PrefixBatch) -> c.Round:
        """The round or the part of one, with whole texts.

        Raises:
            ValueError: as the function of this name, and for a start beyond the known text.
        """
        for prefix in message.prefixes:
            known = self._texts.get(prefix.candidate_id, "")
            if not 0 <= prefix.text_start <= len(known):
                raise ValueError(f"text_start: {prefix.text_start} of {len(known)} characters")
            prefix.text = known[: prefix.text_start] + prefix.text
        ended = from_message(message, c.Round)
        self._keep(ended.candidates)
        return ended

    def _keep(self, candidates: Iterable[c.Candidate]) -> None:
        """Keep the texts of these; without any, those of a round that goes on."""
        self._texts = {candidate.id: candidate.text for candidate in candidates} or self._texts


# From contracts to messages; tables are computed once per pair of classes


def _cached(make: Callable[[Any, Any], R]) -> Callable[[Any, Any], R]:
    """`functools.cache`, typed for classes as arguments."""
    return cache(make)


@_cached
def _encoder(contract: Any, message: Any) -> Encode:
    alternatives = {
        option.message_type.name: option
        for option in message.DESCRIPTOR.fields
        if option.message_type and option.containing_oneof
    }
    if option := alternatives.get(contract.__name__):
        encode = _encoder(contract, GetMessageClass(option.message_type))
        return lambda value: message(**{option.name: encode(value)})
    encoders = _field_encoders(contract, message)
    return lambda value: message(
        **{
            wire: encode(getattr(value, name)) if encode else getattr(value, name)
            for name, wire, encode in encoders
        }
    )


@_cached
def _field_encoders(contract: Any, message: Any) -> tuple[tuple[str, str, Encode | None], ...]:
    """Names in contract and message, and the conversion, of all fields and properties sent."""
    described, pairs = message.DESCRIPTOR.fields_by_name, _pairs(contract, message)
    names = {wire: item.name for wire, item in pairs.items()}
    names |= {
        name: name
        for name in described.keys() - pairs.keys()
        if isinstance(getattr(contract, name, None), property)
    }
    return tuple((name, wire, _encode(described[wire])) for wire, name in names.items())


def _pairs(contract: Any, message: Any) -> dict[str, Field[Any]]:
    """Contract fields by the names of their message fields."""
    described = message.DESCRIPTOR.fields_by_name
    pairs = {}
    for item in fields(contract):
        name = item.name if item.name in described else _ALIASES.get(item.name, "")
        if name in described:
            pairs[name] = item
    return pairs


def _encode(described: Any) -> Encode | None:
    if _is_time(described):
        return _encode_time
    if described.message_type:
        message = GetMessageClass(described.message_type)

        def encode(value: Any) -> Any:
            return None if value is None else _encoder(type(value), message)(value)
    elif described.enum_type:
        numbers = {name: number for number, name in _enum_names(described).items()}

        def encode(value: Any) -> Any:
            if value is None:
                return None
            name = value.name if isinstance(value, Enum) else value.upper()
            if name not in numbers:
                raise ValueError(f"unknown value {value!r}; accepted: {', '.join(numbers).lower()}")
            return numbers[name]
    else:
        return None
    return (lambda values: list(map(encode, values))) if described.is_repeated else encode


def _is_time(described: Any) -> bool:
    return described.message_type is Duration.DESCRIPTOR


def _encode_time(value: float) -> Duration:
    encoded = Duration()
    encoded.FromNanoseconds(round(value * _NANOSECONDS))
    return encoded


def _enum_names(described: Any) -> dict[int, str]:
    """Names by number without the enum's prefix; 0, unspecified, is left out."""
    unspecified, *values = described.enum_type.values
    prefix = unspecified.name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix) for value in values}


# From messages to contracts


@_cached
def _decoder(contract: Any, message: Any) -> Decode:
    """`from_message` for one pair of classes."""
    decoders = _field_decoders(contract, message)

    def decode(message: Message, path: str, violations: Violations) -> Any:
        return contract(
            **{
                name: convert(getattr(message, wire), f"{path}{wire}", violations)
                if convert
                else getattr(message, wire)
                for name, wire, is_optional, convert in decoders
                if not is_optional or message.HasField(wire)
            }
        )

    return decode


def _field_decoders(
    contract: Any, message: Any
) -> tuple[tuple[str, str, bool, Decode | None], ...]:
    """Names in contract and message, whether absence means the default, and the conversion."""
    described, hints = message.DESCRIPTOR.fields_by_name, get_type_hints(contract)
    decoders = []
    for wire, item in _pairs(contract, message).items():
        given = get_args(hints[item.name])
        if ... in given:  # a tuple, perhaps of one of several
            given = get_args(given[0]) or given
        types = tuple(kind for kind in given if kind not in (NoneType, ...))
        types = types or (hints[item.name],)
        # An absent message is decoded as an empty one, unless the contract has None for it.
        is_value = is_dataclass(types[0]) and NoneType not in given
        has_default = item.default is not MISSING or item.default_factory is not MISSING
        is_optional = described[wire].has_presence and has_default and not is_value
        decode = _decode(described[wire], types, item.default)
        decoders.append((item.name, wire, is_optional, decode))
    return tuple(decoders)


def _decode(described: Any, types: tuple[Any, ...], default: object) -> Decode | None:
    if _is_time(described):
        return lambda time, *_: time.ToNanoseconds() / _NANOSECONDS
    if described.message_type:
        decode = _decode_message(described, types)
    elif described.enum_type:
        decode = _decode_enum(described, types[0], default)
    else:
        return (lambda values, *_: tuple(values)) if described.is_repeated else None
    if not described.is_repeated:
        return decode
    return lambda values, path, violations: tuple(
        decode(value, f"{path}[{index}]", violations) for index, value in enumerate(values)
    )


def _decode_message(described: Any, types: tuple[Any, ...]) -> Decode:
    if len(types) == 1:
        one = _decoder(types[0], GetMessageClass(described.message_type))
        return lambda message, path, violations: one(message, f"{path}.", violations)
    alternatives = {kind.__name__: kind for kind in types}

    def decode(message: Message, path: str, violations: Violations) -> Any:
        for option, value in message.ListFields():
            contract = alternatives[value.DESCRIPTOR.name]
            return from_message(value, contract, violations, f"{path}.{option.name}.")
        return types[0]()

    return decode


def _decode_enum(described: Any, kind: type[Enum] | str, default: object) -> Decode:
    """`kind` is the contract's Enum, or one of its literal texts."""
    names = _enum_names(described).items()
    values: dict[int, object] = {
        number: name.lower() if isinstance(kind, str) else kind[name] for number, name in names
    }

    def decode(number: int, path: str, violations: Violations) -> object:
        if number in values:
            return values[number]
        if (default is MISSING) or (number and violations is None):
            raise ValueError(f"{path}: unknown value {number}")
        if number and violations is not None:
            violations.append(Violation(path, f"unknown value {number}"))
        return default

    return decode


def to_plain(value: c.Generation | c.ServiceDescription | c.Event) -> dict[str, object]:
    """JSON types under proto field names; absent fields are left out.

    Unlike protobuf's own JSON, 64-bit integers stay numbers, bytes are text, NaN is None, and times
    are numbers under the contracts' names, which have the unit. An event is one field of its name.
    """
    match value:
        case c.Generation():
            return _plain(generation_to_message(value))
        case c.ServiceDescription():
            return _plain(to_message(value, pb.OrchestratorServiceDescribeResponse))
        case _:
            return _plain(event_to_message(value))


def _plain(message: Message) -> dict[str, object]:
    return {
        _TIMES.get(field.name, field.name): _plain_field(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain_field(field: Any, value: Any) -> object:
    if field.is_repeated:
        return [_plain_value(field, item) for item in value]
    return _plain_value(field, value)


def _plain_value(field: Any, value: Any) -> object:
    if _is_time(field):
        return value.ToNanoseconds() / _NANOSECONDS
    if field.message_type:
        return _plain(value)
    if field.enum_type:
        return field.enum_type.values_by_number[value].name
    if value != value:  # NaN, which JSON cannot have
        return None
    return text_of(value) if isinstance(value, bytes) else value


def text_of(token: bytes) -> str:
    r"""The text of a token; bytes that are no whole character as `\xNN`."""
    return token.decode(errors="backslashreplace")
