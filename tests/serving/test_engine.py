"""Requests over several ranks get the tokens one process finds by reading the whole text again for every token."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ring_la import ArgumentError, ContextParallel, DisagreementError, PeerError, UnsupportedError
from ring_la.inference import Sampler, generate, key_store
from ring_la.models import HybridConfig, HybridLM
from ring_la.nn import seats
from ring_la.serving import (
    Batch,
    Busy,
    Completion,
    Ended,
    Engine,
    Event,
    Failed,
    Hybrid,
    Keep,
    NewToken,
    NoText,
    Overdue,
    Request,
    static,
)
from ring_la.serving.disk import fingerprint
from ring_la.serving.ranks import What
from tests.support.generation import WHOLE, greedy, make, tokens
from tests.support.pool import group

LONG = 60.0


class Asked(Completion):
    """A request, and what it heard."""

    def __init__(self, ids: Sequence[int], max_tokens: int = 4, **options) -> None:
        self.events: list[Event] = []
        super().__init__(Request(list(ids), max_tokens, **options), self.events.append)

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.events if isinstance(e, NewToken)]


def prompt(length: int) -> list[int]:
    return tokens(1, length)[0].tolist()


def serve(engine: Engine, jobs: Sequence[Completion]) -> None:
    """Answer all of them, then stop."""
    if engine.ranks.leads:
        for job in jobs:
            engine.submit(job)
        engine.stop()
    engine.run()


def engine(cp: ContextParallel | None = None, without: tuple[str, ...] = WHOLE, **options) -> Engine:
    return Engine(Hybrid(make(without)), NoText(), cp, patience=LONG, **options)


def truth(ids: Sequence[int], n: int, without: tuple[str, ...] = WHOLE) -> list[int]:
    return greedy(make(without), torch.tensor([ids]), n)[0].tolist()


ASKED = [(1, 5), (23, 2), (2, 1), (12, 4)]
"""Lengths of prompts, and tokens wanted: they come and go at different times, two at once."""


def check_requests(rank: int, piece: int | None) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    jobs = [Asked(prompt(length), n) for length, n in ASKED]
    serve(engine(cp, (), piece=piece, batch=2), jobs)
    return [job.tokens for job in jobs]


@pytest.mark.parametrize(("size", "piece"), [(1, 9), (2, None), (3, 9)])
def test_requests_on_ranks(ranks, size, piece):
    assert ranks.run(size, check_requests, piece)[0] == [truth(prompt(length), n, ()) for length, n in ASKED]


FIXED = (*WHOLE, "mla")
"""Layers that have no states of fixed addresses."""


def check_captured(rank: int) -> tuple[list[list[int]], int]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    jobs = [Asked(prompt(length), n) for length, n in ASKED] + [Asked(prompt(3), 6, temperature=2.0, seed=1)]
    serve(server := Engine(Hybrid(make(FIXED)), NoText(), cp, piece=9, batch=3, patience=LONG, capture=True), jobs)
    return [job.tokens for job in jobs], len(server.batch._step.kinds)


def test_a_step_over_states_of_fixed_addresses(ranks):
    want = [greedy(make(FIXED), torch.tensor([prompt(length)]), n)[0].tolist() for length, n in ASKED]
    sampler = Sampler(2.0, generator=torch.Generator().manual_seed(1))
    want.append(generate(make(FIXED), torch.tensor([prompt(3)]), 6, sampler)[0].tolist())
    got, kinds = ranks.run(3, check_captured)[0]
    assert got == want
    assert kinds <= 3  # one, two or four seats, of the same columns
    with pytest.raises(UnsupportedError, match="capture: expected False for a model with such a layer"):
        engine(capture=True)


def test_states_of_fixed_addresses_grow(monkeypatch):
    monkeypatch.setattr(static, "COLUMNS", 2)
    server = Engine(Hybrid(make(FIXED)), NoText(), batch=2, patience=LONG, capture=True)
    serve(server, jobs := [Asked(prompt(length), n) for length, n in ((1, 9), (2, 3), (7, 20))])
    for job, (length, n) in zip(jobs, ((1, 9), (2, 3), (7, 20)), strict=True):
        assert job.tokens == greedy(make(FIXED), torch.tensor([prompt(length)]), n)[0].tolist()
    assert server.batch._keys.capacity == 32
    for n, columns in ((3, 4), (4096, 4096), (4097, 5120), (65536, 65536), (65537, 81920), (131071, 131072)):
        assert static.columns_for(n) == columns


def check_turns(rank: int) -> list[tuple[list[int], int, int]]:
    """A conversation of three turns, a prompt that begins like it, and one asked again."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    ids = prompt(40)
    asked = [ids[:9], ids[:25], ids[:40], ids[:12] + ids[:3], ids[:9]]
    jobs = [Asked(x, 3) for x in asked]
    server = engine(cp, (), piece=8, batch=1, keep=1 << 20)
    serve(server, jobs)
    assert set(server.states.kept) == {e.key for e in server._prefixes._entries.values()} or rank > 0
    assert not server.states.open
    return [(job.tokens, job.events[-1].reused_tokens, len(server.states.kept)) for job in jobs] if rank == 0 else []


