"""Packed sequences hold every token once, in order, and any of them can be had from its number."""

from __future__ import annotations

import importlib.util
import json
from functools import partial

import pytest
import torch

from ring_la import ArgumentError
from ring_la.training import BalancedSequences, Corpus, PackedSequences, Work, batches

TEXTS = ["", "first document", "x", "a third one, somewhat longer than the others are", "ünïcödé"]


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    return Corpus(Corpus.prepare(str(tmp_path), str(tmp_path / "cache")))


def documents(corpus: Corpus) -> list[list[int]]:
    o = corpus.offsets.tolist()
    return [corpus.tokens[a:b].tolist() for a, b in zip(o, o[1:])]


def test_a_folder_becomes_documents(corpus):
    assert documents(corpus) == [[*text.encode(), 256] for text in TEXTS if text]
    assert corpus.vocab_size == 257


@pytest.mark.parametrize("seq_len", [7, 40, 500])
def test_sequences_are_the_epochs_documents_one_after_the_other(corpus, seq_len):
    packed = PackedSequences(corpus, seq_len, seed=3)
    stream, borders = [], [0]
    for i in range(-(-3 * corpus.size // seq_len)):
        ids, cu = packed[i]
        assert (len(ids), cu[0], cu[-1]) == (seq_len, 0, seq_len)
        assert all(a < b for a, b in zip(cu, cu[1:]))
        borders += [len(stream) + c for c in cu[1:]]
        stream += ids.tolist()
    whole, at = documents(corpus), 0
    for _ in range(3):  # each epoch has every document once, none cut but at a sequence's end
        left = list(whole)
        while left:
            found = next(d for d in left if stream[at : at + len(d)] == d)
            left.remove(found)
            inside = [b for b in borders if at < b < at + len(found)]
            assert all(b % seq_len == 0 for b in inside)
            at += len(found)
            assert at in borders
    assert packed[1][0].tolist() == PackedSequences(corpus, seq_len, seed=3)[1][0].tolist()
    assert any(packed[i][0].tolist() != PackedSequences(corpus, seq_len, seed=4)[i][0].tolist() for i in range(3))


def test_long_documents_are_cut(corpus):
    ids, cu = PackedSequences(corpus, 60, max_document=10)[0]
    assert max(b - a for a, b in zip(cu, cu[1:])) == 10
    assert cu[-1] == 60
    assert ids.tolist() == PackedSequences(corpus, 60)[0][0].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_replicas_share_a_step_and_go_on_where_they_stopped(corpus, workers):
    one = [ids.tolist() for ids, _ in batches(PackedSequences(corpus, 8), steps=4, size=4, workers=workers)]
    for start in (0, 3):
        packed = PackedSequences(corpus, 8, begin=start * 4 * 8)
        two = [list(batches(packed, steps=4 - start, size=2, replica=r, replicas=2)) for r in range(2)]
        steps = [two[r][2 * s + j][0].tolist() for s in range(4 - start) for r in range(2) for j in range(2)]
        assert steps == one[4 * start :]
    longer = PackedSequences(corpus, 16, begin=3 * 8)[0][0].tolist()
    assert longer == one[3] + one[4]


def test_parquet_and_jsonl(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": t}) + "\n" for t in TEXTS))
    expected = TEXTS
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"body": TEXTS, "n": list(range(len(TEXTS)))}), tmp_path / "b.parquet")
        expected = TEXTS * 2
    found = Corpus(Corpus.prepare(str(tmp_path), str(tmp_path / "cache"), text_column="body"))
    assert documents(found) == [[*text.encode(), 256] for text in expected if text]


def test_a_tokenizer_of_tokenizers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "first": 1, "document": 2, "</s>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("first document second")
    found = Corpus(Corpus.prepare(str(tmp_path / "a.txt"), str(tmp_path), str(tmp_path / "tokenizer.json")))
    assert documents(found) == [[1, 2, 0, 3]]
    assert found.vocab_size == 4


