"""Runs sessions one after another until told to stop: what is outside (database, brokers) is waited for, a fence is
accepted, a bad record or setting ends the relay with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from typing import TYPE_CHECKING

import psycopg

from oncebox.errors import FatalError, RetriableError, UsageError
from relay.database import connect
from relay.partition_mode import PartitionSession
from relay.schema_changes import change_table
from relay.status import Status
from relay.transaction_mode import TransactionSession
from relay.types import FencedError, RelayError, SchemaChangeError, TableChangedError

if TYPE_CHECKING:
    from relay.config import RelaySettings

RETRY_S = 0.1
# Wrong for ever, however often it is tried.
HOPELESS = ("28", "3D", "42")

log = logging.getLogger(__name__)


def new_instance() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class Relay:
    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self.status = Status(name=settings.name, instance=new_instance())
        self._stop = asyncio.Event()
        self._stop_thread = threading.Event()

    def stop(self) -> None:
        self._stop.set()
        self._stop_thread.set()

    async def run(self) -> None:
        """Until stop(), or an error that waiting does not mend."""
        from confluent_kafka import KafkaException

        pause_s = RETRY_S
        change: SchemaChangeError | None = None
        made = ""
        while not self._stop.is_set():
            batches = self.status.batches
            try:
                if change is not None:
                    await asyncio.to_thread(self._change_table, change)
                    made, change = str(change), None
                await self._session()
                continue
            except (FencedError, TableChangedError) as error:
                log.warning("%s", error)
                self.status.turn("WAITING", str(error))
            except SchemaChangeError as asked:
                log.info("%s", asked)
                change = asked
                if str(asked) != made:
                    continue
                self.status.turn("WAITING", f"{asked}, though it was changed so")
            except (psycopg.Error, KafkaException, RetriableError, OSError) as error:
                if isinstance(error, psycopg.Error) and _is_hopeless(error):
                    self.status.turn("STOPPED", str(error))
                    raise RelayError(f"PostgreSQL refuses: {str(error).strip()}") from error
                log.warning("waits and tries again: %s", str(error).strip())
                self.status.turn("WAITING", str(error).strip())
            except (RelayError, FatalError, UsageError) as error:
                self.status.turn("STOPPED", str(error))
                raise RelayError(str(error)) from error
            self.status.retries += 1
            pause_s = RETRY_S if self.status.batches > batches else min(pause_s * 2, self.settings.retry_max_ms / 1000)
            try:
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
            except TimeoutError:
                continue
        self.status.turn("STOPPED", "asked to stop")

    def _change_table(self, change: SchemaChangeError) -> None:
        with connect(self.settings, self.status.instance) as connection:
            change_table(connection, change)

    async def _session(self) -> None:
        given = (self.settings, self.status.instance, self.status)
        if self.settings.mode == "transaction":
            await TransactionSession(*given, self._stop).run()
        else:
            await asyncio.to_thread(lambda: PartitionSession(*given, self._stop_thread).run())


def _is_hopeless(error: psycopg.Error) -> bool:
    return isinstance(error, psycopg.DataError) or (error.sqlstate or "")[:2] in HOPELESS
