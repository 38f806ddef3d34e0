"""What the gateway stores as metadata with the commit of a batch, and what of it is the user's own. Pure."""

from oncebox.v1 import gateway_pb2

# No text begins like this, and hardly anything else does.
MAGIC = b"\x00obx\x01\xb5\x0a\x00"


def encode(token: gateway_pb2.BatchToken) -> bytes:
    return MAGIC + token.SerializeToString()


def decode(metadata: bytes) -> gateway_pb2.BatchToken | None:
    """None: the commit was not a batch's."""
    return gateway_pb2.BatchToken.FromString(metadata[len(MAGIC) :]) if metadata.startswith(MAGIC) else None


def metadata_of(metadata: bytes) -> bytes:
    """As its user gave it with this commit."""
    token = decode(metadata)
    return metadata if token is None else token.metadata


def resume_token_of(metadata: bytes) -> bytes:
    """As a user gave it, with this commit or with the newest before it that carried any."""
    token = decode(metadata)
    return metadata if token is None else token.resume_token or token.metadata
