"""A coordinator that looks for hanging transactions every second: `python -m tests.support.quick_sweeps`."""

from coordinator import instance
from coordinator.__main__ import main

if __name__ == "__main__":
    instance.HANGING_EVERY_S = 1.0
    main()
