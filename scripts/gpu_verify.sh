#!/usr/bin/env bash
# Verifies the GPU of this machine, AMD or NVIDIA, against the CPU backend, and measures its kernels.
# Builds what is missing, runs the kernel tests on the device, compares the small models (models/*.gguf, or --model
# FILE), runs the kernel benchmark; prints one table and writes gpu_report.json, which holds no names of hosts, users or
# folders and can be attached to an issue. Works offline when a model is given by its path and nothing is left to build.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

usage() {
  cat <<'TEXT'
Usage: scripts/gpu_verify.sh [--no-build] [--device hip[:N]|cuda[:N]] [--model FILE]... [--quick]
                             [--no-tests] [--no-bench] [--report FILE]
  --no-build  take what is built
  --quick     64 tokens instead of 256, three types, one test file: about a minute after the build
The other options are those of scripts/gpu_verify.py --help.
TEXT
}

build=1 arguments=()
for argument in "$@"; do
  case $argument in
    --no-build) build=0 ;;
    -h|--help) usage; exit 0 ;;
    *) arguments+=("$argument") ;;
  esac
done
[ $build = 0 ] || ./build.sh
[ -x .venv/bin/python ] || { echo "gpu_verify.sh: .venv is missing; run ./build.sh" >&2; exit 2; }
.venv/bin/python -c 'import pytest, pytest_timeout, gguf' 2>/dev/null ||
  .venv/bin/python -m pip --disable-pip-version-check --quiet install 'pytest>=8' pytest-timeout pytest-asyncio gguf ||
  echo "gpu_verify.sh: pytest and gguf cannot be installed here: the kernel tests are left out" >&2
cd "$here" # where --model and --report are meant from
exec "$root/.venv/bin/python" "$root/scripts/gpu_verify.py" ${arguments[@]+"${arguments[@]}"}
