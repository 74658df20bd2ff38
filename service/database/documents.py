"""Documents as columns hold them: JSON under zstd. Knows nothing of what they say."""

from typing import Any

import orjson
import zstandard


def read_document(stored: bytes) -> dict[str, Any]:
    """Return the JSON document behind a stored column."""
    document: dict[str, Any] = orjson.loads(zstandard.ZstdDecompressor().decompress(stored))
    return document
