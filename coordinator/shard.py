"""One log partition and this instance's relation to it: loading, serving, resigned or failed.

The only writer of its partition while it serves; what it may not answer any more it sends elsewhere.
"""

import asyncio
from collections.abc import Callable
from enum import Enum

from coordinator.calls import Answer, Change, Fenced, Told
from coordinator.core.apply import PartitionState
from coordinator.core.commands import Command, ErrorCode, GetOutcome, Refused
from coordinator.loading import load
from coordinator.log import codec
from coordinator.log.lead import LostError
from coordinator.log.port import Store
from coordinator.markers.port import Markers
from coordinator.producer_ids import ProducerIdPool
from coordinator.serving import Serving, ShardSettings
from oncebox.v1 import log_pb2

CONFIRM_TIMEOUT_MS = 5_000


class ShardState(Enum):
    LOADING = "loading"
    SERVING = "serving"
    RESIGNED = "resigned"
    FAILED = "failed"


class Shard:
    def __init__(
        self,
        *,
        partition: int,
        store: Store,
        markers: Markers,
        producer_ids: ProducerIdPool,
        instance: str,
        address: str,
        now_ms: Callable[[], int],
        nonce: Callable[[], bytes],
        settings: ShardSettings,
        watchers: set[Callable[[Change], None]],
        listeners: dict[str, set[Fenced]],
        state_changed: Callable[[], None],
    ) -> None:
        self.partition = partition
        self.state = ShardState.LOADING
        self.ids = PartitionState(unpack=codec.decode_id)
        self.leader = log_pb2.LeaderState()
        self._store = store
        self._markers = markers
        self._producer_ids = producer_ids
        self._instance = instance
        self._address = address
        self._now_ms = now_ms
        self._nonce = nonce
        self._settings = settings
        self._watchers = watchers
        self._listeners = listeners
        self._state_changed = state_changed
        self._failure = ""
        self._serving: Serving | None = None

    @property
    def debts(self) -> int:
        return len(self._serving.debts) if self._serving else 0

    async def lead(self) -> None:
        """Takes the partition over and serves it until it is resigned (returns) or lost (raises LostError)."""
        over = ShardState.RESIGNED
        try:
            await self._load_and_serve()
        except (LostError, asyncio.CancelledError):
            raise
        except Exception as error:
            # An unreadable record or a broken invariant: never serve a guess.
            self._failure = f"log partition {self.partition} is not served: {error}"
            over = ShardState.FAILED
            raise
        finally:
            self.state = over
            if self._serving is not None:
                self._serving.stop(self.refusal())
            self._state_changed()

    async def _load_and_serve(self) -> None:
        loaded = await load(
            self._store,
            self.partition,
            instance=self._instance,
            address=self._address,
            nonce=self._nonce,
            accept_lost_log=self._settings.accept_lost_log,
        )
        if self.state is not ShardState.LOADING:
            return
        self.leader = loaded.leader
        self.ids = loaded.ids
        self._serving = Serving(
            self.partition,
            loaded,
            markers=self._markers,
            producer_ids=self._producer_ids,
            now_ms=self._now_ms,
            settings=self._settings,
            watchers=self._watchers,
            listeners=self._listeners,
        )
        self.state = ShardState.SERVING
        self._state_changed()
        await self._serving.run()

    def resign(self) -> None:
        """In good order: what is being appended is still answered, everything else is sent to the next leader."""
        self.state = ShardState.RESIGNED
        if self._serving is not None:
            self._serving.resign()

    async def call(self, command: Command, timeout_ms: int) -> Answer | Refused:
        future: asyncio.Future[Answer | Refused] = asyncio.get_running_loop().create_future()
        # A caller that has gone is not told; the decision under way is taken all the same.
        self.ask(command, timeout_ms, lambda answer: None if future.done() else future.set_result(answer))
        return await future

    async def confirm(self) -> bool:
        """Whether this instance leads the partition still: an append begun now is acknowledged."""
        nobody = GetOutcome(transactional_id="", number=0)
        answer = await self.call(nobody, CONFIRM_TIMEOUT_MS)
        # Nobody has this name; only a leader's append lets even that answer out.
        return isinstance(answer, Refused) and answer.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING

    def ask(self, command: Command, timeout_ms: int, told: Told) -> None:
        if self.state is not ShardState.SERVING or self._serving is None:
            told(self.refusal())
        else:
            self._serving.ask(command, timeout_ms, told)

    def refusal(self) -> Refused:
        """What a call gets while this shard does not serve."""
        match self.state:
            case ShardState.LOADING:
                return Refused(
                    code=ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
                    message=f"log partition {self.partition} is being loaded; send the call again",
                    retriable=True,
                )
            case ShardState.FAILED:
                return Refused(code=ErrorCode.COORDINATOR_NOT_AVAILABLE, message=self._failure, retriable=True)
            case _:
                return Refused(
                    code=ErrorCode.NOT_COORDINATOR,
                    message=f"this instance does not lead log partition {self.partition}; ask FindCoordinator",
                    retriable=True,
                )
