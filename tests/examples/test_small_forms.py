"""The examples that no other test runs, each as its page says, in its small form: tiny, random, offline."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import string
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
ALONE = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def said(script: str, *options: str, torchrun: bool = False) -> str:
    """What the example prints on one rank, which torchrun starts if asked to."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"] if torchrun else []
    environment = {n: x for n, x in os.environ.items() if n not in ALONE} | ENVIRONMENT
    command = [sys.executable, *start, str(EXAMPLES / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_pool(rank: int, script: str, *options: str) -> str:
    """In the pool, whose ranks have met already: what the example prints."""
    sys.path.insert(0, str(EXAMPLES))
    joined = mock.patch("torch.distributed.init_process_group")
    alone = mock.patch.object(sys, "argv", [script, *options])
    with joined, alone, redirect_stdout(StringIO()) as out:
        importlib.import_module(script).main()
    return out.getvalue()


def test_an_image_is_written_by_torchrun_and_the_same_by_four_ranks(ranks, tmp_path):
    pytest.importorskip("diffusers")
    image = pytest.importorskip("PIL.Image")
    one, two = (tmp_path / name for name in ("one.png", "two.png"))
    assert f"{one}: 128 x 128" in said("text_to_image.py", "--steps=2", f"--out={one}", torchrun=True)
    assert f"{two}: 128 x 128" in ranks.run(4, in_pool, "text_to_image", "--steps=2", f"--out={two}")[0]
    pairs = zip(image.open(one).tobytes(), image.open(two).tobytes(), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1, "of 255"


def saved_pipeline(folder: Path) -> None:
    """A tiny random SD3 with tokenizers and text encoders, as a folder of the hub."""
    import diffusers
    import transformers

    sys.path.insert(0, str(EXAMPLES))
    from pipelines import drawn

    letters, ends = string.ascii_lowercase, ["<|startoftext|>", "<|endoftext|>"]
    words = {word: n for n, word in enumerate([*letters, *(x + "</w>" for x in letters), *ends])}
    clip = transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77)
    pieces = [(piece, -float(n)) for n, piece in enumerate(["<pad>", "</s>", "<unk>", "▁", *letters])]
    small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, projection_dim=16)
    ids = dict(vocab_size=len(words), bos_token_id=words[ends[0]], eos_token_id=words[ends[1]])
    config = transformers.CLIPTextConfig(**small, **ids, pad_token_id=ids["eos_token_id"])
    t5 = transformers.T5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    sizes = dict(num_layers=2, attention_head_dim=8, num_attention_heads=4, in_channels=4, out_channels=4, patch_size=1)
    text = dict(caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=32)
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    small_vae = dict(block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, latent_channels=4)
    diffusers.StableDiffusion3Pipeline(
        transformer=drawn(diffusers.SD3Transformer2DModel(sample_size=32, **sizes, **text)),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=drawn(diffusers.AutoencoderKL(**blocks, **small_vae, shift_factor=0.0)),
        text_encoder=drawn(transformers.CLIPTextModelWithProjection(config)),
        tokenizer=clip,
        text_encoder_2=drawn(transformers.CLIPTextModelWithProjection(config)),
        tokenizer_2=clip,
        text_encoder_3=drawn(transformers.T5EncoderModel(t5)),
        tokenizer_3=transformers.T5Tokenizer(vocab=pieces, extra_ids=0),
    ).save_pretrained(folder)


def test_a_pipeline_of_a_folder_with_its_text_encoders(ranks, tmp_path):
    """Guidance on an axis, prompts encoded by one rank, decoded by rows: the image of the library alone."""
    diffusers = pytest.importorskip("diffusers")
    image = pytest.importorskip("PIL.Image")
    saved_pipeline(tmp_path / "model")
    out = tmp_path / "image.png"
    how = ("a fox", f"--model={tmp_path / 'model'}", "--height=64", "--width=72", "--steps=3", f"--out={out}")
    said = ranks.run(4, in_pool, "text_to_image", *how, "--cfg=2", "--vae", "--text")[0]
    assert f"{out}: 72 x 64" in said
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "model")
    call = dict(height=64, width=72, num_inference_steps=3, generator=torch.Generator().manual_seed(0))
    want = pipe("a fox", **call).images[0]
    pairs = list(zip(image.open(out).tobytes(), want.tobytes(), strict=True))
    assert max(abs(a - b) for a, b in pairs) <= 1, "of 255"
    assert len({b for _, b in pairs}) > 50


