# slime on NVIDIA GPUs:
#   docker build -t slime .
#   docker run --rm --gpus all --shm-size=8g slime                        the quickstart, on the GPU
#   docker run --rm --gpus all --shm-size=8g -v $PWD/runs:/slime/runs slime slime train ...
# torch's CUDA build brings the CUDA libraries along; the host needs the NVIDIA driver and the NVIDIA
# Container Toolkit. gcc is there because Triton compiles a small launcher at first use.
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /slime
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# No GPU is visible while an image is built, so the rule of tools/install.sh would choose the CPU build.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt torch
COPY . .
RUN pip install --constraint constraints.txt --editable '.[tensorboard,wandb,parquet]'

CMD ["slime", "quickstart"]
