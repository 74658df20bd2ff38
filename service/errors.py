"""The one tree of errors, each with a stable code and an HTTP status.

    YoroError
    ├─ Invalid (422)          the caller's document is wrong; `errors` names fields and limits
    │  └─ TooLarge (413), Malformed (400), UnsupportedEncoding (415)
    ├─ Unauthenticated (401), Forbidden (403)
    ├─ NotFound (404), RangeNotSatisfiable (416)
    ├─ Conflict (409), Gone (410)
    ├─ Unavailable (503)      retry later; nothing was lost
    ├─ RateLimited (429)      retry later; the key or the policy has used up its share
    ├─ LeaseLost              a newer fencing token owns the policy; discard the work
    ├─ RankLost               a process of a distributed trainer is gone; start them all again
    ├─ AdapterRejected        an adapter failed verification
    └─ TrainingFailed         rows, forward or backward raised: counted against the batch

Expected outcomes (duplicate, no batch ready) are return values, not errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One defect: a JSON pointer into the document, and what is wrong there."""

    pointer: str
    message: str


class YoroError(Exception):
    """Base of all errors; `detail` is for people, `code` for programs."""

    code = "internal"
    status = 500
    title = "Internal error"

    def __init__(self, detail: str = "", errors: Sequence[FieldError] = (), code: str = "") -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.errors = tuple(errors)
        self.code = code or type(self).code


class Invalid(YoroError):
    """The document breaks a rule; `errors` says where."""

    code, status, title = "invalid", 422, "Invalid document"


class Malformed(Invalid):
    """The body is not JSON as RFC 8259 has it."""

    code, status, title = "malformed", 400, "Malformed body"


class TooLarge(Invalid):
    """A size limit of `GET /v1/limits` is exceeded."""

    code, status, title = "too_large", 413, "Too large"


class UnsupportedEncoding(Invalid):
    """Content type or encoding is not one we read."""

    code, status, title = "unsupported_encoding", 415, "Unsupported content type or encoding"


class Unauthenticated(YoroError):
    """No key, an unknown key, or a revoked one."""

    code, status, title = "unauthenticated", 401, "A valid API key is needed"


class Forbidden(YoroError):
    """The key lacks the role or the policy."""

    code, status, title = "forbidden", 403, "Not allowed for this key"


class NotFound(YoroError):
    """No such policy, trace, version or file."""

    code, status, title = "not_found", 404, "Not found"


class RangeNotSatisfiable(YoroError):
    """A Range header asks for bytes beyond the file."""

    code, status, title = "range_not_satisfiable", 416, "Range not satisfiable"


class Conflict(YoroError):
    """Something else already has this name."""

    code, status, title = "conflict", 409, "Conflict"


class Gone(YoroError):
    """The trace was erased; its id cannot be used again."""

    code, status, title = "erased", 410, "Erased"


class Unavailable(YoroError):
    """The database cannot take it now; the same request may be sent again."""

    code, status, title = "unavailable", 503, "Try again"
    retry_after_seconds = 1


class RateLimited(YoroError):
    """The key sends faster, or the policy takes more a day, than it may; retry after a while."""

    code, status, title = "rate_limit", 429, "Too many requests"

    def __init__(self, detail: str, *, code: str, retry_after_seconds: int) -> None:
        super().__init__(detail, code=code)
        self.retry_after_seconds = retry_after_seconds


class LeaseLost(YoroError):
    """Another holder has the policy's lease, or its head moved; discard the step."""

    code, title = "lease_lost", "Lease lost"


class RankLost(YoroError):
    """Another process of this trainer ended or said nothing for too long; none can go on alone."""

    code, title = "rank_lost", "A process of the trainer is gone"


class AdapterRejected(YoroError):
    """An adapter's files failed verification; `code` says which check."""

    code, title = "adapter_rejected", "Adapter rejected"


class TrainingFailed(YoroError):
    """Rows, forward or backward raised on this batch."""

    code, title = "training_failed", "Training failed"
