"""The command line of a sweep."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadtest.prompts import OWN_PROMPTS, read_prompts
from loadtest.sweep.settings import Settings

# For tests and a first look: a minute or two on toys, little more on the embedded models.
_QUICK = {"ns": (1, 2, 4), "repeats": 2, "minutes": 1.0, "max_tokens": 32, "rate": 2.0}


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """Its defaults are those of `Settings`."""
    parser = argparse.ArgumentParser(prog="latency-vs-n", description=description)
    given = Settings()
    parser.add_argument(
        "--out", type=Path, default=Path("build/latency-vs-n"), help="folder of all files"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the files")
    parser.add_argument("--quick", action="store_true", help=f"small: {_QUICK}")
    parser.add_argument(
        "--address", default="", help="host:port of a service; left out: one is started"
    )
    parser.add_argument("--ns", type=int, nargs="+", help=f"{' '.join(map(str, given.ns))}")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="one per line")
    parser.add_argument("--num-prompts", type=int, default=6, help="the first of them; 6")
    for name, kind, text in (
        ("repeats", int, "how often all is measured"),
        ("minutes", float, "what it should take; decides how many requests there are"),
        ("max_tokens", int, "most new tokens of a candidate"),
        ("alpha", float, "fraction rejected per round"),
        ("rate", float, "arrivals per second, at a fixed rate"),
        ("patience_s", float, "seconds until a user gives up, at a fixed rate"),
        ("slo_s", float, "seconds a good answer may take"),
        ("saturating_candidates", int, "of all users together, at saturation"),
        ("max_users", int, "at saturation"),
        ("seed", int, "of the order and the arrivals"),
    ):
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, dest=name, help=f"{text}; {getattr(given, name)}")
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What was said, over what --quick says, over the defaults.

    Raises:
        OSError, ValueError: the prompts cannot be read.
    """
    names = {field.name for field in fields(Settings)} - {"prompts"}
    said = {
        name: value
        for name, value in vars(arguments).items()
        if name in names and value is not None
    }
    prompts = read_prompts(arguments.prompts)[: arguments.num_prompts]
    chosen: dict[str, Any] = {**(_QUICK if arguments.quick else {}), **said, "prompts": prompts}
    return Settings(**(chosen | {"ns": tuple(sorted(chosen.get("ns", Settings().ns)))}))
