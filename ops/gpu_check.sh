#!/usr/bin/env bash
# Does pawl train rightly on this machine's GPU? A few minutes on one GPU; prints a table, exit 0 if every row is right.
#   ops/gpu_check.sh [CONFIG] [--steps N] [--keep DIR]        CONFIG: configs/smollm-135m.yaml
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvidia-smi > /dev/null; then
    echo "gpu_check: nvidia-smi is not on this machine, so there is no NVIDIA GPU to check. Run it on a GPU node." >&2
    exit 2
fi
if ! nvidia-smi > /dev/null; then
    echo "gpu_check: nvidia-smi fails: the driver does not answer. See its message above." >&2
    exit 2
fi
python=${PYTHON:-.venv/bin/python}
if ! "$python" -c 'import torch' 2> /dev/null; then
    echo "gpu_check: $python has no torch. Run 'make setup' first, or set PYTHON to an interpreter that has pawl." >&2
    exit 2
fi
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    build=$("$python" -c 'import torch; print(torch.__version__, "for CUDA", torch.version.cuda)')
    echo "gpu_check: the driver answers, but torch finds no GPU (torch $build; CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-unset})." >&2
    echo "gpu_check: a CPU build of torch, or one for a newer CUDA than the driver's, cannot use it: install the build that fits." >&2
    exit 2
fi
nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader
# One GPU is enough, and the reproducible cuBLAS workspace must be chosen before CUDA starts.
export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" CUBLAS_WORKSPACE_CONFIG=:4096:8
exec "$python" -m ops.gpu_check "$@"
