# What SkyPilot runs first on a machine (bash; its drivers are there): an environment for node work, and this project in it.
#
# A prepared environment on the machine's image saves minutes: one that `make image` has made is used if it is of this
# release's lock, one of the user's own as it is. Else one is made with uv. The project itself always comes from the
# controller's wheel, so that both sides are of one version. Running this again is quick.
#
# Told by the environment: GRPO_ORCH_WHEEL (below the home folder, in a folder named by its digest), GRPO_ORCH_PREPARED
# (where the image's environment is, /opt/grpo-orch/env by default), and, where an image is built, GRPO_ORCH_IMAGE
# (what for: `node` with GPUs or `node-cpu`): then the environment is made in that place and no more.
# shellcheck shell=bash
set -euo pipefail

say() { echo "grpo-orch setup: $*"; }
fail() {
    say "$*" >&2
    exit 1
}

home=$HOME/.grpo-orch
wheel=$HOME/${GRPO_ORCH_WHEEL:?grpo-orch setup: not set; a machine is set up by the controller}
digest=$(basename "$(dirname "$wheel")")
env=${GRPO_ORCH_PREPARED:-/opt/grpo-orch/env}
code=$home/code/$digest
[[ -f $wheel ]] || fail "$wheel is missing; the controller ships it with every launch"

# Writes a file of a wheel: the lock is needed before the wheel can be installed.
READ_FILE='import sys, zipfile; sys.stdout.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]).decode())'

# Whether a file is a lock of the wheel's: of either kind of node, or of a controller.
IS_LOCK='import sys, zipfile; wheel, made_of = zipfile.ZipFile(sys.argv[1]), open(sys.argv[2], "rb").read()
sys.exit(made_of not in [wheel.read(one) for one in wheel.namelist() if one.startswith("tasks/sky/locks/")])'

find_uv() {
    local found
    for found in "$HOME/.local/bin/uv" "$(command -v uv || true)" "$home/uv/bin/uv"; do
        if [[ -x $found ]]; then
            echo "$found"
            return
        fi
    done
    say "installing uv" >&2
    python3 -m pip install --quiet --target "$home/uv" uv >&2 ||
        fail "there is no uv, and pip cannot install it; put uv or a prepared environment on the image"
    echo "$home/uv/bin/uv"
}

has_gpu() { [[ -e /dev/nvidiactl ]] || nvidia-smi -L >/dev/null 2>&1; }

# vLLM's CPU build is linked against libnuma, and compiles kernels as it starts.
install_system_packages() {
    local root=(sudo) missing=()
    [[ $(PATH=$PATH:/sbin:/usr/sbin ldconfig -p) == *libnuma.so.1* ]] || missing+=(libnuma1)
    command -v g++ >/dev/null || missing+=(g++)
    [[ ${#missing[@]} -eq 0 ]] && return
    say "installing ${missing[*]}"
    [[ $EUID -eq 0 ]] && root=()
    { "${root[@]}" apt-get update -q && "${root[@]}" apt-get install -yq "${missing[@]}"; } >/dev/null ||
        fail "${missing[*]} cannot be installed with apt-get; put it on the image"
}

# Owned by who builds the image, as whom its machines work: `setup` of run.yaml installs into it.
make_place() {
    local root=(sudo)
    [[ $EUID -eq 0 ]] && root=()
    "${root[@]}" mkdir -p "$env" && "${root[@]}" chown "$EUID" "$env" || fail "$env cannot be made"
    export UV_COMPILE_BYTECODE=1 # once, and not at each machine's first start
}

make_environment() {
    local extra=${GRPO_ORCH_IMAGE:-} uv torch=()
    if [[ -z $extra ]]; then
        if has_gpu; then extra=node; else extra=node-cpu; fi
    fi
    if [[ $extra == node-cpu ]]; then
        torch=(--torch-backend cpu) # PyTorch's builds without CUDA are not on PyPI; uv knows where they are
    fi
    if [[ $(cat "$env/.made-of" 2>/dev/null) == "$digest $extra" ]]; then
        say "the environment is there"
        return
    fi
    uv=$(find_uv)
    [[ $extra == node ]] || install_system_packages
    say "making the environment with grpo-orch[$extra]; this takes minutes"
    "$uv" venv --quiet --allow-existing --seed --python 3.11 "$env" || fail "uv cannot make an environment in $env"
    "$env/bin/python" -c "$READ_FILE" "$wheel" "tasks/sky/locks/$extra.txt" >"$env/lock.txt" ||
        fail "$wheel cannot be read"
    "$uv" pip install --quiet --python "$env/bin/python" --constraint "$env/lock.txt" "${torch[@]}" \
        "grpo-orch[$extra] @ file://$wheel" ||
        fail "uv cannot install grpo-orch[$extra]; its reason is above"
    if [[ $extra == node-cpu ]]; then
        # They are built against another torch and break `import transformers`; nothing here uses them.
        "$uv" pip uninstall --quiet --python "$env/bin/python" torchvision torchaudio torchcodec
    fi
    echo "$digest $extra" >"$env/.made-of"
}

# run.sh asks the same.
is_of_this_release() {
    [[ ! -f $env/lock.txt ]] || "$env/bin/python" -c "$IS_LOCK" "$wheel" "$env/lock.txt"
}

if [[ -n ${GRPO_ORCH_IMAGE:-} ]]; then
    make_place
    make_environment
    say "made $env for images"
    exit
elif [[ -x $env/bin/python ]] && is_of_this_release; then
    say "using the prepared environment $env"
else
    [[ ! -x $env/bin/python ]] || say "not using $env, which is of another release of grpo-orch; build the image anew"
    env=$home/env
    make_environment
fi
"$env/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$env/bin/python does not run as Python 3.11 or newer"

if [[ ! -d $code ]]; then
    say "unpacking ${wheel##*/}, $digest"
    mkdir -p "$home/code"
    part=$(mktemp -d "$code.XXXXXX") # some homes are shared by machines
    "$env/bin/python" -m zipfile -e "$wheel" "$part" || fail "$wheel cannot be unpacked"
    mv -T "$part" "$code" 2>/dev/null || rm -rf "$part" # another was quicker
fi
say "ready"
