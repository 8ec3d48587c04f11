"""Step time and memory of a model with a sequence split over P ranks, from a device's rates and a cluster's links.

docs/users/guides/planning.md says what is counted and how far the predictions were checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..choices import LayoutKind
from ..layout import Layout
from ..scan import Chain, CostModel
from ..training.flops import pairs
from . import chosen_keys
from .cluster import Cluster
from .rates import GROUPED, Rates
from .workload import BlockWork, Workload

STATES = {"adamw": 2.0, "adamw8bit": 0.5, "adamw4bit": 0.25}
"""Both moments of an optimizer, in units of a parameter in fp32; with bf16 parameters AdamW's are half as large."""
HOST = 25e9
"""Bytes a second between a GPU and its host, each way: assumed, not measured."""
PASSES, AGAIN = 8, 3
"""How often what is saved for the backward pass is moved by what is no product and no recurrence (convolutions, norms,
gates, sums of gradients, copies), forward and backward, and once more where it is computed again; from one profile."""
LIBRARY = 2.2
"""How much more of it Transformers' own operations move, unfused but for RMS norms; from one profile of a mixture."""
UPDATE = 0.5
"""The rate at which the fused AdamW and clipping move their bytes beside a copy's; from the same profile."""
LOGIT = 9
"""Bytes that a loss and its gradient move for a logit at a copy's rate: it is read twice in bf16 and its gradient is
written, 6 bytes, which go at two thirds of that rate in one profile (benchmarks/results/large-moe-norms-h200.json: 35
ms of logits that are made twice)."""

ROUTED = 1.25
"""Rows of a token's experts that exist at once in their backward pass, beside those that are kept: the gradients of
what the experts give and of what is between their products (docs/notebook/2026-11-23-models-of-real-size.md)."""


@dataclass(frozen=True)
class Setting:
    """What is the same for every line of the table."""

    work: Workload
    rates: Rates
    cluster: Cluster
    length: int
    layout: LayoutKind = "zigzag"
    backward: bool = True
    recompute: tuple[str, ...] = ()
    memory: float = 0.0
    mlp_chunk: int | None = None
    rounds: int = 1
    offload: bool = False
    spread: bool = False
    parameters: str = "float32"
    optimizer: str = "adamw"
    transformers: Path | None = None
    host_memory: float = 100 * 2**30
    loss_chunk: int = 8192
    keep_attention: bool = False

    @property
    def state_bytes(self) -> float:
        """Of a parameter, its gradient and its optimizer's states."""
        return 2 * (4 if self.parameters == "float32" else 2) + self.moments

    @property
    def moments(self) -> float:
        """Bytes of an optimizer's states of a parameter."""
        own = 4 if self.parameters == "float32" else 2
        return own * 2 if self.optimizer == "adamw" else 4 * STATES[self.optimizer]


@dataclass(frozen=True)
class Prediction:
    """One split.

    Attributes:
        seconds: of a step on one sequence a replica. compute, exchange, attention, weights: their parts: one rank's
            own work, the recurrences' exchanges (nothing hidden), and what is not hidden of moving keys and values and
            of gathering weights and summing gradients.
        memory: bytes of one GPU. mailboxes: those of them that PyTorch's allocator does not count.
        strategies: of the recurrences' exchange, by layer.
        throughput: tokens a second of one GPU.
    """

    gpus: int
    P: int
    seconds: float
    compute: float
    exchange: float
    attention: float
    weights: float
    memory: float
    mailboxes: float
    fits: bool
    throughput: float
    strategies: dict[str, str]


