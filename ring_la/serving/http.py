"""The HTTP side, on rank 0: a FastAPI application, and the thread it is served from.

The engine has the main thread, whose signals and GPU are its own. Here is one event loop, which hands requests over and
gets their events back by `call_soon_threadsafe`; it computes nothing longer than a tokenizer, and that in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..errors import ArgumentError, RingLAError
from .answering import GONE, Asked, EventStream, whole
from .answers import Answer, ChatAnswer, error
from .bodies import LARGEST, Silent, body
from .completion import Trail
from .connections import SILENT, protocol
from .engine import Engine
from .fields import UnknownModel, short
from .keys import Keys
from .lookout import Lookout
from .protocol import Limits, parse, parse_chat
from .records import Record, Records
from .shares import shares
from .waiting import Busy, Stopping

STALLED = 5.0
"""Seconds without a sign of life from a rank, or of waiting for it, after which the server is not healthy."""
CLOSING = 5
"""Seconds that connections get to close at the end."""
REMEMBERED = 256
"""Requests of which it is known afterwards which rank read what."""
PAGE = Path(__file__).parent / "page" / "index.html"
SAFE = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""What the page may do: nothing but ask this server."""


@dataclass(frozen=True)
class Options:
    """How an application answers.

    Attributes:
        max_body: the most bytes of a request. silent: the most seconds between two parts of it.
        choices: the most completions of one request.
        keys: API keys; none: everybody may ask. log: where a line of each request goes; None: nowhere.
    """

    max_body: int = LARGEST
    silent: float = SILENT
    choices: int = 16
    keys: tuple[str, ...] = ()
    log: logging.Logger | None = None


def application(engine: Engine, name: str, *, lookout: Lookout | None = None, options: Options = Options()) -> FastAPI:
    """The application.

    Args:
        engine: what answers; its `run` is called elsewhere. name: the model's.
        lookout: what knows whether the other ranks live. options: how it answers.
    """
    app = FastAPI(title="ring_la", docs_url=None, redoc_url=None, openapi_url=None)
    records = Records(engine, options.log)
    app.add_middleware(Keys, keys=options.keys, refused=lambda asking: Record(records, asking).end("refused", 401))
    _add_state(app, engine, records, lookout)
    _add_models(app, engine, name)
    _add_completions(app, engine, name, records, options)
    _add_errors(app, options.silent)
    return app


def _add_state(app: FastAPI, engine: Engine, records: Records, lookout: Lookout | None) -> None:
    """What is known of the server, and the page."""
    page = PAGE.read_text()

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"running": engine.running, "waiting": engine.waiting}
        if engine.stopping:
            return JSONResponse({"status": "stopping", **state}, 503)
        stalled = {} if lookout is None else lookout.stalled(STALLED)
        if stalled:
            return JSONResponse({"status": "stalled", **stalled, **state}, 503)
        return JSONResponse({"status": "ok", **state})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(records.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def root() -> HTMLResponse:
        return HTMLResponse(page, headers=SAFE)


def _add_models(app: FastAPI, engine: Engine, name: str) -> None:
    served = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "ring_la",
        "max_model_len": engine.max_tokens,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str) -> dict[str, Any]:
        if wanted != name:
            raise UnknownModel("model", f"{name!r}, the one that is served", short(wanted))
        return served


def _add_completions(app: FastAPI, engine: Engine, name: str, records: Records, options: Options) -> None:
    limits = Limits(name, options.choices, engine.max_tokens)
    trails: OrderedDict[str, list[Trail]] = OrderedDict()

    async def complete(request: Request, reader: Callable[..., Any], form: type[Answer], record: Record) -> Response:
        said = await body(request, options.max_body, options.silent)
        wanted = await asyncio.to_thread(reader, said, limits, engine.text)
        answer, asked = form(name, engine.text, wanted), Asked(wanted, record)
        record.about["id"] = answer.id
        await asyncio.to_thread(engine.submit, *asked.jobs)
        trails[answer.id] = [job.trail for job in asked.jobs]
        if len(trails) > REMEMBERED:
            trails.popitem(last=False)
        if wanted.stream:
            return EventStream(asked, answer, wanted.include_usage)
        return JSONResponse(*await whole(asked, answer, request))  # the status second

    async def recorded(request: Request, reader: Callable[..., Any], form: type[Answer]) -> Response:
        record = Record(records, request)
        try:
            return await complete(request, reader, form, record)
        except BaseException as e:
            record.end(*_fate(e), param=e.name if isinstance(e, ArgumentError) else None)
            raise

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await recorded(request, parse, Answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await recorded(request, parse_chat, ChatAnswer)

    @app.get("/shares/{wanted}")
    async def shares_of(wanted: str) -> dict[str, Any]:
        if wanted not in trails:
            raise HTTPException(404, f"not the id of one of the last {REMEMBERED} requests")
        return {"object": "list", "data": [shares(engine, trail) for trail in trails[wanted]]}


def _fate(e: BaseException) -> tuple[str, int]:
    """How a request ended that was not answered, and the status."""
    if isinstance(e, Busy):
        return "busy", 503 if isinstance(e, Stopping) else 429
    if isinstance(e, RingLAError):
        return "refused", 404 if isinstance(e, UnknownModel) else 400
    if isinstance(e, Silent):
        return "gone", 408
    if isinstance(e, (ClientDisconnect, asyncio.CancelledError)):
        return "gone", GONE
    return "failed", 500


def _add_errors(app: FastAPI, silent: float) -> None:
    """How an error reads."""

    @app.exception_handler(RingLAError)
    async def refused(_: Request, e: RingLAError) -> JSONResponse:
        status = _fate(e)[1]
        if isinstance(e, Stopping):
            return JSONResponse(error(str(e), "server_error", code="busy"), status, {"Retry-After": "1"})
        if isinstance(e, Busy):  # clients of OpenAI's wait and ask again
            said = error(str(e), "rate_limit_error", code="rate_limit_exceeded")
            return JSONResponse(said, status, {"Retry-After": "1"})
        param = e.name if isinstance(e, ArgumentError) else None
        code = "model_not_found" if isinstance(e, UnknownModel) else None
        return JSONResponse(error(str(e), "invalid_request_error", param, code), status)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, e: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {e.detail}"
        return JSONResponse(error(what, "invalid_request_error"), e.status_code, e.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, e: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody hears it

    @app.exception_handler(Silent)
    async def late(_: Request, e: Silent) -> JSONResponse:
        said = error(f"the request did not go on for {silent:g} seconds", "invalid_request_error")
        return JSONResponse(said, 408, {"Connection": "close"})

    @app.exception_handler(Exception)
    async def failed(_: Request, e: Exception) -> JSONResponse:
        return JSONResponse(error(f"the server has failed ({type(e).__name__})", "server_error"), 500)


class Server:
    """The application, served from a thread of its own.

        with Server(application(engine, name), engine, listening):
            engine.run()

    The engine is told to stop if the thread ends before it. A connection is closed that has no request for `silent`
    seconds.
    """

    def __init__(self, app: FastAPI, engine: Engine, listening: socket.socket, *, silent: float = SILENT) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(silent),
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING,
        )
        self._server, self._engine, self._listening = uvicorn.Server(config), engine, listening
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listening])
        finally:
            self._engine.stop()

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(2 * CLOSING)
