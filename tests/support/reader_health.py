"""What a reader of prompts for vLLM says of itself, over its HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any

from ring_la.integrations.vllm.asking import ReaderError, connection


def health(address: str, timeout: float = 5.0) -> dict[str, Any]:
    """What a reader says of itself.

    Raises:
        ReaderError: it does not.
    """
    line = connection(address, timeout)
    try:
        line.request("GET", "/health")
        said = json.loads(line.getresponse().read())
        if not isinstance(said, dict):
            raise ReaderError(f"what answers at {address} is no reader (it said {str(said)[:80]!r})")
        return said
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ReaderError(f"the reader at {address} did not answer ({type(error).__name__}: {error})") from error
    finally:
        line.close()
