"""Bearer tokens: what is forged, stale, or meant for somebody else is refused; what is good names its subject."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from oncebox.access.identity import (
    TOKEN_MAX_BYTES,
    Identity,
    KeysError,
    Tokens,
    UnidentifiedError,
    certificate_identity,
)
from oncebox.settings import TokensSection
from tests.support.certificates import AUDIENCE, ISSUER, claims, forged, public_pem, token

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)


def tokens(tmp_path: Path, keys: bytes | None = None, **fields: Any) -> Tokens:
    file = tmp_path / "keys"
    file.write_bytes(keys or public_pem(KEY))
    return Tokens(TokensSection(keys_location=file, audience=AUDIENCE, issuer=ISSUER, leeway_s=0, **fields))


def key_set(**keys: Any) -> bytes:
    kinds: dict[Any, Any] = {
        rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
        ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
    }
    entries = []
    for kid, key in keys.items():
        algorithm: Any = next(
            (each for kind, each in kinds.items() if isinstance(key, kind)), jwt.algorithms.OKPAlgorithm
        )
        entries.append({**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid})
    return json.dumps({"keys": entries}).encode()


def test_a_good_token(tmp_path: Path):
    identity = tokens(tmp_path).identify(f"Bearer {token(KEY, claims('alice'))}")
    assert identity.principal == "token:alice"
    assert identity.expires_at_s is not None
    assert identity.expires_at_s > time.time()


def test_another_claim_may_name_the_principal(tmp_path: Path):
    verified = tokens(tmp_path, principal_claim="azp").identify(f"bearer {token(KEY, claims(azp='service'))}")
    assert verified.principal == "token:service"


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("RS256", RSA), ("PS512", RSA), ("ES256", KEY), ("EdDSA", ed25519.Ed25519PrivateKey.generate())],
)
def test_asymmetric_algorithms(tmp_path: Path, algorithm, key):
    assert tokens(tmp_path, public_pem(key)).identify(f"Bearer {token(key, claims(), algorithm)}")


def hmac_signed(secret: bytes) -> str:
    """By hand: the library refuses to sign with a public key."""
    import base64
    import hashlib
    import hmac

    unsigned = forged({"alg": "HS256", "typ": "JWT"}, claims()).rpartition(".")[0]
    signature = hmac.new(secret, unsigned.encode(), hashlib.sha256).digest()
    return f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def now() -> int:
    return int(time.time())


BAD: dict[str, Callable[[], str]] = {
    "no algorithm": lambda: forged({"alg": "none", "typ": "JWT"}, claims()),
    "no algorithm, other spelling": lambda: forged({"alg": "nOnE"}, claims()),
    "signed with the public key as a secret": lambda: hmac_signed(public_pem(KEY)),
    "signed by another": lambda: token(OTHER, claims()),
    "another algorithm than the key's": lambda: token(RSA, claims(), "RS256"),
    "signature cut off": lambda: token(KEY, claims()).rpartition(".")[0] + ".",
    "claims changed": lambda: ".".join(
        [
            token(KEY, claims()).split(".")[0],
            token(KEY, claims("admin")).split(".")[1],
            token(KEY, claims()).split(".")[2],
        ]
    ),
    "a key of its own in the header": lambda: token(
        OTHER, claims(), jwk=json.loads(jwt.algorithms.ECAlgorithm.to_jwk(OTHER.public_key()))
    ),
    "critical extension": lambda: token(KEY, claims(), crit=["exp"]),
    "for somebody else": lambda: token(KEY, claims(aud="other")),
    "for nobody": lambda: token(KEY, claims(aud=None)),
    "by another issuer": lambda: token(KEY, claims(iss="https://evil.example")),
    "expired": lambda: token(KEY, claims(exp=now() - 5)),
    "never expires": lambda: token(KEY, claims(exp=None)),
    "not yet": lambda: token(KEY, claims(nbf=now() + 600)),
    "of nobody": lambda: token(KEY, claims(sub=None)),
    "of an empty name": lambda: token(KEY, claims("")),
    "of a name with a line break": lambda: token(KEY, claims("alice\nadmin")),
    "no token": lambda: "x.y.z",
    "nothing": lambda: "",
    "too long": lambda: "x" * TOKEN_MAX_BYTES,
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_tokens_are_refused(tmp_path: Path, name):
    shown = BAD[name]()
    with pytest.raises(UnidentifiedError) as refused:
        tokens(tmp_path).identify(f"Bearer {shown}")
    # What was shown is not told back.
    assert not shown or shown not in str(refused.value)


@pytest.mark.parametrize("header", ["", "Basic YTpi", "Bearer", "bearer"])
def test_other_headers(tmp_path: Path, header):
    with pytest.raises(UnidentifiedError):
        tokens(tmp_path).identify(header)


def test_a_token_known_to_be_good_expires_all_the_same(tmp_path: Path):
    now = [time.time()]
    known = tokens(tmp_path)
    known._now_s = lambda: now[0]
    header = f"Bearer {token(KEY, claims())}"
    assert known.identify(header) == known.identify(header)
    now[0] += 301
    with pytest.raises(UnidentifiedError, match="expired"):
        known.identify(header)


def test_keys_by_their_id_and_after_rotation(tmp_path: Path):
    known = tokens(tmp_path, key_set(first=KEY, second=RSA))
    assert known.identify(f"Bearer {token(KEY, claims(), kid='first')}")
    assert known.identify(f"Bearer {token(RSA, claims(), 'RS256', kid='second')}")
    for wrong in (token(KEY, claims(), kid="second"), token(KEY, claims(), kid="third"), token(KEY, claims())):
        with pytest.raises(UnidentifiedError):
            known.identify(f"Bearer {wrong}")
    (tmp_path / "keys").write_bytes(key_set(third=OTHER))
    known.reload()
    assert known.identify(f"Bearer {token(OTHER, claims(), kid='third')}")
    with pytest.raises(UnidentifiedError):
        known.identify(f"Bearer {token(KEY, claims(), kid='first')}")
    (tmp_path / "keys").write_bytes(b"nonsense")
    with pytest.raises(KeysError):
        known.reload()
    assert known.identify(f"Bearer {token(OTHER, claims(), kid='third')}")


@pytest.mark.parametrize(
    "keys",
    [
        b"",
        b'{"keys": []}',
        b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "x"}]}',
        b"-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n",
        public_pem(rsa.generate_private_key(65537, 1024)),
        public_pem(ec.generate_private_key(ec.SECP256K1())),
        json.dumps({"keys": [json.loads(jwt.algorithms.ECAlgorithm.to_jwk(KEY))]}).encode(),  # a private one
    ],
)
def test_keys_that_are_not_good_enough(tmp_path: Path, keys):
    (tmp_path / "keys").write_bytes(keys)
    with pytest.raises(KeysError):
        Tokens(TokensSection(keys_location=tmp_path / "keys", audience=AUDIENCE, issuer=ISSUER))


@pytest.mark.parametrize(
    ("context", "principal"),
    [
        ({}, None),
        ({"transport_security_type": [b"ssl"]}, None),
        ({"x509_pem_cert": [b"."], "x509_common_name": [b"orders"]}, "cert:orders"),
    ],
)
def test_certificates(context, principal):
    identity = certificate_identity(context, "common_name")
    assert identity == (None if principal is None else Identity(principal))


@pytest.mark.parametrize("names", [[], [b""], [b"a", b"b"], [b"\xff"], [b"a\nb"], [b"x" * 300]])
def test_certificates_without_one_clear_name(names):
    with pytest.raises(UnidentifiedError):
        certificate_identity({"x509_pem_cert": [b"."], "x509_common_name": names}, "common_name")
