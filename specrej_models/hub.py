"""Where a model's files are: a directory, a GGUF file, or a repository of a model hub by its name.

    /models/llama-3-8b          a directory as transformers saves it
    /models/smol.Q4_1.gguf      a GGUF file: converted once, into the user's cache
    org/name, org/name@REVISION, org/name/FILE.gguf[@REVISION]        of a hub

The hub is read by its own client, huggingface_hub: HF_HOME has the cache, HF_TOKEN or a login the
token, HF_ENDPOINT another hub, HF_HUB_OFFLINE=1 allows the cache alone. Of weights only safetensors
and GGUF files are fetched, since others can hold code. `specrej pull` fetches before a start, and a
service what the cache lacks when it starts.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specrej import fingerprint

log = logging.getLogger(__name__)

_CONVERSION = 1  # of GGUF files; increase it when the result changes

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/([\w./-]+\.gguf))?(?:@([\w./-]+))?")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Subfolders hold copies of the weights for other programs, and so do Mistral's own files.
_OTHERS = ("*/*", "consolidated*")
_CONFIGS = ("config.json", "adapter_config.json")
_INDEX = "model.safetensors.index.json"
# Keys of a GGUF file after "rope.scaling." that are understood.
_SCALING_KEYS = {"type", "factor", "original_context_length", "finetuned"}
_SHA256 = re.compile(r"[0-9a-f]{64}")


class HubError(OSError):
    """A model cannot be found or fetched by its name; the text has the reason."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's name, as callers see it, and the directory with its files."""

    name: str
    directory: Path


def cache_directory() -> Path:
    """Of this program, for this user."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "specrej"


def embedded_models() -> Path:
    """Directory of the embedded models: that of a checkout, else one in the user's cache."""
    checkout = Path(".models")
    return checkout if checkout.exists() else cache_directory() / "models"


def find(model: str, *, with_code: bool = False) -> ModelFiles:
    """The files of a model; those of a hub come from its cache, and are fetched if they are absent.

    `with_code`: Python files, too.

    Raises:
        FileNotFoundError: there is no such directory or file, and it is not a name of a hub.
        HubError: the hub has no such model, or cannot be reached.
        ValueError: a GGUF file cannot be converted.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, path)
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.stem, _converted(path))
    if not is_name(model):
        raise FileNotFoundError(
            f"{model}: no model directory, GGUF file or name such as org/name@revision"
        )
    cached = _cached(model, with_code=with_code)
    return cached or pull(model, with_code=with_code)


def is_name(model: str) -> bool:
    """Whether `model` can be a name of a hub."""
    return bool(_NAME.fullmatch(model))


def pull(model: str, *, with_code: bool = False) -> ModelFiles:
    """Fetch a model of a hub into its cache, as far as it is not there, and check all files.

    Raises:
        HubError: the model cannot be fetched, or files are damaged; those are removed.
        ValueError: as in `find`.
    """
    name, file, revision = _parts(model)
    log.info("fetching %s", model)
    with _kept_reference(name, revision or "main"):
        with _hub_errors(model):
            directory = _snapshot(model, with_code=with_code, local=False)
        _check_digests(directory)
    log.info("%s is at revision %s", name, directory.name)
    return _usable(name, directory, file)


@contextmanager
def _kept_reference(name: str, revision: str) -> Iterator[None]:
    """Restore the commit that a revision stood for, if the new one cannot be fetched: the hub's
    library stores it before the files, so that the old ones would not be found offline."""
    from huggingface_hub.constants import HF_HUB_CACHE

    file = Path(HF_HUB_CACHE, "models--" + name.replace("/", "--"), "refs", revision)
    before = file.read_text() if file.is_file() else None
    try:
        yield
    except BaseException:
        if before is not None:
            file.write_text(before)
        raise


def _parts(model: str) -> tuple[str, str, str | None]:
    """Repository, GGUF file in it or empty, revision."""
    match = _NAME.fullmatch(model)
    if not match:
        raise HubError(f"{model}: not a name such as org/name, org/name@revision")
    return match[1], match[2] or "", match[3]


def _cached(model: str, *, with_code: bool) -> ModelFiles | None:
    """The files in the hub's cache, if all of them are there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, file, _ = _parts(model)
    try:
        directory = _snapshot(model, with_code=with_code, local=True)
        return _usable(name, directory, file)
    except (LocalEntryNotFoundError, HubError):
        return None


def _snapshot(model: str, *, with_code: bool, local: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    name, file, revision = _parts(model)
    patterns = [file] if file else [*_FILES, *(["*.py"] if with_code else [])]
    return Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=None if file else list(_OTHERS),
            local_files_only=local,
        )
    )


def _usable(name: str, directory: Path, file: str) -> ModelFiles:
    """Raises HubError if the directory lacks what a model has."""
    if file:
        if not (directory / file).exists():
            raise HubError(f"{name} has no file {file}")
        return ModelFiles(name, _converted(directory / file))
    if not any((directory / config).exists() for config in _CONFIGS):
        raise HubError(f"{name} has no config.json: it is not a model of transformers")
    shards = {path.name for path in directory.glob("*.safetensors")}
    if (index := directory / _INDEX).exists():
        try:
            wanted = set(json.loads(index.read_text())["weight_map"].values())
            missing = sorted(wanted - shards)[:3]
            listed = ", ".join(missing)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise HubError(f"{name} has an index that names no weights") from None
        if missing:
            raise HubError(f"{name} lacks {listed}, which its index names")
    elif not shards:
        raise HubError(f"{name} has no safetensors files; other weights are not loaded")
    return ModelFiles(name, directory)


