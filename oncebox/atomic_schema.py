"""The tables that commits over Kafka and PostgreSQL need, as one script for a migration."""

from oncebox.queries import queries

ATOMIC_SCHEMA = queries("oncebox", "atomic.sql")["schema"]
