"""Diffusers' own pipelines, tiny and random, whole loop and decoder: split, their images are those of one process.

    python -m tests.integrations.diffusers.pipelines [title ...]

Prints a line for each; exits with the number of wrong ones. No test collects it: importing pipelines takes each rank
longer than what they do.
"""

from __future__ import annotations

import sys

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLWan,
    AutoencoderTiny,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    HeliosPipeline,
    HeliosScheduler,
    HiDreamImagePipeline,
    MagCacheConfig,
    SanaPipeline,
    StableDiffusion3Pipeline,
    WanPipeline,
)

import ring_la
from ring_la.integrations.diffusers import parallelize, restore
from ring_la.integrations.diffusers.catalogue import find_plan
from tests.support.attention_cases import error
from tests.support.pool import Ranks, group

from .control_models import flux_control
from .cross_models import wan
from .joint_models import flux, sd3
from .linear_models import sana
from .streams_models import helios, hidream

RATIOS = [1.0, 1.1, 0.9, 1.0, 1.0, 1.0]


FLUX = {
    "flux": FluxPipeline,
    "flux tiny": FluxPipeline,
    "flux callback": FluxPipeline,
    "flux LoRA": FluxPipeline,
    "flux from an image": FluxImg2ImgPipeline,
    "flux inpaint": FluxInpaintPipeline,
    "flux control": FluxControlNetPipeline,
}


def drawn(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter drawn, in fp32."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.float().eval()


def autoencoder(channels: int) -> AutoencoderKL:
    sizes = dict(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=channels)
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    return AutoencoderKL(**sizes, **blocks, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0)


def video_autoencoder() -> AutoencoderKLWan:
    scales = dict(dim_mult=[1, 1], temperal_downsample=[True], scale_factor_temporal=2, scale_factor_spatial=2)
    moments = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, **scales, **moments)


