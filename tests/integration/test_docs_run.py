"""The guides of the coordinator's side are tried: snippets and commands run, settings and rules load. Of every page,
commands and flags exist.

Not run: blocks marked `sh` (they start servers that stay, or need Docker), and those of the pages on the relays and the
reconciliation, whose own tests do the same; their commands and flags must exist all the same, as those in the text.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from coordinator.config import CoordinatorSettings
from oncebox.access.permissions import read_policy
from oncebox.cli import app
from oncebox.settings import load
from relay.config import RelaySettings
from relay.outbox.config import OutboxSettings
from tests.support.coordinator import values

if TYPE_CHECKING:
    from tests.support.coordinator import Coordinators
    from tests.support.kafka import TopicFactory

ROOT = Path(__file__).resolve().parents[2]
ONCEBOX = str(Path(sys.executable).with_name("oncebox"))
DOCS = ROOT / "docs"
GUIDES = [
    DOCS / "quick-start.md",
    DOCS / "concepts.md",
    DOCS / "limits.md",
    DOCS / "supported-kafka.md",
    DOCS / "when-the-log-is-lost.md",
    *(
        DOCS / "how-to" / f"{name}.md"
        for name in ("secure-it", "run-it", "scale-it-out", "upgrade-it", "move-from-kafka")
    ),
]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP), *sorted(DOCS.rglob("*.md"))]
# 3 and 4 tell what was found, as the guide on running it says.
FINE = {0, 3, 4}


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def with_blocks(kind: str) -> list[Path]:
    return [page for page in GUIDES if blocks(page, kind)]


async def run(argv: list[str], environment: dict[str, str]) -> tuple[int, str]:
    done = await asyncio.to_thread(
        subprocess.run,
        argv,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


async def test_snippets_and_then_commands(shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path):
    """In the order of the pages: what the commands ask about is what the snippets have made."""
    topics = {name: await asyncio.to_thread(new_topic) for name in ("orders", "payments")}
    number = 0
    for page in with_blocks("python"):
        for snippet in blocks(page, "python"):
            number += 1
            script = tmp_path / f"{number}.py"
            text = snippet.replace("localhost:9092", shared_coordinator.bootstrap_servers)
            text = text.replace("localhost:7171", shared_coordinator.addresses[0])
            for name, topic in topics.items():
                text = text.replace(f'"{name}"', f'"{topic}"')
            script.write_text(text)
            kafka = {"ONCEBOX_BOOTSTRAP_SERVERS": shared_coordinator.bootstrap_servers}
            code, output = await run([sys.executable, str(script)], kafka)
            assert code == 0, f"{page.name}: {output}"
    assert len(await asyncio.to_thread(values, shared_coordinator.bootstrap_servers, topics["orders"])) == 2
    environment = {"ONCEBOX_COORDINATORS": shared_coordinator.addresses[0]}
    ran = 0
    for page in with_blocks("console"):
        for block in blocks(page, "console"):
            lines = block.splitlines()
            for index, line in enumerate(lines):
                if line.startswith("$ oncebox "):
                    words = [word.replace("orders:", f"{topics['orders']}:") for word in shlex.split(line[2:])]
                    code, output = await run([ONCEBOX, *words[1:]], environment)
                    assert code in FINE, f"{page.name}: {line}: {output}"
                    follows = lines[index + 1] if index + 1 < len(lines) else "$"
                    if not follows.startswith("$"):
                        assert follows.split("…")[0].strip() in output, f"{page.name}: {line}: {output}"
                    ran += 1
    assert ran >= 8


@pytest.mark.parametrize("page", with_blocks("yaml"), ids=lambda page: page.name)
def test_settings_and_rules_load(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith("ONCEBOX_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KAFKA_PASSWORD", "a-password")
    for name in (
        "server.pem",
        "server.key",
        "clients-ca.pem",
        "operators-ca.pem",
        "rules.yaml",
        "keys.pem",
        "peer.token",
    ):
        (tmp_path / name).touch()
    for block in blocks(page, "yaml"):
        kind = block.splitlines()[0].removeprefix("# ")
        file = tmp_path / f"shown-{kind}"
        file.write_text(block)
        if kind == "coordinator.yaml":
            assert load(CoordinatorSettings, file=file).kafka.bootstrap_servers
        elif kind == "relay.yaml":
            assert load(RelaySettings, file=file).tls
        else:
            assert kind == "rules.yaml"
            assert read_policy(file)


def test_the_outboxs_settings_load(tmp_path: Path):
    (shown,) = blocks(DOCS / "outbox.md", "yaml")
    file = tmp_path / "outbox.yaml"
    file.write_text(shown)
    assert load(OutboxSettings, file=file).bad_row == "park"


def commands(page: Path) -> set[str]:
    """Each `oncebox …` in a block or in the text, up to what ends it."""
    text = page.read_text()
    found = re.findall(r"(?:^|`|\$ )oncebox ([a-z][^`\n#|]*)", text, re.MULTILINE)
    return {command.strip() for command in found if not command.startswith(("import", "."))}


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path):
    for command in sorted(commands(page)):
        words = shlex.split(command.replace("…", "x"))
        names: list[str] = []
        for word in words:
            if not re.fullmatch(r"[a-z][a-z-]*", word) or len(names) == 3:
                break
            names.append(word)
        shown = _help(*names) or _help(*names[:2]) or _help(*names[:1])
        assert shown, f"{page.name}: oncebox {command}"
        for flag in [word for word in words if word.startswith("--")]:
            assert flag.partition("=")[0] in shown, f"{page.name}: oncebox {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_commands_exist(page: Path):
    for command in sorted(set(re.findall(r"`oncebox ([a-z]+(?: [a-z]+(?:-[a-z]+)*)?)\b", page.read_text()))):
        assert _help(*command.split()), f"{page.name} names `oncebox {command}`"


@cache
def _help(*names: str) -> str:
    done = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "200"})
    return done.stdout if done.exit_code == 0 else ""


def test_the_errors_page_has_a_cause_and_a_cure_for_each():
    rows = [line for line in (DOCS / "reference/errors.md").read_text().splitlines() if line.startswith("| `")]
    named = [row.split(" | ") for row in rows if row.count(" | ") == 5]
    assert len(named) >= 24
    lacking = [cells[0] for cells in named if cells[2] != "-" and (not cells[4].strip() or not cells[5].strip(" |"))]
    assert lacking == []
