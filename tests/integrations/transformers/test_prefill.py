"""A prompt read on a split sequence, then decoded from the cache it left: as the unmodified model does alone."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from ring_la.integrations.transformers import mixers  # noqa: E402
from ring_la.integrations.transformers.names import CACHE, NAMES  # noqa: E402
from tests.support.transformers_models import CASES, RECURRENT  # noqa: E402

from .test_models import LENGTH, batch  # noqa: E402

UNCACHED = {"glm5_next", "qwen4_exp", "xlstm"} | ({"recurrent_gemma"} if mixers.OF_ONE_SEQUENCE else set())
PROMPT = LENGTH - 2


def decoded(model: torch.nn.Module) -> list[torch.Tensor]:
    """Logits of each token after the prompt."""
    kind = type(model).__name__
    ids, results, given = batch(1 if "Rwkv" in kind else 2), [], {}  # of which the library's steps mix the rows
    if "RecurrentGemma" in kind:  # the library's returns none
        given = {CACHE: transformers.DynamicCache(config=model.config)}
    with torch.no_grad():
        out = model.eval()(input_ids=ids[:, :PROMPT], use_cache=True, **given)
        key = next((name for name in NAMES if name in out), CACHE)
        given = given or {key: out[key]}
        for t in range(PROMPT, LENGTH):
            results.append(model(input_ids=ids[:, t : t + 1], use_cache=True, **given).logits[:, -1])
    return results


def split(rank: int, name: str) -> list[torch.Tensor]:
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring")
    return decoded(parallelize(CASES[name].make(), cp, check=False))


WITH_LATENTS = ["deepseek_v3", "deepseek_v32", "hy_v4_vl"]


@pytest.mark.parametrize("name", sorted({*RECURRENT, *WITH_LATENTS} - UNCACHED))
def test_decodes_after_a_split_prompt(ranks, name):
    if not hasattr(transformers, CASES[name].model):
        pytest.skip(f"this version of transformers has no {CASES[name].model}")
    expected = decoded(CASES[name].make())
    for results in ranks.run(2, split, name):
        for x, y in zip(results, expected, strict=True):
            error, scale = float((x - y).abs().max()), float(y.abs().max())
            assert error <= 1e-4 * scale, f"{error:.1e} of {scale:.1e}"


def refused(rank: int) -> None:
    import ring_la
    from ring_la.integrations.transformers import parallelize
    from tests.support.pool import group

    cp = ring_la.ContextParallel(group(), scan="ring", attention="ring")
    for name in sorted(UNCACHED):
        model = parallelize(RECURRENT[name].make(), cp, check=False).eval()
        with torch.no_grad():
            assert model(input_ids=batch(2)).get(model._ring_la.cache.name) is None, name
            with pytest.raises(ring_la.UnsupportedError, match="use_cache: expected False with layers like"):
                model(input_ids=batch(2), use_cache=True)


def test_caches_that_a_split_prompt_cannot_leave(ranks):
    ranks.run(2, refused)


def failing(rank: int) -> str:
    """A decoding step of a parallelized model that Transformers has given fla-core's kernels, on a CPU."""
    from transformers.models.qwen3_next import modeling_qwen3_next as library

    import ring_la

    def kernel(*args, **keywords):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    theirs = type(kernel)(kernel.__code__, {"__name__": "fla.ops.gated_delta_rule", "RuntimeError": RuntimeError})
    own, library.torch_recurrent_gated_delta_rule = library.torch_recurrent_gated_delta_rule, theirs
    try:
        split(rank, "qwen3_next")
    except ring_la.RingLAError as error:
        return str(error)
    finally:
        library.torch_recurrent_gated_delta_rule = own
    return "nothing raised"


def test_fla_core_beside_a_cpu_is_named(ranks):
    for said in ranks.run(2, failing):
        assert "fla-core's Triton kernels" in said
        assert "fails without ring_la, too: pip uninstall fla-core" in said
