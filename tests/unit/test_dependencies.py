"""What is imported is installed: by `pip install oncebox` for the client, by an extra for each service."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import oncebox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

ROOT = Path(__file__).parents[2]
OURS = {"oncebox", "coordinator", "relay", "spark_jobs"}
# Imported where a database is named, which only those name who have them; and tried, with another way without it.
OWN = {
    "oncebox.databases": {"psycopg", "sqlalchemy"},
    "oncebox.dsn": {"psycopg"},
    "oncebox.outbox_model": {"sqlalchemy"},
    "coordinator.__main__": {"uvloop"},
    "relay.outbox.service": {"uvloop"},
}
# Of oncebox.local it wants a Java and its jars, no Kafka.
LEFT_OUT = {"spark": {"oncebox.local.kafka"}}
BY_EXTRA = {
    "": ["oncebox.blocking", *(f"oncebox.{home}" for home in set(oncebox._HOMES.values()))],
    "coordinator": ["coordinator.__main__"],
    "relay": ["relay.__main__", "relay.outbox.service", "relay.control", "relay.checking", "oncebox.resolver"],
    "spark": ["spark_jobs.reconcile", "spark_jobs.jobs.audit", "spark_jobs.jobs.repair", "spark_jobs.backfill"],
    "local": ["oncebox.local.supervisor", "oncebox.local.kafka", "oncebox.local.postgres"],
}


def installed(extra: str) -> set[str]:
    """Names of all distributions that come with it."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else ())]
    waiting = [Requirement(text) for text in asked]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in found:
                found.add((name, wanted))
                below = [Requirement(text) for text in requires(name) or ()]
                waiting += [each for each in below if each.marker is None or each.marker.evaluate({"extra": wanted})]
    return {name for name, _ in found}


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def imports_of(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Also those inside of functions, but not those for the types alone."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imports_of(node.orelse)
        else:
            yield from imports_of(ast.iter_child_nodes(node))


def reached(modules: Iterable[str], left_out: AbstractSet[str]) -> dict[str, set[str]]:
    """The first part of everything foreign that is imported on the way → by whom."""
    waiting, seen, foreign = list(modules), set(left_out), dict[str, set[str]]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        path = file_of(module)
        if path is None:  # a name in a module
            waiting.append(module.rpartition(".")[0])
            continue
        waiting += [module.rpartition(".")[0]] if "." in module else []
        for name in imports_of(ast.iter_child_nodes(ast.parse(path.read_text()))):
            first = name.partition(".")[0]
            if first in OURS:
                waiting.append(name)
            elif first not in sys.stdlib_module_names and first not in OWN.get(module, ()):
                foreign.setdefault(first, set()).add(module)
    return foreign


@pytest.mark.parametrize("extra", BY_EXTRA)
def test_what_is_imported_is_installed(extra: str):
    assert all(file_of(module) for module in BY_EXTRA[extra])
    brought, packages = installed(extra), packages_distributions()
    missing = {
        name: sorted(modules)
        for name, modules in reached(BY_EXTRA[extra], LEFT_OUT.get(extra, set())).items()
        if not {canonicalize_name(each) for each in packages[name]} & brought
    }
    assert missing == {}
