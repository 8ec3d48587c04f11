"""The tapes that a call plays, taken apart, for `benchmarks.host` and `benchmarks.host_parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ring_la.kernels.runtime.tape import Playback, Tape, TapedLaunch
from ring_la.kernels.runtime.written import function_of


class TapesOfACall:
    """The tapes that a call plays, each with its tensors: ``with``, once."""

    def __init__(self) -> None:
        self.played: list[tuple[Tape, Playback]] = []

    def __enter__(self) -> TapesOfACall:
        self._play = Tape.play

        def play(tape: Tape, playing: Playback) -> list[Tensor | None]:
            out = self._play(tape, playing)
            kept = Playback(playing.like)
            kept.tensors, kept.bases, kept.stream = playing.tensors.copy(), playing.bases.copy(), playing.stream
            self.played.append((tape, kept))
            return out

        Tape.play = play  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        Tape.play = self._play  # type: ignore[method-assign]

    def parts(self, microseconds: Callable[[Callable[[], Any]], float]) -> dict[str, float]:
        """Numbers of allocations, launches and other steps, and µs of the allocations, and of all that the tapes do."""
        found = dict.fromkeys(("allocations", "launches", "other", "us_allocations", "us_tapes"), 0.0)
        for tape, playing in self.played:
            tape._written(playing)  # what the launches write into is there as long as `playing` is
            launches = sum(isinstance(step, TapedLaunch) for step in tape.work)
            found["allocations"] += len(tape.room)
            found["launches"] += launches
            found["other"] += len(tape.work) - launches
            room = function_of(tape.room, (), tape.device)
            found["us_allocations"] += microseconds(lambda: room(playing))  # noqa: B023
            found["us_tapes"] += microseconds(lambda: tape._written(playing))  # noqa: B023
        return {name: round(x, 1) for name, x in found.items()}

    def steps(self, microseconds: Callable[[Callable[[], Any]], float]) -> list[tuple[str, float]]:
        """µs of each launch and each operation alone."""
        found = []
        for tape, playing in self.played:
            tape._written(playing)
            for step in tape.work:
                one = function_of((), (step,), tape.device)
                name = str(getattr(step, "function", "")) or type(getattr(step, "how", step)).__name__
                found.append((name, microseconds(lambda: one(playing))))  # noqa: B023
        return found
