"""What is kept of prompts, off the model's device: in host memory, and on disk for servers to come.

On a rank a kept prefix is packed: tensors on the CPU, of keys this rank's of the tokens since the prefix before it,
with their positions. On disk (safetensors) each rank writes what it has, a file each, into a folder by the prefix's
hash, and rank 0 last of all what it is. So any number of ranks finds it again: where keys stay on the rank that read
them, each takes every P-th token's, whoever wrote them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError
from ..inference import KeyRows, KeyStore, LayerKeys, Prefilled
from ..nn import Attention, KVCache, LayerState
from .prefixes import KeptPrefix

ABOUT = "about.json"
SAMPLED = 4096
"""Numbers of each weight that tell models apart."""


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
            if not isinstance(value, int) or value < 0:
                raise ArgumentError("keep", f"bytes on the {name}, an int ≥ 0", repr(value))
        if bool(self.disk) != (self.folder is not None):
            raise ArgumentError("keep", "a folder where there are bytes on disk, else none", self)
        if self.disk and importlib.util.find_spec("safetensors") is None:
            raise UnsupportedError("keep", "an environment with safetensors", "none", "pip install safetensors")
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
    layers these are of, by the number of their state."""

    device: torch.device
    keys: KeyStore | None
    layers: Mapping[int, Attention]


def pack(prefix: KeptPrefix) -> PackedPrefix:
    """What this rank has of a prefix beyond its parent's, on the CPU, as memory of its own."""
    tensors, runs = {"logits": prefix.since.logits}, []
    kinds = [s.layer if isinstance(s, LayerKeys) else type(s) for s in prefix.since.states]
    for i, state in enumerate(prefix.since.states):
        if isinstance(state, LayerKeys):
            [held] = state.rows.held
            views = [state.views(span) for span in held.spans(held.before(prefix.begin), held.here)]
            parts = zip(*views) if views else [[_nothing(state, state.size.key)], [_nothing(state, state.size.value)]]
            tensors |= {f"{i}.{name}": torch.cat(list(part)) for name, part in zip("kv", parts)}
            tensors |= {} if state.carried is None else {f"{i}.carried": state.carried}
            runs = [part for run in held.runs if (part := _from(run, prefix.begin))]
        else:
            tensors |= {f"{i}.{name}": x for name, x in state._asdict().items() if x is not None}
    on_host = {name: x.to("cpu", copy=True).contiguous() for name, x in tensors.items()}
    return PackedPrefix(*prefix[:3], kinds, on_host, runs)


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


# -- on disk -----------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """What a folder says of a prefix: its hash, its parent's (empty: none), its tokens, and its bytes on a rank."""

    name: str
    parent: str
    length: int
    size: int


