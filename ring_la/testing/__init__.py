"""Judges implementations of split sequences, whosever they are: `judge(Subject(run, "gated_delta_rule"))`."""

from .judge import Finding, Report, WrongError, judge
from .subject import Call, Refused, Subject

__all__ = ["Call", "Finding", "Refused", "Report", "Subject", "WrongError", "judge"]
