"""What holds implementations to what is right: `judge(Subject(run, "gated_delta_rule"))` judges a split implementation,
whosever it is; `check_recurrence` holds a recurrence to its reference.
"""

from .judge import Finding, Report, WrongError, judge
from .recurrences import check_recurrence
from .subject import Call, Refused, Subject

__all__ = ["Call", "Finding", "Refused", "Report", "Subject", "WrongError", "check_recurrence", "judge"]
