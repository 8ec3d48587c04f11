#!/usr/bin/env bash
# The main job: trains a small hybrid model on one sequence split over 4 ranks, shows that the split changes nothing,
# and continues a prompt. Results go to runs/demo. Arguments go to examples/train_demo.py (--help lists them).
#
# On CPUs: 4 processes, whatever the number of cores. With GPUs: NCCL and one rank a GPU, at most 4.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh demo tqdm 'matplotlib?'

gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
ranks="${RANKS:-$((gpus == 0 || gpus > 4 ? 4 : gpus))}"
if [ "$gpus" -gt 0 ] && [ "$gpus" -lt 4 ]; then
    echo "demo: $gpus GPU(s) here, so $ranks rank(s) instead of 4"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the demo shares the cores out among the ranks itself
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"  # ranks share cores: a thread that waits must not spin
if [ "$gpus" -eq 0 ] && [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" examples/train_demo.py "$@"
