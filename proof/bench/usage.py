"""What a process uses, as Linux tells."""

import os
import re


def resident_mb(pid: int) -> float:
    """The memory that it has now."""
    with open(f"/proc/{pid}/status") as file:
        found = re.search(r"VmRSS:\s+(\d+) kB", file.read())
    if found is None:
        raise RuntimeError(f"process {pid} has no memory; it has ended")
    return int(found[1]) / 1024


def cpu_s(pid: int) -> float:
    """The processor time that it has used so far, in user and in system mode."""
    with open(f"/proc/{pid}/stat") as file:
        # The name, in parentheses, may hold anything; two fields after it are left out of no count (proc(5)).
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
