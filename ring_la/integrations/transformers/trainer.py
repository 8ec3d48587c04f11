"""`ContextTrainer`: the Trainer of Transformers for a model that `parallelize` was given.

A Trainer gives every rank rows of its own. Here the ranks of a context group share each sequence, so they get the same
rows, and an evaluation counts each row once.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from ...context import ContextParallel
from ...errors import ArgumentError, UnsupportedError
from .split import SplitModel
from .trainer_shards import ShardsTrainer

LOGITS = "Ranks have the logits of their own tokens"
ROWS = "The ranks of a context group need the same rows"


def _refuse(option: str, allowed: object, got: object, hint: str) -> NoReturn:
    raise UnsupportedError(option, f"{allowed} under a ContextTrainer", got, hint)


@dataclass(frozen=True)
class DataAxis:
    """The context groups of a job, each of which has rows of its own.

    Attributes:
        groups: of each group its ranks in the job.
        index: of this rank's group.
    """

    groups: tuple[tuple[int, ...], ...]
    index: int

    @classmethod
    def of(cls, cp: ContextParallel) -> DataAxis:
        """As the ranks of the job find it together.

        Raises:
            ArgumentError: the groups are not of one size, or a rank is in none or in two.
        """
        mine, found = tuple(cp.comm.global_ranks), [()] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        groups = tuple(sorted(set(found)))
        if len({len(g) for g in groups}) > 1 or sum(map(len, groups)) != len(found):
            expected = f"context groups of one size that share no rank, of all {len(found)} ranks"
            raise ArgumentError("model", expected, " and ".join(map(str, groups)))
        return cls(groups, groups.index(mine))

    def once(self, gathered: Tensor) -> Tensor:
        """Of what all ranks gave ``[ranks · B, …]``, what the first of each group did ``[groups · B, …]``."""
        by_rank = gathered.unflatten(0, (sum(map(len, self.groups)), -1))
        return by_rank[[g[0] for g in self.groups]].flatten(0, 1)


class DataAccelerator:
    """An Accelerator as its data loaders should see it: a process is a context group."""

    dispatch_batches = False  # a process reads its own rows of an iterable data set

    def __init__(self, accelerator: Accelerator, axis: DataAxis) -> None:
        self.accelerator, self.axis = accelerator, axis
        self.num_processes, self.process_index = len(axis.groups), axis.index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.accelerator, name)

    def gather_for_metrics(self, input_data: Tensor, use_gather_object: bool = False) -> Tensor:
        """Of every group one rank's values ``[groups · B]``, without the rows that fill up a last batch."""
        values = self.axis.once(self.accelerator.gather(input_data))
        state = self.accelerator.gradient_state
        return values[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else values


class ContextTrainer(ShardsTrainer):
    """A Trainer whose sequences are split over the ranks of a context group; the arguments are the Trainer's.

    ::

        mesh = init_device_mesh("cuda", (data, context), mesh_dim_names=("data", "context"))
        parallelize(model, ring_la.ContextParallel(mesh["context"]), average=True)
        ContextTrainer(model=model, args=arguments, train_dataset=rows).train()

    The ranks of a group get the same rows, in the order the Trainer's own sampler gives them; batch sizes are those of
    a group. Losses are of whole sequences, in training and in `evaluate`. What needs the logits of a whole sequence is
    refused: label smoothing, compute_loss_func, compute_metrics and `predict`, but with prediction_loss_only.

    A model that ``shard_parameters(…, average=True)`` was given, and that `load_weights` has filled, stays on its
    shards: checkpoints are in Transformers' format beside the optimizer's shards; any other split goes on from them.
    What is trained and whole on every rank, such as adapters (`add_adapters`), the Trainer averages itself.

    Raises:
        ArgumentError: a model that was not parallelized, or without average=True; groups of several sizes.
        DisagreementError: of a sharded model, adapters that differ between ranks.
        UnsupportedError: an option that needs whole logits, or one that gives out rows in a way of its own; a model cut
            by `tensor_parallel`; of a sharded model, an option that would wrap or cast it again.
    """

    axis: DataAxis
    """The context groups of the job."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        settings = _split(self.model).settings
        if settings.cp.size > 1 and not settings.average:
            hint = "The Trainer averages gradients over all ranks: parallelize(…, average=True)"
            raise ArgumentError("model", "one parallelized with average=True", "average=False", hint)
        self._refuse_options()
        self._refuse_alone()
        self.axis = DataAxis.of(settings.cp)
        ours = DataAccelerator(self.accelerator, self.axis)
        self.accelerator.prepare_data_loader = MethodType(Accelerator.prepare_data_loader, ours)
        self.accelerator.gather_for_metrics = self.gather_function = ours.gather_for_metrics

    def _refuse_alone(self) -> None:
        """Refuse ranks that Accelerate takes for processes alone: it would average nothing among them."""
        ranks, taken = dist.get_world_size(), self.accelerator.num_processes
        if taken != ranks:
            hint = "Accelerate goes by RANK, LOCAL_RANK and WORLD_SIZE: start the ranks by torchrun, or set them"
            raise ArgumentError("args", f"TrainingArguments of {ranks} processes, the ranks of the job", taken, hint)

    def _refuse_options(self) -> None:
        """Refuse what wants the logits of whole sequences, or gives out rows in a way of its own."""
        if self.args.label_smoothing_factor != 0:
            _refuse("label_smoothing_factor", 0, self.args.label_smoothing_factor, LOGITS)
        if getattr(self.args, "train_sampling_strategy", None) == "batch_rebalance":
            _refuse("train_sampling_strategy", "another strategy", "batch_rebalance", ROWS)
        if self.args.n_gpu > 1:
            _refuse("n_gpu", 1, self.args.n_gpu, "One process would copy the model to all GPUs: start it by torchrun")
        for name in ("dispatch_batches", "split_batches"):
            if getattr(self.accelerator, name):
                _refuse(name, False, True, ROWS)
        if getattr(self.accelerator, "parallelism_config", None) is not None:
            _refuse("parallelism_config", None, "one", "ring_la splits the sequences")

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of an optimizer's step, each counted once however many ranks share it."""
        return super().get_total_train_batch_size(args) // len(self.axis.groups[0])

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        if self.compute_loss_func is not None:
            _refuse("compute_loss_func", None, "one", LOGITS)
        return super().compute_loss(*args, **keywords)

    def prediction_step(
        self, model: nn.Module, inputs: dict, prediction_loss_only: bool, *args: Any, **keywords: Any
    ) -> Any:
        if not prediction_loss_only:
            _refuse("prediction_loss_only", True, False, f"{LOGITS}: leave out compute_metrics")
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **keywords)


def _split(model: nn.Module | None) -> SplitModel:
    """What `parallelize` left in a model, whatever wraps it."""
    for module in [] if model is None else model.modules():
        if hasattr(module, "_ring_la"):
            return module._ring_la  # type: ignore[return-value]
    raise ArgumentError("model", "one that parallelize(model, cp, average=True) was given", type(model).__name__)