def _check_digests(directory: Path) -> None:
    """Raises HubError if a large file's SHA-256 is not its name in the hub's cache; removes it."""
    damaged = []
    for path in directory.rglob("*"):
        blob = path.resolve()
        if path.is_file() and _SHA256.fullmatch(blob.name) and _sha256(blob) != blob.name:
            path.unlink()
            blob.unlink()
            damaged.append(path.name)
    if damaged:
        names = ", ".join(sorted(damaged))
        raise HubError(f"{names}: damaged on the way, and removed; fetch the model again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn the errors of the hub's client into HubError."""
    import httpx2
    from huggingface_hub import errors

    name, _, revision = _parts(model)
    try:
        yield
    except errors.GatedRepoError:
        reason = "its terms must be accepted on the hub, and HF_TOKEN be set"
        raise HubError(f"{name} is gated: {reason}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"the hub has no model {name}, or it needs a token: HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision}") from None
    except errors.RemoteEntryNotFoundError as error:
        raise HubError(f"{name} lacks a file that it lists: {_line(error)}") from None
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            way = f"specrej pull {model}, with HF_HUB_OFFLINE=0, fetches it"
            raise HubError(f"{name} is not in the cache: {way}") from None
        raise HubError(
            f"{name}: the hub does not answer: {_line(error.__cause__ or error)}"
        ) from None
    except (OSError, httpx2.HTTPError) as error:
        raise HubError(f"{name}: the download failed: {_line(error)}") from None


def _line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _converted(gguf: Path) -> Path:
    """A directory in the user's cache with a GGUF file's model as float32 and its tokenizer."""
    # Another version may convert it in another way.
    by = f"{_CONVERSION} {version('transformers')} {gguf.stat().st_size} "
    digest = hashlib.sha256(by.encode() + fingerprint.sample(gguf))
    target = cache_directory() / "gguf" / f"{gguf.stem}-{digest.hexdigest()[:16]}"
    if not target.exists():
        log.info("converting %s into %s, once: 4 bytes per weight", gguf, target)
        convert(gguf, target)
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file's model, unpacked to float32 safetensors, and its tokenizer to `target`.

    All at once: `target` is complete or absent. Of processes that begin together, one converts.

    Raises:
        ValueError: transformers cannot read this file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:  # until it is closed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(target.glob("*.safetensors")):
            _convert(gguf, target)


def _convert(gguf: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        with _parsed_once():
            packed, loading = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # of a damaged file, readers raise errors of many kinds
        raise ValueError(f"{gguf}: {_line(error)}") from error
    if missing := sorted(map(str, loading["missing_keys"])):
        raise ValueError(f"{gguf}: lacks {', '.join(missing[:3])}")
    config = packed.config
    _set_rotary_scaling(config, gguf)
    if hasattr(config, "quantization_config"):
        # The weights are unpacked by now; a config of packed ones cannot be saved.
        del config.quantization_config
    plain = type(packed)(config)
    plain.load_state_dict(packed.state_dict())
    plain.generation_config = packed.generation_config

    def save(directory: Path) -> None:
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    write_directory(target, save)


def _set_rotary_scaling(config: Any, gguf: Path) -> None:
    """Set the rotary scaling of a GGUF file, which transformers does not read (5.23).

    Raises:
        ValueError: it is of a kind that is not known here.
    """
    import numpy as np
    from gguf import GGUFReader
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    reader = GGUFReader(gguf)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if "rope_" in tensor.name}
    keys = {
        name.partition(".rope.scaling.")[2]: field.contents()
        for name, field in reader.fields.items()
        if ".rope.scaling." in name
    }
    kind, plain = keys.get("type", "none"), dict(getattr(config, "rope_parameters", None) or {})
    if not (tensors or kind != "none") or plain.get("rope_type") != "default":
        return
    if tensors.keys() == {"rope_freqs.weight"} and kind == "none":
        # As Llama 3.1 to 3.3 have it; the file has the divisors of the frequencies only.
        divisors = tensors["rope_freqs.weight"]
        scaled = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        config.rope_parameters = plain | scaled
        frequencies = plain["rope_theta"] ** -np.linspace(0, 1, len(divisors), False) / divisors
        if np.allclose(ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0], frequencies, rtol=1e-3):
            return
    elif not tensors and kind in ("linear", "yarn") and keys.keys() <= _SCALING_KEYS:
        scaled = {"rope_type": kind, "factor": float(keys["factor"])}
        if "original_context_length" in keys:
            scaled["original_max_position_embeddings"] = int(keys["original_context_length"])
        config.rope_parameters = plain | scaled
        return
    raise ValueError(f"{gguf}: its rotary scaling is not known here: use the original checkpoint")


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Cache parsed GGUF files and tensor name tables: transformers parses a file three times, and
    makes the table for every module, two thirds of the time of a conversion.
    """
    import gguf

    functions = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(functools.cache, functions)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = functions


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Fill a directory beside `target` and rename it; an incomplete `target` is replaced.

    One at a time. What an earlier process left unfinished is removed.
    """
    scratch = target.with_name(f".{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        write(scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """`specrej pull`: fetch models, and print their directories.

    Raises:
        SystemExit: one of them cannot be had.
    """
    parser = argparse.ArgumentParser(prog="specrej pull", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="+", metavar="org/name[@revision]")
    parser.add_argument(
        "--with-code", action="store_true", help="fetch Python files, too: for trust_remote_code"
    )
    given = parser.parse_args(arguments)
    try:
        for model in given.models:
            print(pull(model, with_code=given.with_code).directory)
    except ImportError as error:
        parser.exit(1, f"specrej: {error.name} is not installed: pip install 'specrej[server]'\n")
    except (OSError, ValueError) as error:
        parser.exit(1, f"specrej: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)


if __name__ == "__main__":
    main()
