"""The benches by name. A bench is a function from a Context to results; its docstring says what is measured and becomes
part of the report. Its module is imported only when it runs.
"""

import importlib
from collections.abc import Callable, Iterator

from proof.bench.context import Context
from proof.bench.result import Result

Bench = Callable[[Context], Iterator[Result]]

BENCHES = {
    "kafka": "proof.bench.kafka:bench",
    "coordinator": "proof.bench.coordinator:bench",
    "producer": "proof.bench.producer:bench",
    "transform": "proof.bench.transform:bench",
    "gateway": "proof.bench.gateway:bench",
    "ids": "proof.bench.ids:bench",
    "failover": "proof.bench.failover:bench",
    "idle": "proof.bench.idle:bench",
    "operate": "proof.bench.operate:bench",
    "reverse": "proof.bench.reverse:bench",
    "atomic": "proof.bench.atomic:bench",
    "relay": "proof.bench.relay:bench",
    "reconcile": "proof.bench.reconcile:bench",
}


def find(name: str) -> Bench:
    module, _, function = BENCHES[name].partition(":")
    found: Bench = getattr(importlib.import_module(module), function)
    return found
