#!/usr/bin/env bash
# All rows of diffusion models on 1, 2 or 4 GPUs: a step of each model, and whole images of Flux, peers beside ours.
#
#   bash launch/bench_diffusion.sh 4 runs/diffusion
#
# A run that is cut off goes on where it was when it is called again.
set -euo pipefail
gpus=${1:?how many GPUs}
out=${2:-runs/diffusion}
bench() {
  local file=$1
  shift
  torchrun --standalone --nproc_per_node "$gpus" -m ring_la bench diffusion "$@" --limit 120 --resume --out "$out/$file-x$gpus.json"
}
arms=one,ours peers=""
if [ "$gpus" -gt 1 ]; then
  arms=one,ours,ours_keys_first,ours_ulysses
  peers=,diffusers_ulysses,diffusers_ring,xdit_ulysses,xdit_ring
fi
bench images --pipeline --arms one,ours --modes eager,graph,compiled,compiled_graph --steps 28 --sizes 1024x1024
bench flux --model flux --arms "$arms$peers" --modes eager,compiled,compiled_graph --parts
bench sana --model sana,sana_video --arms one,ours --modes eager,compiled
bench models --model qwen,ltx,wan,hunyuan_video --arms "one,ours${peers}" --modes eager,compiled --rounds 3