class Disk:
    """Prefixes in a folder.

    Args:
        folder: of all models. model: whose. rank, ranks: this one, and how many write.
    """

    def __init__(self, folder: str | Path, model: nn.Module, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks = Path(folder) / fingerprint(model), rank, ranks
        self._folder.mkdir(parents=True, exist_ok=True)

    def found(self, home: Home) -> list[Stored]:
        """The prefixes there, those before others first; what is half written is removed."""
        from safetensors import safe_open

        there = {}
        for path in self._folder.iterdir():
            if (path / ABOUT).is_file():
                about = json.loads((path / ABOUT).read_text())
                with safe_open(path / "rank-0.safetensors", "pt") as file:
                    said = {name: json.loads(text) for name, text in file.metadata().items()}
                keys = said["keys"].items()
                size = said["rest"] + sum(n // self._ranks if int(i) in home.layers else n for i, n in keys)
                there[path.name] = Stored(path.name, about["parent"], about["length"], size)
            elif path.is_dir():
                shutil.rmtree(path)
        good: dict[str, Stored] = {}
        for entry in sorted(there.values(), key=lambda entry: entry.length):
            if not entry.parent or entry.parent in good:
                good[entry.name] = entry
            else:
                self.remove(entry.name)
        return list(good.values())

    def write(self, name: str, packed: PackedPrefix) -> None:
        """This rank's part; it counts from `publish` on."""
        from safetensors.torch import save_file

        shared = [f"{i}." for i, kind in enumerate(packed.kinds) if isinstance(kind, int)]
        mine = {n: x for n, x in packed.tensors.items() if self._rank == 0 or _is_key(n, shared)}
        mine["runs"] = torch.tensor([[r.start, r.stop, r.step] for r in packed.runs], dtype=torch.int64).view(-1, 3)
        (self._folder / name).mkdir(exist_ok=True)
        about = {"kinds": [kind if isinstance(kind, int) else kind.__name__ for kind in packed.kinds]} | _bytes(packed)
        said = {name: json.dumps(value) for name, value in about.items()}
        save_file(mine, self._folder / name / f"rank-{self._rank}.safetensors", said)

    def publish(self, stored: Stored) -> None:
        """Rank 0, when all have written."""
        about = {"parent": stored.parent, "length": stored.length, "ranks": self._ranks}
        new = self._folder / stored.name / f"{ABOUT}.new"
        new.write_text(json.dumps(about))
        os.replace(new, new.with_suffix(""))

    def read(self, name: str, parent: int, begin: int, home: Home) -> PackedPrefix:
        """A prefix's part for this rank, after a parent of `begin` tokens, as its model keeps it on these ranks."""
        from safetensors import safe_open

        about = json.loads((self._folder / name / ABOUT).read_text())
        files = [safe_open(self._folder / name / f"rank-{r}.safetensors", "pt") for r in range(about["ranks"])]
        said = json.loads(files[0].metadata()["kinds"])
        whole = range(begin, about["length"])
        mine = range(begin + (self._rank - begin) % self._ranks, about["length"], self._ranks)
        layers, kinds, tensors = (
            {i: n for n, i in enumerate(home.layers)},
            [],
            {"logits": files[0].get_tensor("logits")},
        )
        for i, kind in enumerate(said):
            shared = isinstance(kind, int)
            kinds.append(layers.get(i, KVCache if shared else KINDS[kind]))
            for n in (n for n in files[0].keys() if n.startswith(f"{i}.")):
                x, key = files[0].get_tensor(n), n.endswith((".k", ".v"))
                if shared and key:
                    x = _gathered(files, n, mine if i in layers else whole)
                    x = x if i in layers else x[None]
                elif key and i in layers:  # of one process, which has all
                    if n.endswith(".k") and (carried := home.layers[i].carried_of(x[:, -1])) is not None:
                        tensors[f"{i}.carried"] = carried
                    x = x[0, torch.arange(mine.start - begin, len(whole), mine.step)]
                tensors[n] = x
        return PackedPrefix(parent, begin, about["length"], kinds, tensors, [mine] if layers and mine else [])

    def remove(self, name: str) -> None:
        """Rank 0: no more of it."""
        (self._folder / name / ABOUT).unlink(missing_ok=True)
        shutil.rmtree(self._folder / name, ignore_errors=True)


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (KVCache, LayerState)}


def _is_key(name: str, shared: Sequence[str]) -> bool:
    """Whether a tensor is of keys that stay on their ranks."""
    return name.endswith((".k", ".v")) and name.startswith(tuple(shared)) if shared else False


def _bytes(packed: PackedPrefix) -> dict[str, Any]:
    """Bytes of the keys of all ranks, by state, and of the rest."""
    keys: dict[int, int] = {}
    for i, kind in enumerate(packed.kinds):
        if isinstance(kind, int) or kind is KVCache:
            parts = [packed.tensors[f"{i}.{name}"] for name in "kv" if f"{i}.{name}" in packed.tensors]
            each = sum(math.prod(x.shape[-2:]) * x.itemsize for x in parts)
            keys[i] = each * (packed.length - packed.begin)
    own = tuple(f"{i}." for i in keys)
    return {"keys": keys, "rest": sum(x.nbytes for name, x in packed.tensors.items() if not name.startswith(own))}


def _gathered(files: Sequence[Any], name: str, wanted: range) -> Tensor:
    """Keys at some positions, whichever ranks wrote them."""
    first = files[0].get_tensor(name)
    out = first.new_empty(len(wanted), *first.shape[1:])
    for file in files:
        runs = file.get_tensor("runs").tolist()
        at = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(*run) for run in runs)])
        source = ((at - wanted.start) % wanted.step == 0).nonzero().flatten()
        out[(at[source] - wanted.start) // wanted.step] = file.get_tensor(name)[source]
    return out


def fingerprint(model: nn.Module) -> str:
    """What tells models apart: names, shapes, dtypes and some numbers of their weights."""
    digest = hashlib.sha256()
    for name, x in model.state_dict().items():
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        some = x.flatten()[:: max(1, x.numel() // SAMPLED)][: SAMPLED + 1]
        digest.update(some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
