"""``--help`` as commands print it: the module's text as it stands, and every option with its default."""

from __future__ import annotations

import argparse
import copy


class Help(argparse.RawDescriptionHelpFormatter):
    """A formatter that leaves the description's lines alone and says what an option is where it is not given."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(_told(action))


def _told(action: argparse.Action) -> argparse.Action:
    """The action with its default in its help, where it has one and does not say it in words of its own."""
    given, text = action.default, action.help or ""
    known = given is not None and given is not False and given not in ("", argparse.SUPPRESS)
    if not action.option_strings or not known or text is argparse.SUPPRESS or "default" in text:
        return action
    shown = ",".join(map(str, given)) if isinstance(given, (list, tuple)) else str(given)
    told = copy.copy(action)
    told.help = f"{text} (default: {shown.replace('%', '%%')})".lstrip()
    return told
