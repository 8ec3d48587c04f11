"""What makes a file in this folder a public function.

A recurrence is described by a function from its own arguments to a `Recurrence`: the rule, and what its tokens
bring under it. `recurrence` adds the keywords all recurrences have in common, checks, lets the ranks agree, and runs.
"""

from __future__ import annotations

import functools
import inspect
import math
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
from ..errors import ArgumentError, RingLAError, UnsupportedError, describe_tensor
from ..kernels import Inputs, check_choice, state_dtype
from ..kernels.gates import l2norm
from ..layout import check_cu_seqlens
from ..outputs import LinearAttentionOutput
from .bidirectional import bidirectional

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
            options.layout.agree(name, None if error else (*signature(r, options, flags), decays), error)
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


# -- checks ------------------------------------------------------------------------------------------------


def check(r: Recurrence, options: Options) -> None:
    """Refuse wrong shapes, dtypes, devices and choices. No synchronisation unless the layout validates always."""
    B, T, H, K, V = check_tensors(r)
    check_choice(options.mode, options.backend)
    check_flag("causal", r.causal)
    for name in ("use_qk_l2norm", "output_final_state", "in_place"):
        check_flag(name, getattr(options, name))
    scale = options.scale
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and abs(scale) < math.inf):
        raise ArgumentError("scale", "a finite number or None", describe_tensor(scale))
    deterministic = isinstance(options.layout, ShardedLayout) and options.layout.cp.deterministic
    if deterministic and (options.mode == "recurrent" or not r.causal):
        got = "mode='recurrent'" if r.causal else "causal=False"
        raise UnsupportedError("layout", f"one without deterministic=True for {got}", "a deterministic one")
    if not r.causal and (options.mode == "recurrent" or options.backend == "triton"):
        got = f"mode={options.mode!r}, backend={options.backend!r}"
        raise UnsupportedError("causal", "True for mode='recurrent' and backend='triton'", got)
    documents = check_split(T, B, options.layout, options.cu_seqlens, r.inputs.q.device)
    if options.layout is not None and options.backend == "reference":
        expected = "None, 'triton' or 'torch' with a layout"
        raise UnsupportedError("backend", expected, "'reference'", "It runs on one device")
    state = options.initial_state
    if state is not None:
        expected = [documents, H, K, V]
        if not isinstance(state, Tensor) or list(state.shape) != expected or state.dtype not in FLOATS:
            raise ArgumentError("initial_state", f"a float tensor [N, H, K, V] = {expected}", describe_tensor(state))
        if state.device != r.inputs.q.device:
            raise ArgumentError("initial_state", f"a tensor on {r.inputs.q.device}", state.device)
    if options.in_place:
        check_in_place(r, options)
    if options.layout is not None and options.layout.cp.validate == "always":
        check_values(r, state)


def check_flag(name: str, value: object) -> None:
    """Refuse anything but a bool: a string or None would pass for one."""
    if not isinstance(value, bool):
        raise ArgumentError(name, "True or False", describe_tensor(value))


def check_depth(layer_idx: object, num_layers: object) -> None:
    """Refuse a layer that a model of so many layers does not have."""
    ints = isinstance(layer_idx, int) and isinstance(num_layers, int)
    if not ints or not 0 <= layer_idx < num_layers:
        raise ArgumentError("layer_idx", f"an int, 0 ≤ layer_idx < num_layers = {num_layers!r}", repr(layer_idx))


def check_in_place(r: Recurrence, options: Options) -> None:
    """Refuse to overwrite a state that is missing, shared between ranks, of another dtype, or part of a graph."""
    state, wanted = options.initial_state, state_dtype(*r.inputs)
    if options.backend == "reference":
        raise UnsupportedError("in_place", "False for backend='reference'", True)
    if options.layout is not None or not r.causal:
        raise UnsupportedError("in_place", "False under a layout and with causal=False", True)
    if state is None or state.dtype != wanted:
        raise ArgumentError("initial_state", f"a state of {wanted} for in_place=True", describe_tensor(state))
    present = [x for x in (*r.inputs, state) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in present):
        raise ArgumentError("in_place", "False where gradients are wanted", True, "Call it under torch.no_grad()")


