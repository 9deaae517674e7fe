#!/usr/bin/env bash
# recipes/qwen3_8b.yaml on several nodes; 32 rows per step are 16 processes x 1 row x 2 micro-batches:
#   HOSTFILE=hosts.txt recipes/launch/qwen3_8b_multinode.sh model.path=... data.path=... train.accumulation=2
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
exec "$here/hosts.sh" recipe=qwen3_8b "$@"
