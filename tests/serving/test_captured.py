"""A server that decodes by `ring_la.capture`, with graphs of a stand-in."""

from __future__ import annotations

from tests.support.step_graphs import Repeating, standing

from .engines import Asked, engine, prompt, serve, truth


def test_decoding_in_a_server(monkeypatch):
    """Sequences that come and go, and are sampled between steps: nothing of it is the graph's."""
    standing(monkeypatch.setattr, Repeating)
    jobs = [Asked(prompt(n), 12) for n in (5, 9, 3, 7)]
    served = engine(batch=2, capture=True)
    serve(served, jobs)
    assert [job.tokens for job in jobs] == [truth(job.request.ids, 12) for job in jobs]
    assert served.batch.graphs >= 1
