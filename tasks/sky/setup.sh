# SkyPilot runs this first on a machine, with bash and its drivers. It makes an environment for the work of a node.
#
# A prepared environment on the machine's image saves minutes. One made by `make image` is used if it is from this
# release's lock, and a user's own always. Otherwise uv makes one. The project itself always comes from the
# controller's wheel, so that both have the same version. Running this again is quick.
#
# Environment: GRPO_ORCH_WHEEL (below the home folder, in a folder named by its digest), GRPO_ORCH_PREPARED (folder of
# the image's environment, by default /opt/grpo-orch/env). GRPO_ORCH_IMAGE (`node` with GPUs, or `node-cpu`) is set
# when an image is built: then this only makes the environment in that folder.
# shellcheck shell=bash
set -euo pipefail

log() { echo "grpo-orch setup: $*"; }
fail() {
    log "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
wheel=$HOME/${GRPO_ORCH_WHEEL:?grpo-orch setup: not set; only the controller sets up machines}
digest=$(basename "$(dirname "$wheel")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/env}
code=$home/code/$digest
[[ -f $wheel ]] || fail "$wheel is missing; the controller ships it with every launch"

# Prints a file of a wheel, since the lock is needed before the wheel is installed.
READ_FILE='import sys, zipfile; sys.stdout.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())'

# Succeeds if a file equals one of the wheel's locks, for nodes or controllers.
IS_LOCK='import sys, zipfile; wheel, made_of = zipfile.ZipFile(sys.argv[1]), open(sys.argv[2], "rb").read()
sys.exit(made_of not in [wheel.read(name) for name in wheel.namelist() if name.startswith("grpo_orch/tasks/sky/locks/")])'

find_uv() {
    local candidate
    for candidate in "$HOME/.local/bin/uv" "$(command -v uv || true)" "$home/uv/bin/uv"; do
        if [[ -x $candidate ]]; then
            echo "$candidate"
            return
        fi
    done
    log "installing uv" >&2
    python3 -m pip install --quiet --target "$home/uv" uv >&2 ||
        fail "uv not found, and pip failed to install it; add uv or a prepared environment to the image"
    echo "$home/uv/bin/uv"
}

has_gpu() { [[ -e /dev/nvidiactl ]] || nvidia-smi -L >/dev/null 2>&1; }

# vLLM's CPU build links to libnuma and compiles kernels at its start.
install_system_packages() {
    local root=(sudo) missing=()
    [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *libnuma.so.1* ]] || missing+=(libnuma1)
    command -v g++ >/dev/null || missing+=(g++)
    [[ ${#missing[@]} -eq 0 ]] && return
    log "installing ${missing[*]}"
    [[ $EUID -eq 0 ]] && root=()
    { "${root[@]}" apt-get update -q && "${root[@]}" apt-get install -yq "${missing[@]}"; } >/dev/null ||
        fail "apt-get failed to install ${missing[*]}; add it to the image"
}

# The folder is owned by the user who builds the image and who later works on its machines, so that `setup` of
# run.yaml can install into it.
make_folder() {
    local root=(sudo)
    [[ $EUID -eq 0 ]] && root=()
    "${root[@]}" mkdir -p "$env" && "${root[@]}" chown "$EUID" "$env" || fail "cannot create $env"
    export UV_COMPILE_BYTECODE=1 # once, instead of at each machine's first start
}

make_environment() {
    local extra=${GRPO_ORCH_IMAGE:-} uv torch=()
    if [[ -z $extra ]]; then
        if has_gpu; then extra=node; else extra=node-cpu; fi
    fi
    if [[ $extra == node-cpu ]]; then
        torch=(--torch-backend cpu) # PyTorch's builds without CUDA are not on PyPI; uv knows their index
    fi
    if [[ $(cat "$env/.made-of" 2>/dev/null) == "$digest $extra" ]]; then
        log "the environment is up to date"
        return
    fi
    uv=$(find_uv)
    [[ $extra == node ]] || install_system_packages
    log "making the environment with grpo-orch[$extra]; this takes minutes"
    "$uv" venv --quiet --allow-existing --seed --python 3.11 "$env" || fail "uv failed to make an environment in $env"
    "$env/bin/python" -c "$READ_FILE" "$wheel" "grpo_orch/tasks/sky/locks/$extra.txt" >"$env/lock.txt" ||
        fail "$wheel is unreadable"
    "$uv" pip install --quiet --python "$env/bin/python" --constraint "$env/lock.txt" "${torch[@]}" \
        "grpo-orch[$extra] @ file://$wheel" ||
        fail "uv failed to install grpo-orch[$extra]; see its output above"
    if [[ $extra == node-cpu ]]; then
        # Unused packages, built for another torch, that break `import transformers`.
        "$uv" pip uninstall --quiet --python "$env/bin/python" torchvision torchaudio torchcodec
    fi
    echo "$digest $extra" >"$env/.made-of"
}

# See also run.sh.
is_of_this_release() {
    [[ ! -f $env/lock.txt ]] || "$env/bin/python" -c "$IS_LOCK" "$wheel" "$env/lock.txt"
}

if [[ -n ${GRPO_ORCH_IMAGE:-} ]]; then
    make_folder
    make_environment
    log "made $env for images"
    exit
elif [[ -x $env/bin/python ]] && is_of_this_release; then
    log "using the prepared environment $env"
else
    [[ ! -x $env/bin/python ]] || log "not using $env, made by another release of grpo-orch; rebuild the image"
    env=$home/env
    make_environment
fi
"$env/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$env/bin/python is broken or older than Python 3.11"

if [[ ! -d $code ]]; then
    log "unpacking ${wheel##*/}, $digest"
    mkdir -p "$home/code"
    part=$(mktemp -d "$code.XXXXXX") # machines may share a home
    "$env/bin/python" -m zipfile -e "$wheel" "$part" || fail "cannot unpack $wheel"
    mv -T "$part" "$code" 2>/dev/null || rm -rf "$part" # another machine was faster
fi
log "ready"
