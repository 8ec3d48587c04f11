"""`parallelize`: a transformer of Diffusers whose blocks run on this rank's tokens."""

from __future__ import annotations

import copy
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ...context import ContextParallel
from ...errors import ArgumentError, PeerError, RingLAError, UnsupportedError
from .keys import Keys
from .plans import PLANS, Attention, Block, Mask, Plan, Role, Rows, Steps
from .processors import split_class
from .streams import Streams, Whole


def parallelize(
    transformer: nn.Module, cp: ContextParallel, *, backend: str | None = None, average: bool = False
) -> nn.Module:
    """Make a transformer of Diffusers run on a split sequence; changed in place and returned.

    The call stays as it was: every rank gives the whole inputs, the same on all of them (seed the generators that draw
    latents alike), and gets the whole output. Parameters' and inputs' gradients of a loss that every rank computes from
    the whole output are parts, whose sum over the group is the gradient of one process.

    Args:
        transformer: a model with an entry in `PLANS`, with its own attention processors. LoRA's layers may be in it;
            hooks on its blocks (caches, offloading by Diffusers) may not.
        cp: the group the sequence is split over; its `attention` says how keys travel.
        backend: the kernel of split attention, by `ring_la.attention`'s name; None: the fastest that can do it.
        average: gradients averaged over the group, not summed, are those of one process: for DDP and FSDP.

    Raises:
        ArgumentError, UnsupportedError: a wrong argument; a model that cannot run split, by the module's name, which is
            then left as it was. In a call: arguments that have no part in a split one, or inputs that differ among the
            ranks, by name and on every rank.
    """
    if not isinstance(transformer, nn.Module):
        got = type(transformer).__name__
        raise ArgumentError("transformer", "a model (a pipeline's transformer)", got, "pipeline.transformer")
    if not isinstance(cp, ContextParallel):
        raise ArgumentError("cp", "a ContextParallel", type(cp).__name__)
    if not isinstance(average, bool):
        raise ArgumentError("average", "True or False", repr(average))
    if cp.deterministic:
        raise UnsupportedError("cp", "deterministic=False", "a deterministic one", "Text and image mix by rank")
    if hasattr(transformer, "_ring_la"):
        raise ArgumentError("transformer", "one that is not parallelized", "one that is")
    plan = PLANS.get(type(transformer).__name__)
    if plan is None or not type(transformer).__module__.startswith("diffusers."):
        expected = f"one of {', '.join(PLANS)}"
        raise UnsupportedError("transformer", expected, type(transformer).__name__, "A model is an entry in PLANS")
    if getattr(transformer, "_parallel_config", None) is not None:
        raise UnsupportedError("transformer", "one without Diffusers' own parallelism", "enable_parallelism was called")
    parallel = Parallel(transformer, plan, cp, backend, cp.size if average else 1)
    with ExitStack() as undo:
        parallel.adopt(transformer, undo)
        undo.pop_all()  # accepted
    return transformer


class Call:
    """One call of the model: its streams of tokens, the keys its blocks see, and its rows."""

    def __init__(self, cp: ContextParallel, layouts: dict, batch: int) -> None:
        self.streams, self.batch = Streams(cp, layouts), batch
        self.keys = Keys(self.streams)


