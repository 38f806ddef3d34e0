"""A certificate authority of one's own and a server certificate for this machine's loopback, for the SASL_SSL listener.
Good for tests and first steps only: the server's key lies unencrypted, readable by its owner alone.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from typing import TYPE_CHECKING

from oncebox.local.ports import HOST

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

VALIDITY = dt.timedelta(days=3650)


def make_certificates(*, ca_path: Path, keystore_path: Path) -> None:
    """Writes the authority's certificate, and the server's key with its certificate, as PEM files."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("oncebox local CA", authority_key, issuer=None, issuer_key=authority_key)
    server = _certificate(HOST, server_key, issuer=authority.subject, issuer_key=authority_key)
    key = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    keystore_path.touch(mode=0o600)
    keystore_path.write_bytes(key + _pem(server) + _pem(authority))
    ca_path.write_bytes(_pem(authority))


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, *, issuer: x509.Name | None, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    authority_key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_key_id, critical=False)
    )
    if issuer is not None:
        names = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)
