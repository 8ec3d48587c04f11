"""How long replays of CUDA graphs take on the GPU, and how long it has nothing to do between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Replays:
    """Events around every replay of this process, from `noted` on; nothing where there is no GPU."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Replays within are noted."""
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            self._events.append((begin, end))

        torch.cuda.CUDAGraph.replay = timed  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]

    def taken(self) -> dict[str, float | int | None]:
        """Of the replays that have ended since this was asked last: how many, and in milliseconds the median of what
        one takes, with its messages, and of what is between one's end and the next one's begin."""
        ended, self._events = [each for each in self._events if each[1].query()], []
        return {
            "replays": len(ended),
            "replay, device": quantile([begin.elapsed_time(end) for begin, end in ended], 0.5),
            "between replays, device": quantile([a[1].elapsed_time(b[0]) for a, b in zip(ended, ended[1:])], 0.5),
        }


def quantile(numbers: Sequence[float], part: float) -> float | None:
    """The number that so large a part of the others lies below; None of none."""
    return sorted(numbers)[min(len(numbers) - 1, int(part * len(numbers)))] if numbers else None
