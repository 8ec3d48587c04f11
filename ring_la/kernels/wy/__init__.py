"""Rules whose chunks need products of their own first (delta writes, decays by key channel, dplr), in Triton; and
launches in CUDA C++ that take all of one device's tokens, on Hopper."""
