#!/bin/bash
# The first process of a machine, in namespaces of its own. Usage: machine.sh FOLDER IMAGE PRIVATE PUBLIC GATEWAY
# [BIND...]. Says "cable?" on its output, and goes on when it reads a line: its end of the cable is there then.
set -euo pipefail
folder=$1 image=$2 private=$3 public=$4 gateway=$5
shift 5
root=$folder/root

echo 'cable?'
read -r _
exec <&- >>"$folder/console.log" 2>&1

ip link set lo up
ip link set eth0 up
ip address add "$private/32" dev eth0
ip address add "$public/32" dev eth0
ip route add "$gateway" dev eth0 src "$private"
ip route add default via "$gateway" src "$private"

mount -t overlay overlay -o "lowerdir=$image,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir -p "$root/run/sshd" "$root/dev/pts" "$root/dev/shm"
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
    IFS=: read -r name major minor <<<"$device"
    mknod -m 666 "$root/dev/$name" c "$major" "$minor"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for stream in stdin:0 stdout:1 stderr:2; do
    ln -s "/proc/self/fd/${stream#*:}" "$root/dev/${stream%:*}"
done

for bind in "$@"; do
    mkdir -p "$root$bind"
    # Every user may go through the folders on the way.
    for ((parent = 1; ; parent++)); do
        way=$(cut -d/ -f"1-$((parent + 1))" <<<"$bind")
        [ "$way" = "$bind" ] && break
        chmod a+x "$root$way"
    done
    mount --bind "$bind" "$root$bind"
    mount -o remount,bind,ro "$root$bind"
done

hostname "$(cat "$root/etc/hostname")"
cd /
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=linux \
    chroot "$root" /bin/bash -c '/usr/sbin/sshd -E /var/log/sshd.log; while :; do sleep 3600 & wait $!; done'
