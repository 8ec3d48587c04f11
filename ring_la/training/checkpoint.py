"""Checkpoints that any number of ranks can go on from, written while training goes on.

    folder/step-00000120/     torch.distributed.checkpoint: parameters, optimizer states, and a small dict of the run's
    folder/step-00000240/     progress; complete once its .metadata is there, which is written last

Sharded tensors are stored by their global indices, so a run with other axes reads what it needs of them.
"""

from __future__ import annotations

import io
import re
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from ..checks import check_flag, check_int, check_kind, check_path
from ..comm.members import JobStore, Members
from ..comm.watch import PeerWatch
from ..errors import ArgumentError, DisagreementError, PeerError, RingLAError, describe_tensor
from ..reading import METADATA, contents, load


class Checkpoints:
    """The checkpoints of one run. Collective: every rank makes one and makes the same calls.

    A rank that dies meanwhile is a `PeerError` that names it; what one rank cannot write or read is an `ArgumentError`
    of `folder` on every rank, and what was half written is removed. A step that is written again is gone until it is.

    Args:
        folder: shared by all ranks.
        keep: how many to keep; older ones are removed. background: write in a thread, from a copy on the host.
        frozen: keep parameters without gradients too, which adapters leave as they were.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, background: bool = True, frozen: bool = True) -> None:
        check_int("keep", keep, 1)
        folder = check_path("folder", folder)
        check_flag("background", background)
        check_flag("frozen", frozen)
        self.folder, self.keep, self.background = folder, keep, background
        self._options = StateDictOptions(ignore_frozen_params=not frozen, strict=frozen)
        self._group: Any = dist.new_group(backend="gloo")  # its own: the writing thread talks while training does
        self._writing: tuple[Future, Path] | None = None
        self._members = Members(self._group, timedelta(minutes=5))
        self._watch = PeerWatch(self._members, JobStore(_number(self._group.group_name)))

    def save(self, step: int, model: nn.Module, optimizer: Any, progress: dict[str, Any]) -> None:
        """Write the state after `step` steps; waits for the checkpoint before it.

        Args:
            step: an int ≥ 0, the same on all ranks.
            progress: plain values and tensors, in dicts and lists as they may be; the same on all ranks.

        Raises:
            ArgumentError: by name, of the checkpoint before it, too. DisagreementError: the ranks have come to other
                steps, or one refuses.
        """
        self.wait()
        self._agree(step, lambda: _check(step, progress, model, optimizer))
        parameters, states = get_state_dict(model, optimizer, options=self._options)
        told = {"step": step, GIVEN: (progress,)}  # a tuple: torch takes dicts apart, and does not put them together
        state = {"model": parameters, "optimizer": states, "progress": told}
        where = self.folder / f"step-{step:08d}"
        if dist.get_rank() == 0:  # nobody writes before this rank has planned, and files are written over
            (where / METADATA).unlink(missing_ok=True)
        with self._writing_to(where):
            if self.background:
                writing: Any = dcp.async_save(state, checkpoint_id=where, process_group=self._group)
                self._writing = writing, where
                return
            dcp.save(state, checkpoint_id=where, process_group=self._group)
        self._tidy()

    def _agree(self, step: int, check: Callable[[], None]) -> None:
        """Refuse on all ranks what would leave a checkpoint that nobody can read: parts of it in several folders."""
        error = None
        try:
            check()
        except ArgumentError as e:
            error = e
        said: list[Any] = [None] * len(self._members.global_ranks)
        with self._named("writing a checkpoint"):
            dist.all_gather_object(said, f"refused: {error}" if error else step, group=self._group)
        if error is not None:
            raise error
        if any(other != step for other in said):
            lines = [f"\n  rank {rank}: {other}" for rank, other in enumerate(said)]
            raise DisagreementError(f"the ranks disagree on the step of a checkpoint:{''.join(lines)}")

    def wait(self) -> None:
        """Until the checkpoint under way is on disk; its error, if it had one, is raised here."""
        under_way, self._writing = self._writing, None
        if under_way is not None:
            writing, where = under_way
            with self._writing_to(where):
                writing.result()
            self._tidy()

    def load(self, model: nn.Module, optimizer: Any, step: int | None = None) -> dict[str, Any] | None:
        """The newest complete checkpoint (or that of `step`) into model and optimizer; its progress, None if none.

        Raises:
            ArgumentError: no complete checkpoint of `step`, or one of a model that has more.
        """
        _check_parts(model, optimizer)
        steps: list[int | None] = [max(self.steps(), default=None)]
        with self._named("reading a checkpoint"):
            dist.broadcast_object_list(steps, src=0, group=self._group)  # what rank 0 sees counts
        newest = steps[0]
        if step is not None and step not in self.steps():
            raise ArgumentError("step", f"one of {self.steps()}", step)
        newest = newest if step is None else step
        if newest is None:
            return None
        parameters, states = get_state_dict(model, optimizer, options=self._options)
        state: dict[str, Any] = {"model": parameters, "optimizer": states, "progress": {"step": 0}}
        where = self.folder / f"step-{newest:08d}"
        stored = contents(where).state_dict_metadata
        _refuse_more(stored, parameters, where)
        state["progress"] = {k.removeprefix("progress."): 0 for k in stored if k.startswith("progress.")}
        with self._named("reading a checkpoint"):
            load(state, where, process_group=self._group)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states, options=self._options)
        told: dict[str, Any] = state["progress"]
        return {**told.pop(GIVEN, ({},))[0], **told}

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        found = (_step_of(file.parent) for file in self.folder.glob(f"step-*/{METADATA}"))
        return sorted(step for step in found if step is not None)

    @contextmanager
    def _writing_to(self, where: Path) -> Iterator[None]:
        """What is half written there, for want of room, say, is removed: the next one needs the room."""
        try:
            with self._named("writing a checkpoint"):
                yield
        except ArgumentError:
            if dist.get_rank() == 0:
                shutil.rmtree(where, ignore_errors=True)
            raise

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Messages of ours that fail within it name the rank that they fail by, files the rank that could not."""
        if self._group is None:
            raise PeerError(f"{what}: the ranks' group has ended with a failure before. Start them again")
        try:
            yield
        except RingLAError:
            raise
        except dcp.CheckpointException as error:
            got = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, (e, *_) in error.failures.items())
            raise ArgumentError("folder", f"one that allows {what}", f"{self.folder} ({got})") from error
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # which have the group
            self._leave()
            raise self._watch.error(what, error) from error

    def _leave(self) -> None:
        """End the group, which closes its connections: who waits for this rank fails, too, and does not wait on."""
        dist.destroy_process_group(self._group)
        self._group = None
        vars(self._members).pop("group")

    def _tidy(self) -> None:
        """Remove what is older than the newest `keep`, incomplete ones too."""
        if dist.get_rank() == 0:
            kept = self.steps()[-self.keep :]
            for folder in self.folder.glob("step-*"):
                step = _step_of(folder)
                if kept and step is not None and step < kept[0]:
                    shutil.rmtree(folder, ignore_errors=True)


