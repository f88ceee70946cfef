#!/usr/bin/env bash
# The model end to end on every GPU of this machine (on a CPU: in two processes), in every
# configuration that there is. Exit status 0 only if everything is right; docs/report.md explains
# the report.
#
#   scripts/h20_e2e_report.sh [OPTIONS OF deepinfer report]
#
#   PYTHON  interpreter; default: .venv of the project, else python3
#   MODEL   checkpoint folder; default: models/demo
#   OUT     folder of the report; default: e2e-report
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ -z "${PYTHON:-}" ] && [ ! -x "$python" ]; then
  python=python3
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import cyclopts, deepinfer, torch' 2>/dev/null; then
  echo "$python lacks the packages of deepinfer: run make test once, or name another in PYTHON" >&2
  exit 2
fi

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
every=ref,triton,tilelang,flaggems,no-tilelang,strict,speculation,no-speculation

# Whether the option $1 is among the arguments after it.
given() {
  local name=$1 argument
  shift
  for argument in "$@"; do
    case $argument in "$name" | "$name="*) return 0 ;; esac
  done
  return 1
}

options=()
given --configs "$@" || given --compare "$@" || options+=(--configs "$every")
given --out "$@" || options+=(--out "${OUT:-e2e-report}")
given --ranks "$@" || [ "$gpus" = 0 ] || options+=(--ranks "$gpus")

exec "$python" -m deepinfer report "${MODEL:-$root/models/demo}" ${options[@]+"${options[@]}"} "$@"
