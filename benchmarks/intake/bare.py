"""The other arm: FastAPI that authenticates as we do, parses the same pydantic body, and stores nothing.

python -m benchmarks.intake.bare PORT     (database URL in YORO_DATABASE_URL)
"""

import sys
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, Request

from service.api.directory import Directory
from service.database import engine as database
from service.errors import Unauthenticated
from service.schemas import Trace
from service.settings import Settings


def create_app() -> FastAPI:
    """Build the app."""
    directory = Directory(database.connect(Settings().database_url, name="bare"))
    directory.start()
    app = FastAPI()

    def authenticated(request: Request) -> None:
        _, _, key = request.headers.get("authorization", "").partition(" ")
        caller = directory.known_caller(key)
        if caller is None or not caller.has("agent"):
            raise Unauthenticated

    # async, or FastAPI runs the dependency in a thread, which would flatter us.
    async def dependency(request: Request) -> None:
        authenticated(request)

    @app.post("/v1/traces", status_code=201)
    async def post_trace(trace: Trace, _: Annotated[None, Depends(dependency)]) -> dict[str, Any]:
        return {
            "trace_id": trace.trace_id,
            "status": "accepted",
            "trainability": {"verdict": "text", "reasons": []},
            "warnings": [],
        }

    return app


if __name__ == "__main__":
    uvicorn.run(create_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