class Parallel:
    """What `parallelize` leaves in a model, under the name ``_ring_la``.

    Attributes:
        call: the one under way; while a block is computed again in a backward pass, the one it belongs to.
        scale: what the output's gradient is multiplied by.
    """

    def __init__(self, model: nn.Module, plan: Plan, cp: ContextParallel, backend: str | None, scale: int) -> None:
        self.plan, self.cp, self.backend, self.scale = plan, cp, backend, scale
        self._layouts: dict = {}
        self._classes: dict[tuple, type] = {}
        self.call = Call(cp, self._layouts, 0)
        self._signature = inspect.signature(type(model).forward)
        self._compared = False

    def adopt(self, model: nn.Module, undo: ExitStack) -> None:
        """Replace processors and hook the modules; `undo` takes the way back."""
        model._ring_la = self
        undo.callback(delattr, model, "_ring_la")
        missing = [n for n in self.plan.inputs if n not in self._signature.parameters]
        if missing:
            raise _other_version(type(model).__name__, f"no argument {missing[0]}")
        undo.callback(model.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
        first = True
        for path, kind in self.plan.blocks.items():
            blocks = getattr(model, path, None)
            if not isinstance(blocks, nn.ModuleList):
                raise _other_version(type(model).__name__, f"no list of blocks {path}")
            for n, block in enumerate(blocks):
                self._adopt_block(f"{path}.{n}", block, kind, undo)
                signature = inspect.signature(type(block).forward)
                hook = functools.partial(self._split, f"{path}.{n}", self.plan.classes[kind], signature, first)
                undo.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
                first = False
        if self.plan.cuts_whole_text:
            undo.callback(blocks[-1].register_forward_hook(self._widen).remove)
        for path, roles in self.plan.outputs.items():
            hook = functools.partial(self._split_output, roles)
            undo.callback(model.get_submodule(path).register_forward_hook(hook).remove)
        undo.callback(model.get_submodule(self.plan.last).register_forward_hook(self._gather).remove)

    def _adopt_block(self, name: str, block: nn.Module, kind: str, undo: ExitStack) -> None:
        if type(block).__name__ != kind or not type(block).__module__.startswith("diffusers."):
            raise UnsupportedError("transformer", f"a {kind}", f"{name}, a {type(block).__name__}")
        spec = self.plan.classes[kind]
        taken = inspect.signature(type(block).forward).parameters
        taken = [n for n, p in taken.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
        if set(taken) != set(spec.arguments):
            odd = sorted(set(taken) ^ set(spec.arguments))
            raise _other_version(f"{name} ({kind})", f"arguments that differ in {', '.join(odd)}")
        for label, module in block.named_modules():
            if not hasattr(module, "processor"):
                continue
            known = spec.attention.get(label)
            processor, where = module.processor, f"{name}.{label}"
            if known is None or type(processor).__name__ not in known.processors:
                expected = f"an attention with {' or '.join(known.processors)}" if known else "no attention there"
                raise UnsupportedError("transformer", expected, f"{where} with {type(processor).__name__}")
            if getattr(processor, "_attention_backend", None) is not None:
                hint = "Name a kernel by parallelize(backend=…) instead"
                raise UnsupportedError("transformer", "no attention backend of Diffusers", f"one in {where}", hint)
            if known.streams is not None:
                undo.callback(setattr, module, "processor", processor)
                module.processor = copy.copy(processor)
                module.processor.__class__ = self._class_of(type(processor), known)

    def _class_of(self, kind: type, spec: Attention) -> type:
        """Of split processors; one for all of a kind, which torch.compile then compiles once."""
        if (kind, spec.streams) not in self._classes:
            self._classes[kind, spec.streams] = split_class(kind, functools.partial(self._attend, spec.streams))
        return self._classes[kind, spec.streams]

    def __deepcopy__(self, memo: dict) -> Parallel:
        """A copy would share the calls of its original."""
        raise UnsupportedError("transformer", "a copy made before parallelize", "a parallelized one")

    # -- in a call ---------------------------------------------------------------------------------------------

    def _enter(self, model: nn.Module, args: tuple, keywords: Mapping[str, object]) -> None:
        """Before the model: refuse what a split call has no part for, on all ranks if on one; compare the inputs."""
        error = None
        try:
            given = self._signature.bind(model, *args, **keywords).arguments
            self._check(model, given)
            self.call = Call(self.cp, self._layouts, len(given["hidden_states"]))
        except (TypeError, RingLAError) as e:
            error = e
        validate = self.cp.validate
        if validate == "always" or (validate == "first" and (error is not None or not self._compared)):
            report = f"refused: {error}" if error else {n: _facts(x) for n, x in given.items() if n != "self"}
            try:
                self.cp.comm.agreement.agree("the inputs of the model, which every rank must be given whole", report)
            except PeerError:
                if error is not None:  # the others compared a call before: this rank's own error
                    raise error from None
                raise
            self._compared = error is None
        if error is not None:
            raise error
        own = getattr(model, "_gradient_checkpointing_func", None)
        if own is not None and not hasattr(own, "ring_la"):
            model._gradient_checkpointing_func = self._checkpointed(own)

    def _checkpointed(self, own: Callable) -> Callable:
        """The model's way to compute a block again in backward, as part of the call it was in."""

        @functools.wraps(own)
        def checkpointed(block: Callable, *args, **keywords):
            call = self.call

            def run(*args, **keywords):
                last, self.call = self.call, call
                try:
                    return block(*args, **keywords)
                finally:
                    self.call = last

            return own(run, *args, **keywords)

        checkpointed.ring_la = True
        return checkpointed

    def _check(self, model: nn.Module, given: Mapping[str, object]) -> None:
        for name, value in given.items():
            default = self._signature.parameters[name].default
            if name == "self" or name in self.plan.inputs or value is None or value is default:
                continue
            if isinstance(value, dict) and set(value) <= {"scale"}:  # LoRA's, which the library takes out itself
                continue
            hint = "Its tokens would not be split"
            raise UnsupportedError(name, "its default on a split sequence", type(value).__name__, hint)
        if not isinstance(given["hidden_states"], Tensor):
            raise ArgumentError("hidden_states", "a tensor", type(given["hidden_states"]).__name__)
        for path, kind in self.plan.blocks.items():
            for n, block in enumerate(getattr(model, path)):
                if hasattr(block, "_diffusers_hook"):
                    raise UnsupportedError("transformer", "blocks without hooks of Diffusers", f"one on {path}.{n}")
                for label, module in block.named_modules():
                    known = self.plan.classes[kind].attention.get(label)
                    if known and known.streams and not getattr(module.processor, "ring_la", False):
                        got = f"{path}.{n}.{label} with {type(module.processor).__name__}, set afterwards"
                        raise UnsupportedError("transformer", "the processors of parallelize", got)

    def _split(
        self,
        name: str,
        spec: Block,
        signature: inspect.Signature,
        first: bool,
        block: nn.Module,
        args: tuple,
        keywords: Mapping[str, object],
    ) -> tuple[tuple, dict[str, object]]:
        """Before a block: this rank's tokens of what is whole."""
        bound = signature.bind(block, *args, **keywords)
        given = bound.arguments
        if first:
            streams = {"image": "hidden_states"}
            if isinstance(spec.arguments["encoder_hidden_states"], Rows):
                streams["text"] = "encoder_hidden_states"
            self.call.streams.sizes = {s: given[n].shape[1] for s, n in streams.items()}
            for stream, argument in streams.items():  # processors slice by lengths, which at 0 is another slice
                if given[argument].shape[1] < self.cp.size:
                    expected = f"at least {self.cp.size} tokens of {stream}, one for each rank"
                    raise ArgumentError(argument, expected, given[argument].shape[1])
        for argument, role in spec.arguments.items():
            if isinstance(role, Mask):
                joint = next(a.streams for a in spec.attention.values() if a.streams and len(a.streams) > 1)
                self.call.keys.set(f"{name}: {argument}", given.get(argument), role, joint)
                if argument in given:
                    given[argument] = None
            elif argument in given:
                given[argument] = self._part(f"{name}: {argument}", given[argument], role)
        return bound.args[1:], bound.kwargs

    def _part(self, name: str, x: object, role: Role) -> object:
        """This rank's tokens of an argument."""
        if role is None or x is None:
            return x
        if isinstance(role, tuple):
            if not isinstance(x, (tuple, list)) or len(x) != len(role):
                raise ArgumentError(name, f"{len(role)} tensors", type(x).__name__)
            return type(x)(self._part(name, one, part) for one, part in zip(x, role))
        if isinstance(role, Rows):
            return self.call.streams.shard(name, x, role.streams, role.dim)
        if role.flat:
            rows = x.unflatten(0, (self.call.batch, -1))
            return x if rows.shape[1] == 1 else self.call.streams.shard(name, rows, ("image",), 1).flatten(0, 1)
        return self.call.streams.shard(name, x, ("image",), 1) if x.dim() == role.dims and x.shape[1] > 1 else x

    def _split_output(self, roles: Mapping[int, Role], module: nn.Module, args: tuple, output: tuple) -> tuple:
        """Behind a module that makes steps of time: this rank's, where each token has its own."""
        output = list(output)
        for n, role in roles.items():
            if isinstance(role, Steps):
                tokens = len(output[n]) // self.call.batch if role.flat else output[n].shape[1]
                if role.flat or output[n].dim() == role.dims:
                    self.call.streams.sizes = {"image": tokens}
            output[n] = self._part(f"steps of {type(module).__name__}", output[n], role)
        return tuple(output)

    def _attend(self, order: tuple[str, ...], q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return self.call.keys.attend(q, k, v, order, scale, self.backend)

    def _widen(self, block: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Behind the last block: rows for the text of others, which the model takes off."""
        text = self.call.streams.of("text")
        others = output.new_zeros(len(output), text.seq_len - text.local_length, output.shape[2])
        return torch.cat([others, output], 1)

    def _gather(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        """Behind the last layer: the whole image."""
        return Whole.apply(output, self.call.streams.of("image"), self.scale)


def _other_version(what: str, got: str) -> UnsupportedError:
    return UnsupportedError("transformer", f"{what} as the plan knows it", got, "Another version of Diffusers")


def _facts(x: object) -> object:
    """What must be the same of an input on all ranks; waits for the device."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {list(x.shape)}, gradient {x.requires_grad}, checksum {_sum(x)}"
    if isinstance(x, (tuple, list)):
        return [_facts(one) for one in x]
    if isinstance(x, Mapping):
        return {n: _facts(one) for n, one in x.items()}
    return x if isinstance(x, (bool, int, float, str)) else type(x).__name__


def _sum(x: Tensor) -> int:
    """A checksum of the values; waits for the device."""
    values = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().flatten())  # a clone of one value keeps stride 0
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())
