"""A model and its vocabulary from what is on disk.

a file, or a folder with checkpoint.pt      "config" of a HybridConfig and "model", its weights (examples/train_demo.py)
a folder with checkpoints/step-*            a run of examples/train_hybrid.py: its newest complete checkpoint
a folder `ring-la export` wrote of one       the same
a folder with config.json and weights       a causal model of Transformers
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..context import ContextParallel
from ..errors import ArgumentError, require
from ..inference.sharded_hybrid import HybridWeights
from ..models import HybridLM
from ..training import stored
from .model import Hybrid, Served
from .pretrained import Pretrained
from .text import Bytes, Messages, NoText, Subwords, Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)

DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load(
    path: str | Path,
    cp: ContextParallel | None = None,
    *,
    dtype: str = "auto",
    tokenizer: str | None = None,
    sharded: bool = False,
) -> tuple[Served, Text]:
    """The model on this rank's device, or its part of it, and its vocabulary. Collective for models of Transformers.

    Args:
        path: see the module's text. cp: the ranks it will read prompts on; None: this process, on the CPU.
        dtype: of the weights, a name out of `DTYPES`; "auto": as they are stored.
        tokenizer: "bytes", a tokenizer.json, or a folder Transformers' AutoTokenizer reads; None: the model's own.
        sharded: each rank has a part of the weights, and all decode. Of a model of Transformers (safetensors) it reads
            no more than that.

    Raises:
        ArgumentError: nothing that can be served is there. UnsupportedError: it cannot be sharded.
    """
    path = Path(path)
    if dtype not in DTYPES:
        raise ArgumentError("dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    about = stored.about(path)
    if "hybrid" not in about and ("model_type" in about or "architectures" in about):
        return _pretrained(path, cp, DTYPES[dtype], tokenizer, sharded)
    config, weights = stored.hybrid(path)
    if "hybrid" in about and not (path / "checkpoint.pt").is_file():
        tokenizer = tokenizer or about["data"]["tokenizer"]
    with torch.device("meta"):
        model = HybridLM(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as e:
        raise ArgumentError("model", "weights that fit the configuration beside them", f"{path} ({e})") from None
    model.to(dtype=DTYPES[dtype])
    served: Any = sharded_hybrid(model, cp) if sharded and cp is not None and cp.size > 1 else _whole(model, cp)
    return served, vocabulary(tokenizer, config.vocab_size)


def _whole(model: HybridLM, cp: ContextParallel | None) -> Hybrid:
    return Hybrid(_unmapped(model.to("cpu" if cp is None else cp.device)))


def sharded_hybrid(model: HybridLM, cp: ContextParallel) -> Hybrid:
    """A model in memory, served by ranks of which each keeps a part of the large weights. Collective.

    Raises:
        UnsupportedError: ranks that are deterministic.
    """
    weights = HybridWeights(model, cp)
    own: Any
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, x in own.items():
                if x is not None and not isinstance(x, DTensor):
                    moved = x.data.to(cp.device)
                    own[name] = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
    weights.settle()
    return Hybrid(_unmapped(model), weights)


def vocabulary(tokenizer: str | None, vocab_size: int, end: frozenset[int] = frozenset()) -> Text:
    """The vocabulary of a tokenizer; None: bytes where the number of tokens says so, else token ids alone.

    Args:
        end: tokens that end a text of the model; none: those the tokenizer knows.
    """
    if tokenizer is None:
        return Bytes(vocab_size) if vocab_size in (256, 257) else NoText()
    if tokenizer == "bytes":
        if vocab_size < 256:
            raise ArgumentError("tokenizer", "none for a model of less than 256 tokens", "'bytes'")
        return Bytes(vocab_size, end)
    if tokenizer.endswith(".json"):
        return _fast(tokenizer, end)
    return _auto(tokenizer, end)


def _unmapped(model: M) -> M:
    """The model with weights of its own: on a CPU they are those of the file, whatever is written there later."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and not isinstance(tensor, DTensor):  # whose parts are copies
            tensor.data = tensor.data.clone()
    return model


def _pretrained(
    path: Path, cp: ContextParallel | None, dtype: torch.dtype | None, tokenizer: str | None, sharded: bool
) -> tuple[Served, Text]:
    model = pretrained(path, cp, dtype, sharded)
    end = model.generation_config.eos_token_id
    end = frozenset([] if end is None else [end] if isinstance(end, int) else end)
    beside = str(path) if any((path / name).is_file() for name in TOKENIZER_FILES) else None
    named = tokenizer or beside
    text = vocabulary(named, model.config.get_text_config().vocab_size, end) if named else NoText(end)
    return Pretrained(model, cp), text


def pretrained(
    path: str | Path, cp: ContextParallel | None, dtype: torch.dtype | None = None, sharded: bool = False
) -> PreTrainedModel:
    """The causal model of a folder of Transformers, on this rank's device.

    Args:
        sharded: each rank reads and has a part of the weights alone, and the model is parallelized. Collective then.

    Raises:
        ArgumentError: none is there. UnsupportedError: it cannot be sharded.
    """
    require("transformers", "model", "a model of Transformers")
    from transformers import AutoModelForCausalLM

    try:
        if sharded and cp is not None:
            from ..integrations.transformers.sharded import load_sharded

            return _unmapped(load_sharded(path, cp, dtype))
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto", local_files_only=True)
    except ArgumentError:
        raise
    except (OSError, ValueError) as e:
        raise ArgumentError("model", "a folder with a causal model of Transformers", f"{path} ({e})") from None
    return _unmapped(model.to("cpu" if cp is None else cp.device))


def _fast(file: str, end: frozenset[int]) -> Text:
    """A tokenizer.json."""
    require("tokenizers", "model", f"the tokenizer {file}")
    from tokenizers import Tokenizer

    try:
        fast = Tokenizer.from_file(file)
    except Exception as e:  # tokenizers knows no other kind
        raise ArgumentError("tokenizer", "a tokenizer.json", f"{file} ({e})") from None
    ends = (fast.token_to_id(t) for t in ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"))
    end = end or frozenset({e for e in ends if e is not None})
    return Subwords(lambda text: fast.encode(text).ids, lambda ids: fast.decode(ids, skip_special_tokens=True), end)


def _auto(name: str, end: frozenset[int]) -> Text:
    """What AutoTokenizer reads."""
    require("transformers", "model", f"the tokenizer {name}")
    from jinja2 import TemplateError  # torch needs jinja2, so it is there
    from transformers import AutoTokenizer

    try:
        auto = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as e:  # each kind of tokenizer fails in its own way
        raise ArgumentError("tokenizer", "a folder AutoTokenizer reads", f"{name} ({e})") from None
    end = end or frozenset([] if auto.eos_token_id is None else [auto.eos_token_id])

    def decode(ids: list[int]) -> str:
        return str(auto.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def template(messages: Messages) -> list[int]:
        try:
            said: Any = [dict(message) for message in messages]
            return list(auto.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
        except TemplateError as e:  # what templates say of roles in an order they do not know
            raise ArgumentError("messages", "what the model's chat template takes", str(e)) from None

    return Subwords(lambda text: auto(text)["input_ids"], decode, end, template if auto.chat_template else None)
