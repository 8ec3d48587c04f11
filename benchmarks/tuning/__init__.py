"""Where the launch settings of our kernels come from: one file a family of kernels."""
