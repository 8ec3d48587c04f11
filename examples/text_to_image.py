"""An image from a prompt, by a pipeline of Diffusers whose tokens are split over the ranks.

    bash launch/diffusion.sh image                                            # set-up included; tiny, random, offline
    torchrun --nproc_per_node 4 examples/text_to_image.py "a fox in the snow" --model black-forest-labs/FLUX.1-dev
    torchrun --nproc_per_node 4 examples/text_to_image.py --model Qwen/Qwen-Image --cfg 2 --vae

Any pipeline runs whose transformer ring_la.integrations.diffusers covers. The image is that of one GPU, to rounding;
the same seed gives it on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import diffusers
from pipelines import drawn, embeds, generate, join, load, options

CHANNELS = 4


def tiny() -> diffusers.FluxPipeline:
    """A Flux of a few thousand random weights, without text encoders: its images are noise."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4 * CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=12,
        pooled_projection_dim=6,
        axes_dims_rope=(4, 4, 8),
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=CHANNELS,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
    )
    text = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.FluxPipeline(scheduler, vae=drawn(vae), transformer=drawn(transformer), **text)


def main() -> None:
    args = options(__doc__, {"height": 128, "width": 128}, "image.png")
    cp = join(args.attention)
    size = {"height": args.height, "width": args.width}
    call: dict[str, Any] = {n: x for n, x in size.items() if x is not None}
    if args.model is None:
        pipe = tiny()
        call = {"height": 128, "width": 128, "num_inference_steps": 8, "max_sequence_length": 8} | call
        call |= {"prompt_embeds": embeds(args.prompt, 1, 8, 12), "pooled_prompt_embeds": embeds(args.prompt, 1, 6)}
    else:
        pipe = load(args.model)
        call["prompt"] = args.prompt
    image = generate(pipe, cp, args, call).images[0]
    if cp.rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        image.save(args.out)
        print(f"{args.out}: {image.width} x {image.height}")


if __name__ == "__main__":
    main()
