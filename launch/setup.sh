# shellcheck shell=bash
# Sourced by the other scripts: finds or makes a Python with torch and the modules given, and leaves it in $PYTHON.
#
#   . launch/setup.sh demo tqdm matplotlib?       # the extra of pyproject.toml, and the modules that must import
#
# The current python3 is used if it has them; else .venv in the repository, made here once, which keeps python3's torch
# if that is >= 2.9. A module with "?" is wished for: where nothing can be installed, things go on without.
# Modules are compiled when they are first imported, once, not all of them at the installation. Needs Python >= 3.10.

unset PYTHONDONTWRITEBYTECODE
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

has_all() {  # whether interpreter $1 has torch >= 2.9 and every module of the rest
    command -v "$1" >/dev/null && "$1" - "${@:2}" <<'EOF' 2>/dev/null
import importlib.util, sys
if sys.version_info < (3, 10) or not all(map(importlib.util.find_spec, ["torch", *sys.argv[1:]])):
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

install() {  # extra $1 into .venv, whose interpreter is left in $PYTHON
    local base make=(-m venv) pip=(-m pip install --quiet --no-compile)
    base="$(newest_python)" || return 1
    PYTHON="$ROOT/.venv/bin/python"
    echo "setup: installing the $1 extra into $ROOT/.venv (once)" >&2
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        if has_all "$base"; then make+=(--system-site-packages); fi  # with its torch
        "$base" "${make[@]}" "$ROOT/.venv" || {
            echo "setup: $base has no venv module (on Debian and Ubuntu: the package python3-venv)" >&2
            return 1
        }
    fi
    if ! has_all "$PYTHON"; then pip+=(-c "$ROOT/launch/constraints.txt"); fi  # else the torch that is there stays
    "$PYTHON" "${pip[@]}" -e "${ROOT}[$1]"
}

setup() {
    local extra="$1" wanted=("${@:2}") needed=(einops) module
    for module in "${wanted[@]}"; do [[ "$module" == *\? ]] || needed+=("$module"); done
    wanted=(einops "${wanted[@]%\?}")
    for PYTHON in python3 "$ROOT/.venv/bin/python"; do
        if has_all "$PYTHON" "${wanted[@]}"; then return; fi
    done
    if install "$extra" && has_all "$PYTHON" "${wanted[@]}"; then return; fi
    for PYTHON in python3 "$ROOT/.venv/bin/python"; do
        if has_all "$PYTHON" "${needed[@]}"; then
            echo "setup: going on with $PYTHON, which has not all of ${wanted[*]}" >&2
            return
        fi
    done
    echo "setup: no installation. Needed: torch >= 2.9 and ${needed[*]}; if $ROOT/.venv is broken, remove it" >&2
    return 1
}

setup "$@" || exit 1
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
