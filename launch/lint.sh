#!/usr/bin/env bash
# What continuous integration checks without running: lint, format and types, set-up included; a few minutes, most of it types.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh dev ruff mypy pyright

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pyright --pythonpath "$(command -v "$PYTHON")"
