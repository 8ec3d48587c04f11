"""From a prompt split over ranks to tokens: prefill, hand-over of the states, decoding.

prompt = prefill(model, layout.shard(ids), layout=layout)        # all ranks; every rank gets the states
for token in decode(model, prompt, max_new_tokens=100): ...      # any ranks, no communication

keys = key_store(model, cp)                                      # keys stay on the rank that read them
prompt = prefill(model, layout.shard(ids), layout=layout, keys=keys)
for token in decode(model, prompt, max_new_tokens=100): ...      # all ranks together
"""

from ..keystore import (
    KeyRows,
    KeySize,
    KeyStore,
    LayerKeys,
    decode_attention,
    decode_blocks,
    decode_index,
    decode_latents,
    read_attention,
)
from .by_block import BlockReader
from .generate import Prefilled, Sampler, decode, generate, key_store, prefill, step
from .stored import load_prompt, save_prompt

__all__ = [
    "BlockReader",
    "KeyRows",
    "KeySize",
    "KeyStore",
    "LayerKeys",
    "Prefilled",
    "Sampler",
    "decode",
    "decode_attention",
    "decode_blocks",
    "decode_index",
    "decode_latents",
    "generate",
    "key_store",
    "load_prompt",
    "prefill",
    "read_attention",
    "save_prompt",
    "step",
]
