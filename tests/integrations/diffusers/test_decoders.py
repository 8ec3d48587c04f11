"""Autoencoders that decode by rows (`parallelize(vae=True)`): tiny random ones give the image, or video, of one
process, with rows that do not divide by the ranks."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

import diffusers

import ring_la
from ring_la.integrations.diffusers.autoencoder import RowDecoder
from tests.support.attention_cases import error
from tests.support.pool import group

IMAGE = dict(layers_per_block=1, norm_num_groups=4, latent_channels=4)
LTX = dict(latent_channels=4, block_out_channels=(8, 8), layers_per_block=(1,) * 3, decoder_layers_per_block=(1,) * 3)
LTX |= dict(spatio_temporal_scaling=(True, False), decoder_inject_noise=(False,) * 3, patch_size=2)
MAGVIT = dict(down_block_types=("SpatialDownBlock3D",) * 2, up_block_types=("SpatialTemporalUpBlock3D",) * 2)
ALLEGRO = dict(down_block_types=("AllegroDownBlock3D",) * 2, up_block_types=("AllegroUpBlock3D",) * 2)
ALLEGRO |= dict(temporal_upsample_blocks=(True, False), temporal_compression_ratio=2)
FLUX2 = IMAGE | dict(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2)
FLUX2 |= dict(up_block_types=("UpDecoderBlock2D",) * 2)
HUNYUAN = dict(latent_channels=4, layers_per_block=1)
CASES = {
    "AutoencoderKLHunyuanVideo": (  # whose convolutions repeat the border, and whose attention sees no later frame
        HUNYUAN
        | dict(block_out_channels=(8,) * 4, norm_num_groups=4)
        | dict(down_block_types=("HunyuanVideoDownBlock3D",) * 4, up_block_types=("HunyuanVideoUpBlock3D",) * 4),
        (2,),
    ),
    "AutoencoderKLHunyuanVideo15": (
        HUNYUAN | dict(block_out_channels=(8, 8), spatial_compression_ratio=2, temporal_compression_ratio=2),
        (2,),
    ),
    "AutoencoderKLFlux2": (FLUX2, ()),
    "AutoencoderKLCogVideoX": (IMAGE | dict(block_out_channels=(8,) * 4), (5,)),
    "AutoencoderKLLTXVideo": (
        LTX
        | dict(decoder_block_out_channels=(8, 8), decoder_spatio_temporal_scaling=(True, False))
        | dict(downsample_type=("conv",) * 2, upsample_residual=(False,) * 2, upsample_factor=(1, 1))
        | dict(down_block_types=("LTXVideoDownBlock3D",) * 2),
        (2,),
    ),
    "AutoencoderKLLTX2Video": (  # whose convolutions reflect at the border
        LTX
        | dict(decoder_block_out_channels=(8, 16), decoder_spatio_temporal_scaling=(True, True))
        | dict(downsample_type=("spatial",) * 2, upsample_residual=(True,) * 2, upsample_factor=(2, 2))
        | dict(down_block_types=("LTX2VideoDownBlock3D",) * 2),
        (2,),
    ),
    "AutoencoderKLHunyuanImage": (
        dict(in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1)
        | dict(spatial_compression_ratio=2, sample_size=32),
        (),
    ),
    "AutoencoderKLHunyuanImageRefiner": (
        HUNYUAN | dict(block_out_channels=(8, 8), spatial_compression_ratio=2, temporal_compression_ratio=2),
        (2,),
    ),
    "AutoencoderKLMagvit": (IMAGE | MAGVIT | dict(block_out_channels=(8, 8)), (5,)),
    "AutoencoderKLCosmos": (
        dict(latent_channels=4, encoder_block_out_channels=(8,) * 3, decode_block_out_channels=(8,) * 3, patch_size=2)
        | dict(attention_resolutions=(4,), resolution=8, num_layers=1, spatial_compression_ratio=4)
        | dict(temporal_compression_ratio=4),
        (3,),
    ),
    "AutoencoderKLAllegro": (IMAGE | ALLEGRO | dict(block_out_channels=(8, 8)), (2,)),
    "AutoencoderTiny": (
        dict(encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), latent_channels=4)
        | dict(num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1)),
        (),
    ),
}


def autoencoder(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config, frames = CASES[name]
    vae = getattr(diffusers, name)(**config).double().eval()
    for parameter in vae.parameters():
        nn.init.normal_(parameter, std=0.2)
    return vae, torch.randn(1, 4, *frames, 7, 4).double()


def decoded(vae: nn.Module, latents: Tensor) -> Tensor:
    if hasattr(vae, "kernel"):  # Allegro decodes by tiles alone, of which this is one
        vae.kernel = vae.stride = tuple(2 * n for n in latents.shape[2:])
        vae.enable_tiling()
    return vae.decode(latents).sample


def check_decoders(rank: int, P: int) -> list[str]:
    bad, cp = [], ring_la.ContextParallel(group(P), scan="ring", timeout=60)
    for name in CASES:
        vae, latents = autoencoder(name)
        with torch.no_grad():
            few = latents[..., :2, :]  # on 3 ranks it is whole on each
            want, want_of_few = decoded(vae, latents), decoded(vae, few)
            with ExitStack() as undo:
                RowDecoder(cp).adopt(vae, undo)
                wrong = max(error(decoded(vae, latents), want), error(decoded(vae, few), want_of_few))
            bad += [] if wrong < 1e-6 else [f"{name} {wrong:.1e}"]  # LTX rounds to fp32
            bad += [] if torch.equal(decoded(vae, latents), want) else [f"{name}: not as before"]
    return bad


@pytest.mark.parametrize("P", [1, 2, 3])
def test_more_decoders_by_rows(ranks, P):
    assert not any(ranks.run(P, check_decoders, P))


def test_decoders_of_other_kinds_are_refused():
    noise = CASES["AutoencoderKLLTXVideo"][0] | dict(decoder_inject_noise=(True, False, False))
    blurred = CASES["AutoencoderTiny"][0] | dict(upsample_fn="bilinear")
    for name, config, why in (
        ("AutoencoderKLLTXVideo", noise, "draws no noise"),
        ("AutoencoderTiny", blurred, "known to decode by rows"),
    ):
        with pytest.raises(ring_la.UnsupportedError, match=why), ExitStack() as undo:
            RowDecoder(None).adopt(getattr(diffusers, name)(**config), undo)  # type: ignore[arg-type]
