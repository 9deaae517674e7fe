#!/usr/bin/env bash
# Any recipe on the GPUs of this machine, by DeepSpeed's launcher:
#   recipes/launch/one_node.sh recipe=qwen3_8b model.path=... data.path=...     (GPUS=4, DRY=1: common.sh)
# Ctrl-C or SIGTERM saves after the running step; run the same command again to go on.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
. "$here/common.sh"

gpus=${GPUS:-$(count_gpus)}
config=$(freeze "$@")
run "$PYTHON" -m deepspeed.launcher.runner --num_gpus "$gpus" --no_local_rank --module idlm.train.cli \
    "config=$config"
