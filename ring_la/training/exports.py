"""The way out: a checkpoint of any split as files that others read.

    export("runs/hybrid", "out/weights.safetensors")      one file, whatever the model
    export("runs/qwen", "out")                            the folder from_pretrained reads, for a model of Transformers
    export("runs/hybrid", "out")                          model.safetensors and config.json, for a HybridLM

On one process, on the CPU: the weights have to fit its memory. Nothing is gathered over ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..checks import check_path
from ..errors import ArgumentError, UnsupportedError, require
from . import stored

Dtype = Literal["stored", "float32", "bfloat16", "float16"]
DTYPES: dict[Dtype, torch.dtype | None] = {
    "stored": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WHOLE = "1000GB"
"""Of a folder's file of weights: they are not cut."""


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: Dtype = "stored",
) -> list[Path]:
    """Write a checkpoint's model for others to read.

    Args:
        run: what training left (`ring_la.training.stored`).
        out: a file that ends in .safetensors, or a folder. It must not exist, or be an empty folder.
        step: of a run, which checkpoint; None: the newest.
        dtype: of the weights written, a name out of `DTYPES`; "stored": as training kept them, which is fp32.

    Returns:
        The files written.

    Raises:
        ArgumentError: by name. UnsupportedError: safetensors or transformers is not installed.
    """
    run, out = check_path("run", run), check_path("out", out)
    if dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ArgumentError("out", "a file or folder that is not there yet, or an empty folder", str(out))
    require("safetensors", "model", "files of weights")
    known = stored.about(run)
    if "hybrid" in known and known["hybrid"] is None:
        return _pretrained(run, out, known, step, DTYPES[dtype])
    config, weights = stored.hybrid(run, step)
    kept = {"hybrid": config.to_dict(), "data": {"tokenizer": known.get("data", {}).get("tokenizer")}}
    if out.suffix == ".safetensors":
        return [_write(weights, out, kept, DTYPES[dtype])]
    file = _write(weights, out / stored.SINGLE, {}, DTYPES[dtype])
    with _into(out):
        (out / "config.json").write_text(json.dumps(kept, indent=1))
    return [file, out / "config.json"]


def _write(weights: dict[str, Tensor], file: Path, about: dict[str, Any], dtype: torch.dtype | None) -> Path:
    """One file of weights."""
    from safetensors.torch import save_file

    metadata = {"format": "pt"} | ({"ring_la": json.dumps(about)} if about else {})
    with _into(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: _cast(x, dtype).contiguous().clone() for n, x in weights.items()}, file, metadata)
    return file


@contextmanager
def _into(out: Path) -> Iterator[None]:
    """What cannot be written names where it was to go."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ArgumentError("out", "a place with room, which can be written", f"{out} ({error})") from error


def _once(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of tied weights the first alone, as Transformers writes them and ties them again."""
    out: dict[str, Tensor] = {}
    for name, x in weights.items():
        if all(x.data_ptr() != other.data_ptr() for other in out.values()):
            out[name] = x
    return out


def _cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _pretrained(run: Path, out: Path, about: dict[str, Any], step: int | None, dtype: torch.dtype | None) -> list[Path]:
    """A model of Transformers, from the configuration that its run was started with."""
    require("transformers", "model", "a model of Transformers")
    name = about["model"]["transformers"]
    model = _skeleton(name)
    weights = model.state_dict()
    stored.restore(run, weights, step)
    model.load_state_dict(weights)
    model = model if dtype is None else model.to(dtype)
    if out.suffix == ".safetensors":
        kept = {"transformers": model.config.to_dict()}
        return [_write(_once(model.state_dict()), out, kept, None)]
    with _into(out):
        model.save_pretrained(out, max_shard_size=WHOLE)
    _tokenizer(name, about["data"]["tokenizer"], out)
    return sorted(f for f in out.iterdir() if f.is_file())


def _skeleton(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as e:
        hint = "The run's config.json names it as model.transformers"
        raise ArgumentError("model", "the configuration the run was started with", f"{name!r} ({e})", hint) from None
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)
    except (OSError, ValueError):  # it has none of its own: the model's defaults stay
        return model
    return model


def _tokenizer(name: str, tokenizer: str | None, out: Path) -> None:
    """The tokenizer beside the model, where the run's is one of AutoTokenizer's, or the model's own is there."""
    from transformers import AutoTokenizer

    if tokenizer == "bytes" or (tokenizer or "").endswith(".json"):
        return
    try:
        AutoTokenizer.from_pretrained(tokenizer or name).save_pretrained(out)
    except (OSError, ValueError) as e:
        hint = "Put the tokenizer there by hand: the model is written"
        raise UnsupportedError("tokenizer", "one that AutoTokenizer reads", f"{tokenizer or name!r} ({e})", hint) from e
