"""Without Java the tests say so once, before the first one; those that need none still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_JAVA = """
import os, sys, pytest
from oncebox.local import java
java.FOLDERS = ()
os.environ["PATH"] = os.environ["JAVA_HOME"] = ""
sys.exit(pytest.main(sys.argv[1:]))
"""


def run_pytest(folder: Path, *args: str) -> tuple[int, str]:
    command = [sys.executable, "-c", WITHOUT_JAVA, "-q", "-p", "no:cacheprovider", f"--basetemp={folder}", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_it_is_told_once(tmp_path: Path):
    code, output = run_pytest(tmp_path / "run", "tests/integration/test_local_kafka.py")
    assert code == 4
    assert output.count("needs Java 17 or 21") == 1
    assert "3 of the selected tests need it" in output
    assert "Traceback" not in output


def test_the_others_run(tmp_path: Path):
    code, output = run_pytest(tmp_path / "run", "-m", "not kafka and not spark", "tests/unit/test_local_properties.py")
    assert (code, "7 passed" in output) == (0, True)
