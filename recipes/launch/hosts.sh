#!/usr/bin/env bash
# Any recipe on several nodes, by DeepSpeed's launcher over ssh (pdsh):
#   HOSTFILE=hosts.txt recipes/launch/hosts.sh recipe=qwen3_8b model.path=... data.path=...
# hosts.txt has one line per node: `name slots=8`. Every node sees this repository, the model, the data and
# output_dir under the same paths (a shared disk); the frozen configuration lies in output_dir. PORT is the port of the
# first node (default: one that is free here). DeepSpeed kills the ranks 30 s after Ctrl-C or SIGTERM, so that a large
# checkpoint is not finished and the run continues from the one before; slurm.sh and torchrun.sh wait for it.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
. "$here/common.sh"

: "${HOSTFILE:?give HOSTFILE=file with one line 'name slots=GPUS' per node}"
if [ ! -r "$HOSTFILE" ]; then
    echo "cannot read HOSTFILE=$HOSTFILE" >&2
    exit 2
fi
config=$(freeze "$@")
# DeepSpeed hands the command to the shells of the other nodes without quotes that would guard these.
special='['"'"'"\\$`;&|<>()*?#~!{}]|\[|\]'
if [ "${DRY:-0}" != 1 ] && [[ $config =~ $special || $PWD =~ [[:space:]] || $PWD =~ $special ]]; then
    echo "DeepSpeed's launcher cannot pass on the path $config from the folder $PWD: give an output_dir and a folder" \
        "without quotes, brackets and other special characters, or use torchrun.sh or slurm.sh" >&2
    exit 2
fi
# DeepSpeed gives the other nodes the variables of some prefixes and those of one file, which is looked for in two folders.
if [ "${DRY:-0}" != 1 ]; then
    given=${DS_ENV_FILE:-.deepspeed_env}
    for name in OMP_NUM_THREADS OMP_WAIT_POLICY HF_HUB_OFFLINE TOKENIZERS_PARALLELISM; do
        echo "$name=${!name}"
    done > "$config.env"
    for file in "$HOME/$given" "$given"; do
        [ ! -f "$file" ] || cat -- "$file" >> "$config.env"
    done
    export DS_ENV_FILE=$config.env
fi
run "$PYTHON" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --master_port "${PORT:-$(free_port)}" \
    --no_local_rank --module idlm.train.cli "config=$config"
