"""The hot routes' way around the framework: straight from the server to the function.

A route's function here takes the request alone, reads its body itself, under caps, and raises only
YoroError. FastAPI's middlewares, routing and parameter solving cost more than parsing a trace; it
still has the same routes, for its OpenAPI document and for any path spelt differently.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

from service.api import problems
from service.errors import Unavailable

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]
Handler = Callable[[Request], Awaitable[Response]]


class DirectRoute(APIRoute):
    """Calls the route's function with the request alone."""

    def get_route_handler(self) -> Endpoint:
        """Return the function itself."""
        return cast(Endpoint, self.dependant.call)


class DirectApp(FastAPI):
    """FastAPI, with some POST paths answered before its stack begins."""

    direct: Mapping[str, Handler]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a direct path, or hand over to FastAPI."""
        handler = self.direct.get(scope["path"]) if scope.get("method") == "POST" else None
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if handler is None:
                await super().__call__(scope, receive, sending)
                return
            scope["app"] = self
            response = await _answer(handler, Request(scope, receive))
        except asyncio.CancelledError:  # a stopping server gives up on what waits; it may be stored or not
            if begun or scope["type"] != "http":
                raise
            response = problems.respond_to(Request(scope, receive), Unavailable("The server is stopping"))
        await response(scope, receive, send)


async def _answer(handler: Handler, request: Request) -> Response:
    try:
        return await handler(request)
    except Exception as error:  # the outermost place of a request: whatever it is, the client gets a problem
        return problems.respond_to(request, error)
