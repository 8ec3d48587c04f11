"""The rooms of examples/train_hybrid.py: its options, its start, its model, and what a run leaves."""
