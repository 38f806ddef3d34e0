"""A coordinator of a later release, whose records have another version: `python -m tests.support.newer`."""

from coordinator.log import codec

codec.VERSION = 2
codec._ID_PREFIX = bytes([0x08, codec.VERSION, 0x12])

if __name__ == "__main__":
    from coordinator.__main__ import main

    main()
