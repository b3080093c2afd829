# SkyPilot runs this on a controller machine. It restarts the run's daemon whenever it dies, until the run is over.
#
# Environment: GRPO_ORCH_RUN (the store), GRPO_ORCH_REASON (command that starts the daemon: up, resume, down),
# GRPO_ORCH_WHEEL and GRPO_ORCH_PREPARED (as in controller_setup.sh).
# shellcheck shell=bash
set -euo pipefail

WAIT_MAX_S=60
LIVED_S=300 # a daemon that ran this long resets the wait
HELD=75     # policies.model.exit_codes: another controller is in charge of the run

log() { echo "grpo-orch controller: $*"; }
fail() {
    log "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
shipped=${GRPO_ORCH_WHEEL:?grpo-orch controller: not set; a controller is started by \`up --remote\`}
code=$home/code/$(basename "$(dirname "$shipped")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/controller}
[[ -x $env/bin/python ]] || env=$home/controller
[[ -x $env/bin/python ]] || fail "no environment in $env; run the set-up first"
[[ -d $code ]] || fail "this machine was set up by another version of grpo-orch; launch it again"

# One lock per run, since machines may share a home. The daemon inherits it, and holds it while it runs.
run=$(printf '%s' "$GRPO_ORCH_RUN" | sha256sum | cut -c 1-8)
exec 9>>"$home/controller-$run.lock"
if ! flock --nonblock 9; then
    log "already running"
    exit 0
fi

export GRPO_ORCH_HOME=$home/runs GRPO_ORCH_RUN_FOLDER=$HOME/sky_workdir
export PATH=$env/bin:$PATH VIRTUAL_ENV=$env PYTHONPATH=$code PYTHONUNBUFFERED=1
cd "$GRPO_ORCH_RUN_FOLDER"

wait_s=1
while true; do
    started_s=$SECONDS exit_code=0
    log "starting the daemon: $GRPO_ORCH_REASON"
    "$env/bin/python" -m grpo_orch.orchestrator.control.daemon "$GRPO_ORCH_RUN" "$GRPO_ORCH_REASON" || exit_code=$?
    case $exit_code in
        0) log "the daemon has finished" && exit 0 ;;
        "$HELD") log "another controller is in charge of the run" && exit "$HELD" ;;
    esac
    # Not `resume` again: that would resume a run that has been stopped in the meantime, and buy machines.
    GRPO_ORCH_REASON=restart
    if ((SECONDS - started_s > LIVED_S)); then wait_s=1; fi
    log "the daemon exited with code $exit_code; restarting it in $wait_s s"
    sleep "$wait_s" 9>&-
    wait_s=$((wait_s * 2 < WAIT_MAX_S ? wait_s * 2 : WAIT_MAX_S))
done
