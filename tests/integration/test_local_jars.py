"""Jars come whole and right, or not at all: cut off half-way, wrong, killed in between, or asked for twice at once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from oncebox.local import LocalError, jars
from oncebox.local.state import start_time
from tests.unit.test_local_process import await_gone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.kafka  # needs Java
SMALL = ["org.slf4j:slf4j-api:1.7.36"]
JAR = "slf4j-api-1.7.36.jar"
DIGEST = "d3ef575e3e4979678dc01bf1dcce51021493b4d11fb7f1be8ad982877c16a1c0"


@pytest.fixture
def hashes(tmp_path: Path) -> Path:
    path = tmp_path / "hashes"
    path.write_text(f"{DIGEST}  {JAR}\n")
    return path


def fake_maven(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A `mvn` that goes wrong; $out is where the jars belong."""
    program = folder / "bin" / "mvn"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nfor word; do out="${{word#-DoutputDirectory=}}"; done\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def without_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)


def test_maven_and_ivy_bring_the_same(tmp_path: Path, hashes: Path):
    ways = [jars._get_by_ivy, *([jars._get_by_maven] if shutil.which("mvn") else [])]
    for way in ways:
        work = tmp_path / way.__name__
        work.mkdir()
        way(SMALL, work, work / "lib")
        assert hashlib.sha256((work / "lib" / JAR).read_bytes()).hexdigest() == DIGEST
        assert [path.name for path in (work / "lib").iterdir()] == [JAR]


def test_where_maven_brings_a_cut_off_file_ivy_is_asked(tmp_path: Path, hashes: Path, monkeypatch: pytest.MonkeyPatch):
    fake_maven(tmp_path, monkeypatch, f'mkdir -p "$out"; echo half > "$out/{JAR}"')
    folder = jars.resolve(SMALL, tmp_path / "cache" / "small", hashes=hashes)
    assert jars._problem(folder, hashes) is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('mkdir -p "$out"; echo half > "$out/slf4j-api-1.7.36.jar"', "does not have the expected hash"),
        ('mkdir -p "$out"; echo other > "$out/other.jar"', "missing or extra other.jar, slf4j-api-1.7.36.jar"),
        ('mkdir -p "$out"; echo half > "$out/slf4j-api-1.7.36.jar"; echo "[ERROR] connection reset"; exit 1', "reset"),
        ("kill -9 $$", "mvn failed"),
    ],
)
def test_nothing_is_left_of_a_download_that_went_wrong(
    tmp_path: Path, hashes: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
):
    fake_maven(tmp_path, monkeypatch, script)
    without_pyspark(monkeypatch)
    with pytest.raises(LocalError, match=message):
        jars.resolve(SMALL, tmp_path / "cache" / "small", hashes=hashes)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["small.lock"]


def test_a_cached_jar_that_was_changed_is_fetched_again(tmp_path: Path, hashes: Path):
    lines: list[str] = []
    folder = jars.resolve(SMALL, tmp_path / "small", hashes=hashes)
    (folder / JAR).write_bytes((folder / JAR).read_bytes()[:1000])
    jars.resolve(SMALL, folder, hashes=hashes, progress=lines.append)
    assert "does not have the expected hash; getting it again" in lines[0]
    assert hashlib.sha256((folder / JAR).read_bytes()).hexdigest() == DIGEST


def test_killed_half_way_and_asked_again(tmp_path: Path, hashes: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as changed:
        fake_maven(
            tmp_path, changed, f'mkdir -p "$out"; echo half > "$out/{JAR}"; echo $$ > "$out/pid"; exec sleep 1000'
        )
        with start_resolving(tmp_path / "small", hashes) as killed:
            deadline = time.monotonic() + 60
            while not (found := list(tmp_path.glob("small.partial-*/mvn/lib/pid"))) or not found[0].read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            downloading = int(found[0].read_text())
            started = start_time(downloading)
            killed.kill()
            await_gone(downloading, started)
    folder = jars.resolve(SMALL, tmp_path / "small", hashes=hashes)
    assert [path.name for path in folder.iterdir()] == [JAR]
    assert not list(tmp_path.glob("small.partial-*"))


def test_two_at_once_download_once(tmp_path: Path, hashes: Path):
    both = [start_resolving(tmp_path / "small", hashes) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(len(output.splitlines()) for output in outputs) == [0, 1]
    assert jars._problem(tmp_path / "small", hashes) is None


def start_resolving(folder: Path, hashes: Path) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from oncebox.local import jars\n"
        "jars.resolve([sys.argv[1]], Path(sys.argv[2]), hashes=Path(sys.argv[3]), progress=print)"
    )
    command = [sys.executable, "-c", code, *SMALL, str(folder), str(hashes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
