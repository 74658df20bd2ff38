"""Ed25519 signatures of manifests: who published this version, checked without asking the service.

Signed is the canonical JSON of the fields that say what the version is; the API adds marks to a
manifest (tainted, pinned), and those are not the publisher's. Invariant: a field in `SIGNED` never
leaves it without a new schema version of the manifest.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from service.errors import Invalid

SIGNED = (
    "schema_version", "policy", "version", "parent", "depth", "batch", "base_model", "adapter", "files",
    "state", "rewards_sha256",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key of this installation."""

    key: Ed25519PrivateKey

    def sign(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Return the manifest's `signature` entry."""
        made = self.key.sign(signed_bytes(manifest))
        return {
            "algorithm": "ed25519",
            "key_id": key_id(self.key.public_key()),
            "value": base64.b64encode(made).decode(),
        }


def load_signer(path: Path) -> Signer:
    """Read a private key (PEM, PKCS #8). Raises Invalid."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise Invalid(f"{path} is no private key: {error}", code="signing_key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise Invalid(f"{path} is not an Ed25519 key", code="signing_key")
    return Signer(key)


def make_key() -> tuple[bytes, bytes]:
    """Return a new private and public key, both PEM."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


def key_id(key: Ed25519PublicKey) -> str:
    """Return the first 16 hex digits of the public key's sha256."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def signed_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return what is signed: the fields that are there, keys sorted, no spaces."""
    fields = {name: manifest[name] for name in SIGNED if name in manifest}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
