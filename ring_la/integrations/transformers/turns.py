"""Functions that run in turns and meet: one at a time goes on, in a thread of its own, until all ask for something.

What they ask for is done once for all of them, and each gets its part of it. So code of others, which calls an operator
in the middle, can be run for one part of its tokens after the other though the operator needs all of them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from ...errors import UnsupportedError


class _Ended(BaseException):
    """Ends a turn whose others have failed; no `except Exception` on the way holds it."""


class ThreadState(NamedTuple):
    """What PyTorch keeps for each thread, as it is where the turns are started."""

    gradients: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    stream: Any

    @classmethod
    def here(cls, device: torch.device) -> ThreadState:
        kinds = dict.fromkeys(("cpu", device.type))
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, stream)

    def put(self, undo: ExitStack) -> None:
        """Make this thread's the same."""
        undo.enter_context(torch.inference_mode(self.inference))
        undo.enter_context(torch.set_grad_enabled(self.gradients))
        for kind, dtype in self.autocast:
            undo.enter_context(torch.autocast(kind, dtype))
        if self.stream is not None:
            undo.enter_context(torch.cuda.stream(self.stream))


class MeetingTurn:
    """One of the functions, and what it says: an error, its result, or what it asks for."""

    def __init__(self, run: Callable[[MeetingTurn], Any], state: ThreadState) -> None:
        self.error: BaseException | None = None
        self.asked: Any = None
        self.result: Any = None
        self.done = False
        self._answer: Any = None
        self._end = False
        self._go, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._whole, run, state), daemon=True)
        self._thread.start()

    def _whole(self, run: Callable[[MeetingTurn], Any], state: ThreadState) -> None:
        self._go.acquire()
        try:
            with ExitStack() as undo:
                if not self._end:
                    state.put(undo)
                    self.result = run(self)
        except _Ended:
            pass
        except BaseException as error:  # raised again where the turns were started
            self.error = error
        self.done = True
        self._rest.release()

    def ask(self, asked: Any) -> Any:
        """Within the function: what all get who ask."""
        self.asked = asked
        self._rest.release()
        self._go.acquire()
        if self._end:
            raise _Ended
        return self._answer

    def go_on(self, answer: Any) -> None:
        """With what it asked for, until it asks again or is done."""
        self._answer = answer
        self._go.release()
        self._rest.acquire()

    def end(self) -> None:
        """Wherever it is."""
        self._end = True
        if not self.done:
            self._go.release()
            self._rest.acquire()
        self._thread.join()


def in_turns(
    functions: Sequence[Callable[[MeetingTurn], Any]],
    together: Callable[[list[Any]], Sequence[Any]],
    device: torch.device,
) -> list[Any]:
    """The results of functions that meet.

    Args:
        functions: of their turn, whose `ask` waits for the others.
        together: of what all asked for, in their order, what each gets; runs in the caller's thread.
        device: whose streams are used.

    Raises:
        UnsupportedError: some are done where others ask. What a function or `together` raises.
    """
    state = ThreadState.here(device)
    turns = [MeetingTurn(f, state) for f in functions]
    try:
        answers: Sequence[Any] = [None] * len(turns)
        while True:
            for turn, answer in zip(turns, answers):
                turn.go_on(answer)
                if turn.error is not None:
                    raise turn.error
            if all(turn.done for turn in turns):
                return [turn.result for turn in turns]
            if any(turn.done for turn in turns):
                raise UnsupportedError("model", "layers that do the same whatever the tokens", "others for some blocks")
            answers = together([turn.asked for turn in turns])
    finally:
        for turn in turns:
            turn.end()
