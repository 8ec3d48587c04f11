"""What ranks must agree on before anything is sent, compared by the job's store and not by messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import DisagreementError
from .members import JobStore, Members
from .watch import PeerWatch


class Agreement:
    """Compares values of all ranks; one for each group. Every rank calls the same in the same order."""

    def __init__(self, members: Members, store: JobStore, watch: PeerWatch) -> None:
        self._members, self._store, self._watch = members, store.of("agree"), watch
        self._count = 0

    def agree(self, what: str, value: object, hint: str = "") -> None:
        """Raise `DisagreementError` on every rank unless all ranks bring an equal `value`.

        Of mappings the error shows the entries that differ; where one is a refusal ("refused: …"), that alone. The
        `hint` follows.
        """
        if self._members.size == 1:
            return
        told = "\n".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
        try:
            values = self.tell(told)
        except RuntimeError as error:
            raise self._watch.error(f"agreeing on {what}", error) from error
        if any(v != values[0] for v in values):
            lines = "\n".join(f"  rank {r}: {v}" for r, v in enumerate(_differences(values)))
            message = f"the ranks of this group disagree on {what}:\n{lines}"
            raise DisagreementError(f"{message}\n{hint}" if hint else message)

    def tell(self, value: str) -> list[str]:
        """Every rank's value by the job's store: no message that a rank which skips the comparison could mistake.
        Collective; blocks the host."""
        store, n, rank = self._store, self._count, self._members.rank
        self._count += 1
        store.set(f"{n}/{rank}", value)
        keys = [f"{n}/{r}" for r in range(self._members.size)]
        store.wait(keys, self._members.timeout)
        values = [store.get(key).decode() for key in keys]
        if n > 0:  # every rank has posted n, so every rank has read n - 1
            store.delete_key(f"{n - 1}/{rank}")
        return values


def _differences(values: Sequence[str]) -> list[str]:
    """Of each value the lines that not all have; where some are refusals, their reasons alone."""
    if any(v.startswith("refused: ") for v in values):
        return [v if v.startswith("refused: ") else "nothing refused" for v in values]
    told = [v.splitlines() for v in values]
    common = set(told[0]).intersection(*told)
    return [", ".join(line for line in own if line not in common) for own in told]
