"""Text comes out when it is certain: whole characters, and nothing that may yet be a stop string."""

from __future__ import annotations

import pytest

from ring_la import UnsupportedError
from ring_la.serving import Bytes, NoText, Stream, Subwords


def pushed(stream: Stream, tokens: list[int]) -> list[str]:
    out = [stream.push(t) for t in tokens]
    return [*out, stream.rest()]


def test_bytes_make_characters():
    text = Bytes(257)
    assert text.encode("a→") == [97, 226, 134, 146]
    assert text.end == {256}
    assert not Bytes(256).end
    assert pushed(Stream(text.decoder()), [*text.encode("a→b"), 226]) == ["a", "", "", "→", "b", "", "\ufffd"]


@pytest.mark.parametrize(
    ("said", "stop", "want", "stopped"),
    [
        ("hello END more", ("END",), "hello ", True),
        ("hello EN", ("END",), "hello EN", False),
        ("aab", ("ab",), "a", True),
        ("ababac", ("abac", "zz"), "ab", True),
        ("one\n\ntwo", ("\n\n", "\n"), "one", True),
        ("nothing", (), "nothing", False),
    ],
)
def test_stop_strings(said, stop, want, stopped):
    stream, out = Stream(Bytes(256).decoder(), stop), ""
    for token in said.encode():
        out += stream.push(token)
        if stream.stopped:
            break
        assert want.startswith(out)
    assert out + stream.rest() == want
    assert stream.stopped == stopped


def test_subwords_keep_the_spaces_between_them():
    words = {1: "one", 2: "two", 3: "\ufffd"}
    decode = lambda ids: " ".join(words[i] for i in ids).replace("\ufffd \ufffd", "→")  # noqa: E731
    text = Subwords(lambda t: [1], decode, frozenset())
    assert pushed(Stream(text.decoder()), [1, 2, 3, 3, 1]) == ["one", " two", "", " →", " one", ""]


def test_a_model_without_a_tokenizer_takes_ids():
    with pytest.raises(UnsupportedError, match="prompt: expected a list of token ids, got text"):
        NoText().encode("hello")
    assert pushed(Stream(NoText().decoder()), [1, 2]) == ["", "", ""]
