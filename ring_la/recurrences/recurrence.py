"""What makes a file in this folder a public function.

A recurrence is described by a function from its own arguments to a `Recurrence`: the rule, and what its tokens
bring under it. `recurrence` adds the keywords all recurrences have in common, checks, lets the ranks agree, and runs.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import linear, reference
from ..algebra import Rule
from ..autograd import outside_graphs, refuse_transforms, transformed
from ..context import ShardedLayout
from ..errors import Facts, RingLAError
from ..kernels import Inputs, state_dtype
from ..kernels.fused.gates import l2norm
from ..outputs import LinearAttentionOutput
from .bidirectional import bidirectional
from .checks import check


class Recurrence(NamedTuple):
    """One recurrence, with the tensors of a call.

    Attributes:
        rule: how a token changes the state.
        inputs: what tokens bring.
        default_scale: the scale where the caller gives none; None means K**-0.5.
        causal: False: every token reads the state after its document's last token.
        readout: what becomes of ``scale · Sᵀ q``.
        names: the caller's names of the inputs where they differ, for messages.
        decays: the heads' log-decays where every token's are the same: what gives them, or the caller's tensor.
    """

    rule: Rule
    inputs: Inputs
    default_scale: float | None = None
    causal: bool = True
    readout: Callable[[Tensor], Tensor] = lambda o: o
    names: Mapping[str, str] = {}
    decays: Callable[[], tuple[float, ...]] | Tensor | None = None


class Options(NamedTuple):
    """The keywords all recurrences have in common."""

    scale: float | None = None
    initial_state: Tensor | None = None
    output_final_state: bool = False
    use_qk_l2norm: bool = False
    layout: ShardedLayout | None = None
    cu_seqlens: Tensor | None = None
    mode: str = "auto"
    backend: str | None = None
    in_place: bool = False


COMMON = """
Common keywords:
    scale: multiplies the output; None: {scale}.
    initial_state: the state before each document, ``[N, H, K, V]``; N is B, or the number of packed documents.
        Replicated under a layout; its gradient is the whole one on every rank.
    output_final_state: also return the state after each document, ``[N, H, K, V]`` fp32 (fp64 for fp64 inputs), on
        every rank; gradients flowing into it are summed over the ranks.
    use_qk_l2norm: replace q and k by ``x · rsqrt(Σ x² + 1e-6)``.
    layout: how the sequence is split over ranks (`ContextParallel.layout`); T is then this rank's length. None: one
        device. Collective: every rank calls, forward and backward.
    cu_seqlens: offsets ``[N+1]`` of documents packed into one batch row on one device; empty ones are allowed.
    mode: "chunk", "recurrent" (token by token, for decoding) or "auto".
    backend: None (the fastest that can), "triton", "torch" or "reference" (fp64 token loop, one device).
    in_place: write the state after each document over `initial_state`, which is then the final state returned. For
        decoding: one device, no gradients.

Returns:
    LinearAttentionOutput(o ``[B, T, H, V]`` in the values' dtype, final_state or None).

Raises:
    ArgumentError: a wrong shape, dtype, device or choice, by name; under a layout on every rank.
    UnsupportedError: a combination that is not supported, and what would work.
    DisagreementError: the ranks' arguments do not fit together.
"""


def recurrence(describe: Callable[..., Recurrence]) -> Callable[..., LinearAttentionOutput]:
    """The public function of a recurrence: `describe`'s own arguments, then the common keywords."""
    own = inspect.signature(describe)
    fields = inspect.signature(Options).parameters.values()
    common = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fields]
    names = frozenset(p.name for p in common)
    default_scale = "1" if describe.__name__ == "mamba2" else "K**-0.5"

    @functools.wraps(describe)
    def function(*args, **keywords) -> LinearAttentionOutput:
        options = Options(**{k: keywords.pop(k) for k in [*keywords] if k in names})
        call = functools.partial(describe, *args, **keywords)
        if options.layout is None:
            return _run(describe.__name__, call, options, ())
        named = sorted((*zip(own.parameters, args), *keywords.items()), key=itemgetter(0))
        flags = tuple([(n, x) for n, x in named if not isinstance(x, Tensor)])
        run = _run_outside_graphs if torch.compiler.is_compiling() else _run
        return run(describe.__name__, call, options, flags)

    function.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*own.parameters.values(), *common], return_annotation=LinearAttentionOutput
    )
    function.__doc__ = textwrap.dedent(f"    {describe.__doc__}") + COMMON.format(scale=default_scale)
    return function


