"""Rules whose chunks need products of their own first (delta writes, decays by key channel, dplr), in Triton."""
