"""Gets jars by their Maven coordinates into a folder: through `mvn` where it is installed, else the Ivy inside pyspark.
A folder appears by one rename, complete and (given a list) with the right hashes; a partial or wrong jar is never used.
Which repository they come from is the configuration of Maven or Ivy, never ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from oncebox.local.errors import LocalError
from oncebox.local.java import find_java, java_environment
from oncebox.local.process import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DOWNLOAD_TIMEOUT_S = 900
ERROR_LINES = 8

KAFKA_VERSION = "4.3.1"
KAFKA_COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",  # without it Kafka logs nothing
)
KAFKA_HASHES = Path(__file__).with_name("kafka_jars.sha256")


def silent(_line: str) -> None:
    """Progress for callers that want none."""


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oncebox"


def kafka_jars(progress: Callable[[str], None] = silent) -> Path:
    """The folder with the jars of Kafka and its tools, downloaded at the first call on a machine."""
    return resolve(KAFKA_COORDINATES, cache_folder() / f"kafka-{KAFKA_VERSION}", hashes=KAFKA_HASHES, progress=progress)


def resolve(
    coordinates: Sequence[str],
    folder: Path,
    *,
    hashes: Path | None = None,
    progress: Callable[[str], None] = silent,
) -> Path:
    """`folder`, filled with the jars of `coordinates` ("group:artifact:version") and all they depend on.
    `hashes` lists every expected jar as sha256sum writes it; without it the jars are taken as they come.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            problem = _problem(folder, hashes)
            if problem is None:
                return folder
            progress(f"{folder}: {problem}; getting it again")
            shutil.rmtree(folder)
        for leftover in folder.parent.glob(f"{folder.name}.partial-*"):  # of a run that was killed
            shutil.rmtree(leftover)
        progress(f"Downloading {', '.join(coordinates)} (once)")
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as partial:
            _download(coordinates, Path(partial), hashes).rename(folder)
    return folder


def _download(coordinates: Sequence[str], partial: Path, hashes: Path | None) -> Path:
    problems = []
    for name, get in (("mvn", _get_by_maven), ("ivy", _get_by_ivy)):
        jars = partial / name / "lib"
        jars.parent.mkdir()
        try:
            get(coordinates, partial / name, jars)
        except LocalError as error:
            problems.append(str(error))
            continue
        problem = _problem(jars, hashes)
        if problem is None:
            return jars
        problems.append(f"{name} brought wrong files: {problem}")
    raise LocalError(f"could not get {', '.join(coordinates)}:\n" + "\n".join(problems))


def _problem(folder: Path, hashes: Path | None) -> str | None:
    present = {path.name: path for path in folder.glob("*.jar")}
    if hashes is None:
        return None if present else "no jars"
    expected = {name: digest for digest, name in map(str.split, hashes.read_text().splitlines())}
    if expected.keys() != present.keys():
        return f"missing or extra {', '.join(sorted(expected.keys() ^ present.keys()))}"
    for name, path in present.items():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected[name]:
                return f"{name} does not have the expected hash"
    return None


def _get_by_maven(coordinates: Sequence[str], work: Path, jars: Path) -> None:
    if shutil.which("mvn") is None:
        raise LocalError("mvn is not installed")
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>"
        for group, artifact, version in map(_parts, coordinates)
    )
    pom = work / "pom.xml"
    pom.write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>oncebox</groupId><artifactId>jars</artifactId>"
        f"<version>1</version><dependencies>{dependencies}</dependencies></project>"
    )
    command = ["mvn", "-B", "-ntp", "-f", str(pom), "dependency:copy-dependencies"]
    _run([*command, "-DincludeScope=runtime", f"-DoutputDirectory={jars}"], work)


def _get_by_ivy(coordinates: Sequence[str], work: Path, jars: Path) -> None:
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or not pyspark.submodule_search_locations:
        raise LocalError(
            "pyspark, whose Ivy gets jars where mvn is not installed, is missing: pip install 'oncebox[local]'"
        )
    dependencies = "".join(
        f"<dependency org={quoteattr(group)} name={quoteattr(artifact)} rev={quoteattr(version)}"
        ' conf="default->default"/>'
        for group, artifact, version in map(_parts, coordinates)
    )
    ivy = work / "ivy.xml"
    ivy.write_text(
        '<ivy-module version="2.0"><info organisation="oncebox" module="jars"/><configurations><conf name="default"/>'
        f"</configurations><dependencies>{dependencies}</dependencies></ivy-module>"
    )
    classpath = os.path.join(pyspark.submodule_search_locations[0], "jars", "*")
    command = [os.path.join(find_java(), "bin", "java"), "-cp", classpath, "org.apache.ivy.Main", "-ivy", str(ivy)]
    # A cache of its own: Ivy's default cache is not safe against a Spark that starts at the same time.
    command += ["-cache", str(work / "cache"), "-confs", "default", "-types", "jar", "bundle"]
    _run([*command, "-retrieve", f"{jars}/[artifact]-[revision](-[classifier]).[ext]"], work)


def _parts(coordinate: str) -> tuple[str, str, str]:
    group, artifact, version = coordinate.split(":")
    return group, artifact, version


def _run(command: list[str], folder: Path) -> None:
    guard = Guard()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=java_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
            process_group=guard.group(),
        )
    except subprocess.TimeoutExpired as error:
        raise LocalError(f"{command[0]} did not finish in {DOWNLOAD_TIMEOUT_S} s") from error
    finally:
        guard.close()
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if line.strip(" .\t")]
        wrong = [line for line in lines if "ERROR" in line or "FAILED" in line or "not found" in line] or lines
        raise LocalError("\n".join([f"{command[0]} failed:", *(f"  | {line}" for line in wrong[-ERROR_LINES:])]))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
