"""Judges implementations of split sequences, whosever they are: `judge(Subject(run, "gated_delta_rule"))`."""

from .judge import Finding, Report, WrongError, judge
from .subject import Call, Subject

__all__ = ["Call", "Finding", "Report", "Subject", "WrongError", "judge"]
