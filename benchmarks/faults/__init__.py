"""Faults of real processes: what the others raise, after how many seconds, and what a restart finds.

    python -m benchmarks.faults --out benchmarks/results/faults-gloo.json

job        ranks of one job as processes; a fault comes to one of them while the others go on
moments    what a job is doing when it comes: a call forward or backward, a compiled step, training
disks      checkpoints on a disk that is full, cut off by a kill, or changed
servers    `ring-la serve`, as it is typed
"""
