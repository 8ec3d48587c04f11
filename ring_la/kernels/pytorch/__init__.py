"""PyTorch bodies of the linear recurrences: chunked, and token by token. They run anywhere, in fp32 and fp64."""
