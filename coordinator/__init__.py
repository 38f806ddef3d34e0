"""The transaction coordinator: a service of its own process. Imported nowhere else but in tests and the command."""

import os

# Read once, when grpc is imported. Else gRPC does its I/O on threads of its own, and hands each message over to the one
# that wakes asyncio (docs/decisions/0015-grpc-polls-in-place.md). What the user has set stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener,-event_engine_callback_cq")
