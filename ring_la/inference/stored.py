"""A prompt that was read, on disk as safetensors: what each layer remembers of it, usable at any number of ranks.

keys-0.safetensors …    one of each rank that wrote: the keys and values of its tokens, and their positions
states.safetensors      of rank 0, written last: logits, states of recurrences, the sequences' lengths
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checks import check_kind, check_path
from ..errors import ArgumentError, require
from ..keystore import KeyRows, KeyStore, LayerKeys
from ..nn.layer import LayerState
from .generate import Prefilled

STATES = "states.safetensors"
WRITTEN = "states.whole"
"""The same until all ranks have written theirs."""


def save_prompt(prompt: Prefilled, folder: str | Path) -> None:
    """Write a prompt whose keys are in a `KeyStore` to a folder that all ranks see. Collective.

    Each rank writes what it has; a folder without `states.safetensors` is not complete.

    Raises:
        ArgumentError: keys that are not in a `KeyStore`; a folder that a rank cannot write to, on every rank.
        UnsupportedError: safetensors is not installed.
    """
    require("safetensors", "prompt", "prompts on disk")
    from safetensors import SafetensorError

    check_kind("prompt", prompt, Prefilled)
    keys = [state for state in prompt.states if isinstance(state, LayerKeys)]
    wrong = next((s for s in prompt.states if not isinstance(s, (LayerKeys, LayerState))), None)
    if wrong is not None or not keys:
        got = "no keys" if wrong is None else type(wrong).__name__
        raise ArgumentError("prompt", "one read with `keys`, a KeyStore", got)
    folder, rows, error = check_path("folder", folder), keys[0].rows, None
    try:
        _write_mine(prompt, keys, folder)
    except (OSError, SafetensorError) as e:
        error = e
    failed = torch.full((1,), float(error is not None), device=rows.store.device)
    if rows.store.cp is not None:
        failed = rows.store.cp.comm.all_reduce(failed).wait()  # all have written theirs, or have not
    if failed:
        got = f"{folder} ({'another rank had none' if error is None else error})"
        raise ArgumentError("folder", "one that every rank can write to, with room", got) from error
    if rows.store.rank == 0:
        os.replace(folder / WRITTEN, folder / STATES)


def _write_mine(prompt: Prefilled, keys: list[LayerKeys], folder: Path) -> None:
    """This rank's keys; of rank 0 the states, too, not under their name yet."""
    rows = keys[0].rows
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATES).unlink(missing_ok=True)
    runs = [[i, run.start, run.stop, run.step] for i, held in enumerate(rows.held) for run in held.runs]
    tensors = {"runs": torch.tensor(runs, dtype=torch.int64, device="cpu").view(-1, 4)}
    for state in keys:
        parts = [state.views(span) for held in rows.held for span in held.spans(0, held.here)]
        for name, x in zip(("k", "v") if state.size.value else ("k",), zip(*parts)):
            tensors[f"{state.layer}.{name}"] = torch.cat(x).cpu()
    _write(tensors, folder / f"keys-{rows.store.rank}.safetensors", {})
    if rows.store.rank == 0:
        _write_states(prompt, rows, folder / WRITTEN)


def load_prompt(folder: str | Path, keys: KeyStore) -> Prefilled:
    """A prompt as `save_prompt` wrote it, on any number of ranks: each takes every P-th token's keys.

    Args:
        folder: complete. keys: the store of the model that wrote it, with all its blocks' memory to come.

    Raises:
        ArgumentError: nothing there, a file that is missing or damaged, or of another model. UnsupportedError:
            safetensors is not installed.
    """
    require("safetensors", "prompt", "prompts on disk")
    from safetensors import SafetensorError

    check_kind("keys", keys, KeyStore)
    folder = check_path("folder", folder)
    if not (folder / STATES).is_file():
        raise ArgumentError("folder", f"a folder with {STATES}", str(folder))
    try:
        return _loaded(folder, keys)
    except (OSError, SafetensorError) as error:
        raise ArgumentError("folder", "a prompt that is whole", f"{folder} ({error})") from error


