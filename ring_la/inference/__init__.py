"""From a prompt split over ranks to tokens: prefill, hand-over of the states, decoding.

prompt = prefill(model, layout.shard(ids), layout=layout)        # all ranks; every rank gets the states
for token in decode(model, prompt, max_new_tokens=100): ...      # any ranks, no communication
"""

from .by_block import BlockReader
from .generate import Prefilled, Sampler, decode, generate, prefill, step

__all__ = ["BlockReader", "Prefilled", "Sampler", "decode", "generate", "prefill", "step"]
