"""Measures Speculative Rejection and Best-of-N at every N with one request at a time, at a fixed
rate and at saturation. Writes latency_vs_n.json, .csv and .html, also when it is interrupted. The
last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadtest.latency_vs_n.measure import Settings
from loadtest.prompts import OWN_PROMPTS, read_prompts

# About two minutes on the embedded models.
_QUICK = {"ns": (1, 2, 4), "minutes": 0.0, "max_tokens": 32, "rate": 2.0, "patience_s": 2.0}


def parse() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(prog="latency-vs-n", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/latency-vs-n"), help="folder of the files"
    )
    parser.add_argument(
        "--address",
        default=os.environ.get("SPECREJ_ADDRESS", ""),
        help="host:port of a service [SPECREJ_ADDRESS]; default: start one on this machine",
    )
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS, help="file, one per line")
    parser.add_argument("--quick", action="store_true", help=f"a small run: {_QUICK}")
    defaults = Settings(())
    parser.add_argument("--ns", type=int, nargs="+", help=f"default: {defaults.ns}")
    for name, kind, text in (
        ("minutes", float, "no measurement begins later; everything is measured at least once"),
        ("max_tokens", int, "most new tokens of a candidate"),
        ("alpha", float, "fraction rejected per round"),
        ("rate", float, "arrivals per second at a fixed rate"),
        (
            "patience_s",
            float,
            "seconds of warm-up at a fixed rate, and before a cancellation",
        ),
        ("slo_s", float, "seconds within which an answer is in time"),
    ):
        flag = "--" + name.replace("_", "-")
        default = getattr(defaults, name)
        parser.add_argument(flag, type=kind, help=f"{text}; default: {default:g}")
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Settings: a flag, else the value of --quick if it is set, else the default.

    Raises:
        OSError, ValueError: the prompts cannot be read, or a number is out of range.
    """
    names = {field.name for field in fields(Settings)} - {"prompts"}
    given = {name: getattr(arguments, name) for name in names}
    values: dict[str, Any] = _QUICK if arguments.quick else {}
    values = values | {name: value for name, value in given.items() if value is not None}
    if "ns" in values:
        values["ns"] = tuple(sorted(set(values["ns"])))
        if values["ns"][0] < 1:
            raise ValueError(f"--ns {values['ns'][0]}: must be 1 or more")
    for name in ("rate", "patience_s", "slo_s"):
        if name in values and not 0 < values[name] < math.inf:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {values[name]}: must be above 0 and finite")
    return Settings(read_prompts(arguments.prompts), **values)
