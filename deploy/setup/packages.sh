#!/usr/bin/env bash
# Debian packages that some tests use; without root or apt those tests are skipped, and say so.
set -u
packages=(haproxy prometheus chromium postgresql)
missing=()
for package in "${packages[@]}"; do
  dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed (needs root and apt): ${missing[*]}; the tests that use them are skipped"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || true
for package in "${missing[@]}"; do
  # A server package starts its service on installing it, but not in runlevel 1: our tests start their own.
  RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
    echo "cannot be installed: $package; the tests that use it are skipped"
done
