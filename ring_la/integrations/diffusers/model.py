"""A transformer of Diffusers whose blocks run on this rank's tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd import outside_graphs
from ...context import ContextParallel
from ...context.handle import enter
from ...errors import RingLAError, UnsupportedError
from . import operators
from .ahead import Posting
from .caches import check_hooks
from .call import DenoiserCall
from .checks import check_call
from .compare import InputComparison, WholeImage, mapped, tensors_in
from .cutting import ahead, cut, part_of, residuals, sizes_of, start
from .kernels import kernel_named
from .keys import GivenMask
from .layer_hooks import LayerHooks
from .linear import split_linear
from .modulation import StepLayers
from .plans import (
    IMAGE,
    BlockPlan,
    ModelPlan,
    Role,
    TimeSteps,
    TokenRows,
)
from .streams import Layouts


class SplitDenoiser:
    """What `parallelize` leaves in a model, under the name ``_ring_la``.

    Attributes:
        call: the one under way; while a block is computed again in a backward pass, the one it belongs to.
        comparison: of what the ranks are given.
        scale: what the output's gradient is multiplied by.
        posting: lets keys leave before queries, where processors can do so; None: they do not.
        number: under which the compiled attention finds this.
        deciding: the groups whose ranks decide together what a step cache leaves out.
        how: kernel and wire of split attention, as `parallelize` was told.
        signature: of the model's forward, without the model itself.
        modules: the model's, by name.
        steps: layers that read the step of time alone, shared out among the ranks; None: there are none.
        behind: hooks that follow the layers they stand behind.
        undo: the way back.
    """

    undo: ExitStack
    behind: LayerHooks
    modules: list[tuple[str, nn.Module]]

    def __init__(
        self,
        model: nn.Module,
        plan: ModelPlan,
        cp: ContextParallel,
        how: Mapping[str, Any],
        scale: int,
        keys_first: bool = False,
    ) -> None:
        self.plan, self.cp, self.how, self.scale = plan, cp, how, scale
        self.posting = Posting(self) if keys_first and cp.size > 1 else None
        self.layouts, self.comparison = Layouts(cp), InputComparison(cp)
        self.call = DenoiserCall(cp, self.layouts, 0)
        self.deciding = (cp.comm,)
        self.signature = inspect.signature(MethodType(type(model).forward, model))
        self.number = enter(self)
        self.steps: StepLayers | None = None

    def __deepcopy__(self, memo: dict) -> SplitDenoiser:
        """A copy would share the calls of its original."""
        raise UnsupportedError("transformer", "a copy made before parallelize", "a parallelized one")

    # -- in a call ---------------------------------------------------------------------------------------------

    @outside_graphs
    def enter(self, model: nn.Module, args: tuple, keywords: Mapping[str, Any]) -> tuple[tuple, dict] | None:
        """Before the model: refuse what a split call has no part for, on all ranks if on one; compare the inputs."""
        error, given = None, {}
        try:
            given = dict(self.signature.bind(*args, **keywords).arguments)
            processors = check_call(model, self.plan, self.signature, given)
            given["kernel"] = kernel_named(processors, self.how["backend"])
            given["step cache"] = check_hooks(model, self)
            self.call = DenoiserCall(self.cp, self.layouts, len(given[self.plan.latents]))
            self.call.how = {**self.how, "backend": given["kernel"]}
        except (TypeError, RingLAError) as e:
            error = e
        self.behind.follow()
        if self.steps is not None:
            self.steps.forget()
        self.comparison.begin(given, error)
        if self.plan.grid is not None:
            self.call.place(self.layouts.grid(self.plan.grid(model, given["hidden_states"])))
        own = getattr(model, "_gradient_checkpointing_func", None)
        if own is not None and not hasattr(own, "ring_la"):
            model._gradient_checkpointing_func = self._checkpointed(own)  # type: ignore[assignment]
            self.undo.callback(setattr, model, "_gradient_checkpointing_func", own)
        added = {n: residuals(self.call, n, given[n]) for n in self.plan.residuals if given.get(n) is not None}
        if not added:
            return None
        del given["step cache"], given["kernel"]
        return (), given | added

    def step(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Behind the step's embedding: what blocks make of it alone, of all ranks."""
        if self.steps is not None and not torch.compiler.is_compiling():
            self.steps.compute(output[0] if isinstance(output, tuple) else output)

    def _checkpointed(self, own: Callable) -> Callable:
        """The model's way to compute a block again in backward, as part of the call it was in."""

        @functools.wraps(own)
        def checkpointed(block: Callable, *args, **keywords):  # type: ignore[no-untyped-def]
            call = self.call

            def run(*args, **keywords):  # type: ignore[no-untyped-def]
                last, self.call = self.call, call
                try:
                    return block(*args, **keywords)
                finally:
                    self.call = last

            return own(run, *args, **keywords)

        checkpointed.ring_la = True  # type: ignore[attr-defined]
        return checkpointed

    def before_block(
        self,
        path: str,
        spec: BlockPlan,
        names: tuple[str, ...],
        needed: tuple[str, ...],
        block: nn.Module,
        args: tuple,
        keywords: Mapping[str, Any],
    ) -> tuple[tuple, dict[str, Any]]:
        """Before a block: this rank's tokens of what is whole. torch.compile traces it."""
        given = {**dict(zip(names, args)), **keywords}
        sizes = self.call.streams.sizes
        first = not self.call.started or any([stream not in sizes for stream in needed])
        if first:
            start(self.call, spec, given)
        positional, given = cut(self.call, path, spec, names[: len(args)], given, not first)
        if self.posting is not None and spec.wide is not None:
            self.call.rotary = {**dict(zip(names, positional)), **given}.get(spec.wide.rotary)
        return positional, given

    def before_refiner(
        self,
        path: str,
        spec: BlockPlan,
        names: tuple[str, ...],
        first: bool,
        block: nn.Module,
        args: tuple,
        keywords: Mapping[str, Any],
    ) -> tuple[tuple, dict[str, Any]]:
        """The same before one of a list of refiners; `first`: of the list."""
        given = {**dict(zip(names, args)), **keywords}
        if first:
            self.call.streams.note(sizes_of(self.call, spec, given))
        return cut(self.call, path, spec, names[: len(args)], given, not first)

    def split_output(self, roles: Mapping[int, Role], module: nn.Module, args: tuple, output: Any) -> Any:
        """Behind a module that makes steps of time, where each token has its own, or a stream's tokens: this rank's."""
        if isinstance(output, Tensor):
            return self.split_output(roles, module, args, (output,))[0]
        output = list(output)
        for n, role in roles.items():
            if isinstance(role, TokenRows):
                ahead(self.call, type(module).__name__, role, output[n])
            if isinstance(role, TimeSteps):
                tokens = len(output[n]) // self.call.batch if role.flat else output[n].shape[1]
                if role.flat or output[n].dim() == role.dims:
                    self.call.streams.note({role.stream: tokens})
            output[n] = part_of(self.call, f"output of {type(module).__name__}", output[n], role)
        return tuple(output)

    def attend_image(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention over the image's tokens, ``[B, T, H, D]``."""
        return self.attend(IMAGE, q, k, v, scale)

    def attend(self, order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention of a block's processor, over the streams of `order`."""
        masked, sizes = self.call.masked, self.call.streams.whole(order)
        if torch.compiler.is_compiling():
            mask, streams = (None, ()) if masked is None else (masked.mask, masked.streams)
            names = ",".join(order), ",".join(streams)
            return operators.diffusion_attention(q, k, v, mask, self.number, names[0], sizes, names[1], scale)
        return self.call.keys.attend((q, k, v), order, sizes, masked, scale, self.call.how)

    def attend_others(self, order, keys, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:  # type: ignore[no-untyped-def]
        return self.call.keys.attend_others((q, k, v), order, keys, self.call.masked, scale, self.call.how)

    def attend_now(self, qkv, streams: str, sizes, mask: Tensor | None, masked: str, scale: float | None) -> Tensor:  # type: ignore[no-untyped-def]
        """Attention in the call under way, as the registered operator asks for it."""
        given = GivenMask.of(mask, masked)
        return self.call.keys.attend(qkv, tuple(streams.split(",")), tuple(sizes), given, scale, self.call.how)

    def linear_now(
        self, q: Tensor, k: Tensor, v: Tensor, normalizer_q: Tensor | None, normalizer_k: Tensor | None
    ) -> Tensor:
        """Linear attention in the call under way, as the registered operator asks for it."""
        return split_linear(self.call.grid, q, k, v, normalizer_q, normalizer_k)

    def widen(self, block: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Behind the last block: rows for the text of others, which the model takes off."""
        streams = self.call.streams
        others = output.new_zeros(len(output), streams.sizes["text"] - streams.local("text"), output.shape[2])
        return torch.cat([others, output], 1)

    def refined(self, stream: str, block: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Behind a refiner: all its tokens, of which every rank takes its own again."""
        return self.layouts.of(self.call.streams.counts([stream])).gather(output, 1)

    def gather(self, module: nn.Module, args: tuple, output: Any, stream: str | None = None) -> Any:
        """Behind the last layer: the whole image."""
        if not self.call.started:  # all blocks were skipped
            return output
        self.call.parts.clear()  # the blocks are done
        if stream is not None or self.plan.last == "":
            return mapped(output, lambda x: self._whole(x, stream or "image"))
        if isinstance(output, tuple):
            streams = zip(output, self.plan.returned, strict=True)
            return tuple(x if x is None else self._whole(x, stream) for x, stream in streams)
        return self._whole(output, self.plan.returned[0])

    def _whole(self, x: Tensor, stream: str) -> Tensor:
        counts = self.call.streams.counts([stream])
        if torch.compiler.is_compiling():
            return operators.whole_image(x, self.number, self.plan.dim, counts)
        return self.whole_now(x, counts)

    def whole_now(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """All rows of an image of which each rank has so many tokens, recorded for gradients."""
        layout = self.layouts.of(tuple(counts))
        return WholeImage.apply(x, layout, self.plan.dim, self._scale, self.comparison)

    def own_gradient(self, grad: Tensor, counts: Sequence[int]) -> Tensor:
        """The gradient of this rank's rows of it."""
        return self.layouts.of(tuple(counts)).shard(grad, self.plan.dim) * self._scale

    @property
    def _scale(self) -> int:
        return self.cp.size if self.plan.layers_behind else self.scale

    def divide_gradient(self, model: nn.Module, args: tuple, output: Any) -> None:
        """Behind a model with layers behind the gathering: what every rank computes there counts once in the sum."""
        share = self.scale / self.cp.size
        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(lambda grad: grad * share)
