"""What ranks tell each other of their memory is data, not a pickle."""

from __future__ import annotations

import torch

from ring_la.comm.sharing import read, written


def test_a_handle_is_text_without_a_pickle():
    own = (
        torch.Tensor,
        torch.Size([8]),
        (1,),
        0,
        torch.UntypedStorage,
        torch.uint8,
        0,
        b"\x00\xff",
        8,
        2,
        False,
        b"",
        3,
    )
    theirs = (*own[:7], b"other", 16, 4, True, b"n", 5)
    text = written(theirs)
    assert "other" not in text
    assert text.isascii()
    assert read(text, own) == list(theirs)
    assert isinstance(read(text, own)[1], torch.Size)
    assert read(written(()), own) == []
    assert read(text, ()) == []
