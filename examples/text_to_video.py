"""A video from a prompt, by a pipeline of Diffusers whose tokens are split over the ranks.

    bash launch/diffusion.sh video                                            # set-up included; tiny, random, offline
    torchrun --nproc_per_node 4 examples/text_to_video.py "a fox runs" --model Wan-AI/Wan2.1-T2V-14B-Diffusers --cfg 2
    torchrun --nproc_per_node 4 examples/text_to_video.py --model Efficient-Large-Model/SANA-Video_2B_480p_diffusers

Any pipeline runs whose transformer ring_la.integrations.diffusers covers. Writes a GIF, or with --out NAME.mp4 what
diffusers.utils.export_to_video can (it needs imageio or OpenCV).
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import diffusers
from PIL import Image
from pipelines import drawn, embeds, generate, join, load, options


def tiny() -> diffusers.WanPipeline:
    """A Wan of a few thousand random weights, without a text encoder: its videos are noise."""
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=2,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    text = dict.fromkeys(("text_encoder", "tokenizer"))
    return diffusers.WanPipeline(vae=drawn(vae), transformer=drawn(transformer), scheduler=scheduler, **text)


def length(pipe: Any) -> str:
    """What a pipeline calls the number of frames: nearly all num_frames, SANA-Video's frames."""
    taken = signature(pipe.__call__).parameters
    for name in ("num_frames", "frames"):
        if name in taken:
            return name
    raise SystemExit(f"{type(pipe).__name__}: expected a pipeline that takes num_frames or frames")


def main() -> None:
    args = options(__doc__, {"height": 64, "width": 96, "frames": 9}, "video.gif")
    cp = join(args.attention)
    pipe = tiny() if args.model is None else load(args.model)
    size = {"height": args.height, "width": args.width, length(pipe): args.frames}
    call: dict[str, Any] = {n: x for n, x in size.items() if x is not None}
    if args.model is None:
        call = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 6} | call
        call |= {"prompt_embeds": embeds(args.prompt, 1, 8, 12), "negative_prompt_embeds": embeds("", 1, 8, 12)}
    else:
        call["prompt"] = args.prompt
    frames = generate(pipe, cp, args, call | {"output_type": "pil"}).frames[0]
    if cp.rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write(frames, args.out)
        print(f"{args.out}: {len(frames)} frames of {frames[0].width} x {frames[0].height}")


def write(frames: list[Image.Image], out: Path) -> None:
    """A GIF of 16 frames a second, or what the library can."""
    if out.suffix == ".gif":
        frames[0].save(out, save_all=True, append_images=frames[1:], duration=1000 // 16, loop=0)
    else:
        diffusers.utils.export_to_video(frames, str(out), fps=16)


if __name__ == "__main__":
    main()
