"""Kept prefixes on disk, for servers to come.

Each rank writes what it has (safetensors), a file each, into a folder by the prefix's hash, and rank 0 last of all how
many there are. So any number of ranks finds it again: where keys stay on the rank that read them, each takes every P-th
token's, whoever wrote them.

Nothing there is believed. A file says of which model and prefix it is, and has sums of its header and of each tensor:
what was cut off, changed, renamed or brought from elsewhere is no prefix, and its prompts are read anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ArgumentError
from ..nn import KVCache, LayerState
from .tiers import Home, PackedPrefix

LOG = logging.getLogger(__name__)
ABOUT = "about.json"
NAME = re.compile("[0-9a-f]{64}")
"""Of a prefix's folder, the SHA-256 of its tokens."""
SAMPLED = 4096
"""Numbers of each weight that tell models apart."""


class Stored(NamedTuple):
    """What a folder says of a prefix: its hash, its parent's (empty: none), its tokens, and its bytes on a rank."""

    name: str
    parent: str
    length: int
    size: int


class DamagedPrefix(Exception):
    """What is on disk is not what was written."""


class Disk:
    """Prefixes in a folder.

    Args:
        folder: of all models. model: whose. rank, ranks: this one, and how many write.
    """

    def __init__(self, folder: str | Path, model: nn.Module, rank: int, ranks: int) -> None:
        self._model, self._rank, self._ranks = fingerprint(model), rank, ranks
        self._folder = Path(folder) / self._model
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError("keep", "a folder that can be made or is there", f"{folder} ({error})") from None

    def found(self, home: Home) -> list[Stored]:
        """Rank 0: the prefixes there, those before others first. What is half written is removed, and so is what is
        damaged, with a warning that names it; what is not of a prefix is left alone."""
        there: dict[str, Stored] = {}
        unfit: dict[str, str] = {}
        for path in sorted(self._folder.iterdir()):
            if not NAME.fullmatch(path.name):
                unfit[path.name] = "is nothing of ours, and stays"
            elif not (path / ABOUT).exists():
                self.remove(path.name)
            else:
                try:
                    there[path.name] = self._stored(path.name, home)
                except Exception as error:  # of whatever kind: what others left may be anything
                    unfit[path.name] = f"is removed ({type(error).__name__}: {error})"
                    self.remove(path.name)
        if unfit:
            LOG.warning("of states kept in %s are not used: %s", self._folder, "; ".join(map(" ".join, unfit.items())))
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
        mine["runs"] = torch.tensor(
            [[r.start, r.stop, r.step] for r in packed.runs], dtype=torch.int64, device="cpu"
        ).view(-1, 3)
        (self._folder / name).mkdir(exist_ok=True)
        kinds = [kind if isinstance(kind, int) else kind.__name__ for kind in packed.kinds]
        said = {"model": self._model, "name": name, "rank": self._rank, "length": packed.length, "kinds": kinds}
        text = json.dumps(said | _bytes(packed) | {"sums": {n: checksum(x) for n, x in mine.items()}})
        header = {"about": text, "sum": str(zlib.crc32(text.encode()))}
        save_file(mine, self._folder / name / f"rank-{self._rank}.safetensors", header)

    def publish(self, stored: Stored) -> None:
        """Rank 0, when all have written."""
        about = {"parent": stored.parent, "length": stored.length, "ranks": self._ranks}
        new = self._folder / stored.name / f"{ABOUT}.new"
        new.write_text(json.dumps(about))
        os.replace(new, new.with_suffix(""))

    def read(self, name: str, parent: int, begin: int, home: Home) -> PackedPrefix:
        """A prefix's part for this rank, after a parent of `begin` tokens, as its model keeps it on these ranks. Each
        rank looks through every P-th file; what one of them finds is to count for all.

        Raises:
            DamagedPrefix, or what reading the files brings: it cannot be had.
        """
        about, files, said = self._opened(name)
        for file, header in list(zip(files, said))[self._rank :: self._ranks]:
            for n, want in header["sums"].items():
                if checksum(file.get_tensor(n)) != want:
                    raise DamagedPrefix(f"{name}: other numbers in {n} than rank {header['rank']} wrote")
        whole = range(begin, about["length"])
        mine = range(begin + (self._rank - begin) % self._ranks, about["length"], self._ranks)
        layers = {i: n for n, i in enumerate(home.layers)}
        kinds, tensors = [], {"logits": files[0].get_tensor("logits")}
        for i, kind in enumerate(said[0]["kinds"]):
            shared = isinstance(kind, int)
            if i in home.apart and shared != (i in layers):
                raise DamagedPrefix(f"{name}: keys of state {i}, which ranks keep otherwise than one process")
            kinds.append(layers.get(i, KVCache if shared else KINDS[kind]))
            for n in (n for n in files[0].keys() if n.startswith(f"{i}.")):
                x, key = files[0].get_tensor(n), n.endswith((".k", ".v"))
                if shared and key:
                    x = _gathered(files, n, mine if i in layers else whole)
                    x = x if i in layers else x[None]
                elif key and i in layers:  # of one process, which has all
                    layer = home.layers[i] if n.endswith(".k") else None
                    if layer is not None and (carried := layer.carried_of(x[:, -1])) is not None:
                        tensors[f"{i}.carried"] = carried
                    x = x[0, torch.arange(mine.start - begin, len(whole), mine.step, device="cpu")]
                tensors[n] = x
        return PackedPrefix(parent, begin, about["length"], kinds, tensors, [mine] if layers and mine else [])

    def remove(self, name: str) -> None:
        """Rank 0: no more of it."""
        try:
            (self._folder / name / ABOUT).unlink(missing_ok=True)  # first: what is left of it then is half written
            shutil.rmtree(self._folder / name)
        except FileNotFoundError:
            return
        except OSError as error:
            LOG.warning("a kept state stays on disk: %s", error)

    def _stored(self, name: str, home: Home) -> Stored:
        about, _, said = self._opened(name)
        keys = said[0]["keys"].items()
        size = said[0]["rest"] + sum(n // self._ranks if int(i) in home.layers else n for i, n in keys)
        if about["parent"] and not NAME.fullmatch(about["parent"]):
            raise DamagedPrefix(f"{name}: no prefix is called {about['parent']!r}")
        return Stored(name, about["parent"], about["length"], size)

    def _opened(self, name: str) -> tuple[dict[str, Any], list[Any], list[dict[str, Any]]]:
        """What rank 0 wrote last of a prefix, the files, and what each says of itself."""
        from safetensors import safe_open

        about, files, said = json.loads((self._folder / name / ABOUT).read_text()), [], []
        for rank in range(about["ranks"]):
            files.append(safe_open(self._folder / name / f"rank-{rank}.safetensors", "pt"))
            header = files[-1].metadata() or {}
            text = header.get("about", "")
            if header.get("sum") != str(zlib.crc32(text.encode())):
                raise DamagedPrefix(f"{name}: another header than rank {rank} wrote")
            said.append(json.loads(text))
            want = {"model": self._model, "name": name, "rank": rank, "length": about["length"]}
            if said[-1] | want != said[-1] or said[-1]["sums"].keys() != set(files[-1].keys()):
                raise DamagedPrefix(f"{name}: rank {rank}'s file is another model's, or of another prefix")
        return about, files, said


KINDS: dict[str, Any] = {kind.__name__: kind for kind in (KVCache, LayerState)}


def checksum(x: Tensor) -> int:
    """Of a CPU tensor's numbers (CRC-32)."""
    return zlib.crc32(x.contiguous().flatten().view(torch.uint8).numpy().data)


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
        at = torch.cat(
            [torch.zeros(0, dtype=torch.int64, device="cpu"), *(torch.arange(*run, device="cpu") for run in runs)]
        )
        source = ((at - wanted.start) % wanted.step == 0).nonzero().flatten()
        out[(at[source] - wanted.start) // wanted.step] = file.get_tensor(name)[source]
    return out


def fingerprint(model: nn.Module) -> str:
    """What tells models apart: their configuration, and names, shapes, dtypes and some numbers of their weights."""
    config: Any = getattr(model, "config", None)
    digest = hashlib.sha256(json.dumps(_lasting(config.to_dict()) if config else {}, default=str).encode())
    for name, x in model.state_dict().items():
        x = x.full_tensor() if isinstance(x, DTensor) else x  # one weight at a time
        digest.update(f"{name} {list(x.shape)} {x.dtype}".encode())
        some = x.flatten()[:: max(1, x.numel() // SAMPLED)][: SAMPLED + 1]
        digest.update(some.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in order, without where it came from, which attention is taken, and by what version."""
    named = {str(k): v for k, v in config.items() if k != "transformers_version"}
    kept = {k: v for k, v in sorted(named.items(), key=str) if not k.startswith("_")}
    return {k: _lasting(v) if isinstance(v, Mapping) else v for k, v in kept.items()}
