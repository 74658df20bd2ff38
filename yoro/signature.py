"""Checking who published a version, with a public key that came another way than the version did.

Knows nothing of the service's code: what is signed is stated here again, and a test compares the two.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIGNED = (
    "schema_version", "policy", "version", "parent", "depth", "batch", "base_model", "adapter", "files",
    "state", "rewards_sha256",
)  # fmt: skip


class PullError(Exception):
    """What came is not what the manifest promises, or there is nothing to pull."""


class BadSignature(PullError):
    """The version is not signed, or not by this key; nothing was downloaded."""


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A public key that manifests must be signed with."""

    key: Any
    """cryptography's Ed25519PublicKey; the thin client does without that package until a key is given."""

    @property
    def id(self) -> str:
        """Return what a signature's `key_id` must be."""
        return hashlib.sha256(self.key.public_bytes_raw()).hexdigest()[:16]


def load_verify_key(path: Path) -> VerifyKey:
    """Read a public key (PEM). Raises BadSignature."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise BadSignature("--verify-key needs `pip install yoro[verify]`") from error
    try:
        key = load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise BadSignature(f"{path} is no public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise BadSignature(f"{path} is not an Ed25519 key")
    return VerifyKey(key)


def verify_signature(manifest: Mapping[str, Any], verify_key: VerifyKey) -> None:
    """Check that the key signed what the manifest says. Raises BadSignature."""
    from cryptography.exceptions import InvalidSignature

    named = f"{manifest.get('policy')} version {manifest.get('version')}"
    signature = manifest.get("signature")
    if not isinstance(signature, dict) or signature.get("algorithm") != "ed25519":
        raise BadSignature(f"{named} is not signed")
    if signature.get("key_id") != verify_key.id:
        raise BadSignature(f"{named} is signed with key {signature.get('key_id')}, not {verify_key.id}")
    try:
        verify_key.key.verify(base64.b64decode(str(signature.get("value"))), _signed_bytes(manifest))
    except (InvalidSignature, ValueError) as error:
        raise BadSignature(f"{named} is not what was signed") from error


def _signed_bytes(manifest: Mapping[str, Any]) -> bytes:
    fields = {name: manifest[name] for name in SIGNED if name in manifest}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