def splits(gpus: int, length: int) -> list[int]:
    """Powers of two that divide the GPUs, and all of them, while every rank has a chunk of tokens."""
    powers = {2**n for n in range(gpus.bit_length()) if gpus % 2**n == 0} | {gpus}
    return sorted(P for P in powers if length // P >= 64) or [1]


def fastest(lines: Sequence[Prediction]) -> Prediction | None:
    """The split with the most tokens a second among those that fit; None where none does."""
    return max((line for line in lines if line.fits), key=lambda line: line.throughput, default=None)


def predict(setting: Setting, gpus: int, P: int) -> Prediction:
    """Step time and memory with a sequence split over P of `gpus` GPUs."""
    work, rates, cluster = setting.work, setting.rates, setting.cluster
    tokens, where = setting.length / P, (setting.length, P, cluster.per_node)
    model = cluster.model(P, rates) if P > 1 else None
    chain = Chain.of(Layout(setting.length, setting.layout, P, 0)) if P > 1 else None
    compute = ends(setting, tokens) + update(setting, gpus)
    exchange, attention, strategies = 0.0, 0.0, {}
    for block, times in Counter(work.blocks).items():
        own = local(setting, block, tokens)
        compute += times * own
        if model is None or chain is None:
            continue
        if setting.spread and block.routed:  # there and back, forward, recomputed and backward
            ways = 2 * ((3 if "block" in setting.recompute else 2) if setting.backward else 1)
            exchange += times * ways * model.exchange(sent(setting, block, P) * tokens)
        if block.recurrence:
            by_name = model.predict(chain, block.state, setting.backward)
            strategies[block.layer] = min(by_name, key=by_name.__getitem__)
            exchange += times * by_name[strategies[block.layer]]
        elif chosen_keys.gathers(block, *where):
            attention += times * chosen_keys.gathering(model, block, setting.length, P, setting.backward)
        else:
            attention += times * max(0.0, rotation(setting, model, block, tokens, P) - own)
    weights = max(0.0, sharding(setting, gpus, 1 - 1 / P if setting.spread else 0.0) - compute)
    moved = sum(_kept(setting, block, tokens) for block in work.blocks) if setting.offload else 0.0
    seconds = max(compute + exchange + attention + weights, 2 * moved / HOST)
    boxes = max(mailboxes(setting, block, tokens, P) for block in work.blocks)
    gathered = max(chosen_keys.at_hand(block, *where, setting.backward) for block in work.blocks)
    memory = held(setting, gpus, tokens) + boxes + gathered
    fits = memory <= setting.memory and moved <= setting.host_memory
    parts = compute, exchange, attention, weights
    return Prediction(gpus, P, seconds, *parts, memory, boxes, fits, tokens / seconds, strategies)


def matmuls(setting: Setting, parameters: float, tokens: float) -> float:
    """Seconds of multiplying tokens with parameters: 2 operations each, 3 times that with a backward pass."""
    return 2 * (3 if setting.backward else 1) * parameters * tokens / setting.rates.matmul


def ends(setting: Setting, tokens: float) -> float:
    """Seconds of logits and losses; Transformers' heads are computed again in the backward pass."""
    products = matmuls(setting, setting.work.head, tokens)
    if not setting.backward:
        return products
    losses = LOGIT * setting.work.vocabulary * tokens / setting.rates.copy
    return 4 / 3 * products + 2 * losses if setting.work.library else products + losses


def update(setting: Setting, gpus: int) -> float:
    """Seconds of clipping and of the optimizer: weights are read and written, gradients too, and read twice more."""
    if not setting.backward:
        return 0.0
    own = 4 if setting.parameters == "float32" else 2
    moved = 6 * own + 2 * setting.moments
    return moved * setting.work.parameters / gpus / (UPDATE * setting.rates.copy)


def local(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Seconds of one block's own work on this rank's tokens."""
    rates, backward = setting.rates, setting.backward
    products = matmuls(setting, block.multiplied + block.met * (1 / GROUPED - 1), tokens)
    moved = block.saved * tokens / rates.copy * (LIBRARY if setting.work.library else 1)
    if block.recurrence:
        mixing = rates.recurrence(block.recurrence, tokens * block.heads, block.K, block.V, backward)
        again = rates.recurrence(block.recurrence, tokens * block.heads, block.K, block.V, False)
    else:
        mixing, again = (attended(setting, block, tokens, way) for way in (backward, False))
    if not backward:
        return products + AGAIN * moved + again
    seconds = products + PASSES * moved + mixing
    layer, mlp = _recomputed(setting, block)
    shares = layer * block.layer_saved + mlp * block.mlp_saved
    if shares:
        seconds += shares / (block.layer_saved + block.mlp_saved) * (products / 3 + AGAIN * moved)
        seconds += layer * (0.0 if setting.keep_attention and not block.recurrence else again)
    return seconds


def attended(setting: Setting, block: BlockWork, tokens: float, backward: bool) -> float:
    """Seconds of one block's softmax attention; of chosen keys with the choice and, backward, the indexer's loss."""
    rates = setting.rates
    seen = pairs(setting.length, block.window) / setting.length  # keys of a query, in the mean
    if not block.chosen:
        operations = 4 * tokens * seen * block.heads * block.K  # two products
        rows = tokens if block.window < 0 else min(tokens, block.window + 1)
        return rates.attention(operations, backward, rows, block.K)
    width, read = block.kv / 2, tokens * pairs(setting.length, block.chosen - 1) / setting.length
    rounds = chosen_keys.rounds(block, setting.length, round(setting.length / tokens), setting.cluster.per_node)
    seconds = rates.chosen(read, width, block.heads, backward, rounds) + rates.index(tokens, seen, *block.indexed)
    return seconds + (rates.index_loss(read, width, block.indexed[1]) if backward else 0.0)


def _recomputed(setting: Setting, block: BlockWork) -> tuple[bool, bool]:
    """Whether the backward pass computes the layer and the MLP of a block again."""
    whole = "block" in setting.recompute
    mlp = whole or "mlp" in setting.recompute or setting.mlp_chunk is not None
    return whole or block.layer in setting.recompute, mlp


def rotation(setting: Setting, model: CostModel, block: BlockWork, tokens: float, P: int) -> float:
    """Seconds of the ring of keys and values, P − 1 swaps forward; backward their gradients travel too. With a window
    what both segments of a rank need travels alone."""
    return (P - 1) * model.swap(block.kv * _shown(block, tokens, P)) * (3 if setting.backward else 1)


def _shown(block: BlockWork, tokens: float, P: int) -> float:
    """Rows of keys and values that another rank needs."""
    return tokens if block.window < 0 else min(tokens, 2 * block.window / (P - 1))


def mailboxes(setting: Setting, block: BlockWork, tokens: float, P: int) -> float:
    """Bytes of symmetric memory for keys and values of other ranks and for gradients that come from there, at most
    (`softmax/strategies/mailbox.py`); gradients of chosen latents are fp32. Layers use the same, one after another.
    In causal order one rank sees all of the others' keys and is sent gradients of half, another the reverse."""
    here = 1 < P <= setting.cluster.per_node and bool(block.kv) and not block.recurrence
    if not here or chosen_keys.gathers(block, setting.length, P, setting.cluster.per_node):
        return 0.0
    gradients = (2 if block.chosen else 1) if setting.backward else 0
    both = 1 + gradients if block.window >= 0 else max(1 + gradients / 2, 1 / 2 + gradients)
    return both * (P - 1) * block.kv * _shown(block, tokens, P)


def sent(setting: Setting, block: BlockWork, P: int) -> float:
    """Bytes a token takes to its experts on other ranks, one way: it goes once to each rank that has any of them
    (`nn/expert_ranks.py`), here as if each were drawn by itself."""
    row = 2 * setting.work.dim
    return row * (P - 1) * (1 - (1 - 1 / P) ** (block.routed / row))


def sharding(setting: Setting, gpus: int, elsewhere: float = 0.0) -> float:
    """Seconds of gathering bf16 weights for forward and backward and scattering gradients over all GPUs.

    Args:
        elsewhere: the share of the experts that is never gathered.
    """
    if gpus == 1:
        return 0.0
    model = setting.cluster.model(gpus, setting.rates)
    stay = elsewhere * sum(block.experts for block in setting.work.blocks)
    return (3 if setting.backward else 1) * model.gather(2 * (setting.work.parameters - stay) * (gpus - 1) / gpus)


def held(setting: Setting, gpus: int, tokens: float) -> float:
    """Bytes of one GPU: its shard of the training state, one block's gathered weights, what backward needs."""
    work = setting.work
    gathered = max(block.parameters - setting.spread * block.experts for block in work.blocks)
    if not setting.backward:
        return 2 * work.parameters / gpus + 2 * gathered + tokens * max(b.saved for b in work.blocks)
    kept = sum(_kept(setting, block, tokens) for block in work.blocks)  # of all rounds: they are one graph
    kept += 2 * 2 * work.dim * tokens  # what the last norm and the output projection take
    if setting.offload:
        kept = min(kept, 2 * 2**30 + 2 * max(_kept(setting, block, tokens) for block in work.blocks))
    tokens /= setting.rounds
    again = max(_again(setting, block, tokens) for block in work.blocks)
    logits = 4 * work.vocabulary * min(tokens, setting.loss_chunk)
    share = work.parameters / gpus
    gradients = (4 if setting.parameters == "float32" else 2) * share
    # weights and gradients of a block and of both ends, and gradients of the block before in fp32, on their way
    at_hand = 4 * (gathered + work.ends) + 4 * gathered
    lasting = setting.state_bytes * share - gradients
    return lasting + max(kept, gradients) + at_hand + again + logits  # gradients come as what is kept goes


def _kept(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Bytes of a block that last from the forward to the backward pass."""
    one = 2 * setting.work.dim  # what is recomputed keeps its input
    layer, mlp = _recomputed(setting, block)
    result = (2 * block.V + 4) * block.heads if layer and setting.keep_attention and not block.recurrence else 0
    if "block" in setting.recompute:
        return (one + result) * tokens
    norm = one if "norm" in setting.recompute else block.norm_saved
    return ((one + result if layer else block.layer_saved + norm) + (one if mlp else block.mlp_saved + norm)) * tokens


def _again(setting: Setting, block: BlockWork, tokens: float) -> float:
    """Bytes that exist while a block is recomputed: all of it, or its dearer half; of an MLP's, a chunk's."""
    layer, mlp = _recomputed(setting, block)
    halves = [
        layer * (block.layer_saved + block.norm_saved) * tokens,
        mlp * (block.mlp_saved + block.norm_saved + ROUTED * block.routed) * min(tokens, setting.mlp_chunk or tokens),
    ]
    return sum(halves) if "block" in setting.recompute else max(halves)
