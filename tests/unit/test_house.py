"""Rules of the house that no linter knows."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = [
    path
    for package in ("oncebox", "coordinator", "relay", "spark_jobs")
    for path in sorted((ROOT / package).rglob("*.py"))
    if (ROOT / "oncebox" / "v1") not in path.parents
]
LINES_MAX = 450


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_a_module_opens_with_its_contract_and_asserts_nothing(path: Path):
    """`python -O` drops assertions: an expected refusal is a value, a broken invariant an exception."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_a_file_fits_on_a_few_screens(path: Path):
    assert len(path.read_text().splitlines()) <= LINES_MAX


def test_what_the_readme_promises_has_a_test():
    promised = re.findall(r"`(tests/[^`]+)`", (ROOT / "README.md").read_text())
    assert promised
    assert not [path for path in promised if not (ROOT / path).exists()]