def test_what_is_wrong_is_named(corpus, tmp_path):
    with pytest.raises(ArgumentError, match="source: expected a file, or a folder"):
        Corpus.prepare(str(tmp_path / "nowhere"), str(tmp_path))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ArgumentError, match="source: expected files with text"):
        Corpus.prepare(str(tmp_path / "empty.txt"), str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    with pytest.raises(ArgumentError, match=r"text_column: expected one of \['body'\] in .*a.jsonl, got 'text'"):
        Corpus.prepare(str(tmp_path / "a.jsonl"), str(tmp_path))
    if importlib.util.find_spec("pyarrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"body": TEXTS}), tmp_path / "b.parquet")
        with pytest.raises(ArgumentError, match=r"text_column: expected one of \['body'\] in .*b.parquet, got 'text'"):
            Corpus.prepare(str(tmp_path / "b.parquet"), str(tmp_path))
    for name, wrong in (("source", None), ("cache", 3), ("tokenizer", print), ("text_column", None)):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a"):
            Corpus.prepare(**dict(source=str(tmp_path / "a.jsonl"), cache=tmp_path) | {name: wrong})
    with pytest.raises(ArgumentError, match=r"^folder: expected a path"):
        Corpus(None)
    with pytest.raises(ArgumentError, match=r"^sequences: expected a Dataset"):
        batches(corpus, steps=1, size=1)
    for module, name in (("tokenizers", "nowhere.json"), ("transformers", "/no/where")):
        pytest.importorskip(module)
        with pytest.raises(ArgumentError, match=f"tokenizer: expected bytes, .*, got '{name}'"):
            Corpus.prepare(str(tmp_path / "a.jsonl"), str(tmp_path), name, "body")
    with pytest.raises(ArgumentError, match="seq_len: expected an int ≥ 2"):
        PackedSequences(corpus, 1)
    torch.testing.assert_close(corpus.offsets[0], torch.tensor(0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2, "replicas": 2},  # another replica's sequences
        {"replica": -1, "replicas": 2},
        {"replicas": 0},  # the same ones at every step
        {"size": 0},  # none
        {"steps": -1},
        {"steps": 1.5},
        {"workers": -1},
    ],
)
def test_a_share_that_there_is_not_is_refused(corpus, wrong):
    name = next(iter(wrong))
    with pytest.raises(ArgumentError, match=f"{name}: expected"):
        batches(PackedSequences(corpus, 8), **{"steps": 2, "size": 1, **wrong})


@pytest.mark.parametrize("kind", [PackedSequences, partial(BalancedSequences, sequences=2, work=Work())])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", "8"),
        ("seq_len", 8.0),
        ("seed", "a"),
        ("seed", 1.5),
        ("seed", True),
        ("max_document", 2.5),
        ("begin", -3),
    ],
)
def test_what_sequences_are_packed_by_is_checked(corpus, kind, name, value):
    with pytest.raises(ArgumentError, match=f"{name}: expected an int"):
        kind(**{"corpus": corpus, "seq_len": 8, name: value})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("corpus", {"corpus": "folder"}),
        ("kind", {"kind": "zigzagg"}),
        ("layout", {"kind": "striped", "ranks": 2}),
        ("work", {"work": None}),
        ("work", {"work": lambda tokens: float("nan")}),
        ("sequences", {"sequences": 2.0}),
        ("pool", {"pool": 1.5}),
    ],
)
def test_what_documents_are_balanced_by_is_checked(corpus, name, wrong):
    with pytest.raises(ArgumentError, match=f"{name}: expected"):
        BalancedSequences(**{"corpus": corpus, "seq_len": 8, "sequences": 2, "work": Work(), **wrong})


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"text": "a"}\n{"text":', r"JSON in each line, got line 2 of .*a\.jsonl"),
        ('["text"]', r"an object in each line, got line 1 of .*a\.jsonl"),
        ('{"text": 3}', r"text, or null, under 'text', got int in line 1 of .*a\.jsonl"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, lines, said):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ArgumentError, match=f"source: expected {said}"):
        Corpus.prepare(str(tmp_path / "a.jsonl"), str(tmp_path))


@pytest.mark.parametrize("part", ["corpus.json", "tokens.bin", "offsets.bin"])
def test_a_corpus_that_is_cut_off_is_named(tmp_path, part):
    (tmp_path / "a.txt").write_text("a document")
    folder = Corpus.prepare(str(tmp_path / "a.txt"), str(tmp_path))
    file = folder / part
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(ArgumentError, match=r"folder: expected what Corpus\.prepare made, whole"):
        Corpus(folder)
