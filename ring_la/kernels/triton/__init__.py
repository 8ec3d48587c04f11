"""Device code that the Triton kernels of several rooms share. Importing this package does not import Triton."""
