"""What is looked at before a model runs split: its configuration, what crosses the sequence, who averages gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ...errors import UnsupportedError
from . import probe
from .averaging import refuse_averaging
from .call import Current, ModelCall
from .foreign import told_as_theirs
from .mixers import entry_of, takes_blocks
from .modules import ModuleForwards, known
from .settings import Settings


class Checks:
    """The checks of a model whose calls and forwards are ours already, each made once or when something has come."""

    def __init__(self, settings: Settings, current: Current, forwards: ModuleForwards) -> None:
        self.cp, self.current, self.forwards = settings.cp, current, forwards
        self._wanted = self._due = settings.check
        self._summed = settings.average
        self._adapters: list[tuple[str, int]] | None = None

    def first(self, model: PreTrainedModel) -> None:
        """Probe the model, unless a rank has it without memory: then all do in the first call. Collective."""
        if self._wanted and not self._somewhere(any(p.is_meta for p in model.parameters())):
            self._probe(model)

    def before(self, model: PreTrainedModel) -> None:
        """Before a split call: check what has come since. PEFT notes its adapters; the first call with gradients shows
        which wrappers average what is to be summed."""
        if self._wanted:
            adapters = [(name, id(config)) for name, config in (getattr(model, "peft_config", None) or {}).items()]
            if adapters != self._adapters:
                self._due |= any("_ring_la" not in vars(module) for module in model.modules())
                self._adapters = adapters
            if self._due:
                self._probe(model)
        if not self._summed and torch.is_grad_enabled():
            refuse_averaging(model, set(self.cp.comm.global_ranks))
            self._summed = True

    def _somewhere(self, here: bool) -> bool:
        """Whether something holds on any rank: FSDP loads weights on one, and the check may gather them. Collective."""
        return bool(self.cp.comm.all_reduce(torch.tensor(float(here), device=self.cp.device)).wait() > 0)

    @torch.compiler.disable
    def _probe(self, model: PreTrainedModel) -> None:
        """Refuse a model of which something uncovered crosses the sequence."""
        embedding, original = model.get_input_embeddings(), self.forwards.of(model)
        inside = (
            [] if isinstance(embedding, nn.ModuleList) else embedding.modules()
        )  # an adapter's wrapper has it inside
        table = next((m for m in inside if hasattr(m, "num_embeddings")), None)
        if table is None:
            raise UnsupportedError("model", "one table of input embeddings", f"a {type(embedding).__name__} of them")

        def run(ids: Tensor, positions: Tensor | None, offsets: Sequence[int]) -> object:
            self.current.call = ModelCall(None, torch.tensor(offsets, dtype=torch.int32, device=ids.device))
            keywords = {"position_ids": positions, "use_cache": False, "return_dict": True}
            return original(model, input_ids=ids, **known(original, keywords))

        try:
            longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
            longest = longest if longest > 0 else probe.TOKENS  # XLNet's -1: any
            with told_as_theirs(table.weight.device):  # type: ignore[arg-type]
                probe.check(model, run, table.num_embeddings, longest, table.weight.device)  # type: ignore[arg-type]
        finally:
            self.current.leave()
        self._due = False


def refuse_by_config(model: PreTrainedModel) -> None:
    """Refuse what a model's configuration and parameters already show."""
    name, config = type(model).__name__, model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError("model", "a decoder", f"{name}, an encoder-decoder")
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        hint = "Parallelize it first, then fully_shard; the library's tensor parallelism is not supported"
        raise UnsupportedError("model", "whole parameters", f"{name}, whose parameters are sharded", hint)
    for label, module in model.named_modules():
        if getattr(module, "layerdrop", None):
            got = f"{label} ({type(module).__name__}) with layerdrop={module.layerdrop}"
            raise UnsupportedError("model", "the same layers on every rank", got, "Set it to 0")
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError("model", "causal attention", f"{name} with is_causal=False")


def refuse_other_bits(model: PreTrainedModel, settings: Settings) -> None:
    """Refuse, for a deterministic ContextParallel, layers whose operators take no blocks, and what scales gradients."""
    for name, module in model.named_modules():
        if entry_of(type(module)) is not None and not takes_blocks(type(module)):
            got = f"a deterministic one with {name} ({type(module).__name__})"
            raise UnsupportedError("cp", "deterministic=False for this layer", got)
    for name, given in (("average", settings.average), ("loss_chunk", settings.loss_chunk is not None)):
        if given:
            raise UnsupportedError(name, "not given with deterministic=True", getattr(settings, name))


def refuse_head(model: PreTrainedModel, backbone: PreTrainedModel, loss: Callable) -> None:
    """Refuse heads that pool tokens or compare labels in another way."""
    if backbone is not model and loss is not ForCausalLMLoss:
        got = f"{type(model).__name__} with {getattr(loss, '__name__', loss)}"
        raise UnsupportedError("model", "a language model's head with ForCausalLMLoss, or none", got)


def refuse_by_places(model: PreTrainedModel) -> None:
    """Refuse what the Trainer or PEFT put into a model that counts the tokens of a row."""
    noise = getattr(model.get_input_embeddings(), "neftune_noise_alpha", None) if model.training else None
    if noise:
        raise UnsupportedError("neftune_noise_alpha", "None", noise, "Its noise goes by the tokens of a rank")
    for config in (getattr(model, "peft_config", None) or {}).values():
        tokens = getattr(config, "alora_invocation_tokens", None)
        if tokens:
            hint = "Such an adapter counts a rank's tokens from their end"
            raise UnsupportedError("alora_invocation_tokens", "None", tokens, hint)
