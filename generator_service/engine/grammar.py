"""Structured output: which tokens may follow a candidate's tokens, by llguidance. No torch.

A session's output is compiled once. Its `Matchers` have one state per candidate, which depends on
the candidate's tokens alone: cuts change no state, and a fork copies its parent's. Nothing here
depends on logits or draws. A session's candidates share the library's table of lexer states: its
bound, far beyond what useful grammars need, is the one thing in which they can affect each other.

A few characters can describe hours of work, and a thread cannot be killed. So each output is first
compiled in a process of its own, which runs this module, and followed there with random tokens. A
fork of that process ends if it takes too long; the service compiles only outputs that passed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import astuple, dataclass, fields
from decimal import ROUND_DOWN, Context, Decimal, InvalidOperation
from math import trunc
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from specrej.contracts import Grammar, JsonObject, JsonSchema, Regex, StructuredOutput
from specrej.contracts.errors import InternalError, InvalidRequest, Overloaded, Violation
from specrej.isolated import LineProcess

# llguidance is imported at the first use: the engine runs without it, too.
if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

Mask = NDArray[np.uint32]

_PATH = "sampling.structured_output"
_MOST_TRIED = 256  # outputs whose trials are remembered
_MOST_WAITING = 64  # outputs of a tenant that wait for their trial
_LOWEST_PRIORITY = 19  # of trials: sessions under way keep the processor
# Processor seconds per output; a large schema, such as one with 500 properties, takes half.
_TRIAL_S, _TRIAL_BYTES, _TRIAL_TOKENS = 0.5, 4 << 30, 32
# Of stack, half of a thread's: the service compiles again, in a thread of its own, where references
# one behind another that pass here must not overflow.
_STACK_BYTES = 4 << 20
_THREAD_BYTES = 2 << 20  # of glibc's threads, where the stack of the main one is unlimited
_BITS = 32  # of a mask's words

# Processor time that a session's masks may take: an initial budget, and an increment for each token
# of a candidate; many times what JSON takes (docs/structured.md).
_FIRST_S, _TOKEN_S = 1.0, 0.002

_DIGITS = 15  # of numbers that float64 holds exactly
_LARGEST = Decimal(10**_DIGITS - 1)
_TOWARDS_ZERO = Context(_DIGITS, ROUND_DOWN, Emin=-286)  # to 0 below 1e-300
_EXCLUSIVE = {
    "exclusiveMinimum": ("maximum", "exclusiveMaximum"),
    "exclusiveMaximum": ("minimum", "exclusiveMinimum"),
}
# Keywords of bounds, and the sign of one that may be narrowed.
_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # whose have schemas by name
_NO_SYNTAX = ("binary", "password", "path", "file-path", "directory-path")  # formats of pydantic
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"

# A schema's own "x-guidance" replaces options that are not set here; lenient ones ignore keywords
# that are not supported. White space is at most one space after a comma or a colon: models that
# repeat it would never end.
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer of transformers as JSON, the model's number of logits, an end token, and added
    tokens that mark the parts of answers."""

    json: str
    vocabulary: int
    eos_id: int | None
    mark_ids: Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, mark_ids: Sequence[int] = ()) -> TokenizerSpec:
        """The spec of a tokenizer; one that is slow has an empty JSON, which is not supported."""
        backend = copy(getattr(tokenizer, "backend_tokenizer", None))
        if backend is None:
            return cls("", vocabulary, None)
        backend.no_padding()
        backend.no_truncation()
        size = max(vocabulary, len(tokenizer))
        return cls(backend.to_str(), size, tokenizer.eos_token_id, mark_ids)

    def load(self) -> LLTokenizer:
        """llguidance's tokenizer. Holds Python's lock for half a second.

        Raises:
            ValueError: tokenizers of its kind are not supported.
        """
        from llguidance import LLTokenizer

        return LLTokenizer(self.json, self.vocabulary, self.eos_id)


