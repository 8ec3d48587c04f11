"""Transformers of Diffusers on a split sequence of image, video and text tokens.

    cp = ring_la.ContextParallel(group)
    parallelize(pipeline.transformer, cp)
    image = pipeline(prompt, generator=torch.Generator().manual_seed(0)).images[0]

`parallelize` keeps the model, its class, its weights and its call: whole inputs on every rank, the same whole
output on every rank. In between each rank has its share of the image's tokens, and of the
text's where text is part of the sequence:

    plans       what is said of a model: which argument of its blocks has which tokens along which dimension
    catalogue   the models of which that is said
    call        what one call of the model knows
    streams     how the tokens of image, text and both are split
    keys        attention over them, with the text that a mask leaves out
    operators   the same as one node of a compiled graph
    ahead       keys that leave before queries and wide layers are computed; what makes them, by families of processors
                (ahead_families)
    linear      processors of linear attention, by one sum of states
    gated_delta gated delta nets over frames, by scans of affine maps
    caches      step caches whose decisions the ranks take together (cache_dit: those of cache-dit; tea_cache: TeaCache)
    pipeline    a whole pipeline; guidance on an axis of its own (guidance), its decoder by rows (autoencoder,
                autoencoder_frames)
    modules     modules that reach beyond their tokens: convolutions with halos, and recurrences over frames
    compare     inputs that differ among the ranks
    graphs      calls as CUDA graphs
    modulation  layers that read the step of time alone, shared out among the ranks
    checks      everything else that is refused
    model       what is done before the model, before a block and behind the last layer
    adoption    puts that into a model: hooks, and processors that are split
    layer_hooks hooks behind layers that others may take the place of
    cutting     what a block is given, cut to this rank's tokens
    entry       what is called: parallelize, restore
    kernels     kernels that are named to Diffusers, as ours
    processors  the library's attention processors, their attention function replaced by ours
"""

from .catalogue import PLANS
from .entry import parallelize, restore
from .plans import (
    AttentionPlan,
    BlockPlan,
    KeyMask,
    ModelPlan,
    RefinerPlan,
    SliceCount,
    SliceRows,
    StepPlan,
    TimeSteps,
    TokenCount,
    TokenRows,
    WideLayer,
)

__all__ = [
    "PLANS",
    "AttentionPlan",
    "BlockPlan",
    "KeyMask",
    "ModelPlan",
    "RefinerPlan",
    "SliceCount",
    "SliceRows",
    "StepPlan",
    "TimeSteps",
    "TokenCount",
    "TokenRows",
    "WideLayer",
    "parallelize",
    "restore",
]
