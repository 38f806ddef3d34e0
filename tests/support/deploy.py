"""compose.yaml and deploy/ as Docker reads them: variables put in, ports taken apart, the build context filtered.
Only what those files use of Compose's and Docker's languages; anything else is an error, never passed over.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose.yaml"
OVERLAYS = sorted((ROOT / "deploy").glob("compose.*.yaml"))
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PASSWORD = {"POSTGRES_PASSWORD": "a-password"}
VARIABLE = re.compile(r"\$\{(?P<name>\w+):(?P<kind>[-?])(?P<text>[^}]+)\}")
PORT = re.compile(r"(?P<host>[\d.]+):(?P<published>\d+):(?P<target>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    name: str
    default: str | None  # None: must be given


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    host: str
    published: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    requirement: Requirement
    hashes: frozenset[str]


def variables() -> set[Variable]:
    """Of compose.yaml and the files that are laid over it."""
    return {
        Variable(name=match["name"], default=match["text"] if match["kind"] == "-" else None)
        for file in (COMPOSE, *OVERLAYS)
        for match in VARIABLE.finditer(file.read_text())
    }


def compose(given: Mapping[str, str] = PASSWORD) -> dict[str, Any]:
    """The whole file with its variables put in."""
    document: dict[str, Any] = _substituted(yaml.safe_load(COMPOSE.read_text()), given)
    return document


def services(given: Mapping[str, str] = PASSWORD) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(given)["services"]
    return found


def ports(service: Mapping[str, Any]) -> list[Port]:
    """Those it publishes on the machine; each must say at which address."""
    found = []
    for text in service.get("ports", ()):
        match = PORT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text}: should be address:published:target")
        found.append(Port(host=match["host"], published=int(match["published"]), target=int(match["target"])))
    return found


def check_at(service: Mapping[str, Any], folder: Path, file: str) -> list[str]:
    """The service's health check, with the folder of the file that it looks at replaced."""
    words: list[str] = service["healthcheck"]["test"][1:]
    moved = [word.replace(file, str(folder / Path(file).name)) for word in words]
    if moved == words:
        raise ValueError(f"the check does not look at {file}")
    return [sys.executable if word == "python" else word for word in moved]


def kafka_properties(environment: Mapping[str, str]) -> dict[str, str]:
    """The broker's properties as the image makes them of the variables; KAFKA_HEAP_OPTS is for the JVM."""
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment.items()
        if name.startswith("KAFKA_") and name != "KAFKA_HEAP_OPTS"
    }


def endpoints(listeners: str) -> dict[str, str]:
    """Listener name → host:port (the host may be empty)."""
    return dict(listener.split("://") for listener in listeners.split(","))


def instructions(**arguments: str) -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with its arguments put in."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    for name, value in arguments.items():
        text = text.replace(f"${{{name}}}", value)
    split = [line.partition(" ") for line in text.splitlines() if line]
    return [(instruction, rest) for instruction, _, rest in split]


def copies(service: str) -> Iterator[tuple[str, str]]:
    """Each source that the first stage copies from the checkout, and where to."""
    for instruction, rest in instructions(SERVICE=service):
        if instruction == "COPY" and not rest.startswith("--from="):
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)


def stage(service: str, folder: Path) -> None:
    """Puts into `folder` what the first stage has in its own: what is copied and not ignored."""
    for source, target in copies(service):
        into = folder / target / Path(source).name if target.endswith("/") else folder / target
        for path in [ROOT / source, *(ROOT / source).rglob("*")]:
            if path.is_file() and not is_ignored(path.relative_to(ROOT).as_posix()):
                copy = into / path.relative_to(ROOT / source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)


def build_wheel(folder: Path, service: str = "coordinator") -> Path:
    """The wheel, made by the Dockerfile's own command of what the Dockerfile copies."""
    source, wheels = folder / "source", folder / "wheel"
    stage(service, source)
    runs = [rest for instruction, rest in instructions() if instruction == "RUN" and "hatchling" in rest]
    command = shlex.split(runs[0].partition("&&")[0].replace("/wheel", str(wheels)))
    subprocess.run([sys.executable, *command[1:]], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    return wheel


def is_ignored(path: str) -> bool:
    """Whether .dockerignore keeps this path out of the build: the last pattern that matches it or a parent decides."""
    around = ["/".join(path.split("/")[:count]) for count in range(1, path.count("/") + 2)]
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
            if any(re.fullmatch(pattern, each) for each in around):
                ignored = not line.startswith("!")
    return ignored


def pins(lock: Path) -> list[Pin]:
    lines = lock.read_text().replace("\\\n", " ").splitlines()
    split = [line.split("--hash=") for line in lines]
    return [
        Pin(requirement=Requirement(requirement), hashes=frozenset(each.strip() for each in hashes))
        for requirement, *hashes in split
    ]


def exec_form(text: str) -> list[str]:
    words: list[str] = json.loads(text)
    return words


def _substituted(value: Any, given: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _substituted(each, given) for name, each in value.items()}
    if isinstance(value, list):
        return [_substituted(each, given) for each in value]
    if not isinstance(value, str):
        return value
    text = VARIABLE.sub(lambda match: _value(match, given), value)
    if "$" in text:
        raise ValueError(f"{value}: only ${{NAME:-default}} and ${{NAME:?message}} are understood")
    return text


def _value(match: re.Match[str], given: Mapping[str, str]) -> str:
    if given.get(match["name"]):
        return given[match["name"]]
    if match["kind"] == "?":
        raise ValueError(f"{match['name']}: {match['text']}")
    return match["text"]
