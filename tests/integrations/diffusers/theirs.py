"""Outputs of tiny random models split over two CPU processes, by ring_la and by Diffusers' own context parallelism,
beside one process.

    python -m tests.integrations.diffusers.theirs

Diffusers places its ranks by the number of accelerators; here a CPU counts as one. Prints a row for each case: the
largest error of each, relative to the largest output, or what was raised; a way that has not answered after 90 seconds
is ended, and named so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .models import make

P, SECONDS, STEPS = 2, 60, 4
WAYS = ("ours", "ulysses", "ulysses_anything", "ring")


def flux(tokens: int = 14, text: int = 4):
    model, inputs = make("flux")
    for name, n in (("hidden_states", tokens), ("encoder_hidden_states", text)):
        inputs[name] = inputs[name][:, :n]
    return model, inputs | dict(img_ids=inputs["img_ids"][:tokens], txt_ids=inputs["txt_ids"][:text])


def qwen(masked: bool = True, columns: int = 7):
    model, inputs = make("qwen, masked" if masked else "qwen")
    for name, n in (("hidden_states", 2 * columns), ("encoder_hidden_states", 4)):
        inputs[name] = inputs[name][:, :n]
    if masked:
        inputs["encoder_hidden_states_mask"] = inputs["encoder_hidden_states_mask"][:, :4]
    return model, inputs | dict(img_shapes=[[(1, 2, columns)]] * 2)


def ltx(masked: bool = True):
    model, inputs = make("ltx")
    inputs["hidden_states"], inputs["encoder_hidden_states"] = (
        inputs[n][:, :m] for n, m in (("hidden_states", 14), ("encoder_hidden_states", 4))
    )
    inputs["encoder_attention_mask"] = inputs["encoder_attention_mask"][:, :4] if masked else None
    return model, inputs | dict(height=2, width=7)


def wan(frames: int = 2):
    model, inputs = make("wan")
    text = inputs["encoder_hidden_states"][:, :4]
    return model, inputs | dict(hidden_states=inputs["hidden_states"][:, :, :frames], encoder_hidden_states=text)


CASES = {
    "Flux, 14 tokens and 4 of text": (flux, False),
    "Flux, 15 tokens and 5 of text": (lambda: flux(15, 5), False),
    "Flux, First Block Cache": (flux, True),
    "Qwen-Image, text without a mask": (lambda: qwen(False), False),
    "Qwen-Image, masked text": (qwen, False),
    "LTX, text without a mask": (lambda: ltx(False), False),
    "LTX, masked text": (ltx, False),
    "Wan, 18 tokens": (wan, False),
    "Wan, 27 tokens": (lambda: wan(3), False),
}


def loop(model, inputs: dict, cached: bool) -> torch.Tensor:
    """One call; with a cache several, whose latents move in places."""
    x, outs = inputs["hidden_states"].clone(), []
    for n in range(STEPS if cached else 1):
        with torch.no_grad(), model.cache_context("cond"):
            outs.append(model(**inputs | dict(hidden_states=x), return_dict=False)[0])
        x[:, : x.shape[1] // 2] += (0.3 if n % 2 else 0.003) * outs[-1][:, : x.shape[1] // 2].tanh()
    return torch.stack(outs)


def run(rank: int, title: str, way: str, place: str) -> None:
    """One rank of a case."""
    from diffusers import ContextParallelConfig, FirstBlockCacheConfig

    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(P))
    how = dict(init_method=f"file://{place}/meet", timeout=timedelta(seconds=SECONDS))
    dist.init_process_group("gloo", rank=rank, world_size=P, **how)
    make, cached = CASES[title]
    model, inputs = make()
    model = model.float().eval()
    inputs = {n: _single(x) for n, x in inputs.items()}
    if cached:
        model.enable_cache(FirstBlockCacheConfig(threshold=0.05))
    want = loop(model, inputs, cached)
    if cached:
        model._reset_stateful_cache()
    try:
        if way == "ours":
            import ring_la
            from ring_la.integrations.diffusers import parallelize

            parallelize(model, ring_la.ContextParallel(scan="ring", attention="ring", timeout=SECONDS))
        else:
            more = dict(ring_degree=P) if way == "ring" else dict(ulysses_degree=P)
            more |= dict(ulysses_anything=True) if way == "ulysses_anything" else {}
            torch.accelerator.device_count = lambda: 1  # enable_parallelism divides by it, and a CPU has none
            model.enable_parallelism(config=ContextParallelConfig(**more))
        got = loop(model, inputs, cached)
        result = f"{float((got - want).abs().max() / want.abs().max()):.0e}"
    except Exception as e:  # what a user would see
        result = f"{type(e).__name__}: {str(e).splitlines()[0][:150]}"
    with open(f"{place}/{rank}", "w") as f:
        f.write(result)
    os._exit(0)


def _single(x: object) -> object:
    floats = isinstance(x, torch.Tensor) and x.is_floating_point()
    return x.detach().float() if floats else x


def outcome(title: str, way: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        ranks = [mp.get_context("spawn").Process(target=run, args=(r, title, way, place)) for r in range(P)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS + 30)
        late = [rank for rank in ranks if rank.is_alive()]
        for rank in late:
            rank.kill()
        said = [open(f"{place}/{r}").read() for r in range(P) if os.path.exists(f"{place}/{r}")]
    words = " / ".join(dict.fromkeys(said))
    return f"no answer in {SECONDS + 30} s ({words})" if late else words or "ended without a word"


def main(titles: list[str], ways: list[str]) -> None:
    for title in titles:
        for way in ways:
            print(f"{title} | {way} | {outcome(title, way)}", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    main([c for c in CASES if not chosen or c in chosen], list(WAYS))
