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
from starlette.requests import ClientDisconnect

from ..errors import ArgumentError, RingLAError
from .completion import Completion, Ended, Event, Failed, NewToken
from .connections import SILENT, protocol
from .engine import Engine
from .lookout import Lookout
from .protocol import Answer, UnknownModel, error, parse, usage
from .waiting import Busy, Stopping

ALIVE = 15.0
"""Seconds after which a stream without news gets a comment, so that nobody between takes it for dead."""
STALLED = 5.0
"""Seconds without a sign of life from a rank after which the server is not healthy."""
LARGEST = 16 << 20
"""Bytes of a request: token ids of some two million tokens."""
CLOSING = 5
"""Seconds that connections get to close at the end."""


class Silent(Exception):
    """A client that has not gone on with its request."""


def application(
    engine: Engine, name: str, *, lookout: Lookout | None = None, max_body: int = LARGEST, silent: float = SILENT
) -> FastAPI:
    """The application.

    Args:
        engine: what answers; its `run` is called elsewhere. name: the model's.
        lookout: what knows whether the other ranks live.
        max_body: the most bytes of a request. silent: the most seconds between two parts of it.
    """
    app = FastAPI(title="ring_la", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> JSONResponse:
        state = {"running": engine.running, "waiting": engine.waiting}
        if engine.stopping:
            return JSONResponse({"status": "stopping", **state}, 503)
        quiet = {} if lookout is None else {r: round(s, 1) for r, s in lookout.silence.items() if s > STALLED}
        if quiet:
            return JSONResponse({"status": "stalled", "silent_ranks": quiet, **state}, 503)
        return JSONResponse({"status": "ok", **state})

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
            raise UnknownModel("model", f"{name!r}, the one that is served", repr(wanted))
        return served

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, max_body, silent)
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
        if isinstance(e, Stopping):
            return JSONResponse(error(str(e), "server_error", code="busy"), 503, {"Retry-After": "1"})
        if isinstance(e, Busy):  # clients of OpenAI's wait and ask again
            said = error(str(e), "rate_limit_error", code="rate_limit_exceeded")
            return JSONResponse(said, 429, {"Retry-After": "1"})
        missing = isinstance(e, UnknownModel)
        param = e.name if isinstance(e, ArgumentError) else None
        said = error(str(e), "invalid_request_error", param, "model_not_found" if missing else None)
        return JSONResponse(said, 404 if missing else 400)

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

    return app


async def _body(request: Request, most: int, silent: float) -> object:
    """A request's JSON, of at most so many bytes, with at most so many seconds between two parts."""
    data, parts = bytearray(), aiter(request.stream())
    while True:
        try:
            data += await asyncio.wait_for(anext(parts), silent)
        except StopAsyncIteration:
            break
        except asyncio.TimeoutError:
            raise Silent from None
        if len(data) > most:
            raise ArgumentError("body", f"at most {most} bytes", "more")
    return await asyncio.to_thread(_read, bytes(data))


def _read(data: bytes) -> object:
    # numbers by way of Python: json, in C, would keep every other thread from running until it has read them all
    numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda digits: float(digits)}
    try:
        value = json.loads(data, **numbers)
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
    text: list[str] = []
    ids: list[int] = []
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

    The engine is told to stop if the thread ends before it. A connection is closed that has no request for `silent`
    seconds.
    """

    def __init__(self, app: FastAPI, engine: Engine, listening: socket.socket, *, silent: float = SILENT) -> None:
        config = uvicorn.Config(
            app,
            http=protocol(silent),
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
