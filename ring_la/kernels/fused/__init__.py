"""The steps around a recurrence, each an operator with its kernel beside it."""
