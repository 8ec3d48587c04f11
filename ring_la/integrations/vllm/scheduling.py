"""The scheduler's side of vLLM's connector: which prompts come from the reader, and what workers are told of them.

vLLM's objects are used by their attributes; vLLM itself is not imported here.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ArgumentError, UnsupportedError
from .asking import connection


@dataclass
class Load:
    """A prompt that workers are to fetch.

    Attributes:
        name: vLLM's of the request. asked: the reader's of the prompt. ids: the tokens that the reader reads.
        start: of those, how many are in vLLM's memory already.
        blocks: the sequence's blocks in each group of layers; −1: none.
    """

    name: str
    asked: str
    ids: list[int]
    start: int
    blocks: list[list[int]]


@dataclass
class Told:
    """What workers are told in a step: prompts to fetch, and vLLM's names of those to give up."""

    new: list[Load] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ConnectorSettings:
    """What is set in ``kv_connector_extra_config``."""

    reader: str
    least: int
    timeout: float

    @classmethod
    def of(cls, config: Any) -> ConnectorSettings:
        """Those of a vLLM.

        Raises:
            ArgumentError, UnsupportedError: by name, of what is wrong or cannot be had.
        """
        extra = config.kv_transfer_config.get_from_extra_config
        unknown = config.kv_transfer_config.kv_connector_extra_config.keys() - {"reader", "least", "timeout"}
        if unknown:
            raise ArgumentError("kv_connector_extra_config", "reader, least, timeout", sorted(unknown))
        reader, least, timeout = extra("reader", ""), extra("least", 1024), extra("timeout", 600)
        for name, value in (("least", least), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ArgumentError(name, "a number above 0", repr(value))
        connection(reader, 1.0)
        parallel = config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise UnsupportedError(name, "1 with RingLAConnector", getattr(parallel, name))
        if config.speculative_config is not None and config.model_config.is_hybrid:
            raise UnsupportedError("speculative_config", "none for a model with recurrent layers", "one")
        return cls(reader, int(least), float(timeout))


class Scheduler:
    """Which prompts come from the reader."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._said = Told()
        self._under_way: dict[str, bool] = {}  # whether anybody waits for it still
        self._ours: set[str] = set()  # that vLLM is to read itself, after the reader failed

    def wanted(self, request: Any, known: int) -> int:
        """The tokens of vLLM's request that the reader is asked for, all but the last beyond the `known` ones that vLLM
        has; 0: too few, or none that the reader could read."""
        missing = request.num_tokens - 1 - known
        plain = request.prompt_embeds is None and not request.mm_features and request.lora_request is None
        plain = plain and (request.kv_transfer_params or {}).get("reader") is not False
        if not plain or missing < self._settings.least or request.request_id in self._ours:
            return 0
        return missing

    def load(self, request: Any, blocks: Iterable[Sequence[Any]], tokens: int) -> None:
        """The workers are to fetch the last `tokens` of those that are wanted, into these blocks."""
        # no request of this or another vLLM has that name: one that was preempted asks again, with more tokens
        asked, ids = uuid.uuid4().hex, list(request.all_token_ids[: request.num_tokens - 1])
        numbers = [[-1 if block.is_null else block.block_id for block in group] for group in blocks]
        self._under_way[request.request_id] = True
        self._said.new.append(Load(request.request_id, asked, ids, len(ids) - tokens, numbers))

    def said(self) -> Told:
        """What the workers are told in this step."""
        said, self._said = self._said, Told()
        return said

    def ended(self, done: Iterable[str], failed: Iterable[str]) -> None:
        """What workers have fetched, with or without success."""
        waits = {name for name in done if self._under_way.pop(name, False)}
        self._ours |= waits.intersection(failed)

    def forget(self, name: str) -> None:
        """A request is over, or nobody waits for it any more."""
        self._ours.discard(name)
        if name in self._under_way:
            self._under_way[name] = False
            self._said.given_up.append(name)
