"""A certificate authority for tests, and tokens: what honest clients show, and what others try."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jwt
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

if TYPE_CHECKING:
    from pathlib import Path

AUDIENCE, ISSUER = "oncebox", "https://issuer.example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = self._sign(name, self._key, None, dt.timedelta(days=30))
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, common_name: str, *, valid: dt.timedelta = dt.timedelta(days=1), file: str = "") -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(common_name, key, self._certificate, valid)
        stem = file or f"{self._name}-{common_name or 'nobody'}"
        pair = Pair(certificate=self.folder / f"{stem}.crt", key=self.folder / f"{stem}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(private_pem(key))
        return pair

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, issuer: x509.Certificate | None, valid: dt.timedelta
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)] if name else [])
        now = dt.datetime.now(dt.UTC)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer.subject if issuer else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(now + valid)
            .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def private_pem(key: Any) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def claims(subject: str = "alice", **changed: Any) -> dict[str, Any]:
    """Of a good token; None takes a claim away."""
    now = int(time.time())
    all_of_them = {"sub": subject, "aud": AUDIENCE, "iss": ISSUER, "exp": now + 300, "iat": now, **changed}
    return {name: value for name, value in all_of_them.items() if value is not None}


def token(key: Any, said: dict[str, Any], algorithm: str = "ES256", **headers: Any) -> str:
    return jwt.encode(said, key, algorithm, headers=headers)


def forged(header: dict[str, Any], said: dict[str, Any], signature: bytes = b"") -> str:
    """A token that no library would make."""
    parts = [json.dumps(header).encode(), json.dumps(said).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
