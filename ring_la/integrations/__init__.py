"""Adapters for other libraries. Import the one you need; none is imported here."""
