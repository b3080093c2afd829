#!/bin/bash
# The recipe of a node's root: Debian with sshd, and all that SkyPilot installs on a node, so that a launch needs no
# network. Usage: image.sh ROOT WHEELS, where WHEELS is what `sky` made in its ~/.sky/wheels. Run it in a mount
# namespace of its own: what it mounts ends with that.
set -euo pipefail
root=$1 wheels=$2
packages=openssh-server,sudo,python3,python3-venv,rsync,curl,ca-certificates,procps,iproute2,netcat-openbsd,lsof
packages+=,psmisc,patch
# What a prepared node environment (Python, torch, vLLM) is linked against.
packages+=,libssl3,libsqlite3-0,libffi8,libbz2-1.0,liblzma5,libreadline8,libncursesw6,libnuma1,zlib1g,libuuid1
packages+=,libgomp1,libexpat1,libstdc++6

echo 'image: Debian'
debootstrap --variant=minbase --include="$packages" bookworm "$root" >"$root.log" ||
    { tail -20 "$root.log" >&2; exit 1; }
rm "$root.log" "$root"/var/cache/apt/archives/*.deb
cp /etc/resolv.conf "$root/etc/resolv.conf"
# The host may reach the package index through a proxy with a certificate of its own.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
mount --bind /dev "$root/dev"
mount -t proc proc "$root/proc"

in_root() {
    chroot "$root" env -i HOME=/home/ubuntu PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
        ${HTTPS_PROXY:+HTTPS_PROXY="$HTTPS_PROXY"} ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
        ${PIP_INDEX_URL:+UV_DEFAULT_INDEX="$PIP_INDEX_URL"} UV_NATIVE_TLS=1 UV_LINK_MODE=copy UV_NO_CACHE=1 \
        SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV=/home/ubuntu/.local/bin/uv \
        RUNTIME=/home/ubuntu/skypilot-runtime bash -euc "$1"
}

echo 'image: the user and sshd'
in_root '
useradd --create-home --shell /bin/bash ubuntu
echo "ubuntu ALL=(ALL) NOPASSWD:ALL" >/etc/sudoers.d/ubuntu
chmod 440 /etc/sudoers.d/ubuntu
mkdir -p /home/ubuntu/.ssh /home/ubuntu/.local/bin /opt/grpo-orch
ssh-keygen -A >/dev/null
printf "UseDNS no\nMaxStartups 100\n" >>/etc/ssh/sshd_config
printf "#!/bin/sh\nexit 0\n" >/usr/local/bin/systemctl
chmod +x /usr/local/bin/systemctl
'

echo "image: SkyPilot's runtime"
mkdir -p "$root/home/ubuntu/.sky"
cp -r "$wheels" "$root/home/ubuntu/.sky/wheels"
in_root '
python3 -m venv /tmp/pip
/tmp/pip/bin/pip --quiet install uv
cp /tmp/pip/bin/uv $UV
rm -r /tmp/pip
$UV venv --quiet --seed --python /usr/bin/python3 $RUNTIME
export VIRTUAL_ENV=$RUNTIME
wheel=$(echo /home/ubuntu/.sky/wheels/*/*.whl)
$UV pip install --quiet "setuptools<70" "click<8.3.0" "ray[default]==2.9.3" "pydantic-core==2.41.1"
$UV pip install --quiet "$wheel[aws,remote]" "setuptools<70" "click<8.3.0"
basename "$(dirname "$wheel")" >/home/ubuntu/.sky/wheels/current_sky_wheel_hash
# What SkyPilot would do after it installed the wheel.
$RUNTIME/bin/python -c "from sky.skylet.ray_patches import patch; patch()"
$UV venv --quiet --seed --relocatable --system-site-packages --python /usr/bin/python3 /home/ubuntu/sky-user-env
'

echo 'image: bytecode'
in_root '
$RUNTIME/bin/python -m compileall -q -j 2 $RUNTIME/lib >/dev/null || true  # some packages ship templates named .py
rm -rf /home/ubuntu/.cache
chown -R ubuntu:ubuntu /home/ubuntu
chmod 700 /home/ubuntu/.ssh
'
# A machine has no name server; without an entry it learns so at once.
: >"$root/etc/resolv.conf"
rm -rf "$root"/var/lib/apt/lists/*
