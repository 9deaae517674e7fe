#!/usr/bin/env bash
# Any recipe on the GPUs of this machine, by torchrun; also on CPUs with train.device=cpu and GPUS=2.
#   recipes/launch/torchrun.sh recipe=qwen3_8b model.path=... data.path=...
# Several nodes: start it on every node with NODES=2 RENDEZVOUS=first-node:29500 and one shared output_dir; the
# configuration is frozen once: CONFIG=<file>, the path that python -m idlm.train.freeze prints.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
. "$here/common.sh"

gpus=${GPUS:-$(count_gpus)}
config=${CONFIG:-$(freeze "$@")}
if [ "${NODES:-1}" -gt 1 ]; then
    : "${RENDEZVOUS:?give RENDEZVOUS=host:port of one node}" "${CONFIG:?freeze the configuration once, for all nodes}"
    place=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-idlm}")
else
    place=(--standalone)
fi
run "$PYTHON" -m torch.distributed.run "${place[@]}" --nproc-per-node "$gpus" -m idlm.train.cli "config=$config"
