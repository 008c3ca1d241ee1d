#!/bin/sh
# Installs the command line `weft` of a release: finds the archive for this system, checks it, and puts its programs, completions,
# manual pages and the example of a sandbox below a prefix. Needs tar, sha256sum or shasum, and curl or wget unless the release is a directory.
set -eu

usage() {
    cat <<'END'
Usage: install.sh --from RELEASE [--prefix DIRECTORY] [--signers FILE]

  --from RELEASE       where the release is: a directory, or the URL under which its files are (WEFT_RELEASE)
  --prefix DIRECTORY   where bin/weft goes [default: /usr/local for root, else ~/.local] (WEFT_PREFIX)
  --signers FILE       also check the signature of the checksums: `ssh-keygen`'s file of allowed signers, in which the
                       signer is named weft-release (WEFT_SIGNERS)

Examples:
  sh install.sh --from dist
  sh install.sh --from https://github.com/OWNER/REPOSITORY/releases/latest/download
  sh install.sh --from https://github.com/OWNER/REPOSITORY/releases/download/v0.1.0 --signers allowed_signers
END
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

from=${WEFT_RELEASE:-}
prefix=${WEFT_PREFIX:-}
signers=${WEFT_SIGNERS:-}
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --from | --prefix | --signers) [ $# -ge 2 ] || fail "$1 needs a value" ;;
        *) usage >&2; fail "unknown option: $1" ;;
    esac
    case $1 in
        --from) from=$2 ;;
        --prefix) prefix=$2 ;;
        --signers) signers=$2 ;;
    esac
    shift 2
done
[ -n "$from" ] || { usage >&2; fail "say where the release is: --from"; }
if [ -z "$prefix" ]; then
    if [ "$(id -u)" = 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
fi

case $(uname -s) in
    Linux) system=linux ;;
    Darwin) system=darwin ;;
    *) fail "no weft for $(uname -s) is installed by this script; on Windows, unpack weft-windows-amd64.zip" ;;
esac
case $(uname -m) in
    x86_64 | amd64) processor=amd64 ;;
    aarch64 | arm64) processor=arm64 ;;
    *) fail "there is no weft for $(uname -m)" ;;
esac
archive=weft-$system-$processor.tar.gz

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fetch NAME: gets a file of the release into $work.
fetch() {
    case $from in
        http://* | https://*)
            if command -v curl >/dev/null; then
                curl --fail --silent --show-error --location --output "$work/$1" "$from/$1"
            elif command -v wget >/dev/null; then
                wget --quiet --output-document "$work/$1" "$from/$1"
            else
                fail "neither curl nor wget is here"
            fi ;;
        *) cp "${from#file://}/$1" "$work/$1" ;;
    esac || fail "cannot get $1 from $from"
}

fetch SHA256SUMS
if [ -n "$signers" ]; then
    command -v ssh-keygen >/dev/null || fail "--signers needs ssh-keygen"
    fetch SHA256SUMS.sig
    ssh-keygen -q -Y verify -f "$signers" -I weft-release -n weft-release -s "$work/SHA256SUMS.sig" <"$work/SHA256SUMS" ||
        fail "SHA256SUMS of $from is not signed by one of $signers: nothing is installed"
fi

expected=$(sed -n "s/^\([0-9a-f]\{64\}\)  $archive\$/\1/p" "$work/SHA256SUMS")
[ -n "$expected" ] || fail "the release in $from has no $archive"
fetch "$archive"
if command -v sha256sum >/dev/null; then
    found=$(sha256sum "$work/$archive")
else
    found=$(shasum -a 256 "$work/$archive")
fi
[ "${found%% *}" = "$expected" ] || fail "$archive is not the one in SHA256SUMS: nothing is installed"

mkdir "$work/unpacked"
tar -xzf "$work/$archive" -C "$work/unpacked"
# put DIRECTORY MODE TARGET: moves its files below the prefix. A program that runs cannot be overwritten, but replaced.
put() {
    [ -d "$work/unpacked/$1" ] || return 0
    mkdir -p "$prefix/$3"
    for file in "$work/unpacked/$1"/$4; do
        [ -f "$file" ] || continue
        name=${file##*/}
        cp "$file" "$prefix/$3/.$name.new"
        chmod "$2" "$prefix/$3/.$name.new"
        mv "$prefix/$3/.$name.new" "$prefix/$3/$name"
    done
}
put bin 755 bin '*'
put completions 644 share/bash-completion/completions '*.bash'
put completions 644 share/zsh/site-functions '_*'
put completions 644 share/fish/vendor_completions.d '*.fish'
put man 644 share/man/man1 '*.1'
put examples/mesh 644 share/weft/examples/mesh '*.yaml'

echo "installed weft $("$prefix/bin/weft" version --client --short) in $prefix/bin"
case :$PATH: in
    *:"$prefix/bin":*) ;;
    *) echo "$prefix/bin is not in PATH: export PATH=\"$prefix/bin:\$PATH\"" ;;
esac