def _run(name: str, describe: functools.partial[Recurrence], options: Options, flags: tuple) -> LinearAttentionOutput:
    r, error = None, None
    try:
        if transformed() and options.backend != "reference":
            refuse_transforms(_given(describe, options))
        r = describe()
        check(r, options)
    except RingLAError as e:
        error = e
    decays = None
    if isinstance(options.layout, ShardedLayout):
        decays = None if error else known(r.decays, options.layout)
        trusted = error is None and options.layout.cp.validate == "never"
        if not trusted:
            options.layout.agree(name, None if error else signature(r, options, flags, decays), error)
    elif error is not None:
        raise error
    if options.backend == "reference":
        return _reference(name, describe, r, options)
    q = r.inputs.q
    scale = options.scale
    if scale is None:
        scale = q.shape[-1] ** -0.5 if r.default_scale is None else r.default_scale
    inputs = _own_heads(r.inputs)
    if options.use_qk_l2norm:
        inputs = inputs._replace(q=l2norm(inputs.q), k=l2norm(inputs.k))
    if not r.causal:
        sides = (options.initial_state, options.output_final_state, options.layout, options.cu_seqlens)
        out = bidirectional(inputs, float(scale), *sides)
    else:
        out = linear.run(
            r.rule,
            inputs,
            scale=float(scale),
            initial_state=options.initial_state,
            output_final_state=options.output_final_state,
            layout=options.layout,
            cu_seqlens=options.cu_seqlens,
            mode=options.mode,
            backend=options.backend,
            in_place=options.in_place,
            decays=decays,
        )
    return LinearAttentionOutput(r.readout(out.o), out.final_state)


def _given(describe: functools.partial[Recurrence], options: Options) -> Iterator[tuple[str, object]]:
    """A call's own arguments and its initial state, by name."""
    yield from zip(inspect.signature(describe.func).parameters, describe.args)
    yield from describe.keywords.items()
    yield "initial_state", options.initial_state


def known(decays: Callable[[], tuple[float, ...]] | Tensor | None, layout: ShardedLayout) -> tuple[float, ...] | None:
    """Static decays as the host knows them: a tensor's are read once and kept with the layout; None for those that
    are learned, and change with every step."""
    if not isinstance(decays, Tensor):
        return decays if decays is None else decays()
    if decays.requires_grad or decays.is_inference():  # nobody tells when these change
        return None
    read = layout.kept("decays", WeakTensorKeyDictionary)
    version, values = read.get(decays, (None, None))
    if version != decays._version:
        values = tuple(decays.tolist())
        read[decays] = decays._version, values
    return values


def _own_heads(x: Inputs) -> Inputs:
    """Gates and the like that come with the heads of q and k, repeated for the value heads they serve."""
    heads = x.v.shape[2]
    if x.q.shape[2] == heads:
        return x

    def own(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], 2)

    return Inputs(*x[:3], *map(own, x[3:]))


_run_outside_graphs = outside_graphs(_run)


def _reference(
    name: str, describe: functools.partial[Recurrence], r: Recurrence, options: Options
) -> LinearAttentionOutput:
    """The fp64 token loop, returned in the dtypes of the other backends."""
    args, keywords = describe.args, describe.keywords
    common = {k: x for k, x in options._asdict().items() if k != "in_place"}
    out = getattr(reference, name)(*args, **keywords, **common)
    values = args[0] if args else keywords.get("v", keywords.get("x"))  # q, k and v have one dtype
    final = None if out.final_state is None else out.final_state.to(state_dtype(*r.inputs))
    return LinearAttentionOutput(out.o.to(values.dtype), final)


def signature(
    r: Recurrence, options: Options, flags: tuple, decays: tuple[float, ...] | None
) -> tuple[tuple[str, object], ...]:
    """What must be the same on all ranks, by name: shapes but T, dtypes, flags and who needs a gradient."""
    state = options.initial_state
    return (
        ("rule", str(r.rule)),
        ("causal", r.causal),
        *[(r.names.get(f, f), Facts.of(x, 1)) for f, x in zip(Inputs._fields, r.inputs) if x is not None],
        ("initial_state", None if state is None else Facts.of(state)),
        *[(n, getattr(options, n)) for n in ("scale", "use_qk_l2norm", "output_final_state", "mode", "backend")],
        ("gradients", torch.is_grad_enabled()),
        ("decays", decays),
        *flags,
    )
