#!/usr/bin/env bash
# An image or a video from a prompt, over all GPUs, or 2 processes on CPUs; set-up included.
#
#   bash launch/diffusion.sh image                                   # tiny and random, offline: runs/diffusion/image.png
#   bash launch/diffusion.sh video                                   # the same, runs/diffusion/video.gif
#   bash launch/diffusion.sh image "a fox" --model black-forest-labs/FLUX.1-dev --vae
#
# Arguments behind the first go to examples/text_to_image.py or text_to_video.py (--help lists them). RANKS: processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
what="${1:-image}"
case "$what" in
    image) out=runs/diffusion/image.png ;;
    video) out=runs/diffusion/video.gif ;;
    *)
        echo "diffusion: image or video, not '$what'" >&2
        exit 2
        ;;
esac
. launch/setup.sh diffusion diffusers PIL transformers accelerate

gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -eq 0 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    if [ -e /sys/class/net/lo ]; then export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"; fi
fi
ranks="${RANKS:-$((gpus == 0 ? 2 : gpus))}"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$ranks" "examples/text_to_$what.py" \
    --out "$out" "${@:2}"
