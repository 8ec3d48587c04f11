#!/usr/bin/env bash
# The test suite, set-up included. Arguments go to pytest: bash launch/test.sh tests/nn -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. launch/setup.sh test pytest hypothesis numpy transformers
exec "$PYTHON" -m pytest "$@"
