"""A test double that ships: a generator of deterministic words with real slot accounting.

Every token is a hash of (seed, candidate, step), so a survivor's text never depends on its
neighbours. Of the sampling it follows ends, stop tokens and log-probabilities, ignores what would
change the draws, and refuses structured outputs. With tools it makes the calls that the last turn
of the user names, such as `call add {"a": 1}`, those after a "then" in a turn of their own, and
answers with their results; with `Prompt.thinking` it reasons first. No model, no torch. Options
make its steps slow or fail, so that tests can interrupt a request under way.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from generator_service.admission import AdmissionQueue, Demand
from generator_service.engine import commands
from specrej import contracts as c
from specrej.answer_form import written
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.contracts.validation import refuse_images
from specrej_models.slots import SlotLedger

# Of different lengths, so that texts shifted by a word are noticed.
_WORDS = ("ash", "birch", "clouds", "delta", "elm", "fjords", "grove", "heather")
_IDS = range(len(_WORDS))
_TOKENS = [f" {word}".encode() for word in _WORDS]
_FAILING_STEP = 10
_AUTO_CANDIDATES = 8
_CONTEXT_TOKENS = 4096
_TOOL_FORMAT, _THINKING = "hermes", ("<think>", "</think>")
_THOUGHTS = 8  # words of its reasoning
_CALL, _PIECE = re.compile(r"\bcall ([\w.-]+) (?=\{)"), re.compile(r".{1,6}", re.DOTALL)
_EXAMPLES = {"string": "ash", "integer": 1, "number": 1.5, "boolean": True, "array": []}


class _Words:
    """A `GrowingText`; words of `left_out` are no part of it, and `pieces` have the ids after those
    of words."""

    stop_text = ""  # it has none

    def __init__(self, left_out: Collection[int], pieces: Sequence[str], text: str = "") -> None:
        self._left_out = left_out
        self._pieces = pieces
        self._text = text

    def grown(self, token_ids: Sequence[int], finish: c.FinishReason | None) -> str:
        for token_id in token_ids:
            if token_id >= len(_WORDS):
                self._text += self._pieces[token_id - len(_WORDS)]
            elif token_id not in self._left_out:
                space = " " if self._text and not self._text[-1].isspace() else ""
                self._text += space + _WORDS[token_id]
        return self._text

    def copy(self) -> _Words:
        return _Words(self._left_out, self._pieces, self._text)


def _script(prompt: c.Prompt, candidate: int, form: c.AnswerForm) -> str:
    """What a candidate writes in place of words; empty: words."""
    tools = {tool.name: tool for tool in prompt.tools if prompt.tool_choice != "none"}
    turns = prompt.turns
    asked = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    steps = [_calls(part) for part in re.split(r"\bthen\b", turns[asked].text)]
    done = sum(bool(turn.tool_calls) for turn in turns[asked + 1 :])
    calls = next(iter([step for step in steps if step][done:]), [])
    allowed = (prompt.tool_name,) if prompt.tool_name else tools
    calls = [call for call in calls if call.name in allowed]
    if tools and prompt.tool_choice == "required" and not calls:
        calls = [_example(tools[prompt.tool_name or next(iter(tools))])]
    if calls:
        calls = calls if prompt.parallel_tool_calls else calls[:1]
        begins = "Let me see.\n" if candidate % 2 and prompt.tool_choice == "auto" else ""
        return begins + written(calls, form)
    results = [turn.text for turn in turns[asked + 1 :] if turn.role == "tool"]
    return f"The result is {', '.join(results)}." if results else ""


def _calls(text: str) -> list[c.ToolCall]:
    """The calls that a text names, each with an object in JSON."""
    calls = []
    for match in _CALL.finditer(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:
            continue
        calls.append(c.ToolCall("", match[1], text[match.end() : end]))
    return calls


def _example(tool: c.Tool) -> c.ToolCall:
    """A call with the arguments that are required."""
    schema = json.loads(tool.parameters or "{}")
    properties = {name: schema["properties"][name] for name in schema.get("required", ())}
    arguments = {
        name: one.get("enum", [one.get("const", _EXAMPLES.get(one.get("type"), {}))])[0]
        for name, one in properties.items()
    }
    return c.ToolCall("", tool.name, json.dumps(arguments))


class ToySession:
    """A `Session` of words."""

    fingerprint = ""  # the servicer has the generator's
    costly_rounds = False

    def __init__(self, generator: ToyGenerator, session_id: int, spec: c.SessionSpec) -> None:
        self.id = session_id
        self.n, self.reduced = 0, False  # until it is admitted
        self._prompt = prompt = spec.prompt
        text = prompt.text or " ".join(message.text for message in prompt.messages)
        begin, end = _THINKING if prompt.thinking else ("", "")
        self.answer_form = c.AnswerForm(_TOOL_FORMAT if prompt.tools else "", begin, end)
        self._pieces: list[str] = []  # of all scripts; their token ids follow those of words
        # By candidate: its first tokens, and whether it ends behind them.
        self._scripts: dict[int, tuple[range, bool]] = {}
        self.prompt_tokens = max(1, len(text.split()))
        self._sampling = spec.sampling_after(self.prompt_tokens, _CONTEXT_TOKENS)
        self.max_tokens = self._sampling.max_tokens
        first, longest = spec.first_round_tokens, self.max_tokens
        self._first_id = spec.first_id
        self.demand = Demand(spec.n, self.prompt_tokens, first, longest, lambda tokens: tokens)
        self.admitted = asyncio.Event()
        self._generator = generator
        self._ledger = generator.ledger
        self._live: list[commands.GrowingCandidate] = []
        self._unreported: list[commands.GrowingCandidate] = []
        self._num_tokens = 0
        self._rate = commands.ReportRate()

    def begin(self, n: int, *, reduced: bool) -> None:
        """It is admitted with `n` candidates."""
        self.n, self.reduced = n, reduced
        words = _Words(self._sampling.stop_token_ids, self._pieces)
        ids = range(self._first_id, self._first_id + n)
        self._scripts = {number: self._script(number) for number in ids}
        self._live = [commands.GrowingCandidate(number, text=words.copy()) for number in ids]
        self._unreported = list(self._live)
        self.admitted.set()

    async def extend(self, until_tokens: int, report: c.Report | None = None) -> c.Round:
        until = min(until_tokens, self.max_tokens)
        self._generator.queue.widen(self, len(self._live))
        ended_by = c.RoundEnd.DECISION_TOKEN
        while self._live and self._num_tokens < until:
            if self._ledger.room_of(self.id) < len(self._live):
                ended_by = c.RoundEnd.SLOTS_FULL
                break
            if step_s := self._generator.step_s:
                await asyncio.sleep(step_s)
            rows = len(self._live)
            self._step()
            self._generator.on_step(commands.Step(step_s, rows, generated=rows))
            if report and self._live and self._num_tokens < until and self._rate.is_due():
                grown = self._live if len(self._unreported) == 1 else ()
                report(self._round(grown, num_live=len(self._live)))
        ended = self._round(self._unreported, ended_by if self._live else c.RoundEnd.ALL_FINISHED)
        self._unreported = list(self._live)
        return ended

    async def prune(self, keep: Collection[int], forks: c.Forks = c.NO_FORKS) -> c.Pruned:
        live = {candidate.id: candidate for candidate in self._live}
        survivors = [live[number] for number in live if number in keep]
        freed = (len(live) - len(survivors)) * self._num_tokens
        self._ledger.give_back(self.id, freed)
        self._generator.queue.narrow(self, len(survivors), self._num_tokens)
        made = self._generator.queue.with_room(self, forks, live, len(survivors), self._num_tokens)
        self._ledger.take(self.id, len(made) * self._num_tokens)
        self._generator.queue.admit_waiting()
        self._scripts |= {number: self._scripts[parent] for number, parent in made.items()}
        self._live = [*survivors, *(live[parent].fork(number) for number, parent in made.items())]
        self._unreported = list(self._live)
        return c.Pruned(freed, self._gauge(), tuple(sorted(forks.keys() - made.keys())))

    def _step(self) -> None:
        failing = self._generator.failing_seed, _FAILING_STEP
        if (self._sampling.seed, self._num_tokens) == failing:
            raise RuntimeError("the toy fails at its failing_seed")
        self._ledger.take(self.id, len(self._live))
        for candidate in self._live:
            self._draw(candidate)
        self._num_tokens += 1
        finished = sum(candidate.finish is not None for candidate in self._live)
        self._ledger.give_back(self.id, finished * self._num_tokens)
        self._live = [candidate for candidate in self._live if candidate.finish is None]

    def _script(self, candidate: int) -> tuple[range, bool]:
        """The tokens that a candidate begins with, and whether it ends behind them."""
        text = _script(self._prompt, candidate, self.answer_form)
        ends = bool(text)
        if self._prompt.thinking:
            most = self._sampling.max_thinking_tokens or _THOUGHTS
            thoughts = [
                _WORDS[(candidate + at) % len(_WORDS)] for at in range(min(most, _THOUGHTS))
            ]
            text = f"<think>\n{' '.join(thoughts)}\n</think>\n\n{text}"
        first = len(_WORDS) + len(self._pieces)
        self._pieces += _PIECE.findall(text)
        return range(first, len(_WORDS) + len(self._pieces)), ends

    def _token(self, token_id: int) -> bytes:
        words = len(_WORDS)
        return _TOKENS[token_id] if token_id < words else self._pieces[token_id - words].encode()

    def _draw(self, candidate: commands.GrowingCandidate) -> None:
        sampling, step = self._sampling, self._num_tokens
        key = f"{sampling.seed}/{candidate.id}/{step}".encode()
        draw = int.from_bytes(hashlib.sha256(key).digest()[:8])
        stops = sampling.stop_token_ids
        words = [w for w in _IDS if w not in stops or step >= sampling.min_tokens] or _IDS
        word, logprob = words[draw % len(words)], -(draw % 1000) / 500
        script, ends = self._scripts[candidate.id]
        is_scripted = step < len(script)
        word = script[step] if is_scripted else word
        is_last = ends and step + 1 == len(script)
        candidate.append(word, logprob)
        if sampling.top_logprobs:
            others = [other for other in _IDS if other != word]
            ids = [word, *others][: sampling.top_logprobs]
            candidate.new_top.append((ids, [logprob - rank for rank in range(len(ids))]))
        may_end = not sampling.ignore_eos and step >= sampling.min_tokens and not is_scripted
        if is_last or word in stops or (may_end and draw // 1000 % self._generator.end_every == 0):
            candidate.finish = c.FinishReason.STOP
        elif step + 1 == sampling.max_tokens:
            candidate.finish = c.FinishReason.LENGTH

    def _round(
        self,
        grown: Sequence[commands.GrowingCandidate],
        ended_by: c.RoundEnd = c.RoundEnd.DECISION_TOKEN,
        num_live: int = 0,
    ) -> c.Round:
        has_logprobs, position = self._sampling.logprobs, (self._num_tokens, self._gauge())
        candidates = tuple(one.report().candidate(logprobs=has_logprobs) for one in grown)
        tokens = commands.named_tokens(candidates, self._token) if has_logprobs else ()
        return c.Round(candidates, ended_by, *position, tokens, num_live=num_live)

    def _gauge(self) -> c.SlotGauge:
        own = self.prompt_tokens + self._ledger.owned_by(self.id)
        return c.SlotGauge(self._ledger.capacity, self._ledger.owned, own)


class ToyGenerator:
    """A `Generator` of words; about one token in `end_every` ends its candidate.

    A step of a session takes `step_s` seconds, independent of other sessions. `failing_seed`: a
    session with this seed fails at its eleventh step.
    """

    def __init__(
        self,
        capacity_slots: int = 100_000,
        *,
        end_every: int = 40,
        step_s: float = 0.0,
        failing_seed: int | None = None,
        max_waiting: int = 0,
        on_step: commands.OnStep = lambda _: None,
    ) -> None:
        self.ledger = SlotLedger(capacity_slots)
        self.end_every = end_every
        self.step_s = step_s
        self.failing_seed = failing_seed
        self.on_step = on_step
        self._ids = itertools.count(1)
        self.queue: AdmissionQueue[ToySession] = AdmissionQueue(
            self.ledger, self._admit, max_waiting=max_waiting, auto_candidates=_AUTO_CANDIDATES
        )

    @asynccontextmanager
    async def open(self, spec: c.SessionSpec) -> AsyncIterator[ToySession]:
        await self.check(spec)
        session = ToySession(self, next(self._ids), spec)
        self.queue.enter(session)
        try:
            await session.admitted.wait()
            self.on_step(commands.Step(prefilled=session.prompt_tokens))
            yield session
        finally:
            self.queue.leave(session.id)
            if session.admitted.is_set():
                self.ledger.close(session.id)
                self.ledger.retire(session.prompt_tokens)
                self.ledger.evict(session.prompt_tokens)
            self.queue.admit_waiting()

    async def check(self, spec: c.SessionSpec) -> None:
        refuse_images(spec.prompt)
        if spec.sampling.structured_output:
            refused = "is not supported: the toy has no tokenizer"
            raise InvalidRequest([Violation("sampling.structured_output", refused)])

    def _admit(self, session: ToySession, n: int) -> None:
        self.ledger.hold(session.prompt_tokens)
        self.queue.give_share(session, n)
        session.begin(n, reduced=self.queue.is_reduced(session, n))

    def load(self) -> commands.Load:
        """Slots and sessions as of now."""
        slots = c.SlotGauge(self.ledger.capacity, self.ledger.owned, 0)
        return commands.Load(slots, self.ledger.num_sessions, len(self.queue))

    async def describe(self) -> c.GeneratorDescription:
        load = self.load()
        return c.GeneratorDescription(
            model="toy",
            fingerprint=f"toy-{self.end_every}",
            context_tokens=_CONTEXT_TOKENS,
            max_candidates=1024,
            auto_candidates=_AUTO_CANDIDATES,
            vocabulary=len(_WORDS),
            slot_bytes=1,
            device="none",
            slots=load.slots,
            sessions=load.sessions,
            waiting=load.waiting,
            can_fork=True,
            tool_format=_TOOL_FORMAT,
        )


def is_toy(model: str) -> bool:
    """Whether a model's name is a toy's, such as "toy" or "toy:step_ms=5,failing_seed=13"."""
    return model.partition(":")[0] == "toy"


def load_toy(
    model: str, capacity_slots: int, max_waiting: int = 0, on_step: commands.OnStep = lambda _: None
) -> ToyGenerator:
    """The toy of that name; `max_waiting`: sessions that may wait for slots.

    Raises:
        FileNotFoundError: there is none.
    """
    match = re.fullmatch(r"toy(?::(?:step_ms=([0-9.]+))?,?(?:failing_seed=(\d+))?)?", model)
    if not match:
        raise FileNotFoundError(f"no such toy: {model}; options: step_ms=5,failing_seed=13")
    return ToyGenerator(
        capacity_slots,
        step_s=float(match[1] or 0) / 1e3,
        failing_seed=int(match[2] or -1),
        max_waiting=max_waiting,
        on_step=on_step,
    )
