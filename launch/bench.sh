#!/usr/bin/env bash
# Every operator on one GPU beside its peers, set-up included: table on the screen, JSON and PNG under runs/.
# Arguments go to `ring-la bench ops`: bash launch/bench.sh --ops gla,kda --shapes 1x8192x32x128
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh bench matplotlib fla
exec "$PYTHON" -m ring_la bench ops --cold gated_delta_rule --out runs/bench_ops.json --png runs/bench_ops.png "$@"
