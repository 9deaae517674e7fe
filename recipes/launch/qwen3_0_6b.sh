#!/usr/bin/env bash
# recipes/qwen3_0_6b.yaml on the GPUs of this machine:
#   recipes/launch/qwen3_0_6b.sh model.path=... data.path=... [key=value ...]     (GPUS=4, DRY=1: common.sh)
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/one_node.sh" recipe=qwen3_0_6b "$@"
