#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the native kernels, on a machine that has a GPU:
#     bench/sanitize.sh [FOLDER FOR RESULTS] [ARGUMENTS OF bench/sanitized.py...]
# TOOLS are the ones to run, TOOL_SECONDS the time limit of each. The exit status is not 0 if one
# found something or did not get through.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
shift || true
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
status=0
for tool in ${TOOLS:-memcheck racecheck synccheck initcheck}; do
  # Kernels of others are theirs to check, but they write what initcheck must know of.
  only=(--kernel-name kernel_substring=graphed_sampling)
  [[ $tool == initcheck ]] && only=()
  [[ $tool == synccheck ]] && only+=(--num-cuda-barriers 65536)
  timeout -s KILL "${TOOL_SECONDS:-300}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    --print-limit 20 "${only[@]}" \
    python3 bench/sanitized.py "$@" >"$results/$tool.log" 2>&1
  code=$?
  echo "$tool: exit $code; $(grep -E "ERROR SUMMARY|RACECHECK SUMMARY" "$results/$tool.log" | tail -1)"
  ((code == 0)) || status=1
done
exit $status
