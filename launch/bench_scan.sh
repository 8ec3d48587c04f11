#!/usr/bin/env bash
# `ring-la bench scan` on the GPUs of this host: first everything is compiled, all ops side by side, and fla-core tunes
# itself, alone on its GPUs; then the figures are taken. Arguments go to the benchmark (ring-la bench scan --help).
#
#   WARM=100 OPS=gla,kda bash launch/bench_scan.sh --ranks 2,4 --lengths 16384,4096 --out runs/bench_scan
#
# WARM: seconds for the first part (0: none), LENGTHS: tokens a rank there. OPS: what to measure. GPUS: how many.
# FLA: where fla-core tunes itself and is measured. HEADS: head counts to compile for, those of a rank and what the
# all-to-all of heads leaves it.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
. launch/setup.sh demo

WARM="${WARM:-100}"
LENGTHS="${LENGTHS:-16384,4096}"
HEADS="${HEADS:-32 16 8}"
OPS="${OPS:-linear_attention,retention,simple_gla,gla,delta_rule,gated_delta_rule,kda}"
FLA="${FLA-gated_delta_rule,kda}"
GPUS="${GPUS:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}"
if [ "$GPUS" -lt 1 ]; then
    echo "bench_scan: no GPU here; on CPUs: torchrun --nproc_per_node 2 -m ring_la bench scan --lengths 256" >&2
    exit 2
fi
scan() {  # devices, ranks, arguments
    CUDA_VISIBLE_DEVICES="$1" "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$2" \
        -m ring_la bench scan "${@:3}"
}
fla() {  # devices, ranks, op: fla-core tunes itself
    timeout "$WARM" bash -c "$(declare -f scan); PYTHON='$PYTHON'; scan $1 $2 --ops $3 --gates trained \
        --lengths $LENGTHS --rounds 1 --inner 1 --arms FLA --out runs/warm/$3-FLA" >"runs/warm/$3-FLA.log" 2>&1 &&
        echo tuned >"runs/warm/$3-FLA/done" || echo "bench_scan: fla-core's $3 was not tuned within $WARM s" >&2
}
ours() {  # GPU, op, heads
    CUDA_VISIBLE_DEVICES="$1" timeout "$WARM" "$PYTHON" -m ring_la bench scan --compile --ops "$2" --heads "$3" \
        >"runs/warm/$2-$3.log" 2>&1 || echo "bench_scan: not all of $2 with $3 heads was compiled within $WARM s" >&2
}
if [ "$WARM" -gt 0 ]; then
    mkdir -p runs/warm
    n=0
    for op in ${OPS//,/ }; do
        for heads in $HEADS; do
            ours $((n++ % GPUS)) "$op" "$heads" &
        done
    done
    case ",$FLA," in *,gated_delta_rule,*) fla 0,1 2 gated_delta_rule & esac
    case ",$FLA," in *,kda,*) fla "$((GPUS > 3 ? 2 : 0)),$((GPUS > 3 ? 3 : 1))" 2 kda & esac
    wait
fi
skip=""  # what fla-core did not finish tuning would tune on while others wait
for op in gated_delta_rule kda; do [ -s "runs/warm/$op-FLA/done" ] || skip="$skip$op:FLA,"
done
exec "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node "$GPUS" -m ring_la bench scan --ops "$OPS" --skip "$skip" "$@"
