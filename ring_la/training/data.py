"""Documents of a folder, tokenised once, packed into sequences whose every number follows from the seed and an index.

The tokens of all documents lie in one memory-mapped file. Epoch e is the documents in an order drawn from (seed, e),
one after the other; sequence i is tokens ``i·T … (i+1)·T − 1`` of the epochs in a row, cut wherever that falls, with
the offsets of the documents in it. So the state of a loader is one number, the tokens seen so far, the same for any
number of ranks, and a run that goes on with another split, or with longer sequences, repeats and skips nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..checks import check_int, check_kind, check_path, is_int
from ..errors import ArgumentError, describe_tensor, require

TEXT = {".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".html", ".tex", ".c", ".h", ".cpp", ".cu", ".rs", ".go"}
"""Suffixes of files that are one document each, but for .jsonl: a document a line, under "text"."""


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids.

    Attributes:
        encode: a document's ids. vocab_size: one more than the largest.
        end: the id put after each document; None: none.
    """

    encode: Callable[[str], list[int]]
    vocab_size: int
    end: int | None

    @classmethod
    def load(cls, name: str) -> Tokenizer:
        """ "bytes", or a tokenizer.json, or a folder or name that Transformers' AutoTokenizer knows."""
        if name == "bytes":
            return cls(lambda text: list(text.encode()), 257, 256)
        if name.endswith(".json"):
            require("tokenizers", "data", f"the tokenizer {name}")
            from tokenizers import Tokenizer as Fast

            with _named(name):
                fast = Fast.from_file(name)
            ends = (fast.token_to_id(t) for t in ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>"))
            encode = lambda text: fast.encode(text, add_special_tokens=False).ids  # noqa: E731
            return cls(encode, fast.get_vocab_size(), next((e for e in ends if e is not None), None))
        require("transformers", "data", f"the tokenizer {name}")
        from transformers import AutoTokenizer

        with _named(name):
            auto = AutoTokenizer.from_pretrained(name)
        encode = lambda text: auto(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        return cls(encode, len(auto), auto.eos_token_id)


@contextmanager
def _named(tokenizer: str) -> Iterator[None]:
    """Name the tokenizer in what its library says."""
    try:
        yield
    except Exception as error:  # tokenizers knows no other kind
        expected = "bytes, a tokenizer.json or what AutoTokenizer takes"
        raise ArgumentError("tokenizer", expected, repr(tokenizer), f"{type(error).__name__}: {error}") from error


class Corpus:
    """Tokenised documents: ``tokens`` int32, one document after the other, and ``offsets`` int64 ``[N+1]``.

    Both are memory-mapped; `Corpus.prepare` makes the files.

    Attributes:
        key: the same for the same files, unchanged, and the same tokenizer.

    Raises:
        ArgumentError: a folder without them, or with parts of them.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        folder = check_path("folder", folder)
        self.key = folder.name
        try:
            about = json.loads((folder / "corpus.json").read_text())
            self.vocab_size, self.documents, self.size = about["vocab_size"], about["documents"], about["tokens"]
            self.tokens = torch.from_file(str(folder / "tokens.bin"), size=self.size, dtype=torch.int32)
            self.offsets = torch.from_file(str(folder / "offsets.bin"), size=self.documents + 1, dtype=torch.int64)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:  # RuntimeError: of from_file
            expected = "what Corpus.prepare made, whole"
            raise ArgumentError("folder", expected, f"{folder} ({type(error).__name__}: {error})") from error

    @staticmethod
    def prepare(
        source: str | os.PathLike, cache: str | os.PathLike, tokenizer: str = "bytes", text_column: str = "text"
    ) -> Path:
        """The folder below `cache` with the tokens of `source`, made if it is not there. One process calls it.

        Args:
            source: a file, or a folder of text files (`TEXT`), .jsonl or .parquet.
            tokenizer: as in `Tokenizer.load`. text_column: of .parquet and .jsonl.

        Raises:
            ArgumentError: nothing to read.
        """
        cache = check_path("cache", cache)
        for name, value in (("tokenizer", tokenizer), ("text_column", text_column)):
            check_kind(name, value, str)
        files = find(source)
        seen = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        key = hashlib.sha256(json.dumps([seen, tokenizer, text_column]).encode()).hexdigest()[:16]
        folder = cache / key
        if (folder / "corpus.json").exists():
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        coder, offsets = Tokenizer.load(tokenizer), [0]
        with open(folder / "tokens.bin", "wb") as out:
            for text in read(files, text_column):
                ids = coder.encode(text)
                if ids:
                    ids = [*ids, coder.end] if coder.end is not None else ids
                    out.write(torch.tensor(ids, dtype=torch.int32, device="cpu").numpy().tobytes())
                    offsets.append(offsets[-1] + len(ids))
        if offsets[-1] == 0:
            raise ArgumentError("source", "files with text", source)
        (folder / "offsets.bin").write_bytes(torch.tensor(offsets, device="cpu").numpy().tobytes())
        about = {"vocab_size": coder.vocab_size, "documents": len(offsets) - 1, "tokens": offsets[-1]}
        partial = folder / "corpus.json.part"
        partial.write_text(json.dumps(about | {"source": str(source), "tokenizer": tokenizer}))
        partial.rename(folder / "corpus.json")  # last and at once: a folder with it is whole
        return folder


def find(source: str | os.PathLike) -> list[Path]:
    """The files of a source, in the order of their names."""
    path = check_path("source", source)
    if path.is_file():
        return [path]
    files = (
        sorted(f for f in path.rglob("*") if f.suffix in TEXT | {".parquet"} and f.is_file()) if path.is_dir() else []
    )
    if not files:
        raise ArgumentError("source", f"a file, or a folder with {', '.join(sorted(TEXT))} or .parquet files", source)
    return files


def read(files: Sequence[Path], column: str) -> Iterator[str]:
    """The documents of some files."""
    for file in files:
        if file.suffix == ".parquet":
            require("pyarrow", "data", str(file))
            from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]

            table = ParquetFile(file)
            _check_column(column, table.schema_arrow.names, file)
            for batch in table.iter_batches(columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text)
        elif file.suffix == ".jsonl":
            yield from _lines(file, column)
        else:
            yield file.read_text(errors="replace")


def _lines(file: Path, column: str) -> Iterator[str]:
    """The documents of a .jsonl file."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ArgumentError("source", "JSON in each line", f"line {number} of {file} ({error})") from error
            if not isinstance(row, dict):
                raise ArgumentError("source", "an object in each line", f"line {number} of {file}")
            _check_column(column, list(row), file)
            text = row[column]
            if text is not None and not isinstance(text, str):
                expected = f"text, or null, under {column!r}"
                raise ArgumentError("source", expected, f"{type(text).__name__} in line {number} of {file}")
            yield text or ""


def _check_column(column: str, there: list[str], file: Path) -> None:
    if column not in there:
        raise ArgumentError("text_column", f"one of {there} in {file}", repr(column))


def shuffled(n: int, generator: torch.Generator) -> Tensor:
    """0 to before n in a random order, on the CPU whatever the default device is."""
    return torch.randperm(n, generator=generator, device="cpu")


def check_data(corpus: object, seq_len: object, seed: object, max_document: object, begin: object) -> None:
    """Refuse what documents cannot be packed by."""
    check_kind("corpus", corpus, Corpus)
    check_int("seq_len", seq_len, 2, " (tokens)")
    if max_document is not None:
        check_int("max_document", max_document, 2, " (tokens)")
    if not is_int(seed):
        raise ArgumentError("seed", "an int", describe_tensor(seed))
    check_int("begin", begin, 0)


class PackedSequences(Dataset):
    """Sequence i of the corpus: ``(ids int64 [T], offsets of the documents in it, a list of ints [N+1])``.

    Args:
        corpus: the documents. seq_len: T. seed: of the documents' order.
        max_document: longer documents are cut into parts of this many tokens; None: they are not.
        begin: the token sequence 0 starts at.

    Raises:
        ArgumentError: naming the argument.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, seed: int = 0, max_document: int | None = None, begin: int = 0
    ) -> None:
        check_data(corpus, seq_len, seed, max_document, begin)
        self.corpus, self.seq_len, self.seed, self.max_document = corpus, seq_len, seed, max_document
        self.begin = begin
        self._epoch = lru_cache(2)(self._order)

    def _order(self, epoch: int) -> tuple[Tensor, Tensor]:
        """The documents of an epoch, and where each ends in it."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
        order = shuffled(self.corpus.documents, generator)
        return order, self.corpus.offsets.diff()[order].cumsum(0)

    def __getitem__(self, i: int) -> tuple[Tensor, list[int]]:
        parts, cu, at, missing = [], [0], self.begin + i * self.seq_len, self.seq_len
        while missing:
            epoch, place = divmod(at, self.corpus.size)
            order, ends = self._epoch(epoch)
            n = int(torch.searchsorted(ends, place, right=True))
            document = int(order[n])
            left = int(ends[n]) - place
            take = min(left, missing)
            stop = int(self.corpus.offsets[document + 1]) - left + take
            parts.append(self.corpus.tokens[stop - take : stop])
            piece = self.max_document or take
            cu += [cu[-1] + min(j, take) for j in range(piece, take + piece, piece)]
            at, missing = at + take, missing - take
        return torch.cat(parts).long(), cu


def batches(
    sequences: PackedSequences,
    *,
    steps: int,
    size: int,
    replica: int = 0,
    replicas: int = 1,
    workers: int = 0,
) -> DataLoader:
    """This replica's share of so many steps: iterating gives `size` sequences a step, one after the other.

    Sequence j of step s on replica r is number ``(s·replicas + r)·size + j``, so with the same `size` × `replicas` a
    step sees the same sequences on any number of replicas.

    Raises:
        ArgumentError: naming the argument.
    """
    for name, value, least in (
        ("steps", steps, 0),
        ("size", size, 1),
        ("replicas", replicas, 1),
        ("workers", workers, 0),
    ):
        check_int(name, value, least)
    check_kind("sequences", sequences, Dataset)
    if not is_int(replica, 0) or replica >= replicas:
        raise ArgumentError("replica", f"0 ≤ replica < replicas = {replicas}", repr(replica))
    first = [(s * replicas + replica) * size for s in range(steps)]
    indices = [n + j for n in first for j in range(size)]
    return DataLoader(sequences, batch_size=None, sampler=indices, num_workers=workers, persistent_workers=False)
