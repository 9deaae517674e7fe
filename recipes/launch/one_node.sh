#!/usr/bin/env bash
# Any recipe on the GPUs of this machine:
#   recipes/launch/one_node.sh recipe=qwen3_8b model.path=... data.path=...     (GPUS=4, DRY=1: common.sh)
# Ctrl-C or SIGTERM saves after the running step; run the same command again to continue. Under torchrun, also with
# DeepSpeed's ZeRO: DeepSpeed's own launcher kills the ranks 30 s after a signal, whether they have saved or not.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/torchrun.sh" "$@"