def _loaded(folder: Path, keys: KeyStore) -> Prefilled:
    from safetensors import safe_open

    with safe_open(folder / STATES, "pt") as file:
        about = {name: json.loads(value) for name, value in file.metadata().items()}
        found = {name: file.get_tensor(name).to(keys.device) for name in file.keys()}
    if about["sizes"] != [list(size) for size in keys.sizes]:
        raise ArgumentError("folder", f"keys of {[list(size) for size in keys.sizes]}", about["sizes"])
    rows, begin = keys.open(len(about["lengths"])), [0]
    for i, (held, length) in enumerate(zip(rows.held, about["lengths"])):
        mine = range(keys.rank, length, keys.ranks)
        rows.place(i, slice(begin[-1], begin[-1] + len(mine)), [mine] if mine else [], length)
        begin.append(begin[-1] + held.here)
    _fill(rows, begin, [folder / f"keys-{rank}.safetensors" for rank in range(about["ranks"])])
    for layer in range(len(keys.sizes)):
        if f"carried.{layer}" in found:
            rows[layer].carry(found[f"carried.{layer}"])
    states: list[Any] = []
    for i, layer in enumerate(about["layers"]):
        fields = {name: found.get(f"{i}.{name}") for name in LayerState._fields}
        states.append(rows[layer] if layer is not None else LayerState(**fields))
    return Prefilled(found["logits"], states)


def _write_states(prompt: Prefilled, rows: KeyRows, file: Path) -> None:
    tensors = {"logits": prompt.logits.cpu()}
    for i, state in enumerate(prompt.states):
        if isinstance(state, LayerState):
            tensors |= {f"{i}.{name}": x.cpu() for name, x in state._asdict().items() if x is not None}
    tensors |= {f"carried.{layer}": x.cpu() for layer, x in rows.carried.items()}
    layers = [state.layer if isinstance(state, LayerKeys) else None for state in prompt.states]
    about = {"lengths": rows.lengths, "ranks": rows.store.ranks, "layers": layers, "sizes": rows.store.sizes}
    _write(tensors, file, {name: json.dumps(value) for name, value in about.items()})


def _fill(rows: KeyRows, begin: list[int], files: list[Path]) -> None:
    """Put this rank's tokens into the store, a layer at a time, from what other ranks may have had."""
    from safetensors import safe_open

    store, open_files = rows.store, [safe_open(file, "pt") for file in files]
    places = [_places(file.get_tensor("runs").tolist(), begin, store) for file in open_files]
    for layer, size in enumerate(store.sizes):
        made = []
        for name, width in (("k", size.key), ("v", size.value)):
            x = torch.empty(begin[-1], size.heads, width, dtype=store.dtype, device="cpu")
            for file, (source, to) in zip(open_files, places):
                if len(source) and width:
                    x[to] = file.get_tensor(f"{layer}.{name}")[source].to(store.dtype)
            made.append(x[None].to(store.device))
        rows[layer].put(made[0], made[1] if size.value else None)


def _places(runs: list[list[int]], begin: list[int], store: KeyStore) -> tuple[Tensor, Tensor]:
    """Which tokens of a file are this rank's, and where they go among them."""
    source, to, at = [], [], 0
    for row, start, stop, step in runs:
        position = torch.arange(start, stop, step, device="cpu")
        mine = (position % store.ranks == store.rank).nonzero().flatten()
        source.append(at + mine)
        to.append(begin[row] + (position[mine] - store.rank) // store.ranks)
        at += len(position)
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.cat([none, *source]), torch.cat([none, *to])


def _write(tensors: dict[str, Tensor], file: Path, about: dict[str, str]) -> None:
    """A file that is there whole or not at all."""
    from safetensors.torch import save_file

    new = file.with_suffix(".new")
    save_file({name: x.contiguous() for name, x in tensors.items()}, new, about)
    os.replace(new, file)
