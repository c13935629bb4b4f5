# slime on NVIDIA GPUs:
#   docker build -t slime .
#   docker run --rm --gpus all --shm-size=8g slime                        the quickstart, on the GPU
#   docker run --rm --gpus all --shm-size=8g -v $PWD/runs:/slime/runs slime slime train ...
# Runs as the user slime (uid 1000). --rm-type code and other graders run programs in bubblewrap, which needs
# user namespaces and a /proc of its own: add --security-opt seccomp=unconfined --security-opt apparmor=unconfined
# --security-opt systempaths=unconfined where Docker's defaults refuse them; `slime doctor` inside tells.
# torch's CUDA build brings the CUDA libraries along; the host needs the NVIDIA driver and the NVIDIA
# Container Toolkit. gcc is there because Triton compiles a small launcher at first use.
#
# Megatron with TransformerEngine: docker build --target te -t slime-te .
# CUDA's compiler and cuDNN's headers are needed, because TransformerEngine's torch extension is built against
# the torch that is installed. `slime doctor` in it tells whether they match and what FP8 the GPU has.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS te

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap g++ gcc make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 slime \
    && install -d -o slime -g slime /slime
USER slime
WORKDIR /slime
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/slime/.venv/bin:$PATH
COPY --chown=slime constraints.txt ./
RUN python3 -m venv .venv && pip install --constraint constraints.txt torch
COPY --chown=slime . .
RUN SLIME_TORCH=installed tools/install.sh .venv/bin/python megatron,tensorboard,wandb,parquet,constrained
RUN pip install --constraint constraints.txt ninja==1.13.2 pybind11==3.1.0 setuptools wheel==0.48.0 \
    && NVTE_FRAMEWORK=pytorch MAX_JOBS=8 pip install --no-build-isolation 'transformer_engine[pytorch]==2.20.2'
CMD ["slime", "doctor"]

# Never built where this was written: tests/unit/test_dockerfile.py checks what can be read from it.
# The base image by digest; for a newer one: docker buildx imagetools inspect python:3.12-slim-bookworm
FROM python:3.12-slim-bookworm@sha256:782412e85d0f0984994c290652577d4018aff08145c85b262bb63dc0c7522254

RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 slime \
    && install -d -o slime -g slime /slime
USER slime
WORKDIR /slime
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/slime/.venv/bin:$PATH

# No GPU is visible while an image is built, so the rule of tools/install.sh would choose the CPU build.
COPY --chown=slime constraints.txt ./
RUN python -m venv .venv && pip install --constraint constraints.txt torch
COPY --chown=slime . .
RUN SLIME_TORCH=installed tools/install.sh .venv/bin/python tensorboard,wandb,parquet,constrained

CMD ["slime", "quickstart"]
