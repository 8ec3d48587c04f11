"""A request's JSON, as it comes in: of bounded size, from a client that goes on speaking."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request

from ..errors import ArgumentError

LARGEST = 16 << 20
"""Bytes of a request: token ids of some two million tokens."""


class Silent(Exception):
    """A client that has not gone on with its request."""


async def body(request: Request, most: int, silent: float) -> object:
    """A request's JSON, of at most so many bytes, with at most so many seconds between two parts."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > most:  # before a client that waits for a word sends any of it
        raise ArgumentError("body", f"at most {most} bytes", said)
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
    return await asyncio.to_thread(read, bytes(data))


def read(data: bytes) -> object:
    """The JSON of these bytes."""
    # numbers by way of Python: json, in C, would keep every other thread from running until it has read them all
    numbers: dict[str, Any] = {"parse_int": lambda digits: int(digits), "parse_float": lambda digits: float(digits)}
    try:
        # as UTF-8 and nothing else: of bytes `json` would take other encodings, and halves of characters
        value = json.loads(data.decode("utf-8-sig"), **numbers)
        if b"\\ud" in data.lower():  # half a character may be written so, and cannot be said again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise ArgumentError("body", "JSON", f"what is none ({e})") from None
    return value
