"""What ranks must agree on before anything is sent: compared by their log of calls, or where there is none by the
job's store; not by messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..errors import ArgumentError, DisagreementError, PeerError
from .calls import CallLog, Entry, differences
from .members import JobStore, Members
from .watch import PeerWatch


class Agreement:
    """Compares values of all ranks; one for each group. Every rank calls the same in the same order.

    Attributes:
        calls: the log of calls; None: one rank only, or no memory or connection for it.
        backwards: whether backward passes are compared, too.
    """

    def __init__(self, members: Members, store: JobStore, watch: PeerWatch) -> None:
        self._members, self._store, self._watch = members, store.of("agree"), watch
        self._count, self.backwards = 0, True
        self.calls = CallLog.open(members, store, self.tell)

    def agree(self, what: str, value: object, hint: str = "", alike: str = "") -> Entry:
        """Raise `DisagreementError` on every rank unless all ranks bring an equal `value`, or an equal `alike`, which
        stands for values that may differ.

        Of mappings the error shows the entries that differ; where one is a refusal ("refused: …"), that alone. The
        `hint` follows. Returns what `again` takes.
        """
        text = as_text(value)
        entry = Entry.of(what, text, hint, alike)
        if self._members.size == 1:
            return entry
        self._members.refuse_forked()
        try:
            if self.calls is not None:
                self.calls.enter(entry)
                self.calls.meet()
                return entry
            told = [said.partition(" ") for said in self.tell(f"{entry.digest} {text}")]
        except (DisagreementError, PeerError):
            raise
        except RuntimeError as error:
            raise self._watch.error(f"agreeing on {what}", error) from error
        if any(digest != told[0][0] for digest, _, _ in told):
            lines = "\n".join(f"  rank {r}: {v}" for r, v in enumerate(differences([v for _, _, v in told])))
            message = f"the ranks of this group disagree on {what}:\n{lines}"
            raise DisagreementError(f"{message}\n{hint}" if hint else message)
        return entry

    def way_back(self) -> Callable[[], None]:
        """What the backward pass of the call that this rank is in calls before it sends anything: it is compared as
        calls are that were made before (`again`)."""
        entry = self.calls.back() if self.backwards and self.calls is not None else None
        return nothing if entry is None else partial(self.again, entry)

    def word(self) -> int:
        """What tells messages of this rank's call from those of others: odd, of 31 bits; 1 without a log."""
        return 1 if self.calls is None else self.calls.word()

    def again(self, entry: Entry) -> None:
        """What the ranks have agreed on before, brought again: nobody waits. A rank that brings something else is found
        out at the latest when one waits for the other; without a log it is not.

        Raises:
            DisagreementError: another rank brings, or has brought, something else.
        """
        if self.calls is not None:
            self._members.refuse_forked()
            self.calls.enter(entry)

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


def refusal(error: Exception | None) -> str:
    """What stands for an error among ranks (`alike`): the argument's name, for a shape in it may have T_local."""
    return f"refused: {error.name}" if isinstance(error, ArgumentError) else ""


def nothing() -> None:
    """Where nothing is compared."""


def as_text(value: object) -> str:
    """A value as ranks compare it: a mapping's entries a line each."""
    return "\n".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
