"""A folder of safetensors: its files, and tensors that are read where they are asked for."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from ....errors import ArgumentError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def folder_of(name: str) -> Path:
    """A folder with configuration and safetensors: this one, or what the Hub has under this name.

    Raises:
        OSError: neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))


def files_of(folder: Path) -> list[Path]:
    """The files with weights. Raises ArgumentError if there are none."""
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise ArgumentError("folder", f"a folder with {SINGLE} or {INDEX}", str(folder))


class Slice:
    """A tensor of a file that is read where it is asked for; what was read is added up."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self.inner, self.read = inner, read

    def get_shape(self) -> list[int]:
        return self.inner.get_shape()

    def get_dtype(self) -> str:
        return self.inner.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        x = self.inner[index]
        self.read[0] += x.nbytes
        return x


def slices_of(files: list[Path], opened: ExitStack, read: list[int]) -> dict[str, Slice]:
    """All tensors of files by their names. The files stay open as long as `opened`; bytes read are added to `read`."""
    from safetensors import safe_open

    out: dict[str, Slice] = {}
    for path in files:
        file = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
        out |= {name: Slice(file.get_slice(name), read) for name in file.keys()}
    return out
