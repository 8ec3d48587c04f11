"""Completions from a model whose prompts are read by all ranks: requests in, tokens out as they come.

`Engine` decides what happens next, `Ranks` lets the other ranks follow, `Lookout` sees whether they live, `Batch`
decodes requests side by side and `Prefixes` finds prompts that were read before; `text` goes from text to tokens and
back, `load` finds both in a folder.
`protocol` and `answers` are OpenAI's, and `http` serves them (imported by those who have FastAPI).
"""

from .batch import Batch
from .by_block import HybridByBlock
from .completion import Completion, Ended, Event, Failed, NewToken, Request
from .engine import Engine, Overdue
from .lookout import Lookout
from .model import Hybrid, Served
from .prefixes import Prefixes
from .ranks import Ranks
from .text import Bytes, NoText, Stream, Subwords, Text
from .tiers import Keep
from .waiting import Busy, Stopping, Waiting

__all__ = [
    "Batch",
    "Busy",
    "Bytes",
    "Ended",
    "Engine",
    "Event",
    "Failed",
    "Hybrid",
    "HybridByBlock",
    "Keep",
    "Completion",
    "NoText",
    "Overdue",
    "NewToken",
    "Prefixes",
    "Ranks",
    "Request",
    "Served",
    "Stopping",
    "Stream",
    "Subwords",
    "Text",
    "Waiting",
    "Lookout",
]
