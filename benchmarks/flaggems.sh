#!/bin/sh
# Screen FlagGems on the GPU of this machine, then run the demo model with what was found right:
# `benchmarks/flaggems.sh FOLDER [SECONDS]`. FOLDER gets reports of both, the allow-list, and what is
# needed to go on: what SECONDS (default 330) were too short for is tried by another run with FOLDER.
set -u
results=${1:?usage: benchmarks/flaggems.sh FOLDER [SECONDS]}
seconds=${2:-330}
python=${PYTHON:-python3}
work=$(mktemp -d)
mkdir -p "$results"
cp "$results"/*.json "$results"/*.jsonl "$work" 2>/dev/null

"$python" -m deepinfer screen models/demo --library flaggems --out "$work" --jobs "$(nproc)" \
  --seconds "$seconds" --case-seconds 45 --operator-seconds 150
status=$?
for name in screening.json report.md report.html allowlist.json journal.jsonl identity.json \
  catalog.json; do
  [ -e "$work/$name" ] && cp "$work/$name" "$results"
done
[ "$status" = 0 ] || exit "$status"

# The same questions without FlagGems, with what is fast, and with all that is right.
"$python" -m deepinfer report models/demo --out "$results/report" --limit 40 \
  --flaggems-allowlist "$work/allowlist.json" \
  --configs strict,flaggems+ops_strict=true,flaggems+flaggems=right+ops_strict=true
