"""Writes the state diagram from the transition table into the pages that show it. With --check: compares."""

import sys
from pathlib import Path

from coordinator.core.state import TRANSITIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("ARCHITECTURE.md", "docs/concepts.md")
BEGIN, END = "<!-- states: begin -->", "<!-- states: end -->"


def diagram() -> str:
    lines = [
        f"    {before.name} --> {after.name}: {event.name.lower()}" for (before, event), after in TRANSITIONS.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> EMPTY", *lines, "    DEAD --> [*]", "```"])


def main() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text()
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
        fresh = f"{before}{BEGIN}\n{diagram()}\n{END}{after}"
        if "--check" not in sys.argv:
            (ROOT / page).write_text(fresh)
        elif fresh != text:
            sys.exit(f"the state diagram in {page} is stale: run scripts/diagram.py")


if __name__ == "__main__":
    main()
