"""TLS and identity on the way to a coordinator: `Producer(..., open_channel=SecureChannel(ca_location="ca.pem"))`.

Files are read each time a connection is opened, and the token's file with each call: both may be replaced at any time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from oncebox.errors import UsageError
from oncebox.session import CONNECT_TIMEOUT_MS, channel_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureChannel:
    """Opens connections with TLS. Equal ones share their streams."""

    # Who signs the coordinators' certificates; None: the system's authorities.
    ca_location: str | None = None
    # The client's own certificate, where the coordinator asks for one.
    certificate_location: str | None = None
    key_location: str | None = None
    # A bearer token, or better the file that holds the newest one.
    token: str | None = field(default=None, repr=False)
    token_location: str | None = None
    # The name in the coordinator's certificate, where it is not the one in its address.
    server_name: str | None = None
    # For a connection to come up, before it is tried anew with more and more time.
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    # Authorities, key and certificate as they were last read, once they have been.
    _former: list[tuple[bytes | None, bytes | None, bytes | None]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if bool(self.certificate_location) != bool(self.key_location):
            raise UsageError("certificate_location and key_location need each other")
        if self.token and self.token_location:
            raise UsageError("token and token_location exclude each other")

    def __call__(self, address: str) -> grpc.aio.Channel:
        authorities, key, chain = self._material()
        credentials = grpc.ssl_channel_credentials(
            root_certificates=authorities, private_key=key, certificate_chain=chain
        )
        if self.token or self.token_location:
            tokens = grpc.metadata_call_credentials(_Bearer(self._token))
            credentials = grpc.composite_channel_credentials(credentials, tokens)
        options = channel_options(self.connect_timeout_ms)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return grpc.aio.secure_channel(address, credentials, options=options)

    def _material(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """A file that is just being replaced leaves what was read before it in place."""
        try:
            read = (
                _read_pem(self.ca_location, "certificate"),
                _read_pem(self.key_location, "private key"),
                _read_pem(self.certificate_location, "certificate"),
            )
        except UsageError:
            if not self._former:
                raise
            return self._former[0]
        self._former[:] = [read]
        return read

    def _token(self) -> str:
        if self.token_location is None:
            return self.token or ""
        return (_read(self.token_location) or b"").decode().strip()


class _Bearer(grpc.AuthMetadataPlugin):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def __call__(self, _context: Any, callback: Callable[[Any, Exception | None], None]) -> None:
        try:
            token = self._token()
        except (UsageError, UnicodeDecodeError) as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)


def _read_pem(file: str | None, what: str) -> bytes | None:
    """Checked here: gRPC would tell of it only in a log of its own, and then that nobody answers."""
    text = _read(file)
    if text is not None and f"{what.upper()}-----".encode() not in text:
        raise UsageError(f"{file}: no {what} in PEM")
    return text


def _read(file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        with open(file, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
