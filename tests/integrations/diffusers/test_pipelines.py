"""Whole pipelines, split: guidance, decoder, caches and text give the image of one process.

The pipelines are stand-ins that ask as Diffusers' do, of which tests.integrations.diffusers.pipelines runs some.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("diffusers")
pytest.importorskip("cache_dit")

import cache_dit
from cache_dit.caching.cache_blocks.pattern_base import CachedBlocks_Pattern_Base as Loop
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
)

import ring_la
from ring_la.errors import RingLAError
from ring_la.integrations.diffusers import parallelize, restore
from ring_la.integrations.diffusers.pipeline import axes_of
from ring_la.integrations.diffusers.tea_cache import enable_tea_cache
from tests.support.attention_cases import error
from tests.support.pool import group

from .models import make


class Pipeline:
    """Denoises, with guidance by rows of one call or by two calls (in so many steps), and decodes. The one by rows
    begins with a picture, of which it keeps a part (inpainting), and lets a callback change the latents in place."""

    def __init__(self, rows: bool) -> None:
        torch.manual_seed(0)
        self.rows, self.guided, self.asked = rows, 3, 0
        self.transformer, self.given = make("sd3" if rows else "wan")
        self.vae = autoencoder(rows).double().eval()
        for parameter in self.vae.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        self.components = {"transformer": self.transformer, "vae": self.vae, "tokenizer": None}
        self.latents = self.given.pop("hidden_states").detach()[:1]
        self.picture = torch.rand(1, 3, 12, 12).double() if rows else None
        self.callback = lambda n, x: x[..., n].mul_(0.9)

    def encode_prompt(self, prompt: str) -> dict[str, object]:
        self.asked += 1
        return {n: x.detach()[:1] + len(prompt) if x.dim() > 1 else x[:1] for n, x in self.given.items()}

    @torch.no_grad()
    def __call__(self, prompt: str = "a cat") -> torch.Tensor:
        x, (cond, uncond) = self.latents, (self.encode_prompt(p) for p in (prompt, ""))
        if self.picture is not None:
            kept = self.vae.encode(self.picture).latent_dist.mode()
            x = 0.7 * x + 0.3 * kept
        for n in range(3):
            if self.rows:
                both = {name: torch.cat([uncond[name], cond[name]]) for name in cond}
                plain, asked = self.transformer(hidden_states=torch.cat([x, x]), **both)[0].chunk(2)
            else:
                asked = self.transformer(hidden_states=x, **cond).sample
                plain = self.transformer(hidden_states=x, **uncond).sample if n < self.guided else asked
            x = x - 0.01 * (plain + 3 * (asked - plain))
            if self.picture is not None:
                x = torch.cat([x[..., :4], kept[..., 4:]], -1)
                self.callback(n, x)
        return self.vae.decode(x).sample


def autoencoder(image: bool) -> torch.nn.Module:
    if not image:
        return AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True])
    sizes = dict(block_out_channels=(4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=4)
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    return AutoencoderKL(**sizes, **blocks)


def told(call) -> str:
    try:
        call()
        return "accepted"
    except RingLAError as e:
        return str(e)


def check_second(pipe: Pipeline) -> list[str]:
    """A pipeline of the same parts, without guidance, between runs of the first."""
    second = Pipeline(False)
    second.transformer, second.vae, second.guided = pipe.transformer, pipe.vae, 0
    plain = Pipeline(False)
    plain.guided = 0
    errors = [error(second(), plain()), error(second(), plain())]
    return [] if max(errors) < 1e-4 else [f"a second pipeline of the parts: {errors}"]


def check_guided(rank: int, rows: bool) -> list[str]:
    pipe, ran = Pipeline(rows), []
    cp = ring_la.ContextParallel(group(4), scan="ring", attention="ring", timeout=60)
    want, limit = pipe(), 1e-9 if rows else 1e-4  # Wan rounds to fp32, and its image grows
    hook = pipe.transformer.proj_out.register_forward_hook(lambda layer, x, out: ran.append(len(out)))
    parallelize(pipe, cp, cfg=2, vae=True, capture=True)
    errors = [error(pipe(), want), error(pipe(), want)]
    bad = [] if max(errors) < limit else [f"images {errors}"]
    bad += [] if ran == ([1] * 6 if rows else [1] * 8) else [f"rows of calls: {ran}"]
    other = pipe.latents + (rank == 2)
    message = told(lambda: torch.no_grad()(pipe.vae.decode)(other))
    bad += [] if "disagree" in message and "latents of rank 2" in message else [f"decoded: {message}"]
    if not rows:
        bad += check_second(pipe)
        pipe.guided = 2  # the last step asks once
        message = told(pipe)
        bad += [] if "2 calls a step, as in the first, got 1" in message else [f"a call was left out: {message}"]
        pipe.latents = pipe.latents + rank // 2  # another image on each half
        message = told(pipe)
        bad += [] if "disagree" in message and "hidden_states of rank 1" in message else [f"halves: {message}"]
        pipe.latents = pipe.latents - rank // 2
    hook.remove()
    bad += [] if "not parallelized" in told(lambda: parallelize(pipe, cp)) else ["parallelized twice"]
    restore(pipe)
    pipe.guided = 3
    return bad + ([] if torch.equal(pipe(), want) and not hasattr(pipe, "_ring_la") else ["not as before"])


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "calls"])
def test_guidance_on_an_axis_and_decoding_by_rows(ranks, rows):
    assert not any(ranks.run(4, check_guided, rows))


class Parts:
    """Of a pipeline."""


def check_listed(rank: int) -> list[str]:
    """Z-Image's rows are a list of images."""
    model, given = make("z-image")
    given["x"] = [given["x"][0], given["x"][0] + 1]
    given["controlnet_block_samples"] = {n: x[:, :64] for n, x in given["controlnet_block_samples"].items()}
    pipe = Parts()
    pipe.transformer, pipe.components = model, {"transformer": model}
    cp = ring_la.ContextParallel(group(4), scan="ring", attention="ring", timeout=60)
    with torch.no_grad():
        want = model(**given).sample
        parallelize(pipe, cp, cfg=2)
        ran: list[int] = []
        counted = model.layers[0].register_forward_hook(lambda block, x, out: ran.append(len(out)))
        got = model(**given).sample
        counted.remove()
    wrong = max(map(error, got, want))
    bad = [] if len(got) == len(want) and wrong < 1e-9 else [f"{len(got)} images: {wrong:.1e}"]
    return bad + ([] if ran == [1] else [f"rows {ran}"])


