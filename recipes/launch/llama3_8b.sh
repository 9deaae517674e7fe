#!/usr/bin/env bash
# recipes/llama3_8b.yaml on the GPUs of this machine:
#   recipes/launch/llama3_8b.sh model.path=... data.path=... [key=value ...]     (GPUS=4, DRY=1: common.sh)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/one_node.sh" recipe=llama3_8b "$@"
