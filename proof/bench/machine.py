"""The machine and the versions that figures were taken on; without them a figure says little."""

import os
import platform
import re
import subprocess
from importlib import metadata

PACKAGES = ("oncebox", "confluent-kafka", "aiokafka", "grpcio", "psycopg", "pyspark")


def describe() -> dict[str, str]:
    """A line for each part, in the order to be shown. What cannot be found out is left out."""
    found = {
        "CPU": _first(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo")) or platform.machine(),
        "cores": str(_cores()),
        "memory": _memory(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "Java": _java(),
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
    }
    return {name: value for name, value in found.items() if value}


def _cores() -> int:
    """Those we may use, which in a container are often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    kilobytes = _first(r"MemTotal:\s*(\d+)", _read("/proc/meminfo"))
    return f"{int(kilobytes) / 1024**2:.1f} GiB" if kilobytes else ""


def _java() -> str:
    from oncebox.local.java import JavaMissingError, find_java

    try:
        java = os.path.join(find_java(), "bin", "java")
        told = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
    except (JavaMissingError, OSError, subprocess.CalledProcessError):
        return ""
    return _first(r'"([^"]+)"', told)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1].strip() if match else ""
