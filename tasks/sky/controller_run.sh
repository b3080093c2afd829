# What SkyPilot runs on a controller machine: the run's daemon, started again whenever it dies, until the run is over.
#
# Told by the environment: GRPO_ORCH_RUN (the store), GRPO_ORCH_REASON (why the run is taken over: up, resume, down),
# GRPO_ORCH_WHEEL and GRPO_ORCH_PREPARED as the set-up was told.
# shellcheck shell=bash
set -euo pipefail

WAIT_MAX_S=60
LIVED_S=300 # a daemon that lived so long did not die of what the one before died of
HELD=75     # policies.model.exit_codes: another controller steers the run

say() { echo "grpo-orch controller: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
shipped=${GRPO_ORCH_WHEEL:?grpo-orch controller: not set; a controller is started by \`up --remote\`}
code=$home/code/$(basename "$(dirname "$shipped")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/controller}
[[ -x $env/bin/python ]] || env=$home/controller
[[ -x $env/bin/python ]] || fail "there is no environment in $env; the set-up has not been run"
[[ -d $code ]] || fail "this machine was set up by a grpo-orch of another version; launch it again to set it up anew"

# By the run: some homes are shared by several machines. The daemon holds it, too, for as long as it lives.
run=$(printf '%s' "$GRPO_ORCH_RUN" | sha256sum | cut -c 1-8)
exec 9>>"$home/controller-$run.lock"
if ! flock --nonblock 9; then
    say "the daemon is watched over already"
    exit 0
fi

export GRPO_ORCH_HOME=$home/runs GRPO_ORCH_RUN_FOLDER=$HOME/sky_workdir
export PATH=$env/bin:$PATH VIRTUAL_ENV=$env PYTHONPATH=$code PYTHONUNBUFFERED=1
cd "$GRPO_ORCH_RUN_FOLDER"

wait_s=1
while true; do
    started_s=$SECONDS exit_code=0
    say "starting the daemon: $GRPO_ORCH_REASON"
    "$env/bin/python" -m orchestrator.control.daemon "$GRPO_ORCH_RUN" "$GRPO_ORCH_REASON" || exit_code=$?
    case $exit_code in
        0) say "nothing is left to steer" && exit 0 ;;
        "$HELD") say "another controller steers the run" && exit "$HELD" ;;
    esac
    # Not `resume` a second time: that takes up a run that was told to stop in the meantime, and buys machines.
    GRPO_ORCH_REASON=restart
    if ((SECONDS - started_s > LIVED_S)); then wait_s=1; fi
    say "the daemon ended with exit code $exit_code; starting it again in $wait_s s"
    sleep "$wait_s" 9>&-
    wait_s=$((wait_s * 2 < WAIT_MAX_S ? wait_s * 2 : WAIT_MAX_S))
done
