"""Writes the state diagram in ARCHITECTURE.md from the transition table. With --check: says whether it is the same."""

import sys
from pathlib import Path

from coordinator.core.state import TRANSITIONS

PAGE = Path(__file__).resolve().parent.parent / "ARCHITECTURE.md"
BEGIN, END = "<!-- states: begin -->", "<!-- states: end -->"


def diagram() -> str:
    lines = [
        f"    {before.name} --> {after.name}: {event.name.lower()}" for (before, event), after in TRANSITIONS.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> EMPTY", *lines, "    DEAD --> [*]", "```"])


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    fresh = f"{before}{BEGIN}\n{diagram()}\n{END}{after}"
    if "--check" in sys.argv:
        sys.exit(None if fresh == text else "the state diagram in ARCHITECTURE.md is stale: run scripts/diagram.py")
    PAGE.write_text(fresh)


if __name__ == "__main__":
    main()
