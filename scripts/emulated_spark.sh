#!/usr/bin/env bash
# README's path for the owner of a DGX Spark, command by command, in an emulated aarch64 Debian, as
# far as it goes without a GPU; then scripts/first_run_on_a_spark.sh. docs/spark_path.md has a run.
#
#   sudo apt-get install debootstrap qemu-user binfmt-support
#   sudo scripts/emulated_spark.sh FOLDER
#
# FOLDER: where the system is made, or was; 4 GB. What HEAD holds is cloned into it, not what is
# uncommitted. Emulated programs take ten to thirty times as long: some hours on one core.
#   SUITE=trixie         the Debian; its Python is the one that is tried
#   SETTINGS=            for the emulated commands, e.g. "PIP_NO_COMPILE=1 PIP_FIND_LINKS=wheels"
#
# Exit codes: 0 all went as far as it can, 1 a command did not, 2 nothing could begin. The archive
# is FOLDER/first_run.tar.gz. The folder stays: rm -rf --one-file-system FOLDER.
set -u

FOLDER=${1:-}
SUITE=${SUITE:-trixie}
SETTINGS=${SETTINGS:-}
CLONE=$(cd "$(dirname "$0")/.." && pwd)
BINFMT=/proc/sys/fs/binfmt_misc
NAME=spark-aarch64
MADE=

fail() {
    echo "$1" >&2
    exit 2
}

[ -n "$FOLDER" ] || fail "name a folder: scripts/emulated_spark.sh FOLDER"
[ "$(id -u)" -eq 0 ] || fail "debootstrap and chroot need root: sudo $0 $*"
command -v debootstrap > /dev/null || fail "debootstrap is missing: apt-get install debootstrap"
# Static, and not older than 8: under 7.2 the import of onnxruntime ends with SIGSEGV.
QEMU=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
[ -n "$QEMU" ] || fail "qemu-aarch64 is missing: apt-get install qemu-user (Debian 13)"
version=$("$QEMU" --version | sed -n '1s/.*version \([0-9]*\).*/\1/p')
[ "${version:-0}" -ge 8 ] || fail "$QEMU is version ${version:-unknown}; 8 or newer is needed: Debian 13 has 10"
FOLDER=$(mkdir -p "$FOLDER" && cd "$FOLDER" && pwd) || exit 2
ROOT=$FOLDER/root
OWNER=/home/owner

leave() {
    local at
    for at in dev/shm dev/pts dev sys proc; do
        mountpoint -q "$ROOT/$at" && umount "$ROOT/$at"
    done
    [ -n "$MADE" ] && echo -1 > "$BINFMT/$NAME"
}
trap leave EXIT

# The kernel hands aarch64 programs to qemu. F opens qemu once, so that the system needs no copy of
# it; C gives sudo the rights of its file.
register() {
    local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    [ -e "$BINFMT/register" ] || mount -t binfmt_misc binfmt_misc "$BINFMT" || return
    [ -e "$BINFMT/$NAME" ] && return
    printf '%s' ":$NAME:M:0:$magic:$mask:$QEMU:OCF" > "$BINFMT/register"
    MADE=yes
}

# A bare system with what DGX OS has: sudo, certificates (this machine's too), a user.
system() {
    debootstrap --arch=arm64 --variant=minbase --include=sudo,ca-certificates "$SUITE" "$ROOT" \
        || return
    cp /usr/local/share/ca-certificates/*.crt "$ROOT/usr/local/share/ca-certificates/" 2> /dev/null
    chroot "$ROOT" update-ca-certificates || return
    chroot "$ROOT" useradd --uid 1000 --create-home --shell /bin/bash owner || return
    echo "127.0.0.1 $(hostname)" >> "$ROOT/etc/hosts"
    echo 'owner ALL=(ALL) NOPASSWD: ALL' > "$ROOT/etc/sudoers.d/owner"
    touch "$ROOT/.made"
}

# said COMMAND: as the owner types it, in the clone once there is one; its code, with its seconds.
said() {
    local code begin=$SECONDS
    echo "owner\$ $1"
    # shellcheck disable=SC2086
    nice -n 15 chroot --userspec=1000:1000 "$ROOT" /usr/bin/env -i HOME=$OWNER USER=owner \
        LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin $SETTINGS bash -c \
        "cd $OWNER; [ -d spark ] && cd spark; [ -e .venv/bin/activate ] && . .venv/bin/activate; $1"
    code=$?
    echo "   ended with $code after $((SECONDS - begin)) s"
    return "$code"
}

register || fail "no binfmt_misc here: the kernel must know whom to give aarch64 programs"
[ -e "$ROOT/.made" ] || system || fail "the system could not be made in $ROOT"
cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
mount -t proc proc "$ROOT/proc" && mount -t sysfs sysfs "$ROOT/sys" && mount --bind /dev "$ROOT/dev" \
    && mount --bind /dev/pts "$ROOT/dev/pts" && mount -t tmpfs tmpfs "$ROOT/dev/shm" \
    || fail "proc, sys and dev could not be mounted in $ROOT"
git -C "$CLONE" bundle create -q "$ROOT$OWNER/spark.bundle" HEAD || fail "git bundle failed"
chmod a+r "$ROOT$OWNER/spark.bundle"

failed=0
said 'sudo apt-get update && sudo apt-get install -y git python3-venv' || failed=1
if [ -d "$ROOT$OWNER/spark" ]; then # an earlier run's
    said 'git fetch -q ../spark.bundle HEAD && git checkout -q --force FETCH_HEAD' || failed=1
else
    said 'git clone -q spark.bundle spark' || failed=1
fi
said 'python3 -m venv .venv' || failed=1
said "pip install -e '.[cuda,hub,check,bench]'" || failed=1
said 'spark-run doctor' # 1 without an engine that can be served, as here
said 'spark-build models/tiny/checkpoint -o engines/tiny --target sm_121a' || failed=1
said 'spark-build models/tiny/checkpoint -o engines/cpu --target cpu' || failed=1
said 'spark-run doctor engines/tiny' # 1: no GPU
said 'spark-run engines/cpu --prompt "Once upon a time" --max-tokens 32' || failed=1
said 'rm -rf first_run first_run.tar.gz; scripts/first_run_on_a_spark.sh'
[ $? -eq 3 ] || failed=1 # 3: well, but without a GPU
cp "$ROOT$OWNER/spark/first_run.tar.gz" "$FOLDER/" || failed=1
exit "$failed"
