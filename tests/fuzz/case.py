"""A case: plain values from which everything follows, printed as one line that runs it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

import torch

SOFTMAX = ("attention", "mla", "sparse_attention", "forgetting_attention", "chosen")
CAST = ("attention", "mla", "sparse_attention", "forgetting_attention", "grouped_gemm", "loss")
"""Operations that autocast computes in its dtype; others are what they are without it."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One call, or a chain of calls.

    Attributes:
        op: a name out of `problem.MAKERS`, or of a recurrence.
        P: ranks. kind: of the layout. multiple_of: of its borders; None: the layout's own.
        T: tokens of the whole sequence. cu: offsets of packed documents; None: a batch of B rows.
        Hk: heads of keys. groups: value heads to each. K, V: widths.
        dtype: a name out of DTYPES. seed: of the numbers. scan, attention: the strategies.
        transport: what carries messages, "torch" or "symmetric" (see `symmetric`).
        deterministic, validate: of the ContextParallel.
        how: what the operation alone knows.
    """

    op: str
    P: int = 1
    kind: str = "contiguous"
    T: int = 4
    cu: tuple[int, ...] | None = None
    B: int = 1
    Hk: int = 1
    groups: int = 1
    K: int = 2
    V: int = 2
    dtype: str = "fp64"
    scan: str = "ring"
    attention: str = "ring"
    transport: str = "torch"
    multiple_of: int | None = None
    deterministic: bool = False
    validate: str = "first"
    seed: int = 0
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def H(self) -> int:
        """Value heads."""
        return self.Hk * self.groups

    @property
    def documents(self) -> int:
        """Rows of a state."""
        return self.B if self.cu is None else len(self.cu) - 1

    @property
    def is_softmax(self) -> bool:
        """Whether keys travel, not states."""
        return self.op in SOFTMAX

    @property
    def head_groups(self) -> int | str:
        """In how many groups Ulysses goes through the heads; follows from the seed."""
        return (1, 2, "auto", 3)[self.seed % 4]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def works_in(self) -> str:
        """The dtype that it is computed in, out of DTYPES: under autocast bf16."""
        cast = self.how.get("autocast") and self.op in CAST and self.dtype == "fp32"
        return "bf16" if cast else self.dtype

    def dtype_of(self, name: str, usual: torch.dtype) -> torch.dtype:
        """Of "gates" (and sinks, and filters) or "states": what the case says of them, or the usual one."""
        return DTYPES[self.how[name]] if name in self.how else usual

    def wants(self, name: str) -> bool:
        """Whether an input wants a gradient; where "some" do, that follows from the seed."""
        return not self.how.get("some") or Random(f"{self.seed}/{name} wants").random() < 0.5

    def but(self, **changes: Any) -> Case:
        """The same with these changes; `how` is updated, and None takes a key out of it."""
        if "how" in changes:
            how = self.how | changes["how"]
            changes["how"] = {k: v for k, v in how.items() if v is not None}
        return replace(self, **changes)

    def __str__(self) -> str:
        plain = Case(self.op)
        own = {k: v for k, v in asdict(self).items() if k == "op" or v != getattr(plain, k)}
        return json.dumps(own, separators=(",", ":"))

    @property
    def line(self) -> str:
        """What runs it again."""
        return f"python -m tests.fuzz --case '{self}'"

    @classmethod
    def parse(cls, text: str) -> Case:
        """The way back from `str`."""
        given = json.loads(text)
        if given.get("cu") is not None:
            given["cu"] = tuple(given["cu"])
        return cls(**given)
