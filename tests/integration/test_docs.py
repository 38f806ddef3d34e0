"""What the documents show is tried: snippets run, links lead somewhere (commands: test_docs_run)."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oncebox.local.ports import free_ports
from tests.support.coordinator import Coordinators, values, wait_for_markers
from tests.support.kafka import TopicFactory

ROOT = Path(__file__).resolve().parents[2]
ONCEBOX = Path(sys.executable).with_name("oncebox")
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.kafka
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/quick-start.md"], ids=lambda page: page.name)
def test_what_a_stranger_pastes_works(page: Path, tmp_path: Path):
    """The commands, then the programs, in an empty folder: nothing is there but the command itself."""
    (port,) = free_ports(1)
    commands = [line for line in blocks(page, "sh")[0].splitlines() if "bin/activate" not in line]
    script = ["trap 'kill %1; wait; oncebox local down' EXIT", *commands]
    for number, program in enumerate(blocks(page, "python")):
        assert "localhost:9092" not in program
        (tmp_path / f"{number}.py").write_text(program.replace("localhost:7171", f"localhost:{port}"))
        script.append(f"python {number}.py || exit 9")
    script.append("oncebox txn outcome orders-1 1 || exit 9")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONCEBOX_")} | {
        "PATH": f"{ONCEBOX.parent}:{os.environ['PATH']}",
        "ONCEBOX_COORDINATOR_LISTEN_PORT": str(port),
        "ONCEBOX_COORDINATOR_HTTP_PORT": "0",
        "ONCEBOX_COORDINATORS": f"localhost:{port}",
    }
    done = subprocess.run(
        ["bash", "-m", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "orders-1 1: COMMITTED" in done.stdout
    assert "Ended what ran in" in done.stdout


async def test_the_programs_of_the_client_guide(
    shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path
):
    """One after the other, as a reader of the page would run them."""
    one = shared_coordinator
    topics = {name: new_topic() for name in ("debits", "credits", "totals")}
    told = []
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "docs/client.md").read_text(), re.DOTALL)):
        program = text.replace("localhost:9092", one.bootstrap_servers).replace("localhost:7171", one.addresses[0])
        program = program.replace("until_end=True", f'until_end=True, feed_topic="{one.feed_topic}"')
        for name, topic in topics.items():
            program = program.replace(f'"{name}"', f'"{topic}"')
        for teller in ("teller-1", "teller-2", "teller-3"):
            program = program.replace(f'"{teller}"', f'"{teller}-{topics["debits"]}"')
        script = tmp_path / f"{number}.py"
        script.write_text(program)
        command = [sys.executable, str(script)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
        for topic in topics.values():  # what the next one reads is there, however busy the machine is
            await asyncio.to_thread(wait_for_markers, one.bootstrap_servers, topic)
    assert "is committed" in told[0]
    assert "3 records, each in exactly one transaction" in told[3]
    assert told[4].count("[b'30', b'30']") == 1
    assert "position of" in told[4]
    assert sorted(await asyncio.to_thread(values, one.bootstrap_servers, topics["totals"])) == [b"12", b"30", b"5"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_make_targets_exist(page: Path):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in re.findall(r"`make ([a-z-]+)`", text):
        assert name in targets, f"{page.name} names `make {name}`"
