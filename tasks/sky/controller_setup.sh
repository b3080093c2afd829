# SkyPilot runs this first on a controller machine. It makes an environment with SkyPilot. setup.sh follows as part of
# the same script, and adds this project.
#
# Environment: GRPO_ORCH_WHEEL (see setup.sh), GRPO_ORCH_CLOUDS (clouds whose libraries to install: aws,gcp),
# GRPO_ORCH_PREPARED (folder of the image's environment, by default /opt/grpo-orch/controller).
# shellcheck shell=bash
set -euo pipefail

log() { echo "grpo-orch setup: $*"; }
fail() {
    log "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
wheel=$HOME/${GRPO_ORCH_WHEEL:?grpo-orch setup: not set; a controller machine is set up by \`up --remote\`}
[[ -f $wheel ]] || fail "$wheel is missing; every launch ships it"

make_controller_environment() {
    local made_of
    made_of="$(basename "$(dirname "$wheel")") $GRPO_ORCH_CLOUDS"
    if [[ $(cat "$home/controller/.made-of" 2>/dev/null) == "$made_of" ]]; then
        return
    fi
    local uv=$HOME/.local/bin/uv python=$home/controller/bin/python
    [[ -x $uv ]] || uv=$(command -v uv) || fail "uv not found; SkyPilot installs it, see its set-up above"
    log "making the environment with SkyPilot for $GRPO_ORCH_CLOUDS; this takes minutes"
    "$uv" venv --quiet --allow-existing --seed --python 3.11 "$home/controller" ||
        fail "uv failed to make an environment in $home/controller"
    "$python" -c 'import sys, zipfile; sys.stdout.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())' \
        "$wheel" grpo_orch/tasks/sky/locks/controller.txt >"$home/controller/lock.txt" || fail "$wheel is unreadable"
    local locked=(--constraint "$home/controller/lock.txt")
    if [[ ,$GRPO_ORCH_CLOUDS, == *,azure,* ]]; then locked=(); fi # Azure's libraries need older versions than the lock
    "$uv" pip install --quiet --python "$python" "${locked[@]}" \
        "grpo-orch[sky] @ file://$wheel" "skypilot[$GRPO_ORCH_CLOUDS]" ||
        fail "uv failed to install SkyPilot for $GRPO_ORCH_CLOUDS; see its output above"
    echo "$made_of" >"$home/controller/.made-of"
}

# SkyPilot calls these programs, which no Python package contains.
warn_missing() {
    if ! command -v "$1" >/dev/null; then
        log "SkyPilot cannot use $cloud without $1; add it to the image"
    fi
}

for cloud in ${GRPO_ORCH_CLOUDS//,/ }; do
    case $cloud in
        gcp) warn_missing gcloud ;;
        kubernetes | ssh) warn_missing kubectl ;;
    esac
done

export GRPO_ORCH_PREPARED=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/controller}
if [[ ! -x $GRPO_ORCH_PREPARED/bin/python ]]; then
    make_controller_environment
    GRPO_ORCH_PREPARED=$home/controller
fi
