#!/bin/sh
# packages.sh NAME...: installs those Debian packages that are missing; needs root or sudo only then. NAME?: if Debian
# has it.
set -eu

if ! command -v dpkg-query > /dev/null; then
    echo "packages: this is not Debian, nothing is installed. The Debian names of what is needed: $*"
    exit 0
fi
missing= extras=
for name in "$@"; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "${name%\?}" 2> /dev/null || true)
    [ "$status" != installed ] || continue
    case $name in
    *\?) extras="$extras ${name%\?}" ;;
    *) missing="$missing $name" ;;
    esac
done
add_extras() { # that apt knows, which may be none before its first update
    unknown=
    for name in $extras; do
        if apt-cache show "$name" > /dev/null 2>&1; then missing="$missing $name"; else unknown="$unknown $name"; fi
    done
    extras=$unknown
}
add_extras
[ -n "$missing" ] || exit 0

root=
if [ "$(id -u)" != 0 ]; then
    if sudo -n true 2> /dev/null; then
        root='sudo -n'
    elif command -v sudo > /dev/null && [ -t 0 ]; then
        root=sudo
    else
        echo "packages: missing, and neither root nor sudo to install them. As root, run:" >&2
        echo "    apt-get install --no-install-recommends$missing" >&2
        exit 1
    fi
fi
echo "packages: installing$missing"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    $root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" \
        < /dev/null > "$log" 2>&1
}
# shellcheck disable=SC2086
if ! { install update && add_extras && install -y --no-install-recommends install $missing; }; then
    cat "$log" >&2
    echo "packages: apt-get failed, its output is above" >&2
    exit 1
fi
