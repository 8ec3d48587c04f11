"""What the families of Triton kernels share: the plan of a call, its chunks and spans, and the scan over spans."""
