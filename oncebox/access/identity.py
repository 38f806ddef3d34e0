"""Who calls: the name in a client's certificate, or the subject of its bearer token. Never both guessed from one.

A token that is there and not good is refused, whatever the certificate says. Asymmetric algorithms alone are known, so
that nobody can sign with a public key; keys are read from a file, as often as it changes.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from oncebox.access.permissions import ANONYMOUS
from oncebox.settings import TokensSection

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}
RSA_BITS_MIN = 2048
TOKEN_MAX_BYTES = 8 * 1024
NAME_MAX_CHARACTERS = 256
VERIFIED_KEPT_MAX = 1_000
SCHEME = "bearer "
# What gRPC calls the names of a certificate.
CERTIFICATE_NAMES = {"common_name": "x509_common_name", "spiffe_id": "peer_spiffe_id", "dns": "peer_dns"}


class Identity(NamedTuple):
    principal: str
    # When it stops being good; None: with its connection.
    expires_at_s: float | None = None


class UnidentifiedError(Exception):
    """Nobody we know; the text may be told to the caller."""


class KeysError(Exception):
    """The file with the keys of the tokens' issuer cannot be used; the text says why."""


def certificate_identity(auth_context: Mapping[str, Sequence[bytes]], name: str) -> Identity | None:
    """None: the connection shows no certificate."""
    if "x509_pem_cert" not in auth_context:
        return None
    names = auth_context.get(CERTIFICATE_NAMES[name], ())
    if len(names) != 1 or not names[0]:
        raise UnidentifiedError(f"the client's certificate has {len(names) or 'no'} {name}; exactly one is needed")
    try:
        return Identity(f"cert:{_checked(names[0].decode())}")
    except UnicodeDecodeError:
        raise UnidentifiedError(f"the {name} of the client's certificate is not UTF-8") from None


def _checked(name: str) -> str:
    if not name or len(name) > NAME_MAX_CHARACTERS or not name.isprintable():
        raise UnidentifiedError("the name in the certificate or token is empty, too long, or not printable")
    return name


class Tokens:
    """Verifies bearer tokens (JWT)."""

    def __init__(self, settings: TokensSection, now_s: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._now_s = now_s
        self._keys: dict[str, Any] = {}
        self._verified: dict[bytes, Identity] = {}
        self.reload()

    def reload(self) -> None:
        """Reads the keys anew. KeysError: the old ones stay."""
        self._keys = read_keys(self._settings.keys_location)
        self._verified = {}

    def identify(self, header: str) -> Identity:
        if header[: len(SCHEME)].lower() != SCHEME or len(header) > TOKEN_MAX_BYTES:
            raise UnidentifiedError("the authorization header is no bearer token, or too long")
        token = header[len(SCHEME) :].strip()
        # The same token comes with each call of a client: its signature is looked at once.
        digest = _digest(header)
        known = self._verified.get(digest)
        if known is None:
            known = self._verify(token)
            if len(self._verified) >= VERIFIED_KEPT_MAX:
                self._verified.clear()
            self._verified[digest] = known
        if known.expires_at_s is not None and known.expires_at_s <= self._now_s():
            raise UnidentifiedError("the bearer token has expired")
        return known

    def knows(self, header: str) -> bool:
        """Whether this token has been found good before."""
        return _digest(header) in self._verified

    def _verify(self, token: str) -> Identity:
        try:
            key = self._key_of(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=[name for name in ALGORITHMS if _fits(name, key)],
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=self._settings.leeway_s,
                options={"require": ["exp", "aud", "iss", self._settings.principal_claim]},
            )
        except jwt.ExpiredSignatureError:
            raise UnidentifiedError("the bearer token has expired") from None
        except (jwt.InvalidAudienceError, jwt.InvalidIssuerError, jwt.MissingRequiredClaimError):
            raise UnidentifiedError("the bearer token was not issued for this service") from None
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            raise UnidentifiedError("the bearer token is not valid") from None
        principal = claims[self._settings.principal_claim]
        if not isinstance(principal, str):
            raise UnidentifiedError("the bearer token names nobody")
        return Identity(f"token:{_checked(principal)}", float(claims["exp"]) + self._settings.leeway_s)

    def _key_of(self, token: str) -> Any:
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in ALGORITHMS or "crit" in header:
            raise jwt.InvalidAlgorithmError
        kid = header.get("kid")
        if kid in self._keys:
            return self._keys[kid]
        if kid is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        if "" in self._keys:
            return self._keys[""]
        raise jwt.InvalidKeyError


def _digest(header: str) -> bytes:
    return hashlib.sha256(header.encode(errors="replace")).digest()


def _fits(algorithm: str, key: Any) -> bool:
    """Whether the key is of the algorithm's kind: no other algorithm is tried with it."""
    match key:
        case rsa.RSAPublicKey():
            return algorithm.startswith(("RS", "PS"))
        case ec.EllipticCurvePublicKey():
            return algorithm == CURVES.get(key.curve.name)
        case ed25519.Ed25519PublicKey() | ed448.Ed448PublicKey():
            return algorithm == "EdDSA"
    return False


def read_keys(file: Path) -> dict[str, Any]:
    """Public keys by their id: of a JSON Web Key Set, or the one of a PEM file under the empty id."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise KeysError(f"{file}: {error.strerror}") from None
    try:
        if text.lstrip().startswith(b"-----BEGIN PUBLIC KEY"):
            keys = {"": load_pem_public_key(text)}
        else:
            keys = {entry.get("kid", ""): _public_key(entry) for entry in json.loads(text)["keys"]}
    except (ValueError, KeyError, TypeError, AttributeError, jwt.PyJWTError):
        raise KeysError(
            f"{file}: no public key in PEM and no JSON Web Key Set of public RSA, EC or Ed25519 keys"
        ) from None
    for key in keys.values():
        if not any(_fits(name, key) for name in ALGORITHMS):
            raise KeysError(f"{file}: a key is neither RSA, EC (P-256, P-384, P-521) nor Ed25519")
        if isinstance(key, rsa.RSAPublicKey) and key.key_size < RSA_BITS_MIN:
            raise KeysError(f"{file}: an RSA key has {key.key_size} bits; at least {RSA_BITS_MIN} are needed")
    if not keys:
        raise KeysError(f"{file}: it holds no key")
    return keys


def _public_key(entry: Mapping[str, Any]) -> Any:
    if entry["kty"] not in {"RSA", "EC", "OKP"} or "d" in entry:
        raise ValueError(entry["kty"])
    return jwt.PyJWK.from_dict(dict(entry)).key


def anonymous() -> Identity:
    return Identity(ANONYMOUS)