def test_guidance_of_rows_in_a_list(ranks):
    assert not any(ranks.run(4, check_listed))


def check_axes(rank: int) -> list[str]:
    """Guidance beside Ulysses and ring, prompts encoded by one rank; what is refused."""
    pipe = Pipeline(True)
    want, pipe.asked = pipe(), 0
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("cfg", "ulysses", "ring"))
    cp = ring_la.ContextParallel(mesh["ulysses", "ring"], scan="ring", attention="usp", timeout=60)
    parallelize(pipe, cp, cfg=mesh["cfg"], text=True)
    bad = [] if error(pipe(), want) < 1e-9 else ["another image"]
    bad += [] if pipe.asked == (0 if rank % 2 else 2) else [f"encoded {pipe.asked} times"]
    other, flux = Pipeline(True), make("flux")[0]
    other.components["vae"] = other.vae = torch.nn.Identity()
    for words, call in (
        ("cfg: expected a number that divides the 2 ranks", lambda: parallelize(other, cp, cfg=3)),
        ("cfg: expected the axis itself", lambda: parallelize(other, cp, cfg=2)),
        ("disagree on the options of parallelize", lambda: parallelize(other, cp, cfg=1 + rank % 2)),
        ("vae: expected True or False", lambda: parallelize(other, cp, vae=1)),
        ("vae: expected a pipeline with one of AutoencoderKL", lambda: parallelize(other, cp, vae=True)),
        ("expected a pipeline with cfg, vae or text", lambda: parallelize(flux, cp, text=True)),
        ("model: expected one that parallelize was given", lambda: restore(flux)),
    ):
        message = told(call)
        bad += [] if words in message else [f"{words}: {message}"]
    return bad + (["left behind"] if hasattr(other.transformer, "_ring_la") or hasattr(other, "_ring_la") else [])


def test_guidance_beside_two_axes_and_text_of_one_rank(ranks):
    assert not any(ranks.run(4, check_axes))


