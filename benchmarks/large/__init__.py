"""Models of published size on long sequences, with random weights."""
