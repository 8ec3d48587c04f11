"""What rank 0 tells the others, and what they answer with it."""

from __future__ import annotations

from unittest.mock import patch

import torch

from ring_la import ContextParallel
from ring_la.comm import Group
from ring_la.errors import DisagreementError
from ring_la.serving.ranks import INLINE, Ranks, What, Word
from tests.support.pool import group


def check_tokens(rank: int) -> tuple[list[list[int]], int]:
    """Tokens that were heard, and how many messages came beside words."""
    ranks = Ranks(ContextParallel(group(3), scan="ring", timeout=60))
    heard, apart = [], "exchange" if rank == 0 else "recv"
    with patch.object(Group, apart, autospec=True, side_effect=getattr(Group, apart)) as messages:
        for n in (1, INLINE, INLINE + 1, 3):
            word = Word(What.STEP, ids=torch.arange(n) - 1)
            if rank == 0:
                ranks.tell(word)
            else:
                word = ranks.hear()
            heard.append(word.ids.tolist())
    return heard, messages.call_count


def test_few_tokens_are_in_the_word(ranks):
    wanted = [list(range(-1, n - 1)) for n in (1, INLINE, INLINE + 1, 3)]
    assert ranks.run(3, check_tokens) == 3 * [(wanted, 1)]


def check_outcome(rank: int) -> list[str]:
    """What ranks hear with a word after a step that failed on one of them, and after one that failed on all alike."""
    ranks = Ranks(ContextParallel(group(3), scan="ring", timeout=60))
    said = []
    for error in (None, ValueError("late") if rank == 2 else None, ValueError("all")):
        ranks.agree_later(error)
        try:
            if rank == 0:
                ranks.tell(Word(What.NOTHING))
            else:
                ranks.hear()
            said.append("")
        except DisagreementError as e:
            said.append(str(e))
    return said


def test_what_came_of_a_step_is_compared_with_the_next_word(ranks):
    for alike, apart, failed in ranks.run(3, check_outcome):
        assert alike == failed == ""
        assert "what came of a request" in apart
        assert "rank 2" in apart
        assert "ValueError: late" in apart
