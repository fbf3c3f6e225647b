"""Build the images with docker or buildah and print their sizes: `make images`.

`python -m deploy.images.build [--base IMAGE] [--archives DIRECTORY] [TARGET ...]`. --archives keeps
each image as DIRECTORY/TARGET.tar. Package indexes and certificate authorities are those of pip's
configuration on this machine; without one, the Dockerfile's defaults.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TARGETS = ("orchestrator", "generator", "reward", "models", "all", "generator-vllm")
_PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")


def version() -> str:
    """The version of both packages and of the images."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def name_of(target: str) -> str:
    """The image name that the chart uses; `localhost` prevents a pull from a registry."""
    return f"localhost/specrej/{target}:{version()}"


def working_engine() -> str | None:
    """The first of buildah and docker that is installed and can be used here."""
    for name in filter(shutil.which, ("buildah", "docker")):
        if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def pip_settings() -> dict[str, str]:
    """pip's configured package sources, as build arguments."""
    command = (sys.executable, "-m", "pip", "config", "list")
    settings: dict[str, str] = {}
    for line in subprocess.check_output(command, text=True).splitlines():
        name, _, value = line.partition("=")
        variable = f"PIP_{name.rpartition('.')[2]}".upper().replace("-", "_")
        if variable in _PIP_VARIABLES:
            settings[variable] = value.strip("'\"")
    # With sources of its own, the build must not use the Dockerfile's index of torch.
    return {"TORCH_INDEX_URL": "", **settings} if settings.keys() - {"PIP_CERT"} else settings


def main(arguments: list[str]) -> None:
    """Build the images.

    Raises:
        SystemExit: there is no program that builds images.
        subprocess.CalledProcessError: a build failed.
    """
    parser = argparse.ArgumentParser(prog="python -m deploy.images.build")
    parser.add_argument("targets", nargs="*", default=TARGETS, help=" ".join(TARGETS))
    parser.add_argument("--base", default="", help="image to build on; empty: the Dockerfile's")
    parser.add_argument("--archives", type=Path, help="existing directory that keeps the images")
    options = parser.parse_args(arguments)
    engine = working_engine() or sys.exit("neither buildah nor docker can be used here")
    given = pip_settings() | ({"BASE": options.base} if options.base else {})
    build_arguments = [f"--build-arg={key}={value}" for key, value in given.items()]
    dockerfile = ROOT / "deploy" / "images" / "Dockerfile"
    for target in options.targets:
        name = name_of(target)
        # docker caches layers by default; targets share stages.
        command = [engine, "build", *(["--layers"] if engine == "buildah" else [])]
        command += ["--file", str(dockerfile), "--target", target, "--tag", name]
        subprocess.run([*command, *build_arguments, str(ROOT)], check=True)
        if options.archives:
            archive = options.archives / f"{target}.tar"
            push = ("buildah", "push", name, f"oci-archive:{archive}:{name}")
            save = ("docker", "save", "--output", str(archive), name)
            subprocess.run(push if engine == "buildah" else save, check=True)
    subprocess.run([engine, "images", "--filter", f"reference={name_of('*')}"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
