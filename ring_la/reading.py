"""Reading checkpoints of torch.distributed.checkpoint without running what stands in them.

That reads a checkpoint's table of contents, and what is no tensor, by unrestricted pickles: whoever writes a checkpoint
runs code where it is read. Here only the classes that a checkpoint consists of are made, and nothing else is called.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from .errors import ArgumentError

METADATA = ".metadata"
_KNOWN = {
    "torch.distributed.checkpoint.metadata": None,  # dataclasses alone
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}
"""What a table of contents names, by module; None: all classes that the module defines itself."""
_MOVED = {"pathlib._local": "pathlib"}
"""Modules as Python 3.13 writes them, and as all Pythons read them."""


class _Contents(pickle.Unpickler):
    """Makes what a table of contents consists of."""

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        known: set[str] | frozenset[str] | None = _KNOWN.get(module, frozenset())
        if known is not None and name not in known:
            found = getattr(torch, name, None) if module == "torch" else None
            if isinstance(found, torch.dtype):
                return found
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        found = super().find_class(module, name)
        if known is None and not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return found


class _Reader(dcp.FileSystemReader):
    """A folder's reader that makes its table of contents by `_Contents`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            metadata = _Contents(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a table of contents, not {type(metadata).__name__}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """One tensor's or value's bytes: a zip of torch.save's, whose sums torch writes and does not look at."""
        whole = io.BytesIO(super()._slice_file(file, sinfo).read(sinfo.length))
        with zipfile.ZipFile(whole) as written:
            name = written.testzip()
        if name is not None:
            raise zipfile.BadZipFile(f"{sinfo.relative_path} holds other bytes than were written: {name}")
        whole.seek(0)
        return whole


class _Planner(DefaultLoadPlanner):
    """Reads what is no tensor as plain values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # what the parent reads holds nothing else now
        plain.seek(0)
        super().load_bytes(read_item, plain)


def contents(folder: Path) -> Metadata:
    """A checkpoint's table of contents.

    Raises:
        ArgumentError: it is none, is cut off, or holds something that is no part of one.
    """
    return _told(folder, _Reader(folder).read_metadata)


def load(state: dict[str, Any], folder: Path, **how: Any) -> None:
    """`torch.distributed.checkpoint.load` into `state`, with its keywords, of a folder that need not be trusted.

    Raises:
        ArgumentError: it does not fit `state`, is not whole, holds bytes that were changed since, or something that is
            no part of a checkpoint.
    """
    contents(folder)  # some versions of torch say of a refusal only that there is no table
    _told(folder, lambda: dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(), **how))


def _told(folder: Path, read: Any) -> Any:
    """What `read` gives; why it gives nothing, in a line that names the folder."""
    cause: BaseException
    try:
        return read()
    except (pickle.UnpicklingError, EOFError, FileNotFoundError) as error:
        rank, cause = "", error
    except dcp.CheckpointException as error:  # torch's, and no Exception
        first = min(error.failures)
        rank, cause = f"rank {first}: ", error.failures[first][0]
    plain = isinstance(cause, pickle.UnpicklingError)
    expected = "a checkpoint of tensors and plain values" if plain else "a whole checkpoint of this model"
    why = f"{rank}{type(cause).__name__}: {(str(cause) or 'no message').splitlines()[0]}"
    raise ArgumentError("folder", expected, f"{folder} ({why})") from cause
