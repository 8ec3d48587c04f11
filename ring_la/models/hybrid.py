"""A hybrid language model from a list of layer names, over a split sequence.

    model = HybridLM(HybridConfig(vocab_size=256, dim=128, layers=["gdn", "gdn", "gdn", "attention"], num_heads=4))
    layout = cp.layout(seq_len)
    model.loss(layout.shard(ids), layout=layout).backward()     # then sum the gradients over the ranks

Blocks are pre-norm residual: ``x + layer(norm(x))``, then ``x + mlp(norm(x))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..blockwise import by_block, embedding, fixed, linear
from ..checks import check_kind, check_split, check_tokens, check_total
from ..context import ContextParallel, ShardedLayout, agree_on_weights
from ..errors import ArgumentError, RingLAError, describe_tensor
from ..nn import RMSNorm, Routing
from .block import ResidualBlock
from .checks import check_chunk, check_targets
from .config import HybridConfig
from .loss import IGNORE, cross_entropy_by_block, linear_cross_entropy
from .rounds import in_rounds, refuse_growing


class LMOutput(NamedTuple):
    """The result of a language model."""

    logits: Tensor
    """``[B, T, vocab_size]``, in the split of the ids."""
    states: list[Any] | None
    """What each layer remembers of each document, on every rank; None unless ``output_states``."""


class HiddenOutput(NamedTuple):
    """The last layer's result, before the output projection."""

    x: Tensor
    """``[B, T, D]``, normalised."""
    states: list[Any] | None
    """As in `LMOutput`."""


