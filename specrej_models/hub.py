"""Where a model's files are: a directory, or a repository of a model hub by its name.

    /models/llama-3-8b          a directory as transformers saves it
    org/name, org/name@REVISION of a hub

The hub is read by its own client, huggingface_hub: HF_HOME has the cache, HF_TOKEN or a login the
token, HF_ENDPOINT another hub, HF_HUB_OFFLINE=1 allows the cache alone. Of weights only safetensors
files are fetched, since others can hold code. `specrej pull` fetches before a start, and a service
what the cache lacks when it starts.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([\w./-]+))?")
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
# Subfolders hold copies of the weights for other programs, and so do Mistral's own files.
_OTHERS = ("*/*", "consolidated*")


class HubError(OSError):
    """A model cannot be found or fetched by its name; the text has the reason."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's name, as callers see it, and the directory with its files, as transformers saves
    them."""

    name: str
    directory: Path


def embedded_models() -> Path:
    """Directory of the embedded models: that of a checkout, else one in the user's cache."""
    checkout = Path(".models")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return checkout if checkout.exists() else Path(cache).expanduser() / "specrej" / "models"


def find(model: str, *, weights: bool = True) -> ModelFiles:
    """The files of a model; those of a hub come from its cache, and are fetched if they are absent.

    `weights`: whether they are needed.

    Raises:
        FileNotFoundError: there is no such directory, and it is not a name of a hub.
        HubError: the hub has no such model, or cannot be reached.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path.resolve().name, path)
    if not is_name(model):
        raise FileNotFoundError(f"{model}: no model directory or name such as org/name@revision")
    try:
        return _snapshot(model, _parts(model)[1], weights=weights, is_local=True)
    except (LocalEntryNotFoundError, HubError):
        return pull(model, weights=weights)


def is_name(model: str) -> bool:
    """Whether `model` can be a name of a hub."""
    return bool(_NAME.fullmatch(model))


def pull(model: str, *, weights: bool = True) -> ModelFiles:
    """Fetch a model of a hub into its cache, as far as it is not there.

    Raises:
        HubError: the model cannot be fetched.
    """
    from huggingface_hub import HfApi

    name, revision = _parts(model)
    log.info("fetching %s", model)
    with _hub_errors(model):
        # By its commit first: until all files are there, the cache's revision stays the old one.
        commit = HfApi().model_info(name, revision=revision or "main").sha
        _snapshot(model, commit, weights=weights)
        files = _snapshot(model, revision, weights=weights)
    log.info("%s is at revision %s", name, commit)
    return files


def _parts(model: str) -> tuple[str, str | None]:
    """Repository and revision."""
    match = _NAME.fullmatch(model)
    if not match:
        raise HubError(f"{model}: not a name such as org/name, org/name@revision")
    return match[1], match[2]


def _snapshot(
    model: str, revision: str | None, *, weights: bool, is_local: bool = False
) -> ModelFiles:
    """The files at a revision; `is_local`: only if all of them are in the cache.

    Raises:
        HubError: the repository lacks what a model has.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    name, _ = _parts(model)
    directory = Path(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=[*_FILES],
            ignore_patterns=[*_OTHERS, *([] if weights else ["*.safetensors"])],
            local_files_only=is_local,
        )
    )
    if not (directory / "config.json").exists():
        raise HubError(f"{name} has no config.json: it is not a model of transformers")
    if weights and not any(directory.glob("*.safetensors")):
        raise HubError(f"{name} has no safetensors files; other weights are not loaded")
    return ModelFiles(name, directory)


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn the errors of the hub's client into HubError."""
    import httpx2
    from huggingface_hub import errors

    name, revision = _parts(model)
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError:
        reason = "its terms must be accepted on the hub, and HF_TOKEN be set"
        raise HubError(f"{name} is gated: {reason}") from None
    except errors.RepositoryNotFoundError:
        raise HubError(f"the hub has no model {name}, or it needs a token: HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision}") from None
    except errors.OfflineModeIsEnabled:
        way = f"specrej pull {model}, with HF_HUB_OFFLINE=0, fetches it"
        raise HubError(f"{name} is not in the cache: {way}") from None
    except (OSError, httpx2.HTTPError) as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise HubError(f"{name}: the download failed: {line}") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """`specrej pull`: fetch models, and print their directories.

    Raises:
        SystemExit: one of them cannot be had.
    """
    parser = argparse.ArgumentParser(prog="specrej pull", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="+", metavar="org/name[@revision]")
    given = parser.parse_args(arguments)
    try:
        for model in given.models:
            print(pull(model).directory)
    except ImportError as error:
        way = "pip install 'specrej-server[cpu]'"
        parser.exit(1, f"specrej: {error.name} is not installed: {way}\n")
    except (OSError, ValueError) as error:
        parser.exit(1, f"specrej: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)


if __name__ == "__main__":
    main()
