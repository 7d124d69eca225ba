#!/usr/bin/env bash
# Write dist/conserve-cpu.cdx.json and -cuda: bills of material (CycloneDX) of the locked requirements, with hashes.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install cyclonedx-bom
mkdir -p dist
for kind in cpu cuda; do
  "$venv/bin/cyclonedx-py" requirements "requirements/$kind.txt" --pyproject pyproject.toml --mc-type application \
    --output-reproducible --output-format JSON --output-file "dist/conserve-$kind.cdx.json"
  echo "dist/conserve-$kind.cdx.json"
done
