"""A step written down as a CUDA graph: its stream, its graph, and what a refused capture must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class StepStream:
    """The stream that a step is run on before it is captured, and captured on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)

    def run(self, call: Callable[[], Any], strict: bool) -> Any:
        """The step itself; `strict`: waiting for the device is an error."""
        here, mode = torch.cuda.current_stream(self.device), torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            if strict:
                torch.cuda.set_sync_debug_mode("error")
            try:
                out = call()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(self._stream)
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.is_cuda:
                x.record_stream(here)
        return out

    @staticmethod
    def capturing() -> bool:
        """Whether a graph is being written here."""
        return torch.cuda.is_current_stream_capturing()

    def end(self) -> torch.cuda.Event:
        """An event behind all that was launched in the caller's order."""
        return _recorded(torch.cuda.current_stream(self.device))

    def ends(self) -> list[torch.cuda.Event]:
        """Events behind all that was launched here, by the caller and by steps."""
        return [self.end(), _recorded(self._stream)]

    def write(self, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """A graph of the step, and what it returns; nothing is computed.

        Raises:
            Exception: what came first, of the step or of CUDA; streams and random numbers are as they were.
        """
        here, before = torch.cuda.current_stream(self.device), drawn()
        graph, first, out = torch.cuda.CUDAGraph(), None, None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="The CUDA Graph is empty")
                with no_garbage(), torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                    try:
                        out = call()
                    except Exception as error:  # behind it CUDA says that the capture is no good, and not why
                        first = error
        except Exception as error:
            first = first or error
            torch.cuda.set_stream(here)
            self._recover(graph)
        if first is None and (name := changed(before)):
            first = RuntimeError(f"it draws from {name}, and a graph would repeat what was drawn")
        if first is not None:
            raise first
        return graph, out

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where CUDA refused the capture PyTorch leaves memory and random numbers in it."""
        try:
            torch._C._cuda_endAllocateToPool(self.device.index, graph.pool())
        except (AttributeError, RuntimeError):  # they are not in it
            pass
        generator = torch.cuda.default_generators[self.device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers go on, outside of the capture


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Nothing is collected here: a graph that an earlier step left in a cycle would be freed, which CUDA refuses during
    a capture, and the capture with it."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def drawn() -> dict[str, Any]:
    """States of the generators on the host."""
    found: dict[str, Any] = {"PyTorch's CPU generator": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        found["numpy.random"] = sys.modules["numpy"].random.get_state()[1:3]
    return found


def changed(before: dict[str, Any]) -> str | None:
    """The generator that was drawn from, if there is one."""
    for name, now in drawn().items():
        old = before.get(name)
        if old is None:  # it was imported by the step
            continue
        if name == "numpy.random":
            same = bool((old[0] == now[0]).all()) and old[1] == now[1]
        else:
            same = torch.equal(old, now) if isinstance(now, Tensor) else old == now
        if not same:
            return name
    return None


def reason(error: BaseException) -> str:
    """What happened, and where: the step's last line that is not of a library, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = str(Path(torch.__file__).parent.parent), str(Path(__file__).parent)
    own = [f for f in frames if not f.filename.startswith(libraries)]
    where = (own or frames)[-1]
    said, at = (
        str(error).strip().splitlines() or [type(error).__name__],
        f"{where.filename}:{where.lineno} `{where.line}`",
    )
    if frames[-1] != where:
        at += f", in {frames[-1].filename}:{frames[-1].lineno} `{frames[-1].line}`"
    return f"{at}: {' '.join(said[:1] + said[1:][-1:])}"


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
