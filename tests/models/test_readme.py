"""The README's code runs as it stands, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import LlamaConfig

from ring_la.nn import LAYERS
from ring_la.recurrences import RECURRENCES
from tests.support.pool import group

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def check(rank: int) -> None:
    quickstart, moves, layers, model, transformers = blocks()
    quickstart = re.sub(r"dist\.init_process_group\(.*?\)", "pass", quickstart)
    quickstart = quickstart.replace("ContextParallel()", "ContextParallel(pool_group)")
    names: dict = {"pool_group": group()}
    exec(quickstart, names)
    ids = torch.randint(0, 256, (1, 1003), generator=torch.Generator().manual_seed(0))
    names |= {"x_global": torch.randn(1, 1003, 8), "other_layout": names["cp"].layout(1003, "contiguous")}
    names |= {"ids": names["layout"].shard(ids)}
    exec(moves, names)
    names |= {"x": torch.randn(1, names["layout"].local_length, 512), "x_next": torch.randn(1, 1, 512)}
    exec(layers, names)
    names |= {"ids": ids}
    exec(model.replace("max_new_tokens=100", "max_new_tokens=3"), names)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    names |= {"config": LlamaConfig(vocab_size=256, **sizes)}
    exec(transformers.replace("from_pretrained(name)", "from_config(config)"), names)
    assert torch.isfinite(names["loss"])


def test_the_readme_s_code_runs_on_two_ranks(ranks):
    ranks.run(2, check)


def test_tables_are_complete():
    for name in [r.name for r in RECURRENCES] + [layer.__name__ for layer in LAYERS.values()]:
        assert f"`{name}`" in README, name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
