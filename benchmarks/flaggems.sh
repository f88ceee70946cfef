#!/bin/sh
# Screen FlagGems on the GPU of this machine, then run the demo model with what was found right:
# `benchmarks/flaggems.sh FOLDER [SECONDS]`. FOLDER gets the reports, the allow-list, demo.json, and
# what a run that SECONDS (default 420) have cut off needs to go on: start it again with that folder.
set -u
results=${1:?usage: benchmarks/flaggems.sh FOLDER [SECONDS]}
seconds=${2:-420}
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$results"
cp "$results"/*.json "$results"/*.jsonl "$work" 2>/dev/null

# An interrupt ends the child processes too.
timeout -s INT "$seconds" "$python" -m deepinfer screen models/demo --library flaggems \
  --out "$work" --jobs "$(nproc)" --case-seconds 45 --operator-seconds 150
status=$?
for name in screening.json report.md report.html allowlist.json journal.jsonl identity.json \
  catalog.json; do
  [ -e "$work/$name" ] && cp "$work/$name" "$results"
done
[ "$status" = 0 ] || { echo "not finished (status $status); start it again to go on" >&2; exit "$status"; }

"$python" benchmarks/flaggems_demo.py "$work/allowlist.json" --out "$results/demo.json"
