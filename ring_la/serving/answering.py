"""A request's completions between the engine's thread and the event loop: events in, an answer out as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from .answers import Answer, Json, error
from .completion import Completion, Ended, Event, Failed, NewToken, Stopped
from .protocol import Wanted
from .records import Record
from .waiting import Stopping

ALIVE = 15.0
"""Seconds after which a stream without news gets a comment, so that nobody between takes it for dead."""
GONE = 499
"""The status of a request whose client is gone, as proxies write it down."""


class Asked:
    """The completions of one request under way. In the event loop.

    Attributes:
        jobs: for the engine. events: ``(which of them, what came)``; -1: nobody waits any more.
    """

    def __init__(self, wanted: Wanted, record: Record) -> None:
        self.record, self.events = record, asyncio.Queue[tuple[int, Event]]()
        loop = asyncio.get_running_loop()

        def job(index: int) -> Completion:
            def emit(event: Event) -> None:
                record.hear(index, event)
                with suppress(RuntimeError):  # the loop is closed: the server is gone, and so is who asked
                    loop.call_soon_threadsafe(self.events.put_nowait, (index, event))

            return Completion(wanted.requests[index], emit)

        self.jobs = [job(i) for i in range(len(wanted.requests))]

    def leave(self) -> None:
        """Whoever asked has an answer, or is gone."""
        for job in self.jobs:
            job.cancel()
        self.record.end("gone", GONE)


class EventStream(StreamingResponse):
    """Server-sent events of a request, which is left when they end, were it before the first."""

    def __init__(self, asked: Asked, answer: Answer, count: bool) -> None:
        events = _events(asked, answer, count)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._asked = asked

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._asked.leave()


async def _events(asked: Asked, answer: Answer, count: bool) -> AsyncIterator[str]:
    ends: dict[int, Ended] = {}
    for said in answer.opening():
        yield _sent(said)
    while len(ends) < len(asked.jobs):
        try:
            index, event = await asyncio.wait_for(asked.events.get(), ALIVE)
        except asyncio.TimeoutError:
            yield ": still at it\n\n"
            continue
        if isinstance(event, NewToken):
            yield _sent(answer.part(index, event.text, [event]))
        elif isinstance(event, Failed):
            asked.record.end("failed", 500)
            yield _sent(error(event.message, "server_error"))
            return
        else:
            ends[index] = event
            yield _sent(answer.part(index, event.text, [], event.reason))
    asked.record.end("done", 200)
    if count:
        yield _sent(answer.usage([ends[i] for i in range(len(ends))]))
    yield "data: [DONE]\n\n"


def _sent(value: object) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def whole(asked: Asked, answer: Answer, request: Request) -> tuple[Json, int]:
    """The completions in one piece, and the status. Raises Stopping: the server has stopped before they ended."""
    leaving = asyncio.create_task(_watch(request, asked))
    texts: list[list[str]] = [[] for _ in asked.jobs]
    tokens: list[list[NewToken]] = [[] for _ in asked.jobs]
    ends: dict[int, Ended] = {}
    try:
        while len(ends) < len(asked.jobs):
            index, event = await asked.events.get()
            if isinstance(event, Stopped):
                asked.record.end("busy", 503)
                raise Stopping(event.message)
            if isinstance(event, Failed):
                asked.record.end(*(("failed", 500) if index >= 0 else ("gone", GONE)))
                return error(event.message, "server_error"), 500
            texts[index].append(event.text)
            if isinstance(event, Ended):
                ends[index] = event
            else:
                tokens[index].append(event)
        asked.record.end("done", 200)
        return answer.whole(["".join(text) for text in texts], tokens, [ends[i] for i in range(len(ends))]), 200
    finally:
        leaving.cancel()
        asked.leave()


async def _watch(request: Request, asked: Asked) -> None:
    """Say so when whoever asked has gone away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
    asked.events.put_nowait((-1, Failed("nobody waits for the answer any more")))
