# What SkyPilot runs first on a controller machine: an environment in which SkyPilot runs. setup.sh follows, as part
# of the same script, and puts this project beside it.
#
# Told by the environment: GRPO_ORCH_WHEEL (see setup.sh), GRPO_ORCH_CLOUDS (whose libraries are needed: aws,gcp),
# GRPO_ORCH_PREPARED (where the image's environment is, /opt/grpo-orch/controller by default).
# shellcheck shell=bash
set -euo pipefail

say() { echo "grpo-orch setup: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
wheel=$HOME/${GRPO_ORCH_WHEEL:?grpo-orch setup: not set; a controller machine is set up by \`up --remote\`}
[[ -f $wheel ]] || fail "$wheel is missing; it is shipped with every launch"

make_controller_environment() {
    local made_of
    made_of="$(basename "$(dirname "$wheel")") $GRPO_ORCH_CLOUDS"
    if [[ $(cat "$home/controller/.made-of" 2>/dev/null) == "$made_of" ]]; then
        return
    fi
    local uv=$HOME/.local/bin/uv python=$home/controller/bin/python
    [[ -x $uv ]] || uv=$(command -v uv) || fail "there is no uv, which SkyPilot itself installs; see its set-up above"
    say "making the environment with SkyPilot for $GRPO_ORCH_CLOUDS; this takes minutes"
    "$uv" venv --quiet --allow-existing --seed --python 3.11 "$home/controller" ||
        fail "uv cannot make an environment in $home/controller"
    "$python" -c 'import sys, zipfile; sys.stdout.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())' \
        "$wheel" tasks/sky/locks/controller.txt >"$home/controller/lock.txt" || fail "$wheel cannot be read"
    local locked=(--constraint "$home/controller/lock.txt")
    if [[ ,$GRPO_ORCH_CLOUDS, == *,azure,* ]]; then locked=(); fi # its libraries need older versions of some
    "$uv" pip install --quiet --python "$python" "${locked[@]}" \
        "grpo-orch[sky] @ file://$wheel" "skypilot[$GRPO_ORCH_CLOUDS]" ||
        fail "uv cannot install SkyPilot for $GRPO_ORCH_CLOUDS; its reason is above"
    echo "$made_of" >"$home/controller/.made-of"
}

# SkyPilot calls these, and no Python package brings them.
tell_missing() {
    if ! command -v "$1" >/dev/null; then
        say "SkyPilot cannot use $cloud from here without $1; put it on the image"
    fi
}

for cloud in ${GRPO_ORCH_CLOUDS//,/ }; do
    case $cloud in
        gcp) tell_missing gcloud ;;
        kubernetes | ssh) tell_missing kubectl ;;
    esac
done

export GRPO_ORCH_PREPARED=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/controller}
if [[ ! -x $GRPO_ORCH_PREPARED/bin/python ]]; then
    make_controller_environment
    GRPO_ORCH_PREPARED=$home/controller
fi
