"""Finds a Java that can run Kafka and Spark. `make` runs this file with the system's Python before anything is
installed: only the standard library, nothing of ours, nothing newer than Python 3.8. It installs nothing.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys

VERSIONS = (17, 21)  # what Kafka 4 and Spark 4.0 both run on
# Spark starts every JVM with --add-modules of this; trimmed-down runtimes lack it.
MODULE = "jdk.incubator.vector"
FOLDERS = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/opt/homebrew/opt/openjdk@*/libexec/openjdk.jdk/Contents/Home",
    "/usr/local/opt/openjdk@*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
    "~/.jdks/*",
)
HOW_TO_GET = (
    "Install one (Debian/Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install "
    "java-21-openjdk-headless; macOS: brew install openjdk@21) or set JAVA_HOME to one."
)


class JavaMissingError(Exception):
    """No fit Java on this machine; the text says how to get one."""


def find_java() -> str:
    """The home folder of a fit Java: JAVA_HOME, then PATH, then the well-known folders."""
    unfit = []
    for home in _candidates():
        problem = _problem(home)
        if problem is None:
            return home
        unfit.append(f"{home} ({problem})")
    found = f"found only {', '.join(unfit)}" if unfit else "found none"
    raise JavaMissingError(f"Oncebox needs Java 17 or 21 for Kafka and Spark, {found}. {HOW_TO_GET}")


def java_environment() -> dict[str, str]:
    """The environment for a child process that starts Java by itself."""
    return {**os.environ, "JAVA_HOME": find_java()}


def _candidates() -> list[str]:
    homes = [os.environ.get("JAVA_HOME", "")]
    on_path = shutil.which("java")
    if on_path:
        homes.append(os.path.dirname(os.path.dirname(os.path.realpath(on_path))))
    for folder in FOLDERS:
        homes.extend(sorted(glob.glob(os.path.expanduser(folder))))
    unique = dict.fromkeys(os.path.realpath(home) for home in homes if home)
    return [home for home in unique if os.access(os.path.join(home, "bin", "java"), os.X_OK)]


def _problem(home: str) -> str | None:
    """Why this Java is unfit, or None. One cheap run tells version and modules."""
    try:
        output = subprocess.run(
            [os.path.join(home, "bin", "java"), "-XX:-UsePerfData", "--list-modules"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "older than 9 or broken"
    modules = dict(line.strip().partition("@")[::2] for line in output.splitlines())
    version = modules.get("java.base", "")
    if version.partition(".")[0] not in {str(number) for number in VERSIONS}:
        return f"version {version or 'unknown'}"
    if MODULE not in modules:
        return f"version {version} without the module {MODULE}"
    return None


if __name__ == "__main__":
    try:
        find_java()
    except JavaMissingError as error:
        sys.exit(str(error))
