#!/usr/bin/env bash
# The test suite, set-up included, a file a worker where pytest-xdist is there and the machine has more than one core.
# Arguments go to pytest: bash launch/test.sh tests/nn -x;  -m fast for one lane (CONTRIBUTING.md);  -n 0 for one worker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh test pytest hypothesis numpy transformers 'xdist?'

# Triton comes with a torch that has CUDA; beside another one its interpreter runs the kernels, where it can be installed.
if [ "$PYTHON" = "$ROOT/.venv/bin/python" ] && ! "$PYTHON" -c "import triton" 2>/dev/null; then
    extra="$("$PYTHON" - <<'EOF'
from importlib.metadata import requires
print(*(each.partition(";")[0].replace(" ", "") for each in requires("ring_la") if 'extra == "interpreter"' in each))
EOF
    )"
    # shellcheck disable=SC2086  # several words
    "$PYTHON" -m pip install --quiet --no-compile $extra || echo "test: going on without Triton's interpreter" >&2
fi

workers="$("$PYTHON" - <<'EOF'
import importlib.util, os
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(min(4, cores) if importlib.util.find_spec("xdist") else 0)
EOF
)"
if [ "$workers" -gt 1 ]; then
    set -- -n "$workers" --dist loadfile "$@"
fi
exec "$PYTHON" -m pytest --durations=25 --durations-min=5 "$@"
