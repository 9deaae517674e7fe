# Sourced by the launchers of this folder. They compose the configuration once, here, and hand every rank the same
# frozen file; no rank composes for itself and none makes an output folder of its own.
#   PYTHON   interpreter (default: python3)
#   GPUS     processes per node (default: the GPUs that are visible)
#   DRY=1    print the commands, run nothing
# Arguments are those of idlm-train: recipe=NAME key=value ...

PYTHON=${PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} OMP_WAIT_POLICY=passive HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export PYTHONSAFEPATH=1 TOKENIZERS_PARALLELISM=false
# Seconds between torchrun's SIGTERM to the ranks and its SIGKILL, which a checkpoint must fit into. torch 2.12 and
# newer read it; older ones always wait 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-840}

count_gpus() {
    local visible
    if ! visible=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null); then
        echo "$PYTHON has no torch: activate the environment, or give PYTHON=.venv/bin/python" >&2
        return 1
    fi
    if [ "$visible" -eq 0 ]; then
        echo "no GPU is visible; give the number of processes as GPUS=n" >&2
        return 1
    fi
    echo "$visible"
}

# free_port: a port of this machine that no process listens on, so that two runs can share a machine.
free_port() {
    "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# freeze ARGUMENT...: the path of the composed configuration; under DRY=1 what would print it.
freeze() {
    if [ "${DRY:-0}" = 1 ]; then
        echo "\$($(quoted "$PYTHON" -m idlm.train.freeze "$@"))"
    else
        "$PYTHON" -m idlm.train.freeze "$@"
    fi
}

quoted() {
    [ "$#" -eq 0 ] || printf '%q ' "$@"
}

# run COMMAND...: becomes the command, so that signals reach it; under DRY=1 prints it.
run() {
    if [ "${DRY:-0}" = 1 ]; then
        local argument
        for argument in "$@"; do
            case $argument in
                *'$('*) printf '"%s" ' "$argument" ;;
                *) quoted "$argument" ;;
            esac
        done
        echo
    else
        exec "$@"
    fi
}

# wait_for PID: its exit status. A trap that ends the waiting must set was_interrupted=1; then it waits again.
wait_for() {
    local status
    while :; do
        was_interrupted=
        status=0
        wait "$1" || status=$?
        [ -n "$was_interrupted" ] || return "$status"
    done
}
