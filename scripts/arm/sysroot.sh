#!/usr/bin/env bash
# usage: sysroot.sh DEST
# Unpacks an arm64 Python 3.11, pybind11 and the libraries they need from Debian 12 packages into DEST: nothing is installed, no root,
# no chroot. What runs in it is qemu-aarch64-static -L DEST.
set -euo pipefail
dest=$(realpath -m "${1:?usage: sysroot.sh DEST}")
# The program and everything torch's wheel links against that a wheel may expect of a system.
packages=(libc6 libgcc-s1 libstdc++6 libgomp1 libatomic1 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libssl3
  libuuid1 libcrypt1 libdb5.3 libncursesw6 libtinfo6 libreadline8 libnsl2 libtirpc3 media-types
  python3.11 python3.11-minimal libpython3.11 libpython3.11-minimal libpython3.11-stdlib libpython3.11-dev pybind11-dev)
[ ! -e "$dest/complete" ] || exit 0
[ "$(. /etc/os-release && echo "$VERSION_CODENAME")" = bookworm ] || { echo "sysroot.sh: needs Debian 12's package lists" >&2; exit 1; }

# An apt of its own: other architecture, own lists, an empty list of installed packages; the mirror is the machine's.
apt=$dest.apt
mkdir -p "$apt"/{lists/partial,archives/partial} "$dest"
: >"$apt/status"
site=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Codename: bookworm' | sort -u | head -n 1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${site:?this machine has no package site for bookworm} bookworm main" >"$apt/sources.list"
options=(-q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State="$apt" -o Dir::State::status="$apt/status"
  -o Dir::Cache="$apt" -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=- -o Debug::NoLocking=1
  -o APT::Sandbox::User="$(id -un)")
apt-get "${options[@]}" update
(cd "$apt/archives" && apt-get "${options[@]}" download "${packages[@]}")
for deb in "$apt"/archives/*.deb; do dpkg -x "$deb" "$dest"; done
touch "$dest/complete"
