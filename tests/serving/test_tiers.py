"""Kept states in host memory and on disk, on any number of ranks; what is damaged there."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ring_la import ArgumentError, ContextParallel
from ring_la.serving import Engine, Keep, NoText, Overdue
from ring_la.serving.disk import fingerprint
from ring_la.serving.pretrained import Pretrained
from ring_la.serving.ranks import What
from tests.serving.engines import LONG, SOME, Asked, engine, prompt, serve, truth
from tests.support.generation import WHOLE, make
from tests.support.pool import group
from tests.support.transformers_models import CASES

TURNS = (prompt(40), prompt(40) + prompt(6), prompt(40)[::-1], prompt(23), prompt(40) + prompt(6), prompt(23))
"""The second goes on from the first; the last two were asked before, and have left the device since."""


def check_tiers(rank: int, folder: str, asked: Sequence[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    cp = ContextParallel(group(), scan="ring", validate="never")
    whole = engine(cp, WHOLE, batch=1, keep=1 << 20)
    serve(whole, [Asked(TURNS[1])])
    most = cp.comm.all_reduce(torch.tensor(whole._prefixes.sizes[0])).wait().item()  # rank 0's
    server = engine(cp, WHOLE, batch=1, keep=Keep(most * 5 // 2, most * 5 // 4, 1 << 20, folder))
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
    assert got == [truth(x, 3, WHOLE) for x in TURNS]
    assert reused == [0, 40, 0, 0, 46, 23]
    assert set(moved) == {0, 1, 2}
    again = [TURNS[1], TURNS[2], prompt(40) + prompt(3)]
    for size in (1, 3):
        got, reused, _ = ranks.run(size, check_tiers, str(tmp_path), again)[0]
        assert got == [truth(x, 3, WHOLE) for x in again]
        assert reused == [46, 40, 40 if size == 1 else 43]  # what one rank has read and left, three go on from
    [of_model] = tmp_path.iterdir()
    (next(of_model.iterdir()) / "about.json").unlink()  # as one that was not written to its end
    there = len(list(of_model.iterdir()))
    assert ranks.run(1, check_tiers, str(tmp_path), [[3]])[0][0] == [truth([3], 3, WHOLE)]
    assert len([x for x in of_model.iterdir() if (x / "about.json").is_file()]) <= there
    (tmp_path / "file").touch()
    for bad in (Keep(1, disk=1), Keep(1, folder=tmp_path), Keep(-1), Keep(1, disk=1, folder=tmp_path / "file")):
        with pytest.raises(ArgumentError, match="keep: expected"):
            engine(keep=bad)


def check_latents(rank: int, folder: str, length: int) -> tuple[list[int], int, bool]:
    """A prompt of so many tokens: what follows, and what was not read anew; whether keys stay on their ranks."""
    cp = ContextParallel(group(), scan="ring", validate="never")
    model = Pretrained(CASES["deepseek_v3"].make(), cp)
    server = Engine(model, NoText(), cp, patience=LONG, batch=1, keep=Keep(1 << 20, 0, 1 << 20, folder))
    serve(server, jobs := [Asked([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9][:length], 3)])
    return jobs[0].tokens, jobs[0].reused, model.shares_keys


def test_latents_of_transformers_come_back_from_disk_on_any_number_of_ranks(ranks, tmp_path):
    turns = [(2, 11), (1, 11), (1, 15), (2, 15)]
    found = [ranks.run(size, check_latents, str(tmp_path), length)[0] for size, length in turns]
    assert [what[1:] for what in found] == [(0, True), (11, False), (11, False), (15, True)]
    assert (found[0][0], found[2][0]) == (found[1][0], found[3][0])


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
    cp = ContextParallel(group(), scan="ring", validate="never", timeout=60)
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
    other = make(SOME)
    other.config = dataclasses.replace(other.config, norm_eps=1e-3)  # of which no weight tells
    assert fingerprint(other) != fingerprint(make(SOME)) == fingerprint(make(SOME))
