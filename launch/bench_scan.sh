#!/usr/bin/env bash
# `ring-la bench scan` on the GPUs of this host: first everything is compiled, all ops side by side, and fla-core tunes
# itself, alone on its GPUs; then the figures are taken. Arguments go to the benchmark (ring-la bench scan --help).
#
#   WARM=100 OPS=gla,kda bash launch/bench_scan.sh --ranks 2,4 --lengths 16384,4096 --out runs/bench_scan
#
# WARM: seconds for the first part (0: none), LENGTHS: tokens a rank there. OPS: what to measure. GPUS: how many.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. launch/setup.sh demo

WARM="${WARM:-100}"
LENGTHS="${LENGTHS:-16384,4096}"
OPS="${OPS:-linear_attention,retention,simple_gla,gla,delta_rule,gated_delta_rule,kda}"
GPUS="${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"
scan() {  # devices, ranks, arguments
    CUDA_VISIBLE_DEVICES="$1" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$2" \
        -m ring_la bench scan "${@:3}"
}
warm() {  # devices, ranks, op, arms
    timeout "$WARM" bash -c "$(declare -f scan); PYTHON='$PYTHON'; scan $1 $2 --ops $3 --gates trained \
        --lengths $LENGTHS --rounds 1 --inner 1 --arms '$4' --out runs/warm/$3-${4%% *}" >"runs/warm/$3-${4%% *}.log" 2>&1 &&
        echo compiled >"runs/warm/$3-${4%% *}/done" ||
        echo "bench_scan: not all of $3 ($4) was compiled within $WARM s" >&2
}
if [ "$WARM" -gt 0 ]; then
    mkdir -p runs/warm
    all="$(seq -s, 0 $((GPUS - 1)))"
    for op in ${OPS//,/ }; do
        warm "$all" "$GPUS" "$op" "local,alone,ring,all_gather,Ulysses" &
    done
    case "$OPS" in *gated_delta_rule*) warm 0,1 2 gated_delta_rule "FLA" & esac
    case "$OPS" in *kda*) warm "$((GPUS > 3 ? 2 : 0)),$((GPUS > 3 ? 3 : 1))" 2 kda "FLA" & esac
    wait
fi
skip=""  # what fla-core did not finish tuning would tune on while others wait
for op in gated_delta_rule kda; do
    [ "$WARM" -eq 0 ] || [ -s "runs/warm/$op-FLA/done" ] || skip="$skip$op:FLA,"
done
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m ring_la bench scan --ops "$OPS" --skip "$skip" "$@"
