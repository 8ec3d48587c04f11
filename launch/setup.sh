# shellcheck shell=bash
# Sourced by the other scripts: finds or makes a Python with torch and the modules given, and leaves it in $PYTHON.
#
#   . launch/setup.sh demo matplotlib tqdm        # the extra of pyproject.toml, and the modules that must import
#
# The current python3 is used if it has them; else .venv in the repository, made here once. Needs Python >= 3.10.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

has_all() {  # whether interpreter $1 has torch >= 2.9 and every module of the rest
    command -v "$1" >/dev/null && "$1" - "${@:2}" <<'EOF' 2>/dev/null
import importlib.util, sys
if sys.version_info < (3, 10) or not all(map(importlib.util.find_spec, ["torch", "einops", *sys.argv[1:]])):
    sys.exit(1)
import torch
sys.exit(tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 9))
EOF
}

newest_python() {  # the first interpreter of at least 3.10
    local python
    for python in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$python" && return
        fi
    done
    echo "setup: Python >= 3.10 is needed, and none was found" >&2
    return 1
}

setup() {
    local extra="$1" base
    shift
    for PYTHON in python3 "$ROOT/.venv/bin/python"; do
        if has_all "$PYTHON" "$@"; then return; fi
    done
    base="$(newest_python)" || return 1
    echo "setup: installing torch and the $extra extra into $ROOT/.venv (once)" >&2
    "$PYTHON" -m pip --version >/dev/null 2>&1 || "$base" -m venv "$ROOT/.venv" || {
        echo "setup: $base has no venv module (on Debian and Ubuntu: the package python3-venv)" >&2
        return 1
    }
    "$PYTHON" -m pip install --quiet -c "$ROOT/launch/constraints.txt" -e "${ROOT}[$extra]" || return 1
    has_all "$PYTHON" "$@" || { echo "setup: the installation in $ROOT/.venv is incomplete: remove it and try again" >&2; return 1; }
}

setup "$@" || exit 1
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
