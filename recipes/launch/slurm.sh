#!/usr/bin/env bash
# Any recipe under Slurm, one torchrun per node:
#   sbatch --nodes=2 --gpus-per-node=8 recipes/launch/slurm.sh recipe=qwen3_8b model.path=... data.path=...
# Before the time limit Slurm sends SIGTERM: the run saves and ends, and the requeued job goes on from there.
#SBATCH --job-name=idlm-train
#SBATCH --ntasks-per-node=1
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
# Slurm runs a copy of this file: the folder of the original is where the job was submitted from.
here=${SLURM_SUBMIT_DIR:+$SLURM_SUBMIT_DIR/recipes/launch}
here=${LAUNCH_FOLDER:-${here:-$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)}}
# shellcheck source=common.sh
. "$here/common.sh"

: "${SLURM_JOB_NODELIST:?start this file with sbatch}"
gpus=${GPUS:-${SLURM_GPUS_ON_NODE:?ask for --gpus-per-node, or give GPUS}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
config=$(freeze "$@")
run srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$gpus" --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" \
    -m idlm.train.cli "config=$config"
