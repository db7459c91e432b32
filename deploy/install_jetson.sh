#!/usr/bin/env bash
# Install edgeds on a Jetson: an environment that sees JetPack's own TensorRT and OpenCV, the wheel, and a check at the
# end whose exit code is the script's. Nothing is installed with apt and nothing of JetPack is replaced: what is missing
# is named with the command that brings it.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: install_jetson.sh [--prefix DIR] [--wheel FILE] [--python FILE] [--service] [--any-machine]

  --prefix DIR     where the environment goes (default: /opt/edgeds for root, else ~/.edgeds/venv)
  --wheel FILE     the edgeds wheel to install (default: the clone this script lies in)
  --python FILE    the system's Python, the one JetPack installed TensorRT for (default: /usr/bin/python3)
  --service        also install the systemd unit (root; see deploy/README.md for its settings)
  --any-machine    go on where this is no Jetson
TEXT
}

fail() {
    printf 'install_jetson.sh: error: %s\n' "$1" >&2
    exit "${2:-1}"
}

say() { printf '==> %s\n' "$1"; }

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${EDGEDS_INSTALL_ROOT:-} # a made-up tree, for the tests
prefix=
wheel=
python=/usr/bin/python3
service=no
any_machine=no

while [ $# -gt 0 ]; do
    case $1 in
        --prefix | --wheel | --python)
            [ $# -ge 2 ] || fail "$1 needs a value" 2
            declare "${1#--}=$2"
            shift 2
            ;;
        --service) service=yes && shift ;;
        --any-machine) any_machine=yes && shift ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && fail "unknown option $1" 2 ;;
    esac
done
if [ -z "$prefix" ]; then
    if [ "$(id -u)" -eq 0 ]; then prefix=/opt/edgeds; else prefix=${HOME:?}/.edgeds/venv; fi
fi
if [ "$service" = yes ] && [ "$(id -u)" -ne 0 ]; then
    fail "--service writes to /etc/systemd/system; run it with sudo" 2
fi

# --- the machine ---
release=$root/etc/nv_tegra_release
if [ -r "$release" ]; then
    # "# R36 (release), REVISION: 4.3, ..." is L4T 36.4.3
    l4t=$(sed -nE '1s/^# *R([0-9]+) .*REVISION: *([0-9.]+).*/\1.\2/p' "$release")
    say "Jetson Linux ${l4t:-of an unknown release}"
    major=${l4t%%.*}
    if [ -n "$major" ] && [ "$major" -lt 36 ]; then
        fail "L4T $l4t is JetPack 5 or older (Python 3.8, TensorRT 8.5); edgeds needs JetPack 6.1 or newer: flash the board"
    fi
elif [ "$any_machine" = no ]; then
    fail "this is no Jetson (no $release); use pip on other machines, or --any-machine to go on"
fi

[ -x "$python" ] || fail "$python is not there; give the system's Python with --python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" -V 2>&1); edgeds needs Python 3.10 or newer, which JetPack 6 and later bring"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python cannot make environments; sudo apt install python3-venv"
if [ -z "$wheel" ]; then
    [ -f "$here/../setup.py" ] || fail "no clone around this script; give the wheel with --wheel FILE" 2
    wheel=$here/..
fi
[ -e "$wheel" ] || fail "$wheel does not exist" 2

# --- the environment ---
if [ ! -x "$prefix/bin/python" ]; then
    say "making the environment $prefix"
    "$python" -m venv --system-site-packages "$prefix" || fail "the environment $prefix could not be made"
fi
say "installing edgeds from $wheel"
"$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade "$wheel" ||
    fail "pip could not install $wheel (without a network: sudo apt install python3-numpy python3-tqdm, then try again)"

if [ "$service" = yes ]; then
    say "installing the service"
    install -D -m 0644 "$here/edgeds.service" "$root/etc/systemd/system/edgeds.service"
    sed -i "s#/opt/edgeds/bin/edgeds#$prefix/bin/edgeds#g" "$root/etc/systemd/system/edgeds.service"
    if [ ! -e "$root/etc/edgeds/edgeds.env" ]; then
        install -D -m 0644 "$here/edgeds.env" "$root/etc/edgeds/edgeds.env"
    fi
    [ -n "$root" ] || systemctl daemon-reload
    say "edit /etc/edgeds/edgeds.env, then: sudo systemctl enable --now edgeds"
fi

# --- the check: its exit code is ours, so that "installed" and "works" never differ ---
say "checking"
if "$prefix/bin/edgeds" doctor --quiet; then
    say "done; the program is $prefix/bin/edgeds"
else
    fail "installed in $prefix, but a required part is missing: see the lines marked FAILED above"
fi
