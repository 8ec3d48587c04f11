"""TeaCache: a step adds what the blocks added in an earlier one, as long as what they are given has hardly changed.

    enable_tea_cache(pipeline.transformer, steps=28, threshold=0.4)
    image = pipeline(prompt, num_inference_steps=28).images[0]
    disable_tea_cache(pipeline.transformer)

Liu et al. 2024, "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (arXiv 2411.19108). How much
the input of the blocks has changed since the step before (the input of the first attention, where shifts and scales of
the step are in it, or the step's embedding alone; its relative change by the L1 norm) says by a polynomial how much the
output will have. These add up; below `threshold` all blocks are left out. On split tokens the norms are sums over all
ranks, which decide alike; it works on one process, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.hooks import BaseState, StateManager
from torch import Tensor, nn

from ...autograd import outside_graphs
from ...errors import ArgumentError, UnsupportedError
from .caches import relative_change

PLACE = "ring_la_tea_cache"
COEFFICIENTS: dict[str, tuple[float, ...] | None] = {
    "FluxTransformer2DModel": (4.98651651e02, -2.83781631e02, 5.58554382e01, -3.82021401e00, 2.64230861e-01),
    "HunyuanVideoTransformer3DModel": (7.33226126e02, -4.01131952e02, 6.75869174e01, -3.14987800e00, 9.61237896e-02),
    "WanTransformer3DModel": None,
}
"""Polynomials by model, the highest power first, as TeaCache's authors publish them; None: one for each checkpoint."""
BY_EMBEDDING = {"WanTransformer3DModel"}
"""Models whose blocks' embedding of the step tells, without what it is applied to."""


@dataclass
class TeaCacheConfig:
    """Settings, which ranks compare: see `enable_tea_cache`."""

    steps: int
    threshold: float
    coefficients: tuple[float, ...]
    by_embedding: bool


def enable_tea_cache(
    model: Any, steps: int, threshold: float = 0.4, coefficients: Sequence[float] | None = None
) -> None:
    """Have a transformer of Diffusers leave out its blocks by TeaCache's rule, before `parallelize` or after.

    Args:
        model: one of `COEFFICIENTS`. Its calls stand in a `cache_context`, as those of Diffusers' pipelines do.
        steps: denoising steps of a run: the first and the last are computed in any case.
        threshold: how much predicted change adds up before a step is computed; 0: every step is.
        coefficients: of the polynomial, the highest power first; None: those published for the model. For Wan they go
            by checkpoint, and are those for the projected embedding (TeaCache's "use_ret_steps").

    Raises:
        ArgumentError: a wrong argument, or a model that has a cache already. UnsupportedError: another model.
    """
    kind = type(model).__name__
    if kind not in COEFFICIENTS:
        raise UnsupportedError("model", f"one of {', '.join(COEFFICIENTS)}", kind)
    if getattr(model, "is_cache_enabled", False):
        raise ArgumentError("model", "one without a step cache", type(model._cache_config).__name__)
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError("steps", "an int ≥ 1", repr(steps))
    if not threshold >= 0:
        raise ArgumentError("threshold", "a number ≥ 0", repr(threshold))
    powers = COEFFICIENTS[kind] if coefficients is None else tuple(map(float, coefficients))
    if not powers:
        raise ArgumentError("coefficients", f"those of this checkpoint of {kind}", "none")
    config = TeaCacheConfig(steps, float(threshold), powers, kind in BY_EMBEDDING)
    states = StateManager(TeaCacheState, (), {})  # type: ignore[arg-type]
    lists = [x for n, x in model.named_children() if n in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS]
    blocks = [block for each in lists if isinstance(each, nn.ModuleList) for block in each]
    for n, block in enumerate(blocks):
        hook = TeaCacheHook(states, config, first=n == 0, last=n == len(blocks) - 1)
        HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, PLACE)
    HookRegistry.check_if_exists_or_initialize(model).invalidate_child_registries_cache()
    model._cache_config = config


def disable_tea_cache(model: Any) -> None:
    """Take it away again."""
    if not isinstance(getattr(model, "_cache_config", None), TeaCacheConfig):
        raise ArgumentError("model", "one with TeaCache", type(model).__name__)
    HookRegistry.check_if_exists_or_initialize(model).remove_hook(PLACE, recurse=True)
    HookRegistry.check_if_exists_or_initialize(model).invalidate_child_registries_cache()
    model._cache_config = None


class TeaCacheState(BaseState):
    """What is known of a run, of one of guidance's calls.

    Attributes:
        step: how many there were. input: what told of the step before. change: added up since the last one computed.
        compute: whether this step is. before: what its blocks were given. residual: what blocks added last.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.step, self.change, self.compute = 0, 0.0, True
        self.input: Tensor | None = None
        self.before: Tensor | None = None
        self.residual: Tensor | None = None


class TeaCacheHook(ModelHook):
    """On every block: the first decides, the last keeps what all have added.

    Attributes:
        deciding: groups over whose ranks the tokens are split.
    """

    _is_stateful = True

    def __init__(self, states: StateManager, config: TeaCacheConfig, first: bool, last: bool) -> None:
        super().__init__()
        self.state_manager, self.config, self._first, self._last = states, config, first, last
        self.deciding: tuple[Any, ...] = ()

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        self._metadata = TransformerBlockRegistry.get(type(module))
        return module

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.state_manager.reset()
        return module

    def new_forward(self, module: nn.Module, *args: Any, **keywords: Any) -> Any:
        state, place = self.state_manager.get_state(), self._metadata.return_hidden_states_index
        hidden = self._given("hidden_states", args, keywords)
        if self._first:
            step = self._given("temb", args, keywords)
            telling = step if self.config.by_embedding else module.norm1(hidden, emb=step)[0]  # type: ignore[operator]
            state.compute = self._decide(state, telling.detach())
            state.before = hidden if state.compute else None
        if state.compute:
            output = self.fn_ref.original_forward(*args, **keywords)  # type: ignore[misc]
            if self._last:
                state.residual = (output[place] if isinstance(output, tuple) else output) - state.before
                state.before = None
            return output
        if self._first:
            hidden = hidden + state.residual
        text = self._metadata.return_encoder_hidden_states_index
        if text is None:
            return hidden
        pair = {place: hidden, text: self._given("encoder_hidden_states", args, keywords)}
        return tuple(pair[n] for n in sorted(pair))

    def _given(self, name: str, args: tuple, keywords: dict[str, Any]) -> Any:
        return self._metadata._get_parameter_from_args_kwargs(name, args, keywords)

    @outside_graphs
    def _decide(self, state: TeaCacheState, telling: Tensor) -> bool:
        """Whether this step is computed."""
        before, state.input = state.input, telling
        at, state.step = state.step, (state.step + 1) % self.config.steps
        if before is None or state.residual is None or at in (0, self.config.steps - 1):
            state.change = 0.0
            return True
        x = relative_change(telling, before, self.deciding)
        for power, coefficient in enumerate(reversed(self.config.coefficients)):
            state.change += coefficient * x**power
        if state.change < self.config.threshold:
            return False
        state.change = 0.0
        return True
