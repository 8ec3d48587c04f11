"""What the Triton backends share: pieces cut into segments and chunks, and the scan over segments."""
