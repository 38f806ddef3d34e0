"""Hypothesis' profiles: `quick` is what `make test` runs, the same every time; `long` looks further, and anew.

`ONCEBOX_MODEL_PROFILE=long pytest tests/model` chooses; the tests marked `long` always take the second.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    max_examples=200,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "long",
    max_examples=1_000,
    stateful_step_count=60,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(os.environ.get("ONCEBOX_MODEL_PROFILE", "quick"))