def make(name: str) -> tuple:
    """A pipeline without text encoders, and its call."""
    torch.manual_seed(0)
    scheduler = FlowMatchEulerDiscreteScheduler()
    text = dict(text_encoder=None, tokenizer=None)
    if name in FLUX:
        parts = dict(vae=drawn(autoencoder(1)), transformer=drawn(flux()[0]), text_encoder_2=None, tokenizer_2=None)
        if name == "flux tiny":
            sizes = dict(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), latent_channels=1)
            parts["vae"] = drawn(AutoencoderTiny(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1), **sizes))
        if name == "flux control":
            parts |= dict(controlnet=drawn(flux_control()[0]))
        pipe = FLUX[name](scheduler, **parts, **text)
        call = dict(prompt_embeds=torch.randn(1, 5, 12), pooled_prompt_embeds=torch.randn(1, 6))
        call |= dict(height=20, width=12, num_inference_steps=6, max_sequence_length=5)
        picture = torch.rand(1, 3, 20, 12)
        if name in ("flux from an image", "flux inpaint"):
            call |= dict(image=picture, strength=0.7)
        if name == "flux inpaint":
            call |= dict(mask_image=(torch.rand(1, 1, 20, 12) > 0.5).float())
        if name == "flux control":
            call |= dict(control_image=picture, controlnet_conditioning_scale=0.6, control_mode=1)
        if name == "flux callback":
            call |= dict(callback_on_step_end=lambda pipe, n, t, now: dict(latents=now["latents"] * (1 - 0.01 * n)))
        if name == "flux LoRA":
            from peft import LoraConfig

            pipe.transformer.add_adapter(LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_out.0", "proj_out"]))
            drawn(pipe.transformer)
            call |= dict(joint_attention_kwargs=dict(scale=0.5))
    elif name == "sd3":
        parts = dict(vae=drawn(autoencoder(4)), transformer=drawn(sd3()[0]), text_encoder_2=None, tokenizer_2=None)
        pipe = StableDiffusion3Pipeline(scheduler=scheduler, **parts, **text, text_encoder_3=None, tokenizer_3=None)
        names = ("prompt_embeds", "negative_prompt_embeds")
        call = {n: torch.randn(1, 5, 12) for n in names}
        call |= {n: torch.randn(1, 6) for n in ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")}
        call |= dict(height=12, width=12, num_inference_steps=3)
    elif name == "hidream":
        text |= {f"{part}_{n}": None for n in (2, 3, 4) for part in ("text_encoder", "tokenizer")}
        transformer = drawn(hidream(10)[0])
        pipe = HiDreamImagePipeline(scheduler, drawn(autoencoder(4)), transformer=transformer, **text)
        pipe.default_sample_size = 6
        call = {f"{which}prompt_embeds_t5": torch.randn(1, 5, 8) for which in ("", "negative_")}
        call |= {f"{which}prompt_embeds_llama3": torch.randn(4, 1, 5, 12) for which in ("", "negative_")}
        call |= {f"{which}pooled_prompt_embeds": torch.randn(1, 6) for which in ("", "negative_")}
        call |= dict(height=12, width=20, num_inference_steps=3)
    elif name == "helios":
        parts = dict(
            vae=drawn(video_autoencoder()), transformer=drawn(helios()[0]), scheduler=HeliosScheduler(stages=1)
        )
        pipe = HeliosPipeline(**parts, **text)
        pipe.vae_scale_factor_spatial = 2
        call = {n: torch.randn(1, 5, 12) for n in ("prompt_embeds", "negative_prompt_embeds")}
        call |= dict(height=32, width=16, num_frames=9, num_inference_steps=2, num_latent_frames_per_chunk=3)
        call |= dict(history_sizes=[4, 2, 1])
    elif name == "sana":
        vae = AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_qkv_multiscales=((), ()),
            decoder_qkv_multiscales=((), (5,)),
        )
        pipe = SanaPipeline(vae=drawn(vae), transformer=drawn(sana()[0]), scheduler=scheduler, **text)
        call = {n: torch.randn(1, 5, 12) for n in ("prompt_embeds", "negative_prompt_embeds")}
        call |= {n: torch.ones(1, 5) for n in ("prompt_attention_mask", "negative_prompt_attention_mask")}
        call |= dict(height=10, width=6, num_inference_steps=3, use_resolution_binning=False, prompt=None)
        pipe.check_inputs = lambda *args, **keywords: None  # it wants multiples of 32
    else:
        pipe = WanPipeline(vae=drawn(video_autoencoder()), transformer=drawn(wan()[0]), scheduler=scheduler, **text)
        pipe.vae_scale_factor_spatial = 2
        call = {n: torch.randn(1, 5, 12) for n in ("prompt_embeds", "negative_prompt_embeds")}
        call |= dict(height=32, width=16, num_frames=3, num_inference_steps=3)
    pipe.set_progress_bar_config(disable=True)
    return pipe, call


def image(pipe, call) -> torch.Tensor:
    out = pipe(**call, output_type="pt", generator=torch.Generator().manual_seed(1))
    return torch.as_tensor(out.frames if hasattr(out, "frames") else out.images)


def check(rank: int, P: int, name: str, how: dict) -> list[str]:
    pipe, call = make(name)
    cp = ring_la.ContextParallel(group(P), scan="ring", attention="ring", timeout=60)
    bad, cache = [], how.get("cache")
    if cache:
        pipe.transformer.enable_cache(cache)
    want = image(pipe, call)
    ran: list[int] = []
    counted = pipe.transformer.get_submodule(find_plan(pipe.transformer).last).register_forward_hook(
        lambda *x: ran.append(1)
    )
    parallelize(pipe, cp, **how.get("split", {}))
    for again in (1, 2):
        e = error(image(pipe, call), want)
        bad += [] if e < 2e-4 else [f"image {again}: {e:.1e}"]
    expected = how.get("ran")
    bad += [] if expected is None or len(ran) == expected else [f"{len(ran)} calls"]
    counted.remove()
    if how.get("back"):
        restore(pipe)
        bad += [] if torch.equal(image(pipe, call), want) else ["not as before"]
        bad += ["left behind"] if hasattr(pipe, "_ring_la") or hasattr(pipe.transformer, "_ring_la") else []
    return bad


CASES = {
    "flux, decoder by rows": (3, "flux", dict(split=dict(vae=True), back=True)),
    "flux, First Block Cache": (2, "flux", dict(cache=FirstBlockCacheConfig(threshold=0.3))),
    "flux, MagCache": (2, "flux", dict(cache=MagCacheConfig(0.3, num_inference_steps=6, mag_ratios=RATIOS))),
    "flux, tiny decoder": (3, "flux tiny", dict(split=dict(vae=True), back=True)),
    "hidream, guidance by rows": (4, "hidream", dict(split=dict(cfg=2, vae=True), back=True)),
    "sd3, guidance by rows": (4, "sd3", dict(split=dict(cfg=2, vae=True), back=True)),
    "flux, from an image": (3, "flux from an image", dict(split=dict(vae=True), back=True)),
    "flux, inpaint": (2, "flux inpaint", dict(split=dict(vae=True))),
    "flux, inpaint on three": (3, "flux inpaint", {}),
    "flux, ControlNet": (3, "flux control", dict(back=True)),
    "flux, callback that changes latents": (3, "flux callback", {}),
    "flux, LoRA": (2, "flux LoRA", dict(back=True)),
    "flux, LoRA on three": (3, "flux LoRA", {}),
    "sana, decoder by rows": (3, "sana", dict(split=dict(vae=True), back=True)),
    "sana, guidance by rows": (4, "sana", dict(split=dict(cfg=2, vae=True))),
    "helios, guidance by calls": (4, "helios", dict(split=dict(cfg=2, vae=True), back=True)),
    "wan, guidance by calls": (4, "wan", dict(split=dict(cfg=2, vae=True), back=True, ran=8)),
}


def main() -> int:
    ranks, wrong = Ranks(), 0
    for title, (P, name, how) in CASES.items():
        if sys.argv[1:] and title not in sys.argv[1:]:
            continue
        bad = [one for found in ranks.run(P, check, P, name, how, timeout=400) for one in found]
        print(f"{title}, {P} ranks: {'WRONG ' + '; '.join(bad) if bad else 'equal'}", flush=True)
        wrong += bool(bad)
    ranks.stop()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