def check_tensors(r: Recurrence) -> tuple[int, int, int, int, int]:
    """Refuse inputs that are not float tensors of the right shapes on one device, q, k and v of one dtype; returns
    B, T, H, K and V."""
    q, k, v = r.inputs[:3]

    def name(f: str) -> str:
        return r.names.get(f, f)

    wanted, present = r.rule.inputs, []
    for f, x in zip(Inputs._fields, r.inputs):
        if x is None and f not in wanted:
            continue
        if not isinstance(x, Tensor):
            raise ArgumentError(name(f), "a tensor", describe_tensor(x))
        if x.dtype not in FLOATS:
            raise ArgumentError(name(f), "a tensor of fp16, bf16, fp32 or fp64", describe_tensor(x))
        present.append((f, x))
    for f, x in (("q", q), ("v", v)):
        if x.dim() != 4:
            raise ArgumentError(name(f), "four dimensions [B, T, H, D]", list(x.shape))
    B, T, Hk, K = shape = q.shape
    rows, tokens, H, V = v.shape
    if Hk < 1 or K < 1:
        raise ArgumentError(name("q"), "at least one head and one channel", list(shape))
    if k.shape != shape:
        raise ArgumentError(name("k"), f"the shape of {name('q')}, {[B, T, Hk, K]}", list(k.shape))
    if (rows, tokens) != (B, T):
        raise ArgumentError(name("v"), f"[B, T, H, V] with B={B}, T={T}", list(v.shape))
    if H % Hk:
        raise ArgumentError(name("v"), f"a number of heads that is a multiple of the {Hk} of {name('q')}", H)
    for f, x in present[3:]:
        tail = () if f == "beta" or (f == "g" and r.rule.decay != "diagonal") else (K,)
        if x.shape != (B, T, H, *tail) and x.shape != (B, T, Hk, *tail):
            raise ArgumentError(name(f), f"{[B, T, H, *tail]}", list(x.shape))
    device, dtype = q.device, q.dtype
    for f, x in present:
        if x.device != device:
            raise ArgumentError(name(f), f"a tensor on {device}, where {name('q')} is", x.device)
    for f, x in present[1:3]:
        if x.dtype != dtype:
            raise ArgumentError(name(f), f"{dtype}, the dtype of {name('q')}", x.dtype)
    return B, T, H, K, V


def check_split(T: int, B: int, layout: object, cu_seqlens: object, device: torch.device) -> int:
    """Refuse a layout or offsets that do not fit T tokens in B rows; returns the number of documents."""
    if layout is not None:
        if not isinstance(layout, ShardedLayout):
            raise ArgumentError("layout", "a layout made by ContextParallel.layout, or None", type(layout).__name__)
        if cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "None with a layout", "offsets", "Give them to ContextParallel.layout")
        layout.require_runs("a recurrence")
        if device != layout.cp.device:
            raise ArgumentError("layout", f"one whose group works on {device}, where the inputs are", layout.cp.device)
        if T != layout.local_length:
            raise ArgumentError("layout", f"one with {T} tokens on this rank, the T of the inputs", layout.local_length)
        if layout.packed and B != 1:
            raise ArgumentError(
                "layout", f"one without packed documents for a batch of {B}", repr(layout), "Pack into B = 1"
            )
        return layout.num_documents if layout.packed else B
    if cu_seqlens is None:
        return B
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise ArgumentError("cu_seqlens", "an int32 or int64 tensor [N+1]", describe_tensor(cu_seqlens))
    if B != 1:
        raise ArgumentError(
            "cu_seqlens", "None for a batch of several rows", f"B = {B}", "Pack the documents into B = 1"
        )
    if cu_seqlens.device != device:
        raise ArgumentError("cu_seqlens", f"a tensor on {device}", cu_seqlens.device)
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        check_cu_seqlens(cu_seqlens, T)
    return cu_seqlens.shape[0] - 1


def check_values(r: Recurrence, state: Tensor | None) -> None:
    """Refuse gates above zero and NaN anywhere, the initial state included; synchronises."""
    for f, x in (*r.inputs._asdict().items(), ("initial_state", state)):
        if x is None:
            continue
        name = r.names.get(f, f)
        x = x.detach()
        check_nan(name, x)
        if f == "g" and x.numel() and float(x.max()) > 0:
            raise ArgumentError(name, "log-decays ≤ 0", f"a largest value of {float(x.max()):g}")


def check_nan(name: str, x: Tensor) -> None:
    """Refuse NaN; synchronises."""
    if count := int(torch.isnan(x).sum()):
        raise ArgumentError(name, "no NaN", f"{count} of them")


def signature(r: Recurrence, options: Options, flags: tuple) -> tuple:
    """What must be the same on all ranks: shapes but T, dtypes, flags and who needs a gradient."""

    def of(x: Tensor | None) -> object:
        return None if x is None else (x.shape[0], *x.shape[2:], str(x.dtype), x.requires_grad)

    state = options.initial_state
    tensors = tuple((r.names.get(f, f), of(x)) for f, x in r.inputs._asdict().items() if x is not None)
    initial = None if state is None else (tuple(state.shape), str(state.dtype), state.requires_grad)
    rest = (options.scale, options.use_qk_l2norm, options.output_final_state, options.mode, options.backend)
    return (str(r.rule), r.causal, tensors, ("initial_state", initial), rest, torch.is_grad_enabled(), flags)
