"""The Trainer of Transformers on a model that FSDP2 has sharded already: nothing wraps it again, and checkpoints are
written and read by shards.

    checkpoint-500/    config.json, shards of safetensors and their index, as `save_weights` writes them; of adapters
                       what PEFT writes, by rank 0
        optimizer/     its states by torch.distributed.checkpoint, so that a run with other axes reads them
        scheduler.pt, trainer_state.json, rng_state_*.pth: the Trainer's own
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer

from ...context import ContextParallel, agree_on_weights
from ...errors import UnsupportedError
from ...reading import load
from ...training import clip_gradients, sum_gradients
from .averaging import averaging
from .weights import load_weights, save_weights
from .weights.files import INDEX

OPTIMIZER, SCHEDULER, ARGUMENTS = "optimizer", "scheduler.pt", "training_args.bin"
TRAINED = StateDictOptions(ignore_frozen_params=True)


class ShardsTrainer(Trainer):
    """A Trainer that leaves a sharded model as it is; with any other it is the Trainer.

    Attributes:
        sharded: whether the model's parameters are shards.
        copies: of such a model, what is trained and whole on every rank, such as adapters. The Trainer averages it.
    """

    sharded: bool
    copies: list[nn.Parameter]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        model = self.model
        self.sharded = isinstance(model, nn.Module) and any(isinstance(p, DTensor) for p in model.parameters())
        if self.sharded:
            self._refuse_for_shards(model)
            self.accelerator.prepare_model = self._prepared
            self.copies = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
            if self.copies:
                self._everyone = ContextParallel(scan="ring")
                agree_on_weights(nn.ParameterList(self.copies), self._everyone.comm)

    def _refuse_for_shards(self, model: nn.Module) -> None:
        if not any(isinstance(m, FSDPModule) for m in model.modules()):
            name = next(n for n, p in model.named_parameters() if isinstance(p, DTensor))
            hint = "Train what tensor_parallel cut in a loop of your own: sum_gradients, clip_gradients, save_weights"
            raise UnsupportedError("model", "one that is whole on each rank or sharded by FSDP2", f"{name}, cut", hint)
        if not any(True for _ in averaging(model)):
            hint = "The Trainer averages gradients over all ranks: shard_parameters(…, average=True)"
            raise UnsupportedError("model", "one whose shards' gradients are averaged", "sums", hint)
        for name in ("bf16", "fp16", "fsdp", "deepspeed"):
            if getattr(self.args, name, None):
                hint = "shard_parameters(dtype=torch.bfloat16) says what a sharded model computes in"
                raise UnsupportedError(name, "none with a sharded model", getattr(self.args, name), hint)

    def _prepared(self, model: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
        """In place of Accelerate's own, which would wrap the model for data parallelism."""
        self.accelerator._models.append(model)
        return model

    def training_step(self, *args: Any, **keywords: Any) -> Tensor:
        loss = super().training_step(*args, **keywords)
        if self.sharded and self.copies and self.accelerator.sync_gradients:
            sum_gradients(self.copies, self._everyone)
            for p in self.copies:
                if p.grad is not None:
                    p.grad /= self._everyone.size
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if not self.sharded:
            return super()._clip_grad_norm(model)
        return clip_gradients(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if not self.sharded or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return clip_gradients(model.parameters(), float("inf"))

    # -- writing -------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; of a sharded model every rank calls it, and none holds it whole."""
        if not self.sharded:
            return super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir or ".")
        if self.args.should_save:
            for file in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
                file.unlink()
        dist.barrier()
        if not _adapted(self.model):
            save_weights(self.model, folder)  # type: ignore[arg-type]
        elif self.args.should_save:
            self.model.save_pretrained(folder)  # type: ignore[operator]
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / ARGUMENTS)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        dcp.save({"optimizer": self._states()}, checkpoint_id=Path(output_dir) / OPTIMIZER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)
        return None

    def _states(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, _bare(self.optimizer), options=TRAINED)

    # -- reading -------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.sharded:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        return self._reload(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not self.sharded:
            return super()._load_best_model()
        return self._reload(str(self.state.best_model_checkpoint))

    def _reload(self, folder: str) -> None:
        if not _adapted(self.model):
            return reload_weights(self.model, folder, self.args.device)
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_peft_weights(folder, device="cpu"))
        return None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.sharded:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and Path(checkpoint, OPTIMIZER).is_dir():
            state = {"optimizer": self._states()}
            load(state, Path(checkpoint) / OPTIMIZER)
            set_optimizer_state_dict(self.model, _bare(self.optimizer), state["optimizer"], options=TRAINED)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
        return None


def _adapted(model: Any) -> bool:
    """Whether what is trained are adapters of PEFT, around a model."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """What Accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


@torch.no_grad()
def reload_weights(model: Any, folder: str, device: torch.device) -> None:
    """`load_weights` into parameters that FSDP2 and an optimizer know already, which stay the same objects."""
    places = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # whose state orders the rows
        load_weights(model, folder, device=device)
    for module, name, p in places:
        new: Tensor | None = module._parameters[name]
        if new is not None and new is not p:
            p.copy_(new)
            module._parameters[name] = p