def test_a_video_is_written(ranks, tmp_path):
    """Its start is the image's: `join` in examples/pipelines.py."""
    pytest.importorskip("diffusers")
    out = tmp_path / "video.gif"
    first, *others = ranks.run(4, in_pool, "text_to_video", "--steps=2", f"--out={out}")
    assert f"{out}: 9 frames of 96 x 64" in first
    assert others == [""] * 3
    assert out.stat().st_size > 1000


def sana_video() -> Any:
    """A tiny random SANA-Video whose prompts are numbers, of any height and width."""
    import diffusers

    sys.path.insert(0, str(EXAMPLES))
    from pipelines import drawn, embeds
    from text_to_video import tiny

    wan, mask = tiny(), torch.ones(1, 8)
    heads = dict(num_attention_heads=2, attention_head_dim=12, num_cross_attention_heads=2, cross_attention_head_dim=12)
    sizes = dict(num_layers=1, in_channels=4, out_channels=4, cross_attention_dim=24, caption_channels=12)
    model = diffusers.SanaVideoTransformer3DModel(sample_size=22, **heads, **sizes)
    parts = dict(vae=wan.vae, scheduler=wan.scheduler, text_encoder=None, tokenizer=None)
    pipe = diffusers.SanaVideoPipeline(transformer=drawn(model), **parts)
    words = [embeds(prompt, 1, 8, 12) for prompt in ("a fox", "")]
    pipe.encode_prompt = lambda *_, **__: (words[0], mask, words[1], mask)
    pipe.video_processor.classify_height_width_bin = lambda height, width, ratios: (height, width)
    return pipe


def check_named(rank: int, *options: str) -> tuple[str, int]:
    """What the example prints of a pipeline by name, and how many graphs its blocks are."""
    sys.path.insert(0, str(EXAMPLES))
    import text_to_video

    torch._dynamo.reset()
    graphs = []
    compiled = functools.partialmethod(torch.nn.Module.compile, backend=lambda graph, _: graphs.append(graph) or graph)
    named = mock.patch.object(text_to_video, "load", lambda name: {"a SANA-Video": sana_video}[name]())
    with named, mock.patch.object(torch.nn.Module, "compile", compiled):
        return in_pool(rank, "text_to_video", "--model=a SANA-Video", "--compile", *options), len(graphs)


def test_a_video_of_a_named_pipeline_with_compiled_blocks(ranks, tmp_path):
    """SANA-Video has another word for the number of frames, and names no repeated blocks."""
    pytest.importorskip("diffusers")
    out = tmp_path / "video.gif"
    size = ("--height=32", "--width=32", "--frames=7", "--steps=2")
    said, graphs = ranks.run(4, check_named, *size, f"--out={out}")[0]
    assert f"{out}: 7 frames of 32 x 32" in said
    assert graphs >= 1


def test_blocks_of_all_transformers_are_compiled(monkeypatch):
    """Of Wan 2.2, which has two, one was."""
    diffusers = pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    pipelines, wan = importlib.import_module("pipelines"), importlib.import_module("text_to_video").tiny()
    models = [wan.transformer, copy.deepcopy(wan.transformer)]
    parts = dict(vae=wan.vae, scheduler=wan.scheduler, text_encoder=None, tokenizer=None)
    pipe = diffusers.WanPipeline(transformer=models[0], transformer_2=models[1], boundary_ratio=0.5, **parts)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: compiled.append(module))
    pipelines.compile_blocks(pipe)
    assert compiled == [*models[0].blocks, *models[1].blocks]


@pytest.mark.parametrize("takes", ["num_frames", "frames", "height"])
def test_the_number_of_frames_has_the_pipelines_word(monkeypatch, takes):
    pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    word = importlib.import_module("text_to_video").length
    pipe = type("Pipe", (), {})()
    pipe.__call__ = {"num_frames": lambda num_frames: 0, "frames": lambda frames: 0, "height": lambda height: 0}[takes]
    if takes != "height":
        assert word(pipe) == takes
        return
    with pytest.raises(SystemExit, match="Pipe: expected a pipeline that takes num_frames or frames"):
        word(pipe)


def test_a_mixture_of_experts_trains_without_torchrun():
    lines = said("moe_hybrid.py", "--steps=3", "--seq-len=64").splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("layer")] == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.parametrize("words", [["--height", "0"], ["--steps", "-1"], ["--width", "1.5"]])
def test_sizes_are_numbers(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["text_to_image.py", *words])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit):
        importlib.import_module("pipelines").options("", {"height": 128, "width": 128}, "image.png")
    assert f"{words[0]}: expected a number, at least 1, got {words[1]!r}" in capsys.readouterr().err
