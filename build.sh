#!/usr/bin/env bash
# Fresh machine -> .venv with the engine, its native library and its dependencies.
# Needs Python 3.10+, a C++20 compiler (g++ 11+ or clang 14+) and access to a Python package index; nothing else.
# cmake and ninja come as Python packages into the build environment, and so does a compiler for the GPU's kernels where
# the machine has none (native/gpu/build_kernels.py). Run again after any change: it does what is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'EOF'
Usage: ./build.sh [--test [PYTEST ARGS]] [--cpu-only] [--targets LIST] [--clean]
  (none)          make .venv, build libapu.so, install apu_engine into .venv in editable form, and build the kernels
                  of this machine's GPU (without a GPU gfx1151's, where there is a compiler for them)
  --test          also install the test extra, fetch the small test models (0.35 GB) and run all checks and tests;
                  what follows --test is handed to pytest. Up to four processes share the tests; after --test
                  -n 0 means one. The extra has torch 2.13.0, of which the CPU build will
                  do: 0.2 GB, where the default one is 0.5 GB and brings CUDA libraries (pip's extra-index-url
                  or find-links setting says where the CPU build is)
  --cpu-only      build no kernels for GPUs
  --targets LIST  build the kernels of these GPUs, comma separated: gfx1151, gfx1150, gfx1100, gfx1101, gfx1102,
                  gfx1103, gfx1200, gfx1201, gfx90a, sm_90, sm_120 (nvcc), or all. With --test: gfx1151,gfx1201,gfx90a
  --clean         remove .venv and build/ first
Environment: PYTHON (interpreter to use), CXX (C++ compiler to use)
EOF
}

die() { printf 'build.sh: %s\n' "$*" >&2; exit 1; }
say() { printf '\033[1m==>\033[0m %s\n' "$*"; }
[ -t 1 ] || say() { printf '==> %s\n' "$*"; }

test=0 cpu_only=0 targets=auto clean=0 pytest_args=()
while [ $# -gt 0 ]; do
  case $1 in
    --test) test=1; shift; pytest_args=("$@"); break ;;
    --cpu-only) cpu_only=1 ;;
    --targets) [ $# -ge 2 ] || die "--targets needs a list, for example gfx1151,gfx1150"; targets=$2; shift ;;
    --targets=*) targets=${1#*=} ;;
    --clean) clean=1 ;;
    -h|--help) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift
done

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"; return 0
    fi
  done
  return 1
}

find_compiler() { # prints a compiler that accepts C++20, or fails
  local candidate
  for candidate in ${CXX:+"$CXX"} g++ clang++ c++ g++-14 g++-13 g++-12 g++-11 clang++-19 clang++-18 clang++-17; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if printf '#include <bit>\n#include <atomic>\nint main(){return std::popcount(0u);}\n' |
       "$candidate" -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then
      echo "$candidate"; return 0
    fi
  done
  return 1
}

python=$(find_python) || die "Python 3.10 or newer is missing. Debian/Ubuntu: apt install python3 python3-venv; Fedora: dnf install python3; Arch: pacman -S python"
cxx=$(find_compiler) || die "a C++20 compiler (g++ 11+ or clang 14+) is missing. Debian/Ubuntu: apt install g++; Fedora: dnf install gcc-c++; Arch: pacman -S gcc"
export CXX=$cxx

# One build of this folder at a time: a second one waits, then finds everything done.
if command -v flock >/dev/null 2>&1 && { exec 9<build.sh; } 2>/dev/null; then
  flock -n 9 || { say "waiting for another build.sh in this folder"; flock 9; }
fi
[ $clean = 0 ] || rm -rf .venv build
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv with $("$python" --version)"
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "Python's venv module is missing. Debian/Ubuntu: apt install python3-venv; Fedora: dnf install python3; Arch: pacman -S python"
  "$python" -m venv .venv || die "could not make .venv in $PWD (is the folder writable, is the disk full? ./build.sh --clean removes a .venv that does not work)"
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

# Kernels compile while pip installs. They go beside libapu.so, where an editable installation looks. Says what it
# compiles; silent when all is current.
[ $test = 0 ] || [ "$targets" != auto ] || targets=gfx1151,gfx1201,gfx90a
[ $cpu_only = 0 ] || targets=none
.venv/bin/python native/gpu/build_kernels.py --targets "$targets" --out build/editable/kernels --apt 9<&- &
kernels=$!
trap '[ -z "$kernels" ] || kill "$kernels" 2>/dev/null || true' EXIT
finish_kernels() {
  local failed=0
  wait "$kernels" || failed=1
  kernels=
  [ $failed = 1 ] || return 0
  [ "$targets" = auto ] || die "GPU kernels could not be built (--cpu-only goes without)"
  say "GPU KERNELS WERE NOT BUILT, for the reason above: only the CPU backend works until ./build.sh succeeds"
}

# A stamp per extra holds the compiler and a digest of all that the installation is made from.
sources() {
  find native CMakeLists.txt pyproject.toml apu_engine/_native -type f ! -path 'native/gpu/kernels/*.hip' \
    ! -name '*.pyc' ! -name _cdef.py ! -name '*.so'
}
state="$cxx $(sources | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c1-32)"
install_extra() { # EXTRA SPEC
  local stamp=.venv/apu-stamp-$1
  [ "$(cat "$stamp" 2>/dev/null)" != "$state" ] || return 0
  say "building with $cxx and installing apu_engine ($2); this takes a minute or two"
  rm -f .venv/apu-stamp-*
  SKBUILD_CMAKE_DEFINE=APU_GPU_TARGETS=none pip install -e "$2" || die "installation failed; the lines above say why"
  .venv/bin/python -c 'import apu_engine._native' || die "the native library does not load; try ./build.sh --clean"
  echo "$state" >"$stamp"
  [ "$1" = base ] || echo "$state" >.venv/apu-stamp-base
  say "ready: .venv/bin/apu-engine --help, or ./rocm_start_server.sh"
}
if [ $test = 1 ]; then install_extra test '.[test]'; else install_extra base .; fi

if [ $test = 0 ]; then finish_kernels; exit 0; fi
say "small test models"
.venv/bin/python scripts/fetch_model.py smollm2-135m-instruct gemma3-270m
say "ruff, clang-format, mypy"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
git ls-files '*.h' '*.cpp' '*.hip' 2>/dev/null | xargs -r .venv/bin/clang-format --dry-run --Werror
.venv/bin/mypy
finish_kernels
exec 9<&- # tests may run this script
workers=$(.venv/bin/python -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
say "tests, by $workers processes"
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 # the oracles' libraries leave processors to the others
exec .venv/bin/python -m pytest -n "$workers" --dist worksteal "${pytest_args[@]}"
