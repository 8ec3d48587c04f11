"""Transformers of Diffusers on a split sequence of image, video and text tokens.

    cp = ring_la.ContextParallel(group)
    parallelize(pipeline.transformer, cp)
    image = pipeline(prompt, generator=torch.Generator().manual_seed(0)).images[0]

`parallelize` keeps the model, its class, its weights and its call: whole inputs on every rank, the same whole
output on every rank. In between each rank has its share of the image's tokens, and of the
text's where text is part of the sequence:

    plans       which argument of a model's blocks has which tokens along which dimension
    streams     the layouts of image, text and both
    keys        attention over them, with the text that a mask leaves out
    model       splitting before a block, gathering behind the last layer, and everything that is refused
    processors  the library's attention processors, their attention function replaced by ours
"""

from .model import parallelize
from .plans import PLANS

__all__ = ["PLANS", "parallelize"]
