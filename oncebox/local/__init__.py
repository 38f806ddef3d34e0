"""Real Kafka and PostgreSQL on this machine, for demo, tests and first steps. Nothing else of Oncebox needs it:
any part can be the user's own.
"""

from oncebox.local.errors import LocalError
from oncebox.local.kafka import Broker, LocalKafka
from oncebox.local.postgres import LocalPostgres

__all__ = ["Broker", "LocalError", "LocalKafka", "LocalPostgres"]