class HybridLM(nn.Module):
    """A causal language model whose layers may be of any kind (see the module's text)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        check_kind("config", config, HybridConfig)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(ResidualBlock.of(config, i) for i in range(len(config.layers)))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.scale_residuals(self, len(config.layers))

    @staticmethod
    @torch.no_grad()
    def scale_residuals(module: nn.Module, layers: int) -> None:
        """Keep the residual stream's variance as depth grows (GPT-2)."""
        for name, weight in module.named_parameters():
            if name.endswith("out_proj.weight"):
                weight.mul_((2 * layers) ** -0.5)

    def forward(
        self,
        ids: Tensor,
        *,
        states: Sequence[Any] | None = None,
        output_states: bool = False,
        layout: ShardedLayout | None = None,
        cu_seqlens: Tensor | None = None,
        routings: list[Routing] | None = None,
        in_place: bool = False,
        losses: list[Tensor] | None = None,
    ) -> LMOutput:
        """Logits of the next token after each token of `ids`.

        Args:
            ids: int ``[B, T]``; under a layout this rank's tokens.
            states: what the layers remember of earlier tokens. output_states: return what they remember now.
            layout, cu_seqlens, in_place: as in the layers.
            routings: a list to which what each mixture of experts' router did is appended, its auxiliary loss among
                it, which a loss of one's own has to add. Under a layout it takes an exchange, so all ranks give one.
            losses: a list to which what layers add to a training loss is appended, this rank's parts (the loss of an
                indexer). All ranks give one, or none.
        """
        keywords: dict[str, Any] = {
            "layout": layout,
            "cu_seqlens": cu_seqlens,
            "routings": routings,
            "in_place": in_place,
            "losses": losses,
        }
        x, states = self.hidden(ids, states=states, output_states=output_states, **keywords)
        return LMOutput(self.logits(x, layout), states)

    if TYPE_CHECKING:
        # spelled out: to pyright an assignment here has the type that nn.Module declares
        def __call__(
            self,
            ids: Tensor,
            *,
            states: Sequence[Any] | None = None,
            output_states: bool = False,
            layout: ShardedLayout | None = None,
            cu_seqlens: Tensor | None = None,
            routings: list[Routing] | None = None,
            in_place: bool = False,
            losses: list[Tensor] | None = None,
        ) -> LMOutput: ...

    def hidden(
        self,
        ids: Tensor,
        *,
        states: Sequence[Any] | None = None,
        output_states: bool = False,
        layout: ShardedLayout | None = None,
        cu_seqlens: Tensor | None = None,
        routings: list[Routing] | None = None,
        in_place: bool = False,
        losses: list[Tensor] | None = None,
    ) -> HiddenOutput:
        """`forward` without the output projection."""
        self.check(ids, states, layout, cu_seqlens, lists={"routings": routings, "losses": losses})
        weight = self.embedding.weight
        x, after = embedding(ids, weight, layout=layout) if fixed(layout) else self.embedding(ids), []
        keywords = dict(output_state=output_states, layout=layout, cu_seqlens=cu_seqlens, in_place=in_place)
        keywords |= dict(output_loss=losses is not None, output_routing=routings is not None)
        for i, block in enumerate(self.blocks):
            before = None if states is None else states[i]
            x, state, routing, loss = block(x, state=before, **keywords)
            after.append(state)
            if losses is not None and loss is not None:
                losses.append(loss)
            if routings is not None and routing is not None:
                routings.append(routing)
        return HiddenOutput(by_block(self.norm, x, layout=layout), after if output_states else None)

    def logits(self, x: Tensor, layout: ShardedLayout | None = None) -> Tensor:
        """The output projection of `hidden`'s x."""
        if fixed(layout):
            return linear(x, self.output_weight, layout=layout)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @property
    def output_weight(self) -> Tensor:
        """The output projection's weight ``[vocab_size, D]``."""
        return self.embedding.weight if self.head is None else self.head.weight

    def loss(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        layout: ShardedLayout | None = None,
        cu_seqlens: Tensor | None = None,
        routings: list[Routing] | None = None,
        total: Tensor | int | None = None,
        chunk: int = 8192,
    ) -> Tensor:
        """This rank's part of the mean cross-entropy: its tokens' sum over the number of targets of the whole batch.

        Its part of the auxiliary losses of mixtures of experts, and of layers' own losses, is added. Summed over the
        ranks, losses and gradients are those of one process. Logits of at most `chunk` tokens exist at a time
        (`linear_cross_entropy`).

        Args:
            ids: int ``[B, T]``; under a layout this rank's tokens.
            targets: the token that follows each, ``[B, T]``, IGNORE where none does; None: the next in its document.
            layout, cu_seqlens, routings: as in `forward`.
            total: the number of targets to divide by, where the batch is more than this call: several sequences of
                data-parallel ranks, or calls whose gradients are added; other losses count by this call's share of it.
                None: the targets of this call, on all ranks.
            chunk: tokens whose logits exist at a time.
        """
        self.check(ids, None, layout, cu_seqlens, targets, total, chunk, {"routings": routings})
        if targets is None:
            targets, count = _next_tokens(ids, layout, cu_seqlens)
        else:
            count = (targets != IGNORE).sum()
            if layout is not None:
                count = layout.cp.sum_over_ranks(count)
            count = count.clamp(min=1)
        routings = [] if routings is None else routings
        begin = len(routings)
        own: list[Tensor] = []
        x = self.hidden(ids, layout=layout, cu_seqlens=cu_seqlens, routings=routings, losses=own).x
        whole = count if total is None else total
        loss = self._cross_entropy(x, targets, layout, chunk) / whole
        return loss + sum((*own, *(routing.aux_loss for routing in routings[begin:]))) * (count / whole)

    def loss_in_rounds(
        self,
        ids: Tensor,
        cp: ContextParallel,
        *,
        rounds: int,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        total: Tensor | int | None = None,
        chunk: int = 8192,
    ) -> Tensor:
        """This rank's part of the mean loss of a whole sequence whose runs of tokens are worked on one after the other.

        Args:
            ids: int ``[1, T]``, the whole sequence, on every rank.
            cp: the ranks each round is split over. rounds: their number.
            cu_seqlens: offsets ``[N+1]`` of packed documents; None: one document.
            total: the number of targets to divide by; None: those of `ids`.
            chunk: tokens whose logits exist at a time.

        Raises:
            ArgumentError: by name. UnsupportedError: a layer whose state grows with the sequence, or a router balanced
                over the whole of it.
        """
        check_total(total)
        check_chunk(chunk)
        plan = in_rounds(ids, cp, rounds, cu_seqlens)
        refuse_growing(zip(self.config.layers, self.blocks))
        loss: Tensor | float = 0.0
        states = None
        for r in plan:
            before = None if states is None else r.entering(states)
            x, states = self.hidden(r.ids, states=before, output_states=not r.last, layout=r.layout)
            part = self._cross_entropy(x, r.targets, r.layout, chunk)
            loss = loss + part / (r.total if total is None else total)
        assert isinstance(loss, Tensor)
        return loss

    def _cross_entropy(self, x: Tensor, targets: Tensor, layout: ShardedLayout | None, chunk: int) -> Tensor:
        if fixed(layout):
            return cross_entropy_by_block(self.logits(x, layout), targets, layout)
        return linear_cross_entropy(x.flatten(0, 1), self.output_weight, targets.flatten(), chunk=chunk)

    def check(
        self,
        ids: Tensor,
        states: Sequence[Any] | None,
        layout: ShardedLayout | None,
        cu_seqlens: Tensor | None,
        targets: Tensor | None = None,
        total: Tensor | float | None = None,
        chunk: int = 1,
        lists: Mapping[str, object] = {},
    ) -> None:
        """Refuse what does not fit, on every rank alike; what concerns a layer, the layer checks."""
        error, divided = None, None
        try:
            self._check(ids, states, layout, cu_seqlens, targets)
            for name, given in lists.items():
                check_kind(name, given, list, optional=True)
            divided = check_total(total)
            check_chunk(chunk)
        except RingLAError as e:
            error = e
        if isinstance(layout, ShardedLayout) and not torch.compiler.is_compiling():
            signature = None
            if error is None:
                given = [(f"{name} given", x is not None) for name, x in (("states", states), ("targets", targets))]
                signature = (("rows of ids", ids.shape[0]), ("total", divided), *given)
            layout.agree("HybridLM", signature, error)
            agree_on_weights(self, layout.cp.comm, layout.cp.validate)
        elif error is not None:
            raise error

    def _check(
        self, ids: Tensor, states: Sequence[Any] | None, layout: object, cu_seqlens: object, targets: object
    ) -> None:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ArgumentError("ids", "an int tensor [B, T]", describe_tensor(ids))
        if ids.device != (home := self.embedding.weight.device):
            raise ArgumentError("ids", f"a tensor on {home}, where the model is", f"one on {ids.device}")
        if states is not None and (not isinstance(states, (list, tuple)) or len(states) != len(self.blocks)):
            got = len(states) if isinstance(states, (list, tuple)) else describe_tensor(states)
            raise ArgumentError("states", f"a list of one for each of {len(self.blocks)} layers", got)
        if targets is not None:
            check_targets(targets, ids, self.config.vocab_size, layout)
        if isinstance(layout, ShardedLayout):
            layout.require_local("ids", ids.shape[1])
        else:
            check_split(ids.shape[1], ids.shape[0], layout, cu_seqlens, ids.device, "ids")
        check_tokens("ids", ids, self.config.vocab_size, layout)


def _next_tokens(ids: Tensor, layout: ShardedLayout | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | int]:
    """Each token's successor in its document, and how many of them the whole batch has."""
    if layout is not None:
        return layout.targets(ids, IGNORE).long(), max(1, ids.shape[0] * layout.num_successors)
    targets = ids.roll(-1, 1).long()
    targets[:, -1:] = IGNORE
    if cu_seqlens is None:
        return targets, max(1, targets.numel() - targets.shape[0])
    last = torch.isin(torch.arange(1, ids.shape[1] + 1, device=ids.device), cu_seqlens)
    targets = targets.masked_fill(last, IGNORE)
    return targets, (targets != IGNORE).sum().clamp(min=1)
