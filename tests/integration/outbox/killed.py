"""A relay that kills itself: `python -m tests.integration.outbox.killed SETTINGS STEP COUNT`, at the COUNT-th STEP.

With the step "never" it runs until it has been told to stop.
"""

import json
import os
import signal
import sys

from relay.outbox.config import OutboxSettings
from relay.outbox.service import serve

STEPS = [
    "before init",
    "after init",
    "peek",
    "begin",
    "sent",
    "before park",
    "after park",
    "before retry",
    "after retry",
    "before commit",
    "after commit",
    "after clean-up",
    "before advance",
    "after advance",
    "before idle",
    "after idle",
]


def main() -> None:
    settings = OutboxSettings(**json.loads(sys.argv[1]))
    fatal, left = sys.argv[2], int(sys.argv[3])

    def on_step(step: str) -> None:
        nonlocal left
        if step == fatal:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    serve(lambda: settings, on_step=on_step)


if __name__ == "__main__":
    main()
