#!/usr/bin/env bash
# Any recipe under Slurm, one torchrun per node:
#   sbatch --nodes=2 --gpus-per-node=8 recipes/launch/slurm.sh recipe=qwen3_8b model.path=... data.path=...
# 15 minutes before the time limit the run saves and ends, and the job is put into the queue again, where it continues
# from there. `sbatch --signal=B:USR1@1800 ...` gives it half an hour; then set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to a
# minute less. A run that ends by its own train.max_minutes is not put into the queue again. `scancel --batch --signal=TERM JOB` saves and ends the job for good.
#SBATCH --job-name=idlm-train
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# srun answers SIGTERM with SIGKILL for all its tasks, but passes SIGUSR2 on: slurm_node.sh.
is_requeued='' is_stopped='' srun=''
stop_run() {
    was_interrupted=1 is_stopped=1
    [ -z "$srun" ] || kill -USR2 "$srun" 2>/dev/null || true
}
trap 'is_requeued=1; stop_run' USR1
trap stop_run TERM

requeue() {
    echo "the time limit is near: job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
}

# Slurm runs a copy of this file; it records where the original lies: Command=<path> <arguments>. Else: LAUNCH_FOLDER.
launch_folder() {
    local command
    command=$(scontrol show job "${SLURM_JOB_ID:-}" 2>/dev/null | sed -n '/^ *Command=/{s///p;q}') || true
    case $command in
        /*/slurm.sh*) echo "${command%%/slurm.sh*}" ;;
        *) cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd ;;
    esac
}

here=${LAUNCH_FOLDER:-$(launch_folder)}
# shellcheck source=common.sh
. "$here/common.sh"

: "${SLURM_JOB_NODELIST:?start this file with sbatch}"
gpus=${GPUS:-${SLURM_GPUS_ON_NODE:?set --gpus-per-node, or GPUS}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
# srun takes the CPUs of a task from this variable alone.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}
# A job that was put into the queue again continues, whatever its first options were.
[ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || set -- "$@" resume=auto
config=$(freeze "$@")
command=(srun --kill-on-bad-exit=1 "$here/slurm_node.sh" "$PYTHON" -m torch.distributed.run
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" --rdzv-backend c10d
    --rdzv-endpoint "$first:${PORT:-$(free_port)}" --rdzv-id "$SLURM_JOB_ID" -m idlm.train.cli "config=$config")
if [ "${DRY:-0}" = 1 ]; then
    run "${command[@]}"
    exit
fi

if [ -n "$is_stopped" ]; then
    [ -z "$is_requeued" ] || requeue
    exit 143
fi
began=$(mktemp)
"${command[@]}" &
srun=$!
# A signal that came before the line above has not been passed on.
is_early=$is_stopped
[ -z "$is_early" ] || stop_run
status=0
wait_for "$srun" || status=$?
# A stopped run has saved. One that crashed in place of that would crash again.
saved=$(find "$(dirname -- "$(dirname -- "$config")")" -maxdepth 1 -name 'checkpoint-*' -newer "$began")
rm -f -- "$began"
if [ -n "$is_requeued" ] && [ "$status" -ne 0 ]; then
    if [ -n "$saved$is_early" ]; then
        requeue
    else
        echo "the run ended with status $status and without a new checkpoint: job $SLURM_JOB_ID is not requeued" >&2
    fi
fi
exit "$status"
