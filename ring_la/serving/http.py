"""The HTTP side, on rank 0: a FastAPI application, and the thread it is served from.

The engine has the main thread, whose signals and GPU are its own. Here is one event loop, which hands requests over and
gets their events back by `call_soon_threadsafe`; it computes nothing longer than a tokenizer, and that in a thread.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..errors import ArgumentError, RingLAError
from .completion import Completion, Ended, Event, Failed, NewToken
from .engine import Engine
from .protocol import Answer, UnknownModel, error, parse, usage
from .waiting import Busy

ALIVE = 15.0
"""Seconds after which a stream without news gets a comment, so that nobody between takes it for dead."""
CLOSING = 5
"""Seconds that connections get to close at the end."""


def application(engine: Engine, name: str, max_body: int = 64 << 20) -> FastAPI:
    """The application.

    Args:
        engine: what answers; its `run` is called elsewhere. name: the model's.
        max_body: the most bytes of a request.
    """
    app = FastAPI(title="ring_la", docs_url=None, redoc_url=None, openapi_url=None)
    began = int(time.time())

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"running": engine.running, "waiting": engine.waiting}
        if engine.stopping:
            return JSONResponse({"status": "stopping", **state}, 503)
        return JSONResponse({"status": "ok", **state})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": began, "owned_by": "ring_la"}
        return {"object": "list", "data": [model | {"max_model_len": engine.max_tokens}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, max_body)
        wanted = await asyncio.to_thread(parse, body, name, engine.text)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server is gone, and so is who asked
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Completion(wanted.request, emit)
        await asyncio.to_thread(engine.submit, job)
        answer = Answer(name)
        if wanted.stream:
            return EventStream(job, _pieces(events, answer, wanted.include_usage))
        return JSONResponse(*await _whole(job, events, answer, request))  # the status second

    @app.exception_handler(RingLAError)
    async def refused(_: Request, e: RingLAError) -> JSONResponse:
        if isinstance(e, Busy):
            return JSONResponse(error(str(e), "server_error", code="busy"), 503, {"Retry-After": "1"})
        missing = isinstance(e, UnknownModel)
        param = e.name if isinstance(e, ArgumentError) else None
        said = error(str(e), "invalid_request_error", param, "model_not_found" if missing else None)
        return JSONResponse(said, 404 if missing else 400)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, e: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {e.detail}"
        return JSONResponse(error(what, "invalid_request_error"), e.status_code, e.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, e: Exception) -> JSONResponse:
        return JSONResponse(error(f"the server has failed ({type(e).__name__})", "server_error"), 500)

    return app


async def _body(request: Request, most: int) -> object:
    """A request's JSON, of at most so many bytes."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise ArgumentError("body", f"at most {most} bytes", "more")
    return await asyncio.to_thread(_read, bytes(data))


def _read(data: bytes) -> object:
    try:
        value = json.loads(data)
        if b"\\ud" in data.lower():  # half a character may be written so, and cannot be said again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ArgumentError("body", "JSON", f"what is none ({e})") from None
    return value


class EventStream(StreamingResponse):
    """Server-sent events of a job, which is cancelled when they end, were it before the first."""

    def __init__(self, job: Completion, pieces: AsyncIterator[str]) -> None:
        super().__init__(pieces, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._job.cancel()


async def _pieces(events: asyncio.Queue[Event], answer: Answer, count: bool) -> AsyncIterator[str]:
    while True:
        try:
            event = await asyncio.wait_for(events.get(), ALIVE)
        except asyncio.TimeoutError:
            yield ": still at it\n\n"
            continue
        if isinstance(event, NewToken):
            yield _sent(answer.part(event.text, [event.token]))
            continue
        if isinstance(event, Failed):
            yield _sent(error(event.message, "server_error"))
            return
        yield _sent(answer.part(event.text, [], event.reason))
        if count:
            yield _sent(answer.usage(event))
        yield "data: [DONE]\n\n"
        return


def _sent(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _whole(
    job: Completion, events: asyncio.Queue[Event], answer: Answer, request: Request
) -> tuple[dict[str, Any], int]:
    """The completion in one piece, and the status."""
    leaving = asyncio.create_task(_watch(request, events))
    text, ids = [], []
    try:
        while True:
            event = await events.get()
            if isinstance(event, Failed):
                return error(event.message, "server_error"), 500
            text.append(event.text)
            if isinstance(event, Ended):
                return answer.part("".join(text), ids, event.reason) | {"usage": usage(event)}, 200
            ids.append(event.token)
    finally:
        leaving.cancel()
        job.cancel()


async def _watch(request: Request, events: asyncio.Queue[Event]) -> None:
    """Say so when whoever asked has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
    events.put_nowait(Failed("nobody waits for the answer any more"))


class Server:
    """The application, served from a thread of its own.

        with Server(application(engine, name), engine, listening):
            engine.run()

    The engine is told to stop if the thread ends before it.
    """

    def __init__(self, app: FastAPI, engine: Engine, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=CLOSING
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


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0: any free one.

    Raises:
        ArgumentError: it cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as e:
        raise ArgumentError("port", "an address this host has and nobody listens on", f"{host}:{port} ({e})") from None
