"""What is kept of prompts, off the model's device: in host memory, and on disk (`disk`) for servers to come.

On a rank a kept prefix is packed: tensors on the CPU, of keys this rank's of the tokens since the prefix before it,
with their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_path, is_int
from ..errors import ArgumentError, require
from ..inference import KeyRows, KeyStore, LayerKeys, Prefilled
from ..nn.decoding import KeyedLayer
from .prefixes import KeptPrefix


class Keep(NamedTuple):
    """Bytes of states that each rank keeps for prompts that begin alike: on the model's device, in host memory, and on
    disk. What leaves one goes to the next that has room.

    folder: where on disk; all ranks see it, and no other server that runs writes there. What is there of the same model
    is found again.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    folder: str | Path | None = None

    def checked(self) -> Keep:
        """These, if they make sense. Raises ArgumentError or UnsupportedError."""
        for name, value in (("device", self.device), ("host", self.host), ("disk", self.disk)):
            if not is_int(value, 0):
                raise ArgumentError("keep", f"bytes on the {name}, an int ≥ 0", repr(value))
        if bool(self.disk) != (self.folder is not None):
            raise ArgumentError("keep", "a folder where there are bytes on disk, else none", self)
        if self.disk:
            check_path("keep", self.folder)
            require("safetensors", "keep", "prompts on disk")
        return self

    @property
    def budgets(self) -> tuple[int, int, int]:
        """Bytes by tier."""
        return self.device, self.host, self.disk


class PackedPrefix(NamedTuple):
    """A kept prefix on the CPU.

    Attributes:
        parent, begin, length: as in `KeptPrefix`. kinds: what each of its states is, a class; of keys in a `KeyStore`
            the layer's number there. tensors: by the state's number and a name.
        runs: positions of the keys, those of one run after those of another; none where keys are not a rank's own.
    """

    parent: int
    begin: int
    length: int
    kinds: list[Any]
    tensors: dict[str, Tensor]
    runs: list[range]


class Home(NamedTuple):
    """Where a model keeps prefixes: its device, the store of keys that stay on their ranks (None: they do not), and the
    layers these are of, by the number of their state (None: one of Transformers, which carries nothing). apart: states
    whose keys ranks and one process keep otherwise."""

    device: torch.device
    keys: KeyStore | None
    layers: Mapping[int, KeyedLayer | None]
    apart: frozenset[int] = frozenset()


def pack(prefix: KeptPrefix) -> PackedPrefix:
    """What this rank has of a prefix beyond its parent's, on the CPU, as memory of its own."""
    tensors, runs = {"logits": prefix.since.logits}, []
    kinds = [s.layer if isinstance(s, LayerKeys) else type(s) for s in prefix.since.states]
    for i, state in enumerate(prefix.since.states):
        if isinstance(state, LayerKeys):
            [held] = state.rows.held
            views = [state.views(span) for span in held.spans(held.before(prefix.begin), held.here)]
            parts = zip(*views) if views else [[_nothing(state, state.size.key)], [_nothing(state, state.size.value)]]
            k, v = (torch.cat(list(part)) for part in parts)
            tensors |= {f"{i}.k": k, f"{i}.v": v[..., : state.size.value]}  # of latents none
            tensors |= {} if state.carried is None else {f"{i}.carried": state.carried}
            runs = [part for run in held.runs if (part := _from(run, prefix.begin))]
        else:
            tensors |= {f"{i}.{name}": x for name, x in state._asdict().items() if x is not None}
    on_host = {name: x.to("cpu", copy=True).contiguous() for name, x in tensors.items()}
    return PackedPrefix(prefix.parent, prefix.begin, prefix.length, kinds, on_host, runs)


def unpack(packed: PackedPrefix, known: Mapping[int, KeptPrefix], home: Home) -> KeptPrefix:
    """The prefix on the model's device again; its parent is there."""
    before = known[packed.parent].since.states if packed.parent else None
    tensors = {name: x.to(home.device) for name, x in packed.tensors.items()}
    rows: KeyRows | None = None
    states: list[Any] = []
    for i, kind in enumerate(packed.kinds):
        mine = {name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{i}.")}
        if not isinstance(kind, int):
            states.append(kind(**{name: mine.get(name) for name in kind._fields}))
            continue
        if rows is None:
            rows = home.keys.open(1) if before is None else before[i].rows.chosen([0])
            rows.place(0, slice(None), packed.runs, packed.length - packed.begin)
        rows[kind].put(*(mine[name][None] if name in mine else None for name in "kv"))
        if "carried" in mine:
            rows[kind].carry(mine["carried"])
        states.append(rows[kind])
    if rows is not None:  # what is read on from it finds all its tokens read
        rows = rows.chosen([0])
        states = [rows[state.layer] if isinstance(state, LayerKeys) else state for state in states]
    return KeptPrefix(packed.parent, packed.begin, packed.length, Prefilled(tensors["logits"], states))


def _nothing(state: LayerKeys, width: int) -> Tensor:
    store = state.rows.store
    return torch.empty(0, state.size.heads, width, dtype=store.dtype, device=store.device)


def _from(run: range, begin: int) -> range:
    """The positions of a run from one on."""
    return range(max(run.start, run.start + -(-(begin - run.start) // run.step) * run.step), run.stop, run.step)
