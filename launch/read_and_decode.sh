#!/usr/bin/env bash
# Long prompts read by ring_la, decoded by vLLM, on one host: a reader on its last GPUs, `vllm serve` on its first.
#
#   READ_GPUS=4 bash launch/read_and_decode.sh /models/model --tensor-parallel-size 4 --port 8000
#
# The first argument is a folder of Transformers, the others go to `vllm serve`. On CPUs READ_GPUS are processes.
# LEAST: tokens of a prompt from which the reader is asked. SOCKET: where it listens. A reader that dies is started
# anew; meanwhile vLLM reads prompts itself. Needs vllm, transformers and ring_la in one environment.
set -euo pipefail
model="${1:?a folder of Transformers; the rest goes to vllm serve}"
ranks="${READ_GPUS:-1}"
socket="${SOCKET:-/tmp/ring-la-reader-$$.sock}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

read_prompts() {  # its GPUs come first, and it sees vLLM's too, whose workers map its memory
    local gpus child=0
    trap '[ "$child" = 0 ] || { kill "$child" && wait "$child"; }; exit 0' TERM
    gpus="$(python3 -c 'import torch; print(torch.cuda.device_count())')"
    if [ "$gpus" -gt 0 ]; then
        local seen
        IFS=, read -ra seen <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 "$((gpus - 1))")}"
        CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${seen[*]:gpus-ranks},${seen[*]:0:gpus-ranks}")"
        export CUDA_VISIBLE_DEVICES
    fi
    while true; do
        python3 -m torch.distributed.run --standalone --nproc_per_node "$ranks" \
            -m ring_la reader "$model" --listen "unix:$socket" &
        child=$!
        wait "$child" || echo "read_and_decode: the reader has ended; it is started anew" >&2
        sleep 5
    done
}

read_prompts &
reader=$!
trap 'kill "$reader" 2>/dev/null; wait "$reader" || true' EXIT
connector='{"kv_connector": "RingLAConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute",
    "kv_connector_module_path": "ring_la.integrations.vllm.connector",
    "kv_connector_extra_config": {"reader": "unix:'"$socket"'", "least": '"${LEAST:-8192}"'}}'
vllm serve "$model" --kv-transfer-config "$connector" "${@:2}" &
server=$!
trap 'kill "$server"' TERM INT
wait "$server" || wait "$server"  # the first wait is cut short by a signal
