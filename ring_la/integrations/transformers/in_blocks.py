"""A call under a deterministic layout: the model runs on 64 tokens of a document at a time, every block alike.

A model's own code between ring_la's operators is anything, so all of it is run block by block, on tensors of one shape
(`ring_la.blockwise` says why). The blocks' runs meet (`turns`) at what crosses the sequence, at linear layers, at the
embedding and at the loss: there all tokens of the rank are one tensor. Gradients of parameters that blocks use by
themselves are added exactly.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from ...blockwise import BLOCK, blocks_of, embedding, linear, token_sum
from ...blockwise.blocks import filled
from ...context import ShardedLayout
from ...errors import UnsupportedError
from .block_links import JoinedBlocks, PartedBlocks, RankBlocks, SharedParameters
from .call import ModelCall, Returned
from .loss import whole_loss
from .turns import MeetingTurn, in_turns


class Meeting(NamedTuple):
    """What a block's run asks for: a function of tokens ``[B, T, …]`` of which it brings its own, ``[1, 64, …]``."""

    function: Callable[..., Any]
    tokens: tuple[Tensor, ...]
    shared: dict[str, Any]
    one: bool = False
    """The result is one for all blocks."""


class BlockRuns:
    """The runs of one call.

    Args:
        layout: deterministic. rows: of the batch. parameters: of the model, those that want gradients.
    """

    def __init__(self, layout: ShardedLayout, rows: int, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = layout
        places = [(b, start, stop) for b in range(rows) for start, stop in blocks_of(layout)]
        places = places or [(0, 0, 0)]  # a rank without tokens runs one of nothing
        self.blocks, self.places = RankBlocks(places, rows, layout.local_length), places
        self._here = threading.local()
        found = SharedParameters.apply(layout, len(self.places), *parameters)
        self._chain, aliases = found[0], iter(found[1:])
        self._own = {id(p): tuple(next(aliases) for _ in self.places) for p in parameters}

    def run(self, forward: Callable[..., ModelOutput], keywords: dict[str, Any]) -> list[ModelOutput]:
        """The model's result on each block."""

        def one(number: int, turn: MeetingTurn) -> ModelOutput:
            self._here.turn, self._here.place = turn, self.places[number]
            with InBlock(self, number):
                return forward(**{n: self._cut(x) for n, x in keywords.items()})

        functions = [functools.partial(one, n) for n in range(len(self.places))]
        return in_turns(functions, self._together, self.layout.cp.device)

    # -- within a block --------------------------------------------------------------------------------------

    def operator(self, function: Callable[..., Any], *tokens: Tensor, **shared: Any) -> Any:
        """``function(*tokens, **shared, layout=…)`` of all tokens, and this block's of its o."""
        call = functools.partial(function, layout=self.layout)
        return self._here.turn.ask(Meeting(call, tokens, shared))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer of all tokens."""
        call = functools.partial(linear, layout=self.layout)
        return self._here.turn.ask(Meeting(call, (x,), dict(weight=weight, bias=bias)))

    def embedding(self, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """The embedding of all tokens."""
        call = functools.partial(_embedded, layout=self.layout, padding_idx=padding_idx)
        return self._here.turn.ask(Meeting(call, (ids,), dict(weight=weight)))

    def cross_entropy(self, call: Any, logits: Tensor, vocab_size: int) -> Tensor:
        """`loss.cross_entropy`; the same for all blocks."""
        targets, (row, start, stop) = call.targets, self._here.place
        labels = torch.full((BLOCK,), targets.ignore_index, dtype=torch.int64, device=logits.device)
        labels[: stop - start] = targets.labels[row, start:stop]
        flat = logits.float().reshape(BLOCK, vocab_size)
        losses = F.cross_entropy(flat, labels, ignore_index=targets.ignore_index, reduction="none")

        def whole(losses: Tensor) -> Tensor:
            part = token_sum(losses, layout=self.layout) / targets.divisor
            return whole_loss(part, self.layout.cp, call.fingerprint)

        return self._here.turn.ask(Meeting(whole, (losses[None],), {}, one=True))

    def _cut(self, x: Any) -> Any:
        """A block's part of an argument: ids, labels and embeddings ``[B, T, …]``, positions ``[…, B or 1, T]``."""
        if not isinstance(x, Tensor):
            return x
        row, start, stop = self._here.place
        if x.shape[:2] == self.blocks[1:]:
            return filled(x, row, start, stop)
        rows = x.movedim(-2, 0).movedim(-1, 1)
        return filled(rows, min(row, len(rows) - 1), start, stop).movedim(1, -1).movedim(0, -2)

    # -- where they meet -------------------------------------------------------------------------------------

    def _together(self, asked: list[Meeting]) -> list[Any]:
        first = asked[0]
        for other in asked:
            if _name(other.function) != _name(first.function) or any(t.shape[:2] != (1, BLOCK) for t in other.tokens):
                raise UnsupportedError("model", f"one call of {_name(first.function)} for all blocks", "others")
        given = {n: t for n, t in first.shared.items() if isinstance(t, Tensor)}
        blocks = [a.tokens[i] for i in range(len(first.tokens)) for a in asked]
        self._chain, *found = JoinedBlocks.apply(self.blocks, len(first.tokens), self._chain, *blocks, *given.values())
        shared = first.shared | dict(zip(given, found[len(first.tokens) :]))
        out = first.function(*found[: len(first.tokens)], **shared)
        y = out if isinstance(out, Tensor) else out.o
        self._chain, *parts = PartedBlocks.apply(self.blocks, first.one, self._chain, y)
        parts = parts * len(asked) if first.one else parts
        if isinstance(out, Tensor):
            return parts
        return [type(out)(**dict.fromkeys(out._fields) | {"o": part}) for part in parts]

    def joined(self, outs: list[ModelOutput]) -> ModelOutput:
        """The blocks' results as one."""
        groups: list[list[Tensor]] = []
        names: list[tuple[str, int | None]] = []
        for name, x in outs[0].items():
            if name == "loss":
                continue
            for i in [None] if isinstance(x, Tensor) else range(len(x)):
                of_blocks = [out[name] if i is None else out[name][i] for out in outs]
                if not all(isinstance(t, Tensor) and t.shape[:2] == (1, BLOCK) for t in of_blocks):
                    raise UnsupportedError(
                        "layout", f"one without deterministic=True for {name}", "a deterministic one"
                    )
                groups.append(of_blocks)
                names.append((name, i))
        loss = [outs[0]["loss"]] if "loss" in outs[0] else []
        _, *found = JoinedBlocks.apply(self.blocks, len(groups), self._chain, *(t for g in groups for t in g), *loss)
        fields: dict[str, Any] = {"loss": found[-1]} if loss else {}
        for (name, i), x in zip(names, found):
            fields[name] = x if i is None else (*fields.get(name, ()), x)
        return type(outs[0])(**fields)


def _name(function: Any) -> str:
    return getattr(getattr(function, "func", function), "__name__", "?")


def _embedded(ids: Tensor, *, weight: Tensor, layout: ShardedLayout, padding_idx: int | None) -> Tensor:
    x = embedding(ids, weight, layout=layout)
    return x if padding_idx is None else torch.where((ids == padding_idx)[..., None], x.detach(), x)


class InBlock(TorchFunctionMode):
    """In a block's run: its linear layers and embeddings meet the others', and what else reads a parameter reads the
    block's own alias of it."""

    def __init__(self, runs: BlockRuns, number: int) -> None:
        super().__init__()
        self._runs, self._number = runs, number

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear and _meets(*args, **kwargs):
            return self._runs.linear(*args, **kwargs)
        if function is F.embedding and args[0].shape == (1, BLOCK):
            return self._embedding(*args, **kwargs)
        if function is F.dropout:
            _refuse_dropout(*args, **kwargs)
        args, kwargs = tree_map_only(nn.Parameter, self._alias, (args, kwargs))
        return function(*args, **kwargs)

    def _alias(self, p: nn.Parameter) -> Tensor:
        own = self._runs._own.get(id(p))
        return p if own is None else own[self._number]

    def _embedding(
        self,
        ids: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise UnsupportedError("model", "embeddings without max_norm, scale_grad_by_freq or sparse", "one with")
        return self._runs.embedding(ids, weight, padding_idx)


def _meets(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    whole = isinstance(weight, nn.Parameter) and (bias is None or isinstance(bias, nn.Parameter))
    return whole and input.dim() == 3 and input.shape[:2] == (1, BLOCK)


def _refuse_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if p and training:
        raise UnsupportedError("dropout", "0 with deterministic=True: a rank draws for its own tokens", p)


def in_blocks(
    forward: Callable[..., ModelOutput], model: nn.Module, call: ModelCall, keywords: dict[str, Any]
) -> ModelOutput:
    """``forward(model, **keywords)`` on this rank's tokens, block by block.

    Raises:
        UnsupportedError: what has not the same bits on any split, by name.
    """
    refuse_call(model, call, keywords)
    parameters = [p for p in model.parameters() if p.requires_grad and torch.is_grad_enabled()]
    tokens = next(keywords[n] for n in ("input_ids", "inputs_embeds") if keywords.get(n) is not None)
    assert call.layout is not None
    call.blocks = runs = BlockRuns(call.layout, tokens.shape[0], parameters)
    with ExitStack() as undo:
        undo.callback(setattr, call, "blocks", None)
        outs = runs.run(functools.partial(forward, model), keywords)
        whole = runs.joined(outs)
    if call.losses and call.losses[0].unchanged(outs[0].get("loss")):
        call.losses = [Returned.of(whole["loss"])]
    return whole


def refuse_call(model: Any, call: ModelCall, keywords: dict[str, Any]) -> None:
    """Refuse what a call asks for that would depend on the split."""
    reasons = {
        "gradient checkpointing": model.training
        and any(getattr(m, "gradient_checkpointing", False) for m in model.modules()),
        "output_router_logits": bool(keywords.get("output_router_logits")),
        "logits_to_keep": call.keep is not None,
        "padding": call.padded,
        "sharded parameters": any(hasattr(p, "placements") for p in model.parameters()),
    }
    for name, holds in reasons.items():
        if holds:
            raise UnsupportedError("layout", f"one without deterministic=True for {name}", "a deterministic one")
