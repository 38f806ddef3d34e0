"""The programs of docs/gateway.md run as they stand: Python, and Go and Node where their tools and packages are."""

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.coordinator import Coordinators, values
from tests.support.kafka import TopicFactory

ROOT = Path(__file__).parents[3]


def program(language: str, address: str, topic: str, suffix: str) -> str:
    """The page's only program in this language, for this coordinator and topic, with ids that nobody else uses."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "gateway.md").read_text(), re.DOTALL)
    found = found.replace("localhost:7171", address).replace('"orders"', f'"{topic}"')
    return re.sub(r'"(python|go|node)-(batches|stream)"', rf'"\1-\2-{suffix}"', found)


def protoc_arguments() -> list[str]:
    """Of the page's only call of protoc."""
    (found,) = re.findall(r"^protoc (.*?)^```", (ROOT / "docs" / "gateway.md").read_text(), re.DOTALL | re.MULTILINE)
    return shlex.split(found.replace("\\\n", " "))  # a shell joins such lines


def run(*command: str | Path, folder: Path, timeout_s: float = 120, **environment: str) -> str:
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout}{done.stderr}"
    return done.stdout


def install(*command: str, folder: Path) -> None:
    """Packages come from the language's own registry; without it the program is not run, and pytest says so."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"`{' '.join(command)}` took too long: the registry cannot be reached")
    if done.returncode:
        pytest.skip(f"`{' '.join(command)}` failed: {done.stderr.strip()[-200:]}")


async def check(one: Coordinators, topic: str, language: str) -> None:
    seen = await asyncio.to_thread(values, one.bootstrap_servers, topic)
    assert seen == [f"{language} batch".encode(), f"{language} stream".encode()]


async def test_python(shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path):
    one, topic = shared_coordinator, new_topic()
    script = tmp_path / "example.py"
    script.write_text(program("python", one.addresses[0], topic, topic))
    told = await asyncio.to_thread(run, sys.executable, script, folder=tmp_path)
    assert "request 4 answered with outcome" in told
    await check(one, topic, "python")


async def test_node(shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path):
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    one, topic = shared_coordinator, new_topic()
    packages = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.7")
    install("npm", "install", "--no-audit", "--no-fund", "--silent", *packages, folder=tmp_path)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    (tmp_path / "example.js").write_text(program("javascript", one.addresses[0], topic, topic))
    told = await asyncio.to_thread(run, "node", "example.js", folder=tmp_path)
    assert "stream: COMMITTED" in told
    await check(one, topic, "node")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_go(shared_coordinator: Coordinators, new_topic: TopicFactory, tmp_path: Path):
    if shutil.which("go") is None:
        pytest.skip("go is not installed")
    one, topic = shared_coordinator, new_topic()
    bin_folder = tmp_path / "bin"
    install("go", "mod", "init", "example.com/orders", folder=tmp_path)
    for tool in ("google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc"):
        install("env", f"GOBIN={bin_folder}", "go", "install", f"{tool}@latest", folder=tmp_path)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    protoc = (sys.executable, "-m", "grpc_tools.protoc", *protoc_arguments())
    await asyncio.to_thread(run, *protoc, folder=tmp_path, PATH=path)
    (tmp_path / "main.go").write_text(program("go", one.addresses[0], topic, topic))
    install("go", "mod", "tidy", folder=tmp_path)
    told = await asyncio.to_thread(run, "go", "run", ".", folder=tmp_path, timeout_s=600)
    assert "stream: COMMITTED" in told
    await check(one, topic, "go")
