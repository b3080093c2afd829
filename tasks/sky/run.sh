# What SkyPilot runs on a machine that was set up: the node's work, in the folder of run.yaml as it was shipped.
#
# Told by the environment: what `tasks.machine.node_env` reads, except the addresses and the folder of the work, which
# are this machine's own; GRPO_ORCH_ROLE; and what the set-up was told.
# shellcheck shell=bash
set -euo pipefail

say() { echo "grpo-orch run: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
shipped=${GRPO_ORCH_WHEEL:?grpo-orch run: not set; work is started by the controller}
digest=$(basename "$(dirname "$shipped")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/env} code=$home/code/$digest
[[ -d $code ]] || fail "this machine was set up by a grpo-orch of another version; launch it again to set it up anew"
# As in setup.sh: a prepared environment is used if it is the user's own or of this release's lock.
is_of_this_release() {
    local made_of=$env/lock.txt locks=$code/tasks/sky/locks
    [[ ! -f $made_of ]] || cmp -s "$made_of" "$locks/node.txt" || cmp -s "$made_of" "$locks/node-cpu.txt"
}
if [[ ! -x $env/bin/python ]] || ! is_of_this_release; then env=$home/env; fi
[[ -x $env/bin/python ]] || fail "there is no environment in $env; the set-up has not been run"

address=${SKYPILOT_NODE_IPS:-}
address=${address%%$'\n'*}
[[ -n $address ]] || fail "SKYPILOT_NODE_IPS is empty: the address of this machine is not known"
export GRPO_ORCH_NODE_HOST=$address GRPO_ORCH_GATEWAY_HOST=$address

# By the run as well: some homes outlive the machine, or are shared by several.
run=$(printf '%s' "$GRPO_ORCH_RUN" | sha256sum | cut -c 1-8)
export GRPO_ORCH_WORKDIR=$home/work/$run/$GRPO_ORCH_NODE

# What `setup` of run.yaml installs must not replace what this release is tested with: who wants that has an image.
if [[ -f $env/lock.txt ]]; then export PIP_CONSTRAINT=$env/lock.txt UV_CONSTRAINT=$env/lock.txt; fi

# First in the path, so that `pip install` in `setup` of run.yaml reaches the environment that the work runs in.
export PATH=$env/bin:$PATH VIRTUAL_ENV=$env PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
if [[ -d $HOME/sky_workdir ]]; then cd "$HOME/sky_workdir"; fi
say "$GRPO_ORCH_NODE, attempt $GRPO_ORCH_ATTEMPT, at $address"
exec "$env/bin/python" -m tasks.machine.cloud_machine "$GRPO_ORCH_ROLE"
