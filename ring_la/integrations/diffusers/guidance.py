"""Guidance on an axis of its own: each of its ranks has a part of the model's rows, or one of several calls of a step.

A pipeline asks a model for the image with and without its prompt in one of two ways:

    one call of all rows    (SD3, SANA, Z-Image, ...)           each rank of the axis takes its share of the rows
    a call for each         (Qwen-Image, Wan, HunyuanVideo, ...)  each takes one of the calls

The second way is learned in the first step of a run, which every rank computes whole: so many calls with the same
latents. After that a rank gives back NaN for the calls of others; the last call of the step fills them in, in place,
before the pipeline reads them. One that reads earlier gets NaN, and an error, and no wrong image. Calls outside of a
run (another pipeline's, of the same model) are computed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...context import ContextParallel
from ...errors import UnsupportedError
from .compare import InputComparison, WholeImage, tensors_in
from .streams import Layouts

ROWS = frozenset(
    """hidden_states encoder_hidden_states encoder_hidden_states_t5 encoder_hidden_states_image encoder_attention_mask
    encoder_hidden_states_mask attention_mask mask timestep timestep_r guidance pooled_projections class_labels
    text_embedding_mask text_embedding_mask_t5 original_size target_size crop_coords prior_token_id prior_token_drop
    camera_conditions chunk_plucker added_cond_kwargs global_hidden_states text_bth text_lens image_embeds img_shapes
    id_cond id_vit_hidden encoder_attention_mask_t5 inpaint_latents control_latents fps controlnet_block_samples
    controlnet_single_block_samples block_controlnet_hidden_states control_hidden_states pose_hidden_states
    face_pixel_values audio_hidden_states audio_encoder_hidden_states audio_timestep sigma audio_sigma video_coords
    audio_encoder_attention_mask audio_coords encoder_hidden_states_2 encoder_attention_mask_2
    perturbation_mask x t cap_feats r_timestep text_encoder_layers context_latents shape_list
    latents_clean latents_history_2x latents_history_4x joint_attention_kwargs
    timesteps encoder_hidden_states_llama3 pooled_embeds encoder_mask
    indices_hidden_states indices_latents_history_short indices_latents_history_mid indices_latents_history_long
    latents_history_short latents_history_mid latents_history_long visual_token_type_ids""".split()
)
"""Arguments of models with a row for each of the batch; others are the same for all rows."""
LAYERS = frozenset(("encoder_hidden_states_llama3",))
"""Those whose first dimension is layers, the second rows."""


class Guidance:
    """The axis's share in the calls of one model.

    Attributes:
        axis: its ranks.
        running: whether a run of its pipeline is under way.
        passes: calls a step, as the first step showed; None: it is under way.
    """

    def __init__(self, axis: ContextParallel) -> None:
        self.axis, self.layouts, self.comparison = axis, Layouts(axis), InputComparison(axis)
        self.restart(False)

    def restart(self, running: bool) -> None:
        """A run of the pipeline begins or is over: nothing is known of its steps."""
        self.running = running
        self.passes: int | None = None
        self._latents: Tensor | None = None
        self._outputs: list[object] = []
        self._form: object = None

    def finish(self) -> None:
        """The pipeline has its image.

        Raises:
            UnsupportedError: the last step had fewer calls than the first, and was not filled in.
        """
        self._check_step()

    def call(self, forward: Callable[..., object], given: Mapping[str, object], split: Any) -> object:
        """The model's call with arguments by name, of which the axis's ranks each compute a part."""
        x: Any = given.get(split.plan.latents)
        if self.axis.size == 1 or not tensors_in(x):
            return forward(**given)
        alike = isinstance(x, Tensor) or len({one.shape for one in x}) == 1
        if alike and len(x) % self.axis.size == 0:
            self.comparison.begin(given, None)
            return self._rows(forward, given, x, split)
        if not isinstance(x, Tensor):  # images of several sizes
            self.comparison.begin(given, None)
            return forward(**given)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(list(given.values()))):
            raise UnsupportedError("cfg", "no gradients where guidance is calls of its own", "inputs that want one")
        return self._pass(forward, given, x)

    # -- rows of one call --------------------------------------------------------------------------------------

    def _rows(
        self, forward: Callable[..., object], given: Mapping[str, object], x: Tensor | list[Tensor], split: Any
    ) -> object:
        batch, listed = len(x), isinstance(x, list)
        each = batch // self.axis.size
        mine = slice(self.axis.rank * each, (self.axis.rank + 1) * each)
        shared = {"timestep"} if "timestep_indices" in given else set()  # MiniMax-H3's steps are no rows
        cut = {name: x if name in shared else rows_of(name, x, batch, mine, listed) for name, x in given.items()}
        split.deciding = (split.cp.comm, self.axis.comm)
        try:
            out = forward(**cut)
        finally:
            split.deciding = (split.cp.comm,)
        layout, came = self.layouts.of((each,) * self.axis.size), tensors_in(out)
        if listed:
            rows = WholeImage.apply(torch.stack(came), layout, 0, 1, self.comparison)
            return _like(out, [list(rows)])  # type: ignore[list-item]
        return _like(out, [WholeImage.apply(t, layout, 0, 1, self.comparison) for t in came])

    # -- a call of several -------------------------------------------------------------------------------------

    def _pass(self, forward: Callable[..., object], given: Mapping[str, object], x: Tensor) -> object:
        self.comparison.begin(given, None)
        if not self.running:
            return forward(**given)
        if x is not self._latents:
            self._begin(x)
        number = len(self._outputs)
        if self.passes != self.axis.size:  # learning, or not guided in this way
            out = forward(**given)
            self._outputs.append(out)
            return out
        if number == self.passes:
            raise UnsupportedError("cfg", f"{self.passes} calls a step, as in the first", "one more", "Leave out cfg=")
        if number == self.axis.rank:
            out = forward(**given)
        else:
            out = _like(self._form, [torch.full_like(t, torch.nan) for t in tensors_in(self._form)])
        self._outputs.append(out)
        if number + 1 == self.passes:
            self._fill()
        return out

    def _begin(self, x: Tensor) -> None:
        """The first call of a step."""
        self._check_step()
        if self._latents is not None and x.shape != self._latents.shape:
            self.restart(True)
        made = len(self._outputs)
        if self.passes is None and made:
            self.passes, self._form = made, self._outputs[0]
        self._latents, self._outputs = x, []

    def _check_step(self) -> None:
        """Refuse a step whose answers were not filled in."""
        made = len(self._outputs)
        if self.passes == self.axis.size and made and made != self.passes:
            got = f"{made}, whose image is NaN"
            raise UnsupportedError("cfg", f"{self.passes} calls a step, as in the first", got, "Leave out cfg=")

    def _fill(self) -> None:
        """What the other ranks computed, in place of the NaN given back for it."""
        for parts in zip(*map(tensors_in, self._outputs)):
            layout = self.layouts.of((1,) * self.axis.size)
            whole = WholeImage.apply(parts[self.axis.rank][None], layout, 0, 1, self.comparison)
            for n, part in enumerate(parts):
                if n != self.axis.rank:
                    part.copy_(whole[n])


def guided_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class of models, whose calls go through ``_ring_la_guidance``."""

    def call(self: Any, *args: object, **keywords: object) -> object:
        split = self._ring_la
        given = dict(split.signature.bind(*args, **keywords).arguments)
        return self._ring_la_guidance.call(lambda **cut: kind.__call__(self, **cut), given, split)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def rows_of(name: str, x: object, batch: int, mine: slice, listed: bool) -> object:
    """The rows of an argument; `listed`: latents are lists of tensors."""
    if name in LAYERS and isinstance(x, Tensor):
        return x[:, mine]
    return _cut(x, batch, mine, listed) if name in ROWS else x


def _cut(x: object, batch: int, mine: slice, listed: bool) -> object:
    """The rows of an argument that has some; `listed`: rows are lists of tensors."""
    if isinstance(x, Tensor):
        return x[mine] if x.dim() and len(x) == batch else x
    if isinstance(x, Mapping):
        return {n: _cut(one, batch, mine, listed) for n, one in x.items()}
    if isinstance(x, (list, tuple)):
        if not listed and any(isinstance(one, Tensor) for one in x):
            return type(x)(_cut(one, batch, mine, listed) for one in x)
        return x[mine] if len(x) == batch else x
    return x


def _like(out: Any, tensors: Sequence[Tensor]) -> object:
    """An output of the model's with other tensors."""
    if isinstance(out, Tensor):
        return tensors[0]
    if isinstance(out, Mapping):  # the library's outputs are mappings, and classes of their own
        return type(out)(**dict(zip(out, tensors, strict=True)))
    return type(out)(tensors)
