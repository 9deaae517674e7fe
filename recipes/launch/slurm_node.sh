#!/usr/bin/env bash
# One node's part of slurm.sh: runs COMMAND..., sends it SIGTERM when this script gets SIGUSR2 or SIGTERM, and waits.
# Slurm sends a signal to every process of a job step. Everything under this script ignores SIGUSR2, so that torchrun
# alone gets the signal to stop and passes it to its ranks, which save.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=common.sh
. "$here/common.sh"

child=
trap 'was_interrupted=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' USR2 TERM
(trap '' USR2 && trap - TERM && exec "$@") &
child=$!
wait_for "$child"
