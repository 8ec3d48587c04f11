# ring_la with PyTorch for CUDA, on a machine whose driver the container toolkit brings in. From a checkout:
#
#   docker build -t ring-la --build-arg VERSION="$(python -m setuptools_scm 2>/dev/null || echo 0.0.0)" .
#   docker run --rm --gpus all --ipc host ring-la                                    # ring-la doctor
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/workspace/ring_la/runs" ring-la \
#       bash launch/train.sh --config examples/configs/small.yaml
FROM python:3.12-slim

# Triton compiles the code that starts its kernels with gcc; its headers of Python come with the image
# hadolint ignore=DL3008  # Debian keeps no old version to pin
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/ring_la
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# what is needed first, so that a change of the code does not install it again
COPY launch/constraints.txt launch/constraints.txt
RUN pip install -c launch/constraints.txt torch einops

COPY . .
ARG VERSION=0.0.0
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_RING_LA="$VERSION" pip install -c launch/constraints.txt -e '.[train,serve,transformers]'

CMD ["ring-la", "doctor"]
