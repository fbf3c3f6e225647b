"""What the build of specrej-server takes from beside its folder: the version, and the packages."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Adds the version of ../pyproject.toml, and the client of that version to the dependencies."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields."""
        client = tomllib.loads(Path(self.root, "..", "pyproject.toml").read_text())["project"]
        metadata["version"] = client["version"]
        needed = f"specrej=={client['version']}"
        metadata["dependencies"] = [needed, *self.config["dependencies"]]


class Packages(BuildHookInterface[Any]):
    """Adds the packages to a wheel; an editable one has a path to them instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version`: "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"] |= {
                str(Path(self.root, "..", source)): target
                for source, target in self.config["files"].items()
            }
