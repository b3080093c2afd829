# SkyPilot runs this on a machine after setup.sh. It runs the node's work in the shipped folder of run.yaml.
#
# Environment: that of `tasks.machine.node_env` without addresses and workdir, which this script sets; GRPO_ORCH_ROLE;
# and that of setup.sh.
# shellcheck shell=bash
set -euo pipefail

log() { echo "grpo-orch run: $*"; }
fail() {
    log "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
shipped=${GRPO_ORCH_WHEEL:?grpo-orch run: not set; only the controller starts work}
digest=$(basename "$(dirname "$shipped")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/env} code=$home/code/$digest
[[ -d $code ]] || fail "this machine was set up by another version of grpo-orch; launch it again"
# As in setup.sh: use a prepared environment if it is the user's own or made from this release's lock.
is_of_this_release() {
    local made_of=$env/lock.txt locks=$code/grpo_orch/tasks/sky/locks
    [[ ! -f $made_of ]] || cmp -s "$made_of" "$locks/node.txt" || cmp -s "$made_of" "$locks/node-cpu.txt"
}
if [[ ! -x $env/bin/python ]] || ! is_of_this_release; then env=$home/env; fi
[[ -x $env/bin/python ]] || fail "no environment in $env; run the set-up first"

address=${SKYPILOT_NODE_IPS:-}
address=${address%%$'\n'*}
[[ -n $address ]] || fail "SKYPILOT_NODE_IPS is empty, so this machine's address is unknown"
export GRPO_ORCH_NODE_HOST=$address GRPO_ORCH_GATEWAY_HOST=$address

# A folder per run and node, since a home may outlive the machine, or be shared by several machines.
run=$(printf '%s' "$GRPO_ORCH_RUN" | sha256sum | cut -c 1-8)
export GRPO_ORCH_WORKDIR=$home/work/$run/$GRPO_ORCH_NODE

# `setup` of run.yaml must not replace the tested versions; for other versions the user needs an image.
if [[ -f $env/lock.txt ]]; then export PIP_CONSTRAINT=$env/lock.txt UV_CONSTRAINT=$env/lock.txt; fi

# First in PATH, so that `pip install` in `setup` of run.yaml installs into the environment of the work.
export PATH=$env/bin:$PATH VIRTUAL_ENV=$env PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [[ -d $HOME/sky_workdir ]]; then cd "$HOME/sky_workdir"; fi
log "$GRPO_ORCH_NODE, attempt $GRPO_ORCH_ATTEMPT, at $address"
exec "$env/bin/python" -m grpo_orch.tasks.machine.cloud_machine "$GRPO_ORCH_ROLE"
