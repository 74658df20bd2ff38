"""Errors as `application/problem+json` (RFC 9457): code, detail, and the fields that are wrong."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service import telemetry
from service.errors import FieldError, Invalid, NotFound, RateLimited, Unavailable, YoroError


def problem(error: YoroError) -> dict[str, Any]:
    """Return the problem document of an error."""
    document: dict[str, Any] = {
        "type": f"urn:yoro:problem:{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
    }
    if error.errors:
        document["errors"] = [{"pointer": e.pointer, "message": e.message} for e in error.errors]
    return document


def respond(error: YoroError) -> JSONResponse:
    """Return the response of an error."""
    headers = {}
    if isinstance(error, Unavailable | RateLimited):
        headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem(error), error.status, headers, media_type="application/problem+json")


def respond_to(request: Request, error: Exception) -> JSONResponse:
    """Return the response of any error; what we do not know is logged, and the client learns no more."""
    if isinstance(error, YoroError):
        return respond(error)
    telemetry.logger().error("request_failed", path=request.url.path, exc_info=error)
    return respond(YoroError("The server failed; the operator's log says why"))


def install(app: FastAPI) -> None:
    """Make every error of the app a problem document."""

    @app.exception_handler(YoroError)
    async def _known(_: Request, error: YoroError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def _parameters(_: Request, error: RequestValidationError) -> JSONResponse:
        defects = [FieldError("/" + "/".join(str(s) for s in e["loc"]), e["msg"]) for e in error.errors()]
        return respond(Invalid("; ".join(f"{d.pointer}: {d.message}" for d in defects), defects))

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        known = NotFound(str(error.detail)) if error.status_code == 404 else YoroError(str(error.detail))
        document = problem(known) | {"status": error.status_code, "title": str(error.detail)}
        if error.status_code != 404:
            document |= {"code": "http", "type": "urn:yoro:problem:http"}
        return JSONResponse(document, error.status_code, error.headers, media_type="application/problem+json")

    @app.exception_handler(Exception)
    async def _unknown(request: Request, error: Exception) -> JSONResponse:
        return respond_to(request, error)
