#!/usr/bin/env bash
# Train on this node: torchrun, one rank a GPU (4 ranks on CPUs without), restarts included. Arguments go to the script.
#
#   bash launch/train.sh --config examples/configs/small.yaml --parallel.fsdp 2
#   RANKS=2 RESTARTS=0 SCRIPT=my_training.py bash launch/train.sh ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
. launch/setup.sh train jsonargparse tqdm 'tensorboard?'

gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
ranks="${RANKS:-$((gpus > 0 ? gpus : 4))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "$gpus" -eq 0 ] && [ -e /sys/class/net/lo ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
fi
script="${SCRIPT:-examples/train_hybrid.py}"
# torchrun retries whatever fails: what cannot work is told here, once
[ -n "${SCRIPT:-}" ] || "$PYTHON" "$script" --check "$ranks" "$@"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" --max_restarts "${RESTARTS:-3}" \
    "$script" "$@"
