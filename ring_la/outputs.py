"""What the public functions return: always one of these NamedTuples, whatever the flags.

Shapes: B batch, T tokens, H value heads, K and V the key and value widths, D channels, W the convolution's width,
N documents (B where nothing is packed).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LinearAttentionOutput(NamedTuple):
    """The result of a linear recurrence."""

    o: Tensor
    """Outputs ``[B, T, H, V]``."""
    final_state: Tensor | None
    """State after each document's last token, ``[N, H, K, V]``, or a tuple of tensors where a recurrence's state has
    several parts; None unless ``output_final_state``."""


class AttentionOutput(NamedTuple):
    """The result of softmax attention."""

    o: Tensor
    """Outputs ``[B, T, H, V]``."""
    lse: Tensor
    """Natural logarithm of each row's softmax denominator, ``[B, H, T]``; −inf where a row sees no key."""


class MLAOutput(NamedTuple):
    """The result of attention over latents."""

    o: Tensor
    """Outputs ``[B, T, H, V]``."""
    lse: Tensor
    """Natural logarithm of each row's softmax denominator, ``[B, H, T]``; −inf where a row sees no key."""
    latents: Tensor | None
    """Latents and rotary parts of the whole sequence, ``[B, T, L + R]``; None unless ``output_latents``."""


class NSAOutput(NamedTuple):
    """The result of native sparse attention."""

    o: Tensor
    """Outputs ``[B, T, H, V]``."""
    chosen: Tensor
    """Places of the chosen blocks' first tokens in the whole sequence, int32 ``[B, T, Hk, topk]``; −1: none."""


class ShortConvOutput(NamedTuple):
    """The result of a short convolution."""

    o: Tensor
    """Outputs, in the shape of the input."""
    final_state: Tensor | None
    """Each document's last ``W − 1`` inputs, oldest first, ``[N, D, W − 1]``; None unless ``output_final_state``."""


class TokenShiftOutput(NamedTuple):
    """The result of a token shift."""

    o: Tensor
    """Each token's predecessor, in the shape of the input."""
    final_state: Tensor | None
    """Each document's last token ``[N, D]``; None unless ``output_final_state``."""
