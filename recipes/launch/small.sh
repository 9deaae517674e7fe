#!/usr/bin/env bash
# recipes/small.yaml on the GPUs of this machine:
#   recipes/launch/small.sh model.path=... data.path=... [key=value ...]     (GPUS=4, DRY=1: common.sh)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/one_node.sh" recipe=small "$@"
