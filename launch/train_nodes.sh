#!/usr/bin/env bash
# Train on several nodes: run the same command on each of them; they meet at HEAD (c10d rendezvous). NODES may be a
# range, MIN:MAX: when a node is lost, or comes, the ranks start again on those that are there and go on from the
# newest checkpoint, whatever their number (parallel.context = -1, or one that divides any of them). The run's folder
# must be shared.
#
#   HEAD=node0:29500 NODES=2 JOB=my-run bash launch/train_nodes.sh --config examples/configs/hybrid_1b.yaml \
#       --parallel.context 8 --parallel.data -1
#
# A context axis within a node talks over NVLink; FSDP's and the data axis go between nodes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${HEAD:?host:port of one of the nodes}" "${NODES:?number of nodes, or MIN:MAX}"
# shellcheck source=launch/setup.sh
. launch/setup.sh train jsonargparse tqdm 'tensorboard?'

# Each start of the ranks meets in a store of its own: torchrun's shared one keeps the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
ranks="${RANKS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 1)')}"
script="${SCRIPT:-examples/train_hybrid.py}"
# torchrun retries whatever fails: what cannot work, on as many nodes as there are at least, is told here, once
[ -n "${SCRIPT:-}" ] || "$PYTHON" "$script" --check "$((ranks * ${NODES%%:*}))" "$@"
exec "$PYTHON" -m torch.distributed.run --nnodes "$NODES" --nproc_per_node "$ranks" --max_restarts "${RESTARTS:-3}" \
    --rdzv_backend c10d --rdzv_endpoint "$HEAD" --rdzv_id "${JOB:-ring_la}" \
    "$script" "$@"
