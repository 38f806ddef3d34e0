"""The server's certificate, its key, and whom it trusts: read from files, and again whenever they change.

What is read is checked before it is used; a set that does not fit together leaves the last good one in place. Open
connections go on with what they began with, until they reach their age.
"""

import datetime as dt
import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from oncebox.settings import ServerTlsSection

logger = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


class TlsError(Exception):
    """The certificate files cannot be used; the text says which and why."""


class Material(NamedTuple):
    key: bytes
    chain: bytes
    client_authorities: bytes | None
    expires_at: dt.datetime


def read(section: ServerTlsSection, now: dt.datetime) -> Material:
    key, chain = _bytes_of(section.key_location), _bytes_of(section.certificate_location)
    authorities = _bytes_of(section.client_ca_location) if section.client_ca_location else None
    try:
        certificate = x509.load_pem_x509_certificate(chain)
    except ValueError:
        raise TlsError(f"{section.certificate_location}: no certificate in PEM") from None
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError):
        raise TlsError(f"{section.key_location}: no private key in PEM, or one that needs a password") from None
    if _raw(public) != _raw(certificate.public_key()):
        raise TlsError(f"{section.key_location} is not the key of {section.certificate_location}")
    if certificate.not_valid_after_utc <= now:
        raise TlsError(
            f"{section.certificate_location} has expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        )
    if authorities is not None:
        try:
            x509.load_pem_x509_certificates(authorities)
        except ValueError:
            raise TlsError(f"{section.client_ca_location}: no certificates in PEM") from None
    return Material(key, chain, authorities, certificate.not_valid_after_utc)


def _raw(key: Any) -> bytes:
    raw: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return raw


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TlsError(f"{file}: {error.strerror}") from None


class ServerCertificates:
    def __init__(self, section: ServerTlsSection) -> None:
        self._section = section
        self._files = [section.certificate_location, section.key_location]
        if section.client_ca_location:
            self._files.append(section.client_ca_location)
        # gRPC asks from threads of its own.
        self._lock = threading.Lock()
        self._signature = self._look()
        self._material = read(section, dt.datetime.now(dt.UTC))
        self._told: Material | None = None

    @property
    def expires_at_s(self) -> float:
        return self._material.expires_at.timestamp()

    def credentials(self) -> Any:
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._changed,
            require_client_authentication=self._section.client_ca_location is not None,
        )

    def reload(self) -> None:
        """Reads the files if they have changed. What cannot be used is told in the log, and tried again."""
        with self._lock:
            signature = self._look()
            if signature == self._signature:
                return
            try:
                self._material = read(self._section, dt.datetime.now(dt.UTC))
            except TlsError as error:
                logger.error("the changed certificates are not used: %s", error)  # noqa: TRY400 - no trace needed
                return
            self._signature = signature
            logger.info("certificates read anew, good until %s", self._material.expires_at.isoformat())

    def _changed(self) -> Any:
        """Asked by gRPC before each handshake; None: as before."""
        self.reload()
        with self._lock:
            return None if self._told is self._material else self._configuration()

    def _configuration(self) -> Any:
        material = self._told = self._material
        return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.client_authorities)

    def _look(self) -> Signature:
        """Files that are replaced or written anew look different."""
        looks = []
        for file in self._files:
            try:
                look = file.stat()
                looks.append((look.st_ino, look.st_mtime_ns, look.st_size))
            except OSError:
                looks.append((0, 0, 0))
        return tuple(looks)
