"""What is said of a model for it to be split: the arguments of its blocks, and the attention inside them.

A model of which nothing is said is refused, and so is one whose blocks take an argument or hold an attention that its
plan does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

IMAGE, TEXT = ("image",), ("text",)
FRONT, REAR = ("text", "image"), ("image", "text")
"""Streams of tokens, in the order in which a model puts them together."""


@dataclass(frozen=True)
class TokenRows:
    """A tensor with the tokens of `streams` along `dim`; or several, one after the other. Of several, one that nothing
    else tells the length of is what the others leave."""

    streams: tuple[str, ...]
    dim: int = 1


@dataclass(frozen=True)
class KeyMask:
    """Which tokens of `streams` are keys, 1 or True: ``[B, tokens]``, or with dimensions of size 1 between. The other
    streams are all keys.

    Attributes:
        read: the processor works on the mask itself, and gets an `EveryKey` for it, not None.
        within: the argument is a dict, and has the mask under this name.
        raises: floats, 0 or 1, are no mask: the library adds their products, query by key, to the scores.
    """

    streams: tuple[str, ...]
    read: bool = False
    within: str | None = None
    raises: bool = False


@dataclass(frozen=True)
class TimeSteps:
    """Steps of time: a row for each token of a stream along dimension 1, or one for all.

    Attributes:
        dims: the tensor's dimensions where it has a row a token.
        flat: batch and tokens are one dimension, the first.
        stream: the tokens'.
    """

    dims: int = 3
    flat: bool = False
    stream: str = "image"


@dataclass(frozen=True)
class SliceRows:
    """A tensor with a row for each slice of the grid of tokens along `dim`: for each frame, or row of an image."""

    dim: int = 1


@dataclass(frozen=True)
class SliceCount:
    """How many slices of the grid there are, an int."""


@dataclass(frozen=True)
class TokenCount:
    """How many tokens a stream has, an int."""

    stream: str


SAME = None
"""An argument that is the same for all tokens."""

Role = TokenRows | TokenCount | KeyMask | TimeSteps | SliceRows | SliceCount | tuple | dict | None


@dataclass(frozen=True)
class AttentionPlan:
    """An attention of a block.

    Attributes:
        streams: whose tokens are its queries and keys; None: its keys are whole on every rank (cross-attention).
        processors: names of the classes of processors whose attention function can be replaced.
        keys: whose tokens are its keys, where they are other ones than its queries.
    """

    streams: tuple[str, ...] | None
    processors: tuple[str, ...] = ()
    keys: tuple[str, ...] | None = None


@dataclass(frozen=True)
class WideLayer:
    """A layer that takes what an attention of its block is given, and is computed before it: keys may be on their way
    meanwhile (`parallelize(keys_first=True)`).

    Attributes:
        layer, attention: by attribute. rotary: the block's argument with the rotary embedding.
    """

    layer: str = "proj_mlp"
    attention: str = "attn"
    rotary: str = "image_rotary_emb"


@dataclass(frozen=True)
class BlockPlan:
    """One class of blocks: the role of every argument of its forward, and its attention by attribute.

    The first argument with rows of "image" alone, and of "text" alone, says how many tokens there are.

    Attributes:
        modules: other modules inside that reach beyond their own tokens (convolutions, recurrences over frames), by
            attribute ("" is the block itself): the names of the classes that `SPLIT_MODULES` may find there.
        wide: a wide layer beside its attention, in those blocks that have it; None: in none.
    """

    arguments: Mapping[str, Role]
    attention: Mapping[str, AttentionPlan]
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wide: WideLayer | None = None


@dataclass(frozen=True)
class RefinerPlan:
    """A list of blocks before the others, whose output is whole again behind the last of them: a model builds its
    sequence from several. Their stream is their own ("noise").

    Attributes:
        kind: the name of their class.
        block: its plan; the tokens are along dimension 1 of the output, and of one stream.
        added: whether something may be added between them, to tokens that are whole behind each of them then.
    """

    kind: str
    block: BlockPlan
    added: bool = False

    @property
    def stream(self) -> str:
        return next(r.streams[0] for r in self.block.arguments.values() if isinstance(r, TokenRows))


@dataclass(frozen=True)
class StepPlan:
    """Linear layers of blocks that read SiLU of the step of time's embedding and nothing else, the same for all blocks
    of a call. Without gradients each rank computes some of them, for all.

    Attributes:
        embedding: the module whose output (of a tuple the first) is that embedding, ``[B, C]``.
        layers: by class of blocks, their paths. What a block lacks, or what is no ``nn.Linear``, is left as it is.
    """

    embedding: str
    layers: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class ModelPlan:
    """What is split of a model. All tokens of one batch row are one sequence without
    a direction; whatever is not attention works on each token by itself.

        plan = ModelPlan(
            blocks={"transformer_blocks": "MyBlock"},
            classes={"MyBlock": BlockPlan({"hidden_states": TokenRows(("image",)), "temb": None},
                                          {"attn": AttentionPlan(("image",), ("MyProcessor",))})},
            inputs=("hidden_states", "timestep"),
        )
        parallelize(transformer, cp, plan=plan)

    Attributes:
        blocks: its lists of blocks (or single modules that take tokens) by path, in the order of their calls, and what
            their classes are called. "list.*.part": a part of each in a list.
        classes: these blocks.
        inputs: arguments of its forward that may be given; others must be left as they are by default.
        outputs: roles of what other modules of it, or of lists of them, return, by path and index; 0 is a tensor alone.
        refiners: lists of blocks before these, by name.
        residuals: arguments of its forward, in lists or dicts, that are added to the image's tokens between blocks and
            have them along dimension 1 (a ControlNet's).
        latents: the argument that is denoised: a tensor, or a list with one for each batch row.
        last: the layer whose output, the image's tokens, is gathered; of a list the last one. "": all tensors of the
            model's own output are (those of a ControlNet).
        gathered: other layers with an output of their own, and its stream.
        returned: the stream of that output, or of each tensor of it.
        dim: their dimension of tokens.
        layers_behind: what follows on `last`, on whole tokens and every rank, has parameters or takes inputs.
        cuts_whole_text: behind the last block, the model takes off as many tokens as the whole text has.
        grid: for a model of the image as a grid of tokens: its shape, from the model and its `hidden_states`. It is
            split by whole slices of the first axis; None: by single tokens.
        steps: layers that read the step of time alone; None: every rank computes all of them.
    """

    blocks: Mapping[str, str]
    classes: Mapping[str, BlockPlan]
    inputs: tuple[str, ...]
    outputs: Mapping[str, Mapping[int, Role]] = field(default_factory=dict)
    refiners: Mapping[str, RefinerPlan] = field(default_factory=dict)
    residuals: tuple[str, ...] = ()
    latents: str = "hidden_states"
    last: str = "proj_out"
    gathered: Mapping[str, str] = field(default_factory=dict)
    returned: tuple[str, ...] = IMAGE
    dim: int = 1
    layers_behind: bool = False
    cuts_whole_text: bool = False
    grid: Callable[[nn.Module, Tensor], tuple[int, ...]] | None = None
    steps: StepPlan | None = None