class Vocabulary:
    """A tokenizer's tokens as bits of masks."""

    def __init__(
        self, tokenizer: LLTokenizer, end_ids: Collection[int], mark_ids: Collection[int] = ()
    ) -> None:
        """`end_ids` end a candidate; they and special tokens but `mark_ids` are part of no text."""
        self.tokenizer = tokenizer
        self.num_words = -(-tokenizer.vocab_size // _BITS)
        self.ends = self.mask(end_ids)
        special = filter(tokenizer.is_special_token, range(tokenizer.vocab_size))
        self.special_ids = frozenset(special)
        self.texts = ~self.mask({*end_ids, *(self.special_ids - {*mark_ids})})

    def mask(self, token_ids: Collection[int]) -> Mask:
        """Bits [words] of these tokens, token 0 in the lowest one."""
        mask = np.zeros(self.num_words, np.uint32)
        for token_id in token_ids:
            mask[token_id // _BITS] |= np.uint32(1 << token_id % _BITS)
        return mask


class Grammars:
    """Compiles structured outputs for one model."""

    def __init__(self, spec: TokenizerSpec, end_ids: Collection[int]) -> None:
        """Takes a second."""
        opening = json.dumps([*astuple(spec), sorted(end_ids)])
        # One thread: it forks.
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        module = ("-m", "generator_service.engine.grammar")
        self._trials = LineProcess(*module, opening=f"{opening}\n", **one_thread)
        self._trying = threading.Lock()
        self._errors: dict[StructuredOutput, str] = {}  # of outputs that were tried; "": none
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant
        self._num_waiting: Counter[str] = Counter()  # by tenant
        # Outputs that were tried do not wait for trials of others.
        self._for_trials = ThreadPoolExecutor(1, thread_name_prefix="grammar-trial")
        self._for_tried = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._vocabulary: Vocabulary | None = None
        self._problem = ""
        try:
            self._vocabulary = Vocabulary(spec.load(), end_ids, spec.mark_ids)
        except ValueError as error:
            self._problem = f"the model's tokenizer: {error}"

    @property
    def is_supported(self) -> bool:
        """Whether the model's tokenizer is."""
        return self._vocabulary is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are part of a text only where a grammar names them."""
        return self._vocabulary.special_ids if self._vocabulary else frozenset()

    async def compiled(
        self, output: StructuredOutput, tenant: str = "", path: str = ""
    ) -> CompiledGrammar:
        """As `compile`, in a thread. Tenants try new outputs by turns, and the next one of a tenant
        waits for as long as the one before took.

        Raises:
            Overloaded: too many outputs of the tenant wait for their trial.
        """
        run = asyncio.get_running_loop().run_in_executor
        if output in self._errors:
            return await run(self._for_tried, self.compile, output, path)
        if self._num_waiting[tenant] >= _MOST_WAITING:
            raise Overloaded(f"{_MOST_WAITING} structured outputs wait to be compiled already")
        self._num_waiting[tenant] += 1
        try:
            turn = self._turns.setdefault(tenant, asyncio.Lock())
            await turn.acquire()
            began = time.monotonic()
            try:
                return await run(self._for_trials, self.compile, output, path)
            finally:
                pause_s = time.monotonic() - began
                asyncio.get_running_loop().call_later(pause_s, turn.release)
        finally:
            self._num_waiting[tenant] -= 1
            self._num_waiting += Counter()  # without zeros

    def compile(self, output: StructuredOutput, path: str = "") -> CompiledGrammar:
        """Takes milliseconds, and one or two seconds more at first, when the trial process starts.
        `path`: of the field that is refused; empty: the output's.

        Raises:
            InvalidRequest: it is malformed, not supported or too large.
        """
        try:
            if self._vocabulary is None:
                raise ValueError(self._problem)
            source = _source(output)
            if error := self._error_of(output, source):
                raise ValueError(error)
            return CompiledGrammar.of(source, self._vocabulary)
        except ValueError as error:
            raise InvalidRequest([refusal(path or path_of(output), error)]) from None

    def _error_of(self, output: StructuredOutput, source: str) -> str:
        error = self._errors.get(output)
        if error is None:
            with self._trying:
                error = self._errors[output] = self._tried(source)
                if len(self._errors) > _MOST_TRIED:
                    del self._errors[next(iter(self._errors))]
        return error

    def _tried(self, source: str) -> str:
        """The reason why `source` cannot be compiled within the bounds; empty if it can."""
        answer = self._trials.ask(json.dumps(source))
        if not answer:
            log.error("the process that tries structured outputs has ended")
            raise InternalError("the generator cannot compile structured outputs")
        error: str = json.loads(answer)
        return error


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in its first state."""

    first: LLMatcher
    vocabulary: Vocabulary

    @classmethod
    def of(cls, source: str, vocabulary: Vocabulary) -> CompiledGrammar:
        """Raises ValueError if it cannot be compiled."""
        from llguidance import LLMatcher
        from llguidance._lib import LLParserLimits

        limits = LLParserLimits(  # of the work for one grammar, and for one token of a candidate
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=50_000,
            step_max_items=20_000,
            max_lexer_states=50_000,  # of a session's lexers, about a kilobyte each
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        first = LLMatcher(vocabulary.tokenizer, source, limits=limits, log_level=0)
        if first.is_error():
            raise ValueError(first.get_error())
        return cls(first, vocabulary)

    def matchers(self) -> Matchers:
        """The states of a session's candidates."""
        return Matchers(self)


class Matchers:
    """The states of a session's candidates; of one thread."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        # By candidate, with the number of tokens that it has read.
        self._states: dict[int, tuple[LLMatcher, int]] = {}
        self._lost: set[int] = set()  # candidates that are given up
        self._left_s = _FIRST_S

    def allowed(
        self, ids: Sequence[int], texts: Sequence[Sequence[int]], excluded: Collection[int] = ()
    ) -> Mask:
        """Bits [candidates, words] of the tokens that may come next.

        `texts` are all tokens of each candidate. An end token is allowed exactly where the grammar
        may end. `excluded` tokens are not allowed, unless no other one is. The grammar gives up a
        candidate after tokens that do not conform, at a limit of the library, or if the session's
        masks take much more processor time than any useful grammar's. Such a candidate may have
        any token but those that end it, and is cut off at max_tokens.
        """
        masks = np.zeros((len(ids), self._vocabulary.num_words), np.uint32)
        rows = zip(ids, texts, masks, strict=True)
        followed = [row for row in rows if row[0] not in self._lost]
        self._left_s += len(followed) * _TOKEN_S
        for candidate, text, mask in followed:
            if self._left_s <= 0:
                self._lost.add(candidate)
                continue
            began = time.thread_time()
            matcher = self._read(candidate, text)
            self._set_next(mask, matcher)
            if matcher.is_error():
                self._lost.add(candidate)
            self._left_s -= time.thread_time() - began
        if excluded:
            rest = masks & ~self._vocabulary.mask(excluded)
            has_rest = rest.any(axis=1)
            masks[has_rest] = rest[has_rest]
        masks[~masks.any(axis=1)] = self._vocabulary.texts
        return masks

    def walk(self, num_tokens: int, random: Random) -> None:
        """Follow the grammar with `num_tokens` random tokens. Raises ValueError at a dead end."""
        matcher, mask = self._grammar.first.deep_copy(), self._vocabulary.mask(())
        for _ in range(num_tokens):
            self._set_next(mask, matcher)
            if not mask.any():
                raise ValueError(matcher.get_error() or "no text of the model's tokens conforms")
            mask &= self._vocabulary.texts
            (tokens,) = unpacked(mask[None], self._vocabulary.tokenizer.vocab_size)
            choices = np.flatnonzero(tokens)
            if not choices.size:
                return
            matcher.consume_token(int(random.choice(choices)))

    def keep(self, ids: Collection[int], forks: Mapping[int, int]) -> None:
        """Drop the states of all candidates but `ids`; a fork has a copy of its parent's state."""
        states = {number: state for number, state in self._states.items() if number in ids}
        for number, parent in forks.items():
            if parent in self._states:
                matcher, num_read = self._states[parent]
                states[number] = matcher.deep_copy(), num_read
        self._states = states
        lost_forks = {number for number, parent in forks.items() if parent in self._lost}
        self._lost = (self._lost & {*ids}) | lost_forks

    def _set_next(self, mask: Mask, matcher: LLMatcher) -> None:
        """Set bits [words] to the tokens that may come next, none after an error."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        mask &= 0 if matcher.is_error() else self._vocabulary.texts
        if matcher.is_accepting():
            mask |= self._vocabulary.ends

    def _read(self, candidate: int, text: Sequence[int]) -> LLMatcher:
        """The candidate's state after all of `text`."""
        matcher, num_read = self._states.get(candidate) or (self._grammar.first.deep_copy(), 0)
        if num_read < len(text):
            matcher.consume_tokens(list(text[num_read:]))
        self._states[candidate] = matcher, len(text)
        return matcher


def path_of(output: StructuredOutput) -> str:
    """The field of an output, such as "regex.pattern": the kind, and its first field if any."""
    return f"{_PATH}.{output.kind}.{fields(output)[0].name}".removesuffix(".kind")


def refusal(path: str, error: ValueError) -> Violation:
    """An output that is not supported."""
    line = " ".join(str(error).split())
    return Violation(path, f"is not supported: {line[:200]}")


def unpacked(masks: Mask, vocabulary: int) -> NDArray[np.bool_]:
    """Masks as booleans [candidates, vocabulary]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocabulary, bitorder="little")
    return bits.view(np.bool_)


def _source(output: StructuredOutput) -> str:
    """llguidance's text of an output.

    Raises:
        ValueError: a schema is no object of JSON, or llguidance would read it as another one.
    """
    from llguidance import LLMatcher

    match output:
        case JsonSchema(schema):
            return LLMatcher.grammar_from_json_schema(
                checked_schema(schema), overrides=JSON_OPTIONS
            )
        case JsonObject():
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_OPTIONS)
        case Regex(pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Grammar(lark):
            return LLMatcher.grammar_from_lark(lark)


def json_schema_of(output: JsonSchema | JsonObject) -> str:
    """The schema of an output, with the options of this file for a program that uses llguidance.

    Raises:
        ValueError: as `checked_schema`.
    """
    schema = checked_schema(output.schema) if isinstance(output, JsonSchema) else "{}"
    typed = {"type": "object"} if isinstance(output, JsonObject) else {}
    return json.dumps({**json.loads(schema), **typed, "x-guidance": JSON_OPTIONS})


def checked_schema(schema: str) -> str:
    """The schema as llguidance reads it without changing or misreading a part.

    llguidance reads numbers as float64. A bound of more digits, such as a minimum of -2^63, becomes
    one of 15 digits within it, so that answers conform. Formats that describe no syntax are left
    out. Text that is not JSON passes: llguidance refuses it.

    Raises:
        ValueError: a number or a pair of keywords is not supported, or it is nested too deeply.
    """

    def number(text: str) -> int | float | Decimal:
        exact = Decimal(text)
        if abs(exact.adjusted()) > 300 or len(exact.normalize().as_tuple().digits) > _DIGITS:
            return exact
        return float(text) if {*text} & {*".eE"} else int(text)

    def refuse(exact: Decimal) -> NoReturn:
        raise ValueError(
            f"the number {str(exact)[:40]} has more than {_DIGITS} digits or is too large"
        )

    try:
        parsed = json.loads(schema, parse_float=number, parse_int=number)
        return json.dumps(_supported(parsed), default=refuse)
    except json.JSONDecodeError:
        return schema
    except InvalidOperation:
        raise ValueError("a number has too many digits in its exponent") from None
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _supported(part: Any) -> Any:
    """A schema's part with bounds and formats that are supported."""
    if isinstance(part, list):
        return [_supported(item) for item in part]
    if not isinstance(part, dict):
        return part
    part = converted(part, _supported)
    _bound(part)
    form = part.get("format")
    if isinstance(form, str) and form in _NO_SYNTAX:
        del part["format"]
    elif isinstance(form, str) and re.fullmatch("uuid[1-8]", form) and "pattern" not in part:
        part["pattern"] = _UUID.format(version=form[-1])
        del part["format"]
    return part


def converted(
    schema: dict[str, Any], convert: Callable[..., Any], *arguments: Any
) -> dict[str, Any]:
    """A schema with its parts converted, which may have names of keywords."""
    made = dict(schema)
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            made[name] = {key: convert(part, *arguments) for key, part in value.items()}
        elif name not in _VALUES:
            made[name] = convert(value, *arguments)
    return made


def _bound(part: dict[str, Any]) -> None:
    """Narrow bounds of too many digits; refuse those that llguidance misreads."""
    numbers: dict[str, int | float] = {}
    for name, sign in _BOUNDS.items():
        bound = part.get(name)
        if isinstance(bound, Decimal) and (bound > 0) is (sign > 0):
            nearer = _TOWARDS_ZERO.plus(min(max(bound, -_LARGEST), _LARGEST))
            bound = part[name] = int(nearer) if nearer == int(nearer) else float(nearer)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            numbers[name] = bound
            if bound < 0 and "multipleOf" in part:
                raise ValueError(f"multipleOf beside {name} {bound:g}: negative multiples")
    # llguidance would allow an exclusive bound that is the other bound without its fraction.
    for name, others in _EXCLUSIVE.items():
        for other in numbers.keys() & others if name in numbers else ():
            if trunc(numbers[other]) == numbers[name] != numbers[other]:
                text = f"{name} {numbers[name]:g} beside the other bound {numbers[other]:g}"
                raise ValueError(text)


def _try_outputs() -> None:
    """Try outputs until the standard input ends, in the process of `Trials`.

    Reads the tokenizer, then one grammar per line, and writes an error or nothing for each, all as
    JSON. Each is tried in a fork, so that one that takes too long costs no new process.
    """
    os.nice(_LOWEST_PRIORITY)
    with suppress(OSError):  # Linux may share the processor by sessions first: sched(7), autogroup
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))
    resource.setrlimit(resource.RLIMIT_AS, (_TRIAL_BYTES, _TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given, most = resource.getrlimit(resource.RLIMIT_STACK)
    of_threads = _THREAD_BYTES if given == resource.RLIM_INFINITY else given
    resource.setrlimit(resource.RLIMIT_STACK, (min(_STACK_BYTES, of_threads // 2), most))
    *spec, end_ids = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(TokenizerSpec(*spec).load(), end_ids, spec[-1])
    for line in sys.stdin:
        if not (trial := os.fork()):
            _try_output(line, vocabulary)
        _, status = os.waitpid(trial, 0)
        if status:
            print(json.dumps("takes too much time or memory"), flush=True)


def _try_output(line: str, vocabulary: Vocabulary) -> NoReturn:
    """Write the error of one output, and end the process with status 0; a limit ends it before."""
    status = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, _TRIAL_S)  # its signal ends the process
        error = ""
        try:
            grammar = CompiledGrammar.of(json.loads(line), vocabulary)
            grammar.matchers().walk(_TRIAL_TOKENS, Random(0))
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    _try_outputs()
