"""What holds implementations to the references: for the package's own tests, and for what others define with it."""

from .recurrences import check_recurrence

__all__ = ["check_recurrence"]
