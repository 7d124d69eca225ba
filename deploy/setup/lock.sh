#!/usr/bin/env bash
# Make requirements/cpu.txt anew: what pip resolves today for conserve[cpu,dev], without what breaks vLLM.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="$(mktemp -d)"
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3.11}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
"${pip[@]}" install "torch==2.13.0+cpu" 2>/dev/null ||
  "${pip[@]}" install --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${pip[@]}" install -e ".[cpu,dev]"
{
  echo "# Every package of the CPU environment, at the version it was tested with. \`make lock\` makes it anew."
  "${pip[@]}" freeze --exclude-editable | grep -vE '^(torchvision|torchaudio|torchcodec)==' | sort
} > requirements/cpu.txt.new
mv requirements/cpu.txt.new requirements/cpu.txt
