"""Kernels that are named to Diffusers, as ours.

`transformer.set_attention_backend(...)`, `diffusers.attention_backend(...)` and DIFFUSERS_ATTN_BACKEND name the kernel
of split attention, as they name that of the rest. One of which there is none here is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UnsupportedError

OURS: dict[str, str | None] = {
    "native": None,
    "_native_flash": "flash",
    "_native_cudnn": "cudnn",
    "_native_math": "torch",
    "flash": "flash_attn_2",
    "flash_varlen": "flash_attn_2",
    "_flash_3": "flash_attn_3",
    "_flash_varlen_3": "flash_attn_3",
    "sage": "sage",
}
"""Diffusers' names of kernels, and those of `ring_la.attention`; None: the fastest."""
HINT = "Name one of ring_la.attention by parallelize(backend=…), and none to Diffusers"


def kernel_named(processors: Iterable[tuple[str, object]], own: str | None) -> str | None:
    """The kernel of split attention: what Diffusers was told, of these processors or everywhere, or else `own`.

    Raises:
        UnsupportedError: there is no such kernel here, there are several, or another one than `own`.
    """
    active = active_kernel()
    words: dict[str, str] = {}
    for where, processor in processors:
        words.setdefault(_word(getattr(processor, "_attention_backend", None) or active), where)
    words = words or {active: "the library"}
    for word, where in words.items():
        if word not in OURS:
            expected = f"one of {', '.join(OURS)} (set_attention_backend, attention_backend, DIFFUSERS_ATTN_BACKEND)"
            raise UnsupportedError("attention backend of Diffusers", expected, f"{word} of {where}", HINT)
    named = {OURS[word] for word in words} - {None}
    if len(named) > 1 or (named and own not in (None, *named)):
        got = ", ".join(sorted(words)) + ("" if own is None else f" beside backend={own!r}")
        raise UnsupportedError("attention backend of Diffusers", "one kernel for all split attention", got, HINT)
    return next(iter(named), own)


def active_kernel() -> str:
    """The kernel that is named to Diffusers everywhere."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    return _word(_AttentionBackendRegistry.get_active_backend()[0])


def _word(name: object) -> str:
    return str(getattr(name, "value", name))
