"""What is examined when a model is loaded: files, tensors, end tokens, chat template, vocabulary.

A model that would write other tokens or other scores than it was trained for is refused, with one
sentence and the names. What is harmless is a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from specrej import contracts as c
from specrej.answer_form import parts_of
from specrej.contracts.errors import InvalidRequest, Violation
from specrej_models.tools import as_text, call_fields, function_of, with_tools

log = logging.getLogger(__name__)

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_READ = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
# Types of numbers, as safetensors files name them, that weights have without quantization.
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Buffers of old checkpoints, which models make themselves.
_BUFFERS = ("inv_freq", "position_ids", "attn.bias", "attention.bias", "masked_bias")
# Heads that a backbone, loaded without them, has no use for.
_PRETRAINING_HEADS = ("lm_head.", "cls.", "lm_predictions.", "mask_predictions.")
_MOST_NAMES = 3
# Without the second, transformers asks on a terminal whether to run code that comes with a model.
_LOCALLY = {"local_files_only": True, "trust_remote_code": False}
# Texts around reasoning, as templates write or remove them.
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# A turn with a call, beside roles, and the tool that it calls.
_CALLS = "calls"
_TOOL = c.Tool(
    "probe_tool", "A probe.", '{"type": "object", "properties": {"probe": {"type": "string"}}}'
)
# Errors whose texts are sentences; others need the names of their types.
_WITH_REASONS = (TemplateError, SafetensorError, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class Examined:
    """A model's files, and its config, tokenizer, chat template (None: it has none), end tokens;
    warnings are sentences."""

    directory: Path
    config: Any
    tokenizer: Any
    template: ChatTemplate | None
    end_ids: frozenset[int]
    vocabulary: int
    warnings: list[str]


def examine(
    directory: Path,
    *,
    owner: str = "the model",
    ends: bool = True,
    tool_format: str = "auto",
    thinking_marks: str = "auto",
) -> Examined:
    """Examine a model's files, but for its weights, and log what is found out.

    owner: the name in violations; ends: it needs end tokens; tool_format, thinking_marks: as
    `ChatTemplate` takes them.

    Raises:
        OSError, ValueError: a file cannot be read, or is not of a model that can work.
    """
    config = load_config(directory)
    with one_sentence(f"{directory}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(directory, **_LOCALLY)
    sizes = config.get_text_config()
    warnings = _check_vocabulary(tokenizer, sizes.vocab_size)
    template = None
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer, sizes.vocab_size, owner, tool_format, thinking_marks)
        warnings += template.warnings
    end_ids = frozenset[int]()
    if ends:
        listed = [tokenizer.eos_token_id, template.end_id if template else None]
        end_ids, dropped = _find_ends(directory, config, listed)
        warnings += dropped
    names = ", ".join(_token(tokenizer, id_) for id_ in sorted(end_ids))
    log.info("%s: end tokens: %s", directory, names or "none")
    for warning in warnings:
        log.warning("%s: %s", directory, warning)
    return Examined(directory, config, tokenizer, template, end_ids, sizes.vocab_size, warnings)


def load_config(directory: Path) -> Any:
    """The config of a model, whose files are checked before any of them is interpreted.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    for path in sorted(path for pattern in _READ for path in directory.glob(pattern)):
        _check_file(path)
    with one_sentence(f"{directory}: its config"):
        config = AutoConfig.from_pretrained(directory, **_LOCALLY)
        config.get_text_config()
    return config