FACTORS = dict(taylor_factors_dtype=torch.float64, disable_cache_before_step=2)
RANGES = dict(spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(0, 800))
NOW = {"step": 0}
STEP_CACHES = {
    "First Block Cache": lambda: FirstBlockCacheConfig(threshold=0.05),  # one rank's tokens alone decide otherwise
    "MagCache": lambda: MagCacheConfig(0.3, num_inference_steps=5, mag_ratios=[1.0, 1.1, 0.9, 1.0, 1.0]),
    "TaylorSeer": lambda: TaylorSeerCacheConfig(cache_interval=2, **FACTORS),
    "TaylorSeer, lite": lambda: TaylorSeerCacheConfig(cache_interval=2, use_lite_mode=True, **FACTORS),
    "Pyramid Attention Broadcast": lambda: PyramidAttentionBroadcastConfig(
        **RANGES, current_timestep_callback=lambda: NOW["step"]
    ),
    "FasterCache": lambda: FasterCacheConfig(
        **RANGES, is_guidance_distilled=True, current_timestep_callback=lambda: NOW["step"], tensor_format="BCHW"
    ),
    "SeaCache": lambda: SeaCacheConfig(
        threshold=0.5, raw_vision_callback=lambda *x: [x.mT.view(4, 1, 3, 5) for x in x[2]["hidden_states"]]
    ),
    "TeaCache": lambda: "TeaCache",
    "cache-dit": lambda: None,
}


def check_caches(rank: int) -> list[str]:
    """Five steps under each cache: the unsplit model's outputs, and on all ranks as many blocks left out."""
    model, inputs = make("flux")
    parallelize(model, ring_la.ContextParallel(group(3), scan="ring", timeout=60))
    model.enable_cache(FasterCacheConfig(**RANGES, current_timestep_callback=lambda: 0, tensor_format="BCHW"))
    message = told(lambda: model(**inputs))
    bad = [] if "is_guidance_distilled=True" in message else [message]
    return bad + [f"{name}: {what}" for name, config in STEP_CACHES.items() for what in check_cache(config())]


def enable(model: torch.nn.Module, config: object) -> None:
    """A cache of Diffusers, or by None that of cache-dit, which decides as First Block Cache does."""
    if config is not None:
        enable_tea_cache(model, 5, 0.1, (1.0, 0.0)) if config == "TeaCache" else model.enable_cache(config)
        return
    blocks, pattern = [model.transformer_blocks, model.single_transformer_blocks], cache_dit.ForwardPattern.Pattern_1
    adapter = cache_dit.BlockAdapter(transformer=model, blocks=blocks, forward_pattern=[pattern] * 2)
    how = dict(Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=0.05)
    cache_dit.enable_cache(adapter, cache_config=cache_dit.DBCacheConfig(**how, num_inference_steps=5))


def check_cache(config: object) -> list[str]:
    model, inputs = make("flux")
    inputs = {n: x.detach() for n, x in inputs.items()}
    ran: list[int] = []
    model.single_transformer_blocks[-1].attn.to_q.register_forward_hook(lambda *x: ran.append(1))
    enable(model, config)

    def loop() -> tuple[torch.Tensor, int]:
        ran.clear()
        x, outs = inputs["hidden_states"].clone(), []
        for n in range(5):
            NOW["step"] = 900 - 100 * n
            now = dict(step_index=n, sigma=0.9 - 0.2 * n, num_inference_steps=5)
            with torch.no_grad(), model.cache_context("cond", **now):
                outs.append(model(**inputs | dict(hidden_states=x)).sample)
            x[:, :5] += (0.3 if n % 2 else 0.003) * outs[-1][:, :5].tanh()  # the first rank's tokens change most
        model._reset_stateful_cache()
        if config is None:
            cache_dit.refresh_context(model, num_inference_steps=5)
        return torch.stack(outs), len(ran)

    with mock.patch.object(Loop, "_is_parallelized", return_value=False):  # cache-dit asks all ranks of the job else
        want, calls = loop()
    cp = ring_la.ContextParallel(group(3), scan="ring", timeout=60)
    parallelize(model, cp)
    got, mine = loop()
    restore(model)
    with mock.patch.object(Loop, "_is_parallelized", return_value=False):
        again, _ = loop()
    bad = [] if error(got, want) < 1e-9 else [f"output {error(got, want):.1e}"]
    bad += [] if mine == calls and 0 < calls < 5 else [f"{mine} of {calls} calls"]
    return bad + ([] if torch.equal(again, want) else ["not as before"])


def test_step_caches_are_decided_by_all_ranks(ranks):
    assert ranks.run(3, check_caches) == [[]] * 3


def check_counts(rank: int) -> str:
    """Rank 1 has made a group that the others have not: new ones would have other names there."""
    world = dist.distributed_c10d._world
    world.group_count += rank
    try:
        axes_of(ring_la.ContextParallel(group(), scan="ring", timeout=20), 2)
    except ring_la.DisagreementError as error:
        return str(error)
    finally:
        world.group_count -= rank
    return "nothing raised"


def test_ranks_that_have_made_other_groups_are_told(ranks):
    for said in ranks.run(4, check_counts):
        assert "disagree on the number of process groups they have" in said