GIVEN = "given"
"""Under which name a checkpoint's progress has what the caller gave."""


def _step_of(folder: Path) -> int | None:
    """Of which step a checkpoint's folder is; None: it is no checkpoint's."""
    named = re.fullmatch(r"step-(\d+)", folder.name)
    return int(named[1]) if named else None


def _check_parts(model: object, optimizer: object) -> None:
    """Refuse what is no model, and what are no optimizers."""
    check_kind("model", model, nn.Module)
    for one in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        check_kind("optimizer", one, Optimizer)


def _check(step: object, progress: object, model: object, optimizer: object) -> None:
    """Refuse what is no step, a progress that could not be read again, and what is no part of a run."""
    check_int("step", step, 0)
    _check_parts(model, optimizer)
    if not isinstance(progress, dict):
        raise ArgumentError("progress", "a dict", describe_tensor(progress))
    for name, value in progress.items():
        try:
            written = io.BytesIO()
            torch.save(value, written)
            written.seek(0)
            torch.load(written, weights_only=True)
        except Exception as error:  # pickle's are of any kind
            expected = f"plain values and tensors, which are read without running anything, at {name!r}"
            raise ArgumentError("progress", expected, type(value).__name__) from error


def _refuse_more(stored: Collection[str], parameters: Mapping[str, Any], where: Path) -> None:
    """Refuse a checkpoint of a model that has more than these parameters."""
    names = [name.removeprefix("model.") for name in stored if name.startswith("model.")]
    more = [n for n in names if n not in parameters and not any(n.startswith(f"{p}.") for p in parameters)]
    if more:
        raise ArgumentError("model", f"all that {where} has of one", f"one without {', '.join(more[:3])}")


def _number(group: str) -> int:
    """What stands for a process group of torch's, larger than numbers of ours."""
    return int.from_bytes(f"checkpoints {group}".encode(), "little")