def load_weights(
    auto_class: Any, directory: Path, *, spare: Collection[str] = (), **options: Any
) -> Any:
    """A model by one of transformers' Auto classes, with exactly the tensors of its files.

    spare: beginnings of the names of tensors that this class need not use, such as heads that the
    caller reads itself.

    Raises:
        ValueError: tensors are missing, left over, of other sizes or quantized.
    """
    check_tensors(directory)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # what it reports is checked here
    try:
        with one_sentence(f"{directory}: its weights"):
            model, loading = auto_class.from_pretrained(
                directory,
                **_LOCALLY,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    spare = (*spare, *(_PRETRAINING_HEADS if model.base_model is model else ()))
    unexpected = [
        name
        for name in loading["unexpected_keys"]
        if not name.startswith(spare) and not name.endswith(_BUFFERS)
    ]
    sizes = [
        f"{name} ({_size(given)} in place of {_size(due)})"
        for name, given, due in loading["mismatched_keys"]
    ]
    for problem, tensors in (
        ("lacks", loading["missing_keys"]),
        ("has other sizes of", sizes),
        ("has tensors that the model does not use:", unexpected),
    ):
        if tensors:
            raise ValueError(f"{directory}: {problem} {_named(tensors)}")
    return model


def check_tensors(directory: Path, *, reads_quantized: bool = False) -> None:
    """Check that all weights are there, in types that the engine reads.

    reads_quantized: it reads quantized weights, if the files name their method.

    Raises:
        ValueError: they are not; with their names.
    """
    method = _quantization(directory)
    if method and not reads_quantized:
        raise ValueError(
            f"{directory}: is quantized by {method}, which is not supported here; use the"
            " checkpoint that is not quantized"
        )
    packed: dict[str, list[str]] = {}
    for path in weights_of(directory):
        with one_sentence(str(path)), safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                kind = tensors.get_slice(name).get_dtype()
                if kind not in _FLOATS and not name.endswith(_BUFFERS):
                    packed.setdefault(kind, []).append(name)
    if packed and not method:
        kind, names = next(iter(packed.items()))
        raise ValueError(
            f"{directory}: has tensors of type {kind}, and no quantization_config that says how to"
            f" read them: {_named(names)}"
        )


def weights_of(directory: Path) -> list[Path]:
    """The files with a model's weights that transformers reads.

    Raises:
        OSError, ValueError: they are not there, or cannot be read.
    """
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    paths = [single]
    if not single.is_file():
        if not index.is_file():
            raise ValueError(f"{directory}: has no model.safetensors; other weights are not loaded")
        with one_sentence(str(index)):
            names = {*json.loads(index.read_text())["weight_map"].values()}
        paths = [directory / name for name in sorted(names)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{directory}: lacks {_named(missing)}")
    for path in paths:
        _check_file(path)
    return paths


def _quantization(directory: Path) -> str:
    """The name of the method that the files are quantized by; empty: none is named."""
    if (directory / "hf_quant_config.json").is_file():
        return "modelopt"
    with one_sentence(str(directory / "config.json")):
        method = json.loads((directory / "config.json").read_text()).get("quantization_config")
    return str(method.get("quant_method", "an unknown method")) if method else ""


def _check_vocabulary(tokenizer: Any, vocabulary: int) -> list[str]:
    """Warnings of added tokens beyond a model's vocabulary, which are text in prompts.

    Raises:
        ValueError: a token that ordinary text can have is beyond it.
    """
    added = tokenizer.added_tokens_decoder
    beyond = {id_: text for text, id_ in tokenizer.get_vocab().items() if id_ >= vocabulary}
    if not beyond:
        return []
    texts = [text for id_, text in sorted(beyond.items())]
    has = f"tokens beyond the model's vocabulary of {vocabulary}: {_named(texts)}"
    if not beyond.keys() <= added.keys():
        raise ValueError(f"the tokenizer has {has}")
    return [f"treated as text in prompts: {has}"]


class ChatTemplate:
    """A tokenizer's chat template; what it takes is found out by conversations of known texts."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        owner: str = "the model",
        tool_format: str = "auto",
        thinking_marks: str = "auto",
    ) -> None:
        """`owner` is named in violations; `tool_format`: of calls; `thinking_marks`: the texts
        around reasoning, with a space between them; "auto": those of the template.

        Raises:
            ValueError: it cannot write one user turn, or writes a token beyond the vocabulary.
        """
        self._tokenizer = tokenizer
        self._owner = owner
        self._takes_parts = False
        self._violation = lru_cache(256)(self._find_violation)
        if violation := self._violation(("user",)):
            self._takes_parts = True
            self._violation.cache_clear()
            if self._violation(("user",)):
                raise ValueError(f"one user turn: {violation.description}")
        self.takes_system = not self._violation(("system", "user"))
        self.warnings: list[str] = []
        self.end_id: int | None = None
        if violation := self._violation(("user", "assistant")):
            self.warnings.append(violation.description)
        else:
            self.end_id = self._end_of_turn()
            if self._violation(("user", "assistant", "user")):
                self.warnings.append("the chat template takes one user turn only")
        shapes = [("user",), ("system", "user"), ("user", "assistant")]
        written = [self._probe(roles) for roles in shapes if not self._violation(roles)]
        ids = [id_ for text in written for id_ in self._ids(text) if id_ >= vocabulary]
        if ids:
            raise ValueError(
                f"the chat template writes {_token(tokenizer, ids[0])}, token {ids[0]}, beyond the"
                f" model's vocabulary of {vocabulary}"
            )
        found = self._find_tool_format()
        self.tool_format = found or "json" if tool_format == "auto" else tool_format
        self._takes_tools = bool(found) and tool_format in ("auto", found)
        source = str(tokenizer.chat_template)
        marks = [pair for pair in _THINKING if pair[1] in source]
        if thinking_marks != "auto":
            marks = [(begin, end) for begin, _, end in [thinking_marks.partition(" ")] if end]
        begin, end = marks[0] if marks else ("", "")
        self.answer_form = c.AnswerForm(self.tool_format, begin, end)
        self.can_choose_thinking = "enable_thinking" in source
        # Whether turns can have several calls.
        self.repeats_calls = not self._takes_tools or self._can_write(self._turn(_CALLS, 1, 2))

    @property
    def takes_images(self) -> bool:
        """Whether it writes something for an image, between the texts that are around it."""
        first, second = c.TextPart(_text(0)), c.TextPart(_text(1))
        written = []
        for parts in ((first, c.Image(), second), (first, second)):
            try:
                (text,) = self._write([[c.Message("user", parts=parts)]], answers=True)
            except Exception:  # templates may do anything with what they do not know
                return False
            written.append(text.partition(first.text)[2].partition(second.text))
        (image, *found), (nothing, *_) = written
        return bool(all(found[:1]) and len(image) > len(nothing) and "{" not in image)

    def write(
        self,
        conversations: Sequence[Sequence[c.Message]],
        *,
        answers: bool = False,
        continues: bool = False,
        tools: Sequence[c.Tool] = (),
        **variables: Any,
    ) -> list[str]:
        """Conversations as text; `answers`: up to where an answer begins; `continues`: up to the
        end of the last turn's text; `variables`: of the template.

        Tools and calls are text in a template that does not take them.

        Raises:
            InvalidRequest: the template refuses one, or would leave a turn out.
        """
        if not self._takes_tools:
            form, system = self.answer_form, self.takes_system
            conversations = [as_text(turns, form) for turns in conversations]
            if tools:
                conversations = [
                    with_tools(turns, tools, form, takes_system=system) for turns in conversations
                ]
            tools = ()
        for turns in conversations:
            roles = tuple(_CALLS if turn.tool_calls else turn.role for turn in turns)
            if violation := self._violation(roles):
                raise InvalidRequest([violation])
        try:
            return self._write(conversations, tools, answers, continues, **variables)
        except Exception as error:
            raise InvalidRequest([self._refused((), error)]) from error

    def write_prompt(self, prompt: c.Prompt) -> tuple[str, c.AnswerForm]:
        """A conversation up to where its answer begins or goes on, and how that marks its parts.

        Raises:
            InvalidRequest: as `write`; there is no choice whether the model reasons.
        """
        continues, variables = prompt.continue_final, {}
        if prompt.thinking is not None:
            if not self.can_choose_thinking:
                reason = f"{self._owner}'s chat template has no variable enable_thinking"
                raise InvalidRequest([Violation("prompt.thinking", f"must be absent: {reason}")])
            variables = {"enable_thinking": prompt.thinking}
        (written,) = self.write(
            [prompt.messages],
            answers=not continues,
            continues=continues,
            tools=prompt.tools,
            **variables,
        )
        form = self.answer_form
        begin = form.thinking_begin
        thinks = bool(begin) and not continues and written.rstrip().endswith(begin)
        kind = form.tool_format if prompt.tools else ""
        return written, c.AnswerForm(kind, begin, form.thinking_end, thinks)

    def _write(
        self,
        conversations: Sequence[Sequence[c.Message]],
        tools: Sequence[c.Tool] = (),
        answers: bool = False,
        continues: bool = False,
        **variables: Any,
    ) -> list[str]:
        def content(turn: c.Message) -> Any:
            if any(isinstance(part, c.Image) for part in turn.parts):
                return [
                    {"type": "text", "text": part.text}
                    if isinstance(part, c.TextPart)
                    else {"type": "image"}
                    for part in turn.parts
                ]
            return [{"type": "text", "text": turn.text}] if self._takes_parts else turn.text

        turns = [
            [
                {"role": turn.role, "content": content(turn), **fields}
                for turn, fields in zip(conversation, call_fields(conversation), strict=True)
            ]
            for conversation in conversations
        ]
        written: list[str] = self._tokenizer.apply_chat_template(
            turns,
            tools=[function_of(tool) for tool in tools] or None,
            add_generation_prompt=answers,
            continue_final_message=continues,
            tokenize=False,
            **variables,
        )
        return written

    def _find_tool_format(self) -> str:
        """The format of calls that the template writes; empty: it takes no tools, or writes calls
        in a form that is unknown."""
        user, call = self._turn("user", 0), self._turn(_CALLS, 1)
        try:
            (opening,) = self._write([[user]], [_TOOL], answers=True)
            (whole,) = self._write([[user, call]], [_TOOL])
        except Exception:
            return ""
        if _TOOL.name not in opening:
            return ""
        is_there = whole.startswith(opening)
        answer = whole[len(opening) :] if is_there else whole.partition(user.text)[2]
        key = "parameters" if '"parameters"' in answer else "arguments"
        names = ("hermes", "mistral", "llama3" if key == "parameters" else "json")
        for name in names if not self._violation(("user", _CALLS, "tool")) else ():
            parts = parts_of(answer, c.AnswerForm(name), complete=True)
            calls = parts.tool_calls if parts else ()
            if [(one.name, json.loads(one.arguments)) for one in calls] == [
                (one.name, json.loads(one.arguments)) for one in call.tool_calls
            ]:
                return name
        self.warnings.append("the chat template's form of calls is unknown: they are JSON")
        return ""

    def _can_write(self, turn: c.Message) -> bool:
        try:
            self._write([[self._turn("user", 0), turn]], [_TOOL])
        except Exception:
            return False
        return True

    def _turn(self, role: str, number: int, num_calls: int = 1) -> c.Message:
        """A turn of a known text: in the arguments of its calls, or else its content."""
        text = _text(number)
        if role == _CALLS:
            arguments = json.dumps({"probe": text})
            calls = [c.ToolCall(str(index), _TOOL.name, arguments) for index in range(num_calls)]
            return c.Message("assistant", tool_calls=tuple(calls))
        return c.Message(role, text, tool_call_id="0" if role == "tool" else "")

    def _find_violation(self, roles: tuple[str, ...]) -> Violation | None:
        """What prevents a conversation of these roles, if anything does."""
        try:
            written = self._probe(roles)
        except Exception as error:
            return self._refused(roles, error)
        places = [written.find(_text(number)) for number in range(len(roles))]
        before = -1
        last = max((at for at, role in enumerate(roles) if role == "user"), default=0)
        for number, (role, place) in enumerate(zip(roles, places, strict=True)):
            if place < 0 and role in (_CALLS, "tool") and number < last:
                continue  # as some templates of Mistral's do
            if place < 0:
                reason = f"{self._owner}'s chat template leaves out a {role} turn here"
                return Violation(f"prompt.messages[{number}].role", reason)
            if role != "system":  # some templates write it into the last user turn
                if place < before:
                    reason = f"{self._owner}'s chat template changes the order of turns"
                    return Violation(f"prompt.messages[{number}]", reason)
                before = place
        return None

    def _refused(self, roles: Sequence[str], error: Exception) -> Violation:
        # Templates reject what the model was not trained on, such as a system turn.
        others = tuple(role for role in roles if role != "system")
        is_system = "system" in roles and not self._violation(others)
        where = f"[{roles.index('system')}].role" if is_system else ""
        reason = f"{self._owner}'s chat template refuses them: {_line(error)}"
        return Violation(f"prompt.messages{where}", reason)

    def _probe(self, roles: Sequence[str]) -> str:
        turns = [self._turn(role, number) for number, role in enumerate(roles)]
        answers = roles[-1] not in ("assistant", _CALLS)
        return self._write([turns], [_TOOL] if _CALLS in roles else (), answers)[0]

    def _end_of_turn(self) -> int | None:
        """The added token that closes an assistant's turn."""
        closing = self._probe(("user", "assistant")).rpartition(_text(1))[2].lstrip()
        for id_ in self._ids(closing):
            if id_ in self._tokenizer.added_tokens_decoder:
                return int(id_)
            if self._tokenizer.decode([id_]).strip():
                break
        self.warnings.append("the chat template closes an assistant's turn without an end token")
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[list[int]] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        return ids[0]


def _find_ends(
    directory: Path, config: Any, listed: list[int | None]
) -> tuple[frozenset[int], list[str]]:
    """The tokens that end an answer, `listed` or by any of the configs, and warnings.

    Raises:
        ValueError: there is none.
    """
    sources = [config, config.get_text_config()]
    if (directory / "generation_config.json").is_file():
        with one_sentence(f"{directory}: generation_config.json"):
            sources.append(GenerationConfig.from_pretrained(directory, local_files_only=True))
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        listed = [*listed, *(ids if isinstance(ids, list) else [ids])]
    named = [id_ for id_ in listed if id_ is not None]
    known = range(config.get_text_config().vocab_size)
    ends = frozenset(id_ for id_ in named if id_ in known)
    if not ends:
        raise ValueError(f"{directory}: has no end token: set eos_token_id in its config.json")
    dropped = ", ".join(dict.fromkeys(str(id_) for id_ in named if id_ not in known))
    return ends, [f"end tokens that the vocabulary lacks are ignored: {dropped}"] if dropped else []


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Turn all that libraries raise for damaged files into one line: ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what} cannot be loaded: {_line(error)}") from error


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(f"{path}: is a pointer of Git LFS, not the file: run git lfs pull")


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, _WITH_REASONS) else f"{type(error).__name__}: {text}"


def _token(tokenizer: Any, id_: int) -> str:
    """Its text; of an id without a token, its number."""
    return tokenizer.convert_ids_to_tokens(id_) or f"token {id_}"


def _text(number: int) -> str:
    return f"Probe {number}."


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _named(names: Collection[str]) -> str:
    some = sorted(names)
    more = len(some) - _MOST_NAMES
    return ", ".join(some[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
