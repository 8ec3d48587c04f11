"""What ``benchmarks.latents`` counts are the copies that mailboxes make."""

from __future__ import annotations

import torch

from benchmarks import latents
from ring_la.softmax.strategies import mailbox


def test_bytes_that_a_mailbox_copies_are_counted():
    own, source = mailbox.copy_rows, torch.ones(2, 3, 4)
    with latents.counted() as sent:
        for into in (torch.empty(2, 3, 4), torch.empty(2, 3, 4)):
            mailbox.copy_rows(into, source)
            assert torch.equal(into, source)
    assert sent == [2 * 24 * 4]
    assert mailbox.copy_rows is own
