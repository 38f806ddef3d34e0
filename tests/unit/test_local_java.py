"""A fit Java is found wherever it lies; an unfit one is passed over and named, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from oncebox.local import java

if TYPE_CHECKING:
    from pathlib import Path

VECTOR = "jdk.incubator.vector"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without Java: what a test puts under the folder is all there is."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(java, "FOLDERS", (str(tmp_path / "jvm" / "*"),))
    return tmp_path


def make_java(home: Path, version: str, *modules: str) -> str:
    """A program that answers --list-modules as that Java does."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    lines = "\n".join(f"{module}@{version}" for module in ("java.base", *modules))
    program.write_text(f"#!/bin/sh\necho '{lines}'\n")
    program.chmod(0o755)
    return str(home)


def test_none(bare: Path):
    with pytest.raises(
        java.JavaMissingError, match=r"needs Java 17 or 21 for Kafka and Spark, found none. Install one"
    ):
        java.find_java()


def test_java_home_comes_first_then_the_path_then_the_folders(bare: Path, monkeypatch: pytest.MonkeyPatch):
    in_folder = make_java(bare / "jvm" / "17", "17.0.1", VECTOR)
    assert java.find_java() == in_folder
    on_path = make_java(bare / "path-home", "21", VECTOR)
    (bare / "path").mkdir()
    (bare / "path" / "java").symlink_to(os.path.join(on_path, "bin", "java"))
    assert java.find_java() == on_path
    monkeypatch.setenv("JAVA_HOME", make_java(bare / "home", "17.0.9", VECTOR))
    assert java.find_java() == str(bare / "home")
    assert java.java_environment()["JAVA_HOME"] == str(bare / "home")


def test_an_unfit_java_home_does_not_hide_a_fit_one(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_HOME", make_java(bare / "home", "25.0.1", VECTOR))
    fit = make_java(bare / "jvm" / "17", "17.0.1", VECTOR)
    assert java.find_java() == fit


def test_each_unfit_one_is_named_with_its_fault(bare: Path):
    make_java(bare / "jvm" / "a", "11.0.2", VECTOR)
    make_java(bare / "jvm" / "b", "21.0.2")
    broken = bare / "jvm" / "c" / "bin" / "java"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(java.JavaMissingError) as caught:
        java.find_java()
    assert "a (version 11.0.2)" in str(caught.value)
    assert f"b (version 21.0.2 without the module {VECTOR})" in str(caught.value)
    assert "c (older than 9 or broken)" in str(caught.value)


def test_the_file_runs_by_itself_without_the_package(bare: Path, monkeypatch: pytest.MonkeyPatch):
    command = [sys.executable, "-I", "-S", java.__file__]
    monkeypatch.setenv("JAVA_HOME", make_java(bare / "home", "17.0.9", VECTOR))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
