"""Checkpoints that any number of ranks can go on from, written while training goes on.

    folder/step-00000120/     torch.distributed.checkpoint: parameters, optimizer states, and a small dict of the run's
    folder/step-00000240/     progress; complete once its .metadata is there, which is written last

Sharded tensors are stored by their global indices, so a run with other axes reads what it needs of them.
"""

from __future__ import annotations

import re
import shutil
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..comm.members import JobStore, Members
from ..comm.watch import PeerWatch
from ..errors import ArgumentError, PeerError, RingLAError
from ..reading import METADATA, contents, load


class Checkpoints:
    """The checkpoints of one run. Collective: every rank makes one and makes the same calls.

    A rank that dies meanwhile is a `PeerError` that names it; what one rank cannot write or read is torch's error.

    Args:
        folder: shared by all ranks.
        keep: how many to keep; older ones are removed. background: write in a thread, from a copy on the host.
        frozen: keep parameters without gradients too, which adapters leave as they were.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, background: bool = True, frozen: bool = True) -> None:
        if keep < 1:
            raise ArgumentError("keep", "at least 1", keep)
        self.folder, self.keep, self.background = Path(folder), keep, background
        self._options = StateDictOptions(ignore_frozen_params=not frozen, strict=frozen)
        self._group: Any = dist.new_group(backend="gloo")  # its own: the writing thread talks while training does
        self._writing: Future | None = None
        self._members = Members(self._group, timedelta(minutes=5))
        self._watch = PeerWatch(self._members, JobStore(_number(self._group.group_name)))

    def save(self, step: int, model: nn.Module, optimizer: Any, progress: dict[str, Any]) -> None:
        """Write the state after `step` steps; waits for the checkpoint before it."""
        self.wait()
        parameters, states = get_state_dict(model, optimizer, options=self._options)
        state = {"model": parameters, "optimizer": states, "progress": progress | {"step": step}}
        where = self.folder / f"step-{step:08d}"
        with self._named("writing a checkpoint"):
            if self.background:
                writing: Any = dcp.async_save(state, checkpoint_id=where, process_group=self._group)
                self._writing = writing
                return
            dcp.save(state, checkpoint_id=where, process_group=self._group)
        self._tidy()

    def wait(self) -> None:
        """Until the checkpoint under way is on disk; its error, if it had one, is raised here."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._named("writing a checkpoint"):
                writing.result()
            self._tidy()

    def load(self, model: nn.Module, optimizer: Any, step: int | None = None) -> dict[str, Any] | None:
        """The newest complete checkpoint (or that of `step`) into model and optimizer; its progress, None if none.

        Raises:
            ArgumentError: no complete checkpoint of `step`.
        """
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
        state["progress"] = {k.removeprefix("progress."): 0 for k in stored if k.startswith("progress.")}
        with self._named("reading a checkpoint"):
            load(state, where, process_group=self._group)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=states, options=self._options)
        return state["progress"]

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        found = (re.fullmatch(r"step-(\d+)", f.parent.name) for f in self.folder.glob(f"step-*/{METADATA}"))
        return sorted(int(m[1]) for m in found if m)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Messages of ours that fail within it name the rank that they fail by."""
        if self._group is None:
            raise PeerError(f"{what}: the ranks' group has ended with a failure before. Start them again")
        try:
            yield
        except RingLAError:
            raise
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
                if kept and int(folder.name.removeprefix("step-")) < kept[0]:
                    shutil.rmtree(folder, ignore_errors=True)


def _number(group: str) -> int:
    """What stands for a process group of torch's, larger than numbers of ours."""
    return int.from_bytes(f"checkpoints {group}".encode(), "little")