def test_prompts_that_begin_alike_are_read_from_there(ranks):
    ids = prompt(40)
    got = ranks.run(2, check_turns)[0]
    asked = ids[:9], ids[:25], ids[:40], ids[:12] + ids[:3], ids[:9]
    assert [t for t, _, _ in got] == [truth(x, 3, ()) for x in asked]
    assert [reused for _, reused, _ in got] == [0, 9, 25, 9, 9]


def test_states_that_do_not_fit_leave_again():
    ids = prompt(40)
    one = engine(keep=1 << 20)
    serve(one, [Asked(ids)])
    size = one._prefixes.sizes[0]
    jobs = [Asked(ids), Asked(ids[::-1]), Asked(ids[::-1]), Asked(ids)]
    few = engine(keep=size + size // 2, batch=1)
    serve(few, jobs)
    assert [job.events[-1].reused_tokens for job in jobs] == [0, 0, 40, 0]
    assert len(few.states.kept) == 1
    none = engine(batch=1)
    serve(none, jobs := [Asked(ids), Asked(ids)])
    assert jobs[1].events[-1].reused_tokens == 0
    assert not none.states.kept


TURNS = (prompt(40), prompt(40) + prompt(6), prompt(40)[::-1], prompt(23), prompt(40) + prompt(6), prompt(23))
"""The second goes on from the first; the last two were asked before, and have left the device since."""


def check_tiers(rank: int, folder: str, asked: Sequence[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    whole = engine(cp, batch=1, keep=1 << 20)
    serve(whole, [Asked(TURNS[1])])
    most = cp.comm.all_reduce(torch.tensor(whole._prefixes.sizes[0])).wait().item()  # rank 0's
    server = engine(cp, batch=1, keep=Keep(most * 5 // 2, most * 5 // 4, 1 << 20, folder))
    jobs, moved, do = [Asked(x, 3) for x in asked], [], server.states.do

    def noted(word, *row):
        if word.what == What.MOVE:
            moved.append(word.start)
        return do(word, *row)

    server.states.do = noted
    serve(server, jobs)
    assert (server.states.kept, server.states.packed) == ({}, {})  # all is on disk
    return [job.tokens for job in jobs], [job.reused for job in jobs], moved


def test_states_go_to_the_host_and_to_disk_and_come_back_on_any_number_of_ranks(ranks, tmp_path):
    got, reused, moved = ranks.run(2, check_tiers, str(tmp_path), TURNS)[0]
    assert got == [truth(x, 3) for x in TURNS]
    assert reused == [0, 40, 0, 0, 46, 23]
    assert set(moved) == {0, 1, 2}
    again = [TURNS[1], TURNS[2], prompt(40) + prompt(3)]
    for size in (1, 3):
        got, reused, _ = ranks.run(size, check_tiers, str(tmp_path), again)[0]
        assert got == [truth(x, 3) for x in again]
        assert reused == [46, 40, 40 if size == 1 else 43]  # what one rank has read and left, three go on from
    [of_model] = tmp_path.iterdir()
    (next(of_model.iterdir()) / "about.json").unlink()  # as one that was not written to its end
    there = len(list(of_model.iterdir()))
    assert ranks.run(1, check_tiers, str(tmp_path), [[3]])[0][0] == [truth([3], 3)]
    assert len([x for x in of_model.iterdir() if (x / "about.json").is_file()]) <= there
    for bad in (Keep(1, disk=1), Keep(1, folder=tmp_path), Keep(-1)):
        with pytest.raises(ArgumentError, match="keep: expected"):
            engine(keep=bad)


def spoil(entry: Path, how: str) -> None:
    """Damage a kept state on disk."""
    file = entry / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[-9] ^= 64
        file.write_bytes(data)
    elif how == "gone":
        file.unlink()
    elif how == "no text":
        (entry / "about.json").write_text("{")
    elif how == "another's":  # as all that is of another prompt
        for other in entry.parent.iterdir():
            if other != entry:
                shutil.rmtree(entry)
                shutil.copytree(other, entry)
    else:
        (entry / "about.json").unlink()
        entry.rename(entry.parent / "lost+found")
        (entry.parent / "notes.txt").write_text("not ours")


def check_spoiled(rank: int, folder: str, flip: bool) -> tuple[list[int], int, list[str]]:
    """A server that finds what is on disk; on rank 1 alone, `flip`: which cannot be read there."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=20)
    server, said = engine(cp, batch=1, keep=Keep(1 << 20, 0, 1 << 20, folder)), io.StringIO()
    if flip and rank == 1:
        server.states.disk.read = lambda *_: torch.load(f"{folder}/nothing")
    logging.getLogger("ring_la.serving").addHandler(handler := logging.StreamHandler(said))
    serve(server, jobs := [Asked(prompt(40), 3)])
    logging.getLogger("ring_la.serving").removeHandler(handler)
    return jobs[0].tokens, jobs[0].reused, said.getvalue().splitlines()


def test_damaged_states_on_disk_are_read_anew(ranks, tmp_path):
    asked = [prompt(40), prompt(23)[::-1]]
    serve(engine(batch=1, keep=Keep(1 << 20, 0, 1 << 20, tmp_path / "whole")), [Asked(x, 1) for x in asked])
    [of_model] = (tmp_path / "whole").iterdir()
    name = next(x.name for x in of_model.iterdir() if json.loads((x / "about.json").read_text())["length"] == 40)
    for how in ("cut", "flipped", "gone", "no text", "another's", "foreign", "seen by one rank"):
        shutil.copytree(tmp_path / "whole", folder := tmp_path / how)
        if how != "seen by one rank":
            spoil(folder / of_model.name / name, how)
        size = 2 if how in ("seen by one rank", "flipped") else 1
        got, reused, said = ranks.run(size, check_spoiled, str(folder), how == "seen by one rank")[0]
        assert (got, reused) == (truth(prompt(40), 3), 0), how
        assert len(said) == 1, said
        assert ranks.run(1, check_spoiled, str(folder), False)[0][1:] == (40, said if how == "foreign" else []), how
    assert (folder.parent / "foreign" / of_model.name / "lost+found").is_dir()


def test_what_does_not_get_to_disk_in_time_is_told(tmp_path, caplog):
    server, moved = engine(batch=1, keep=Keep(1 << 20, 0, 1 << 20, tmp_path)), []
    do = server.states.do

    def late(word, *row):
        if word.what == What.MOVE:
            moved.append(word.key)
            if len(moved) == 2:
                raise Overdue  # as `Lookout` has it raised
        return do(word, *row)

    server.states.do = late
    serve(server, [Asked(prompt(n), 1) for n in (9, 12, 15)])
    assert "2 of 3 kept states are not on disk when the server ends" in caplog.text
    other = make()
    other.config = dataclasses.replace(other.config, norm_eps=1e-3)  # of which no weight tells
    assert fingerprint(other) != fingerprint(make()) == fingerprint(make())


BITS = ["gdn", "kda", "mamba2", "lightning", "attention"]


def check_bits(rank: int, size: int) -> list[tuple[list[int], list[float]]]:
    """Tokens, and how likely the model finds them, under a deterministic split."""
    cp, found = ContextParallel(group(size), validate="never", deterministic=True), []
    options = {"mamba2": {"state_dim": 16}, "attention": {"num_kv_heads": 1}}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = HybridLM(HybridConfig(50, 48, BITS, 3, mlp_dim=33, options=options)).to(dtype)
        jobs = [Asked(prompt(n), 6, logprobs=1) for n in (5, 200)]
        serve(Engine(Hybrid(model), NoText(), cp, batch=2, patience=LONG), jobs)
        found += [(job.tokens, [e.said.logprob for e in job.events if isinstance(e, NewToken)]) for job in jobs]
    return found


def test_a_deterministic_server_has_the_same_bits_on_any_number_of_ranks(ranks):
    one = ranks.run(1, check_bits, 1)[0]
    assert one[0][0] != one[1][0]
    for size in (2, 3, 4):
        assert ranks.run(size, check_bits, size)[0] == one, size


def check_sampling(rank: int) -> list[list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    options = dict(temperature=1.5, top_k=9)
    jobs = [Asked(prompt(13), 8, seed=s, **options) for s in (3, 4, 3)] + [Asked(prompt(13), 8)]
    options |= dict(logit_bias={2: 4.0}, presence_penalty=0.5, frequency_penalty=0.5, logprobs=1)
    jobs.append(Asked(prompt(13), 8, seed=3, **options))
    serve(engine(cp), jobs)
    return [job.tokens for job in jobs]


def test_a_seed_gives_the_same_tokens_whoever_is_beside(ranks):
    got = ranks.run(2, check_sampling)[0]
    assert got == ranks.run(1, check_sampling)[0]
    for tokens_, seed in zip(got, (3, 4, 3)):
        sampler = Sampler(1.5, 9, torch.Generator().manual_seed(seed))
        assert tokens_ == generate(make(), torch.tensor([prompt(13)]), 8, sampler)[0].tolist()
    assert got[0] != got[1]
    assert got[0] != got[4]
    assert got[3] == truth(prompt(13), 8)


def test_who_goes_away_is_forgotten():
    server = engine(piece=4, batch=2)  # the others wait
    gone, reading, waits, stays = Asked(prompt(5), 50), Asked(prompt(40)), Asked(prompt(3)), Asked(prompt(6), 5)
    hear, seen = gone.emit, []

    def leave(event: Event) -> None:
        hear(event)
        seen.append(server.running)
        if len(gone.events) == 3:
            gone.cancel()
            reading.cancel()
            waits.cancel()

    gone.emit = leave
    serve(server, [gone, reading, waits, stays])
    assert len(gone.events) == 3
    assert (reading.events, waits.events) == ([], [])
    assert stays.tokens == truth(prompt(6), 5)
    assert seen[-1] == 2
    assert not server.states.open


def test_the_end_of_a_text_ends_a_completion():
    want = truth(prompt(7), 6)
    at = next(i for i in range(1, 6) if want[i] not in want[:i])
    server = Engine(Hybrid(make()), NoText(frozenset({want[at]})), patience=LONG)
    serve(server, [job := Asked(prompt(7), 6)])
    assert job.tokens == want[:at]
    assert job.events[-1] == Ended("stop", "", 7, 0, at + 1)
    serve(engine(), [job := Asked(prompt(7), 6)])
    assert job.events[-1] == Ended("length", "", 7, 0, 6)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([]), "^prompt: expected at least one token"),
        (Request([3, 19]), "^prompt: expected token ids from 0 to 18, got 19"),
        (Request([3] * 30, 11), r"^prompt: expected at most 40 tokens together with max_tokens, got 30 \+ 11"),
        (Request([3], 0), "^max_tokens: expected"),
        (Request([3], temperature=-1), "^temperature: expected"),
        (Request([3], stop=("x",)), "^stop: expected nothing for a model without a tokenizer"),
    ],
)
def test_what_cannot_be_completed(request_, message):
    with pytest.raises(ArgumentError, match=message):
        engine(max_tokens=40).submit(Completion(request_, print))


def test_too_many_and_too_late():
    server = engine(waiting=2)
    jobs = [Asked(prompt(3)) for _ in range(2)]
    for job in jobs:
        server.submit(job)
    with pytest.raises(Busy, match="2 requests are waiting"):
        server.submit(Asked(prompt(3)))
    server.stop()
    with pytest.raises(Busy, match="about to stop"):
        server.submit(Asked(prompt(3)))
    server.run()
    assert all(isinstance(job.events[-1], Ended) for job in jobs)


def test_requests_that_do_not_end_in_time_fail():
    server = Engine(Hybrid(make()), NoText(), patience=0.2)
    serve(server, [job := Asked(prompt(3), 100_000)])
    assert job.events[-1] == Failed("the server has stopped")
    with pytest.raises(ArgumentError, match="piece: expected an int"):
        engine(piece=0)


def test_a_result_that_is_not_finite_fails_its_request_and_not_the_server():
    server = engine(batch=2)
    read = server.model.read

    def broken(ids, states, cp):
        out = read(ids, states, cp)
        return out._replace(logits=out.logits.masked_fill(ids[:, -1:] == 3, torch.nan))

    server.model.read = broken
    unchosen = Asked([5], temperature=1.0, logit_bias={1: torch.nan})
    serve(server, jobs := [Asked([1, 3]), Asked([5]), Asked([3], temperature=1.0), Asked([6]), unchosen, Asked([7])])
    assert [job.events for job in jobs[:4:2]] == 2 * [[Failed("the model's result is not finite")]]
    assert [job.tokens for job in jobs[1::2]] == [truth([5], 4), truth([6], 4), truth([7], 4)]
    assert unchosen.events == [Failed("the request has failed (RuntimeError)")]


def test_sequences_wait_for_room():
    jobs, most = [Asked(prompt(n), 4) for n in (20, 6, 3)], []
    for job in jobs:
        hear = job.emit
        job.emit = lambda event, hear=hear: (hear(event), most.append(len(server.batch.rows)))
    server = engine(room=36)  # the first two are 34 together, the last is 7
    serve(server, jobs)
    assert [job.tokens for job in jobs] == [truth(prompt(n), 4) for n in (20, 6, 3)]
    assert max(most) == 2
    with pytest.raises(ArgumentError, match="prompt: expected at most 48 tokens"):
        engine(room=48).submit(Asked(prompt(45)))


def check_stop_elsewhere(rank: int) -> int:
    cp = ContextParallel(group(), scan="ring", validate="never")
    server = engine(cp)
    job = Asked(prompt(5))
    if rank == 0:
        server.submit(job)
    else:
        server.stop()
    server.run()
    return len(job.tokens)


def test_any_rank_may_be_told_to_stop(ranks):
    assert ranks.run(2, check_stop_elsewhere)[0] == 4


def check_death(rank: int) -> tuple[str, str]:
    """While all ranks decode a sequence, of which the last knows no more than its states."""
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=2)
    server, steps = engine(cp), []
    step, said = server.model.step, io.StringIO()
    logging.getLogger("ring_la.serving").addHandler(handler := logging.StreamHandler(said))

    def dying(*arguments, **keywords):
        steps.append(True)
        if rank == 2 and len(steps) == 3:
            os._exit(1)
        return step(*arguments, **keywords)

    server.model.step = dying
    job = Asked(prompt(5), 100_000)
    if rank == 0:
        server.submit(job)
    try:
        server.run()
    except PeerError as error:
        assert "Traceback" not in said.getvalue()
        return str(error), str(job.events[-1:])
    finally:
        logging.getLogger("ring_la.serving").removeHandler(handler)
    raise AssertionError("nobody died")


def test_a_rank_that_dies_ends_the_server(ranks):
    leader, follower = ranks.run(3, check_death, dying=(2,))
    assert "no sign of life from rank 2" in leader[0]
    assert "no sign of life from rank 2" in follower[0]
    assert "the server has failed (PeerError)" in leader[1]


def broken_at(server: Engine, token: int, after: bool = False) -> None:
    """Reading a prompt that ends with `token` raises an error, `after`: when it has been read."""
    read = server.model.read

    def broken(ids, states, cp):
        bad = int(ids[0, -1]) == token
        out = None if bad and not after else read(ids, states, cp)
        if bad:
            raise RuntimeError("no such prompt")
        return out

    server.model.read = broken


def check_one_fails(rank: int) -> list[tuple[list[int], str]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    server = engine(cp, piece=4, batch=2, keep=1 << 20)
    broken_at(server, 3)
    jobs = [Asked([5], 9), Asked([5, 6, 7, 8, 3]), Asked([6, 5])]
    serve(server, jobs)
    assert not server.states.open
    return [(job.tokens, str(job.events[-1])) for job in jobs] if rank == 0 else []


@pytest.mark.parametrize("size", [1, 2])
def test_a_request_that_fails_on_all_ranks_fails_alone(ranks, size):
    good, bad, other = ranks.run(size, check_one_fails)[0]
    assert good[0] == truth([5], 9)
    assert bad == ([], str(Failed("the request has failed (RuntimeError)")))
    assert other[0] == truth([6, 5], 4)


def check_all_decode(rank: int) -> tuple[list[list[int]], int, list[int]]:
    """Two sequences, whose first step at once fails on all ranks; then a long one and a short one."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    server, most, failed = engine(cp, batch=2), [], []
    step = server.model.step

    def broken(tokens_, states, in_place):
        out = step(tokens_, states, in_place)
        most.append(next(state.rows for state in states if hasattr(state, "rows")).nbytes)
        if len(tokens_) == 2 and not failed:
            failed.append(True)
            raise RuntimeError("two at once")
        return out

    server.model.step = broken
    jobs = [Asked(prompt(4), 5), Asked(prompt(5), 5), Asked(prompt(120), 3), Asked(prompt(2), 6)]
    serve(server, jobs)
    failures = sum(isinstance(job.events[-1], Failed) for job in jobs if job.events)
    return [job.tokens for job in jobs], server.model._keys.nbytes, [max(most), failures]


def test_all_ranks_decode_from_their_own_keys(ranks):
    found = ranks.run(3, check_all_decode)
    tokens_, _, (_, failed) = found[0]
    assert failed == 2
    assert tokens_[2:] == [truth(prompt(120), 3), truth(prompt(2), 6)]
    most = key_store(make()).token_bytes * ((120 + 3) / 3 + 5)
    assert max(bytes_ for _, _, (bytes_, _) in found) <= most
    assert [left for _, left, _ in found] == [0, 0, 0]


def check_one_rank_fails(rank: int) -> tuple[str, str]:
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=5)
    server = engine(cp)
    if rank == 1:
        broken_at(server, 3, after=True)
    job = Asked([5, 6, 7, 3])
    if rank == 0:
        server.submit(job)
    with pytest.raises(DisagreementError) as error:
        server.run()
    return str(error.value), str(job.events[-1:])


def test_a_request_that_fails_on_one_rank_ends_the_server_on_all(ranks):
    leader, follower = ranks.run(2, check_one_rank_fails)
    assert leader[0] == follower[0]
    assert "rank 1: RuntimeError: no such prompt" in leader[0]
    assert "the server has failed (DisagreementError)" in leader[1]


def test_errors_while_decoding_end_their_requests_alone():
    server, seen = engine(batch=3), []
    step = server.model.step

    def broken(tokens_, states, in_place):
        if len(tokens_) == 2:
            raise RuntimeError("two at once")
        return step(tokens_, states, in_place)

    def deaf(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("no ears")

    server.model.step = broken
    deaf_one, pair, last = Completion(Request(prompt(4), 5), deaf), [Asked(prompt(5)), Asked(prompt(6))], Asked([7])
    for job in (deaf_one, *pair):
        server.submit(job)
    hear = pair[1].emit

    def then(event: Event) -> None:
        hear(event)
        if isinstance(event, Failed):
            server.submit(last)
            server.stop()

    pair[1].emit = then
    server.run()
    assert isinstance(seen[0], NewToken)
    assert [job.events[-1] for job in pair] == 2 * [Failed("the request has failed (RuntimeError)")]
    assert last.tokens == truth([7], 4)


def test_of_several_prompts_the_shortest_is_read_first_and_none_waits_for_ever():
    server, pieces = engine(piece=4, batch=5), []
    read = server.model.read

    def noted(ids, states, cp):
        pieces.append(int(ids[0, 0]))
        return read(ids, states, cp)

    server.model.read = noted
    jobs = [Asked([mark] * n, 2) for mark, n in ((1, 24), (2, 12), (3, 3), (4, 12))]
    serve(server, jobs)
    assert pieces[:3] == [3, 2, 2]
    assert pieces[3] == 1  # came first
    assert pieces[4:] == [2, 4, 4, 1, 4, 1, 1, 1, 1]
    assert [job.tokens for job in jobs] == [truth(job.request.ids, 2) for job in jobs]


def memory(x: object) -> int:
    """Bytes of the memory behind all tensors in `x`, each once."""
    found, todo, done = {}, [x], set()
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor):
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif id(x) not in done and not isinstance(x, (str, int, torch.nn.Module)):
            done.add(id(x))
            todo += (
                x.values()
                if isinstance(x, dict)
                else x
                if isinstance(x, (list, tuple))
                else getattr(x, "__dict__", {}).values()
            )
    return sum(found.values())


def test_a_long_sequence_costs_short_ones_nothing():
    model = Hybrid(make())
    prompts = [model.read(torch.tensor([prompt(n)]), None, None) for n in (2000, 3, 7, 20, 300, 2, 9, 4)]
    apart = sum(memory(p.states) for p in prompts)
    batch = Batch(model)
    for p in prompts:
        batch.add(0, p, Sampler())
    assert memory(batch._after.states) < 1.5 * apart


def test_sequences_of_any_length_are_decoded_side_by_side(monkeypatch):
    monkeypatch.setattr(seats, "ALONE", 24)
    monkeypatch.setattr(seats, "SMALLEST", 4)
    asked = [(30, 9), (3, 12), (22, 7), (5, 3), (1, 20), (7, 2)]
    jobs = [Asked(prompt(length), n) for length, n in asked]
    serve(engine(batch=4), jobs)
    assert [job.tokens for job in jobs] == [truth(prompt(length), n) for length, n in asked]


def test_one_document_and_two_questions():
    document, questions = tokens(1, 1500)[0].tolist(), [[3, 4, 5], [6, 7, 8, 9], [10, 11]]
    short = document[:700] + questions[0]  # begins alike, and ends elsewhere
    jobs = [Asked(document + q, 3) for q in questions[:2]] + [Asked(short, 3), Asked(document[:600], 3)]
    server = engine(batch=1, keep=1 << 30)
    serve(server, jobs)
    assert [job.events[-1].reused_tokens for job in jobs] == [0, 1024, 0, 512]
    assert [job.tokens for job in jobs] == [truth_of(job) for job in jobs]


def truth_of(job: Asked) -> list[int]:
    return generate(make(), torch.tensor([job.request.ids]), job.request.max_tokens)[0].tolist()


def test_kept_states_grow_with_the_tokens():
    ids = tokens(1, 256)[0].tolist()
    sizes = []
    for length in (128, 256):
        server = engine(batch=1, piece=8, keep=1 << 30)
        serve(server, [Asked(ids[:length], 1)])
        sizes.append(memory(server.states.kept))
    assert sizes[1] < 2.1 * sizes[0]
    small = engine(batch=1, piece=8, keep=sizes[0])
    serve(small, jobs := [Asked(ids, 1), Asked(ids, 1)])
    assert 64 <= jobs[1].events[-1].reused_tokens < 256  # the beginning of what does not fit
    assert jobs[0].tokens == jobs[1].tokens
    assert memory(small.states.kept) <= sizes[0]


def test_others_get_several_tokens_between_two_pieces():
    server, pieces = engine(piece=4), []
    read, step = server.model.read, server.model.step

    def slow(ids, states, cp):
        pieces.append(ids.shape[1])
        time.sleep(0.2 if len(pieces) > 1 else 0)
        return read(ids, states, cp)

    def steady(tokens_, states, in_place):
        time.sleep(0.01)
        return step(tokens_, states, in_place)

    server.model.read, server.model.step = slow, steady
    beside, reading = Asked(prompt(3), 1000), Asked(prompt(20), 1)
    hear, between = beside.emit, []

    def emit(event: Event) -> None:
        hear(event)
        between.append(len(pieces))
        if reading.events:
            beside.cancel()

    beside.emit = emit
    serve(server, [beside, reading])
    assert reading.tokens == truth(prompt(20), 1)
    assert len(pieces) == 6
    assert min(between.count(n) for n in (2, 3, 4, 5)) >= 4
