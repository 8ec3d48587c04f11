"""Documents with a long tail, drawn: what packing and balance are measured on."""

from __future__ import annotations

import json
from pathlib import Path

import torch

MU, SIGMA = 5.5, 1.9
"""Of the lengths' logarithms: half of the documents have at most 245 tokens, half of the tokens are in the 3 % of
documents that have 9,000 and more."""


def long_tailed(file: Path, tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Writes a .jsonl of about so many bytes in documents of at most `longest`; their lengths."""
    generator, lengths = torch.Generator().manual_seed(seed), [longest - 1]
    while sum(lengths) < tokens:
        drawn = torch.empty(256).log_normal_(MU, SIGMA, generator=generator)
        lengths += drawn.long().clamp(1, longest - 1).tolist()  # a document's last token says that it ends
    letters = "".join(map(chr, torch.randint(97, 123, (max(lengths),), generator=generator).tolist()))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": letters[:n]}) + "\n" for n in lengths))
    return lengths
