#!/usr/bin/env bash
# Builds if needed, then hands over to apu_engine.launcher: preflight, start, wait until ready, stop, status.
# rocm_start_server.sh [MODEL] [serve flags] | stop | status | restart | --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

case ${1:-} in
  stop | status | help | -h | --help) built=$here/.venv/apu-stamp-base ;; # whatever is built will do
  *) built= ;;
esac
[ -e "$built" ] || "$here/build.sh" >&2 # does nothing when all is built
exec "$here/.venv/bin/python" -m apu_engine.launcher "$@"
