"""An outbox relay in a process: `python -m proof.chaos.outbox FILE` is `oncebox outbox run --config FILE`."""

import sys
from functools import partial
from pathlib import Path

from oncebox.settings import load
from relay.outbox.config import OutboxSettings
from relay.outbox.service import serve


def main() -> None:
    print("serves at no port", flush=True)
    serve(partial(load, OutboxSettings, file=Path(sys.argv[1])))


if __name__ == "__main__":
    main()
