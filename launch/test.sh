#!/usr/bin/env bash
# The test suite, set-up included, a file a worker where pytest-xdist is there and the machine has more than one core.
# Arguments go to pytest: bash launch/test.sh tests/nn -x;  -m fast for one lane (CONTRIBUTING.md);  -n 0 for one worker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh test pytest hypothesis numpy transformers 'xdist?'

# Triton comes with a torch that has CUDA; beside another one its interpreter runs the kernels, where it can be installed.
if [ "$PYTHON" = "$ROOT/.venv/bin/python" ] && ! "$PYTHON" -c "import triton" 2>/dev/null; then
    "$PYTHON" -m pip install --quiet -e "${ROOT}[interpreter]" || echo "test: going on without Triton's interpreter" >&2
fi

# Files are given out in their order, so that those with many ranks do not come last; xdist before 3.7 knows no other.
read -r workers order <<<"$("$PYTHON" - <<'EOF'
import importlib.metadata, importlib.util, os
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
found = importlib.util.find_spec("xdist") is not None
version = importlib.metadata.version("pytest-xdist").split(".") if found else ["0", "0"]
print(min(4, cores) if found else 0, "--no-loadscope-reorder" if [int(n) for n in version[:2]] >= [3, 7] else "")
EOF
)"
if [ "$workers" -gt 1 ]; then
    set -- -n "$workers" --dist loadfile ${order:+"$order"} "$@"
fi
exec "$PYTHON" -m pytest "$@"
