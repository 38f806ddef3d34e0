"""The way of operators' commands to the coordinators: options that all of them share, and calls that find the leader.

An answer that cannot be had is one sentence that says what to try next.
"""

import functools
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import typer

from oncebox.channels import SecureChannel
from oncebox.errors import CoordinatorError, NotCoordinatorError, OnceboxError
from oncebox.session import open_plain_channel
from oncebox.status import error_of_call
from oncebox.v1 import admin_pb2
from oncebox.v1.admin_pb2_grpc import AdminStub

CALL_TIMEOUT_S = 30.0
# A command calls once: what producers bring about by trying anew, it must get at the first attempt, also from afar.
CONNECT_TIMEOUT_MS = 10_000
HOPS_MAX = 5
# Exit codes beyond the usual 0 (fine), 1 (failed) and 2 (wrong usage).
FOUND = 3
UNDECIDED = 4

Answer = TypeVar("Answer")


class LineError(OnceboxError):
    """No coordinator could be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    coordinators: str
    ca: str | None
    cert: str | None
    key: str | None
    token_file: str | None

    @property
    def addresses(self) -> list[str]:
        return [address.strip() for address in self.coordinators.split(",") if address.strip()]

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[Any]:
        if self.token_file and not os.access(self.token_file, os.R_OK):
            # gRPC reads it with the call, and would tell of a missing answer instead.
            raise LineError(f"--token-file {self.token_file} is not there, or not yours to read")
        if self.ca or self.cert or self.token_file:
            opener: Callable[[str], Any] = SecureChannel(
                ca_location=self.ca,
                certificate_location=self.cert,
                key_location=self.key,
                token_location=self.token_file,
                connect_timeout_ms=CONNECT_TIMEOUT_MS,
            )
        else:
            opener = functools.partial(open_plain_channel, connect_timeout_ms=CONNECT_TIMEOUT_MS)
        async with opener(address) as channel:
            yield channel

    async def ask(self, address: str, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """One call to one instance."""
        async with self.channel(address) as channel:
            return await self.made(address, call(channel))

    async def made(self, address: str, call: Awaitable[Answer]) -> Answer:
        """A call that is under way; its failure as an error of ours."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) or LineError(_explained(address, error)) from None

    async def any(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """To whichever answers first in the order given."""
        trouble: LineError | None = None
        for address in self.addresses:
            try:
                return await self.ask(address, call)
            except LineError as error:
                trouble = trouble or error
        raise trouble or LineError("no coordinator is named: --coordinators host:port")

    async def leader(self, call: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """To the one that leads the id: who does not says where to go."""
        address: str | None = None
        for _ in range(HOPS_MAX):
            try:
                return await (self.any(call) if address is None else self.ask(address, call))
            except NotCoordinatorError as error:
                address = error.detail.leader_address or None
                last: CoordinatorError = error
        raise last

    async def leaders(self) -> list[admin_pb2.Leader]:
        """Of every log partition, as its own leader sees it."""
        request = admin_pb2.ListLeadersRequest()

        async def listed(channel: Any) -> list[admin_pb2.Leader]:
            response = await AdminStub(channel).ListLeaders(request, timeout=CALL_TIMEOUT_S)
            return list(response.leaders)

        known = await self.any(listed)
        by_partition = {leader.log_partition: leader for leader in known}
        for address in sorted({leader.address for leader in known}):
            try:
                theirs = await self.ask(address, listed)
            except LineError:
                continue
            by_partition |= {leader.log_partition: leader for leader in theirs if leader.address == address}
        return [by_partition[partition] for partition in sorted(by_partition)]


def _explained(address: str, error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the coordinator at {address} did not answer in time"
    details = error.details() or ""
    if "CERTIFICATE_VERIFY_FAILED" in details or "certificate" in details.lower():
        return f"the coordinator at {address} has a certificate that --ca does not cover ({details[:200]})"
    return (
        f"no coordinator answers at {address}: name one with --coordinators, and --ca (with --cert and --key, or "
        f"--token-file) if it speaks TLS ({error.code().name}: {details[:200]})"
    )


_OPTIONS = {
    "coordinators": (
        str,
        typer.Option(
            "localhost:7171", "--coordinators", "-c", envvar="ONCEBOX_COORDINATORS", help="host:port, or several."
        ),
    ),
    "ca": (str | None, typer.Option(None, envvar="ONCEBOX_CA", help="Who signs the coordinators' certificates (PEM).")),
    "cert": (str | None, typer.Option(None, envvar="ONCEBOX_CERT", help="Your own certificate (PEM).")),
    "key": (str | None, typer.Option(None, envvar="ONCEBOX_KEY", help="Its key (PEM).")),
    "token_file": (
        str | None,
        typer.Option(None, envvar="ONCEBOX_TOKEN_FILE", help="A file with your bearer token."),
    ),
}


def connected(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options above; it gets them as `line`."""
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "line"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
        for name, (kind, option) in _OPTIONS.items()
    ]

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        line = Line(**{name: arguments.pop(name) for name in _OPTIONS})
        if bool(line.cert) != bool(line.key):
            raise typer.BadParameter("--cert and --key need each other")
        function(line=line, **arguments)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = signature.replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return run
