#!/usr/bin/env bash
# The GPU tests and measurements in one go, on a machine that has a GPU:
#     bench/gpu_suite.sh [FOLDER FOR RESULTS] [WHEELS...]
# Installs the given wheels (the package's own, built anywhere, and what the machine lacks) into a
# folder of its own and runs against that; without wheels, against the source tree. PYTEST_ARGS and
# STEP_ARGS are further arguments of pytest and of bench_step.py (STEP_SECONDS: its time limit). The
# exit status is not 0 if a test failed, or a contender of bench_step.py.
set -uo pipefail
cd "$(dirname "$0")/.."
results=$(mkdir -p "${1:-gpu-results}" && cd "${1:-gpu-results}" && pwd)
shift || true
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if (($#)); then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$@"
  export PYTHONPATH=$work/site
fi
cp -r tests bench examples pyproject.toml "$work"
cd "$work"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -c 'import graphed_sampling as g, torch; print(g.__file__, torch.__version__, g.build_info())'
python3 -m pytest -q -p no:cacheprovider ${PYTEST_ARGS:-} tests 2>&1 | tee "$results/tests.log" | tail -40
status=${PIPESTATUS[0]}
python3 bench/bench_host.py --json "$results/host.json" 2>&1 | tee "$results/host.log" | tail -70
python3 bench/bench_loop.py --json "$results/loop.json" 2>&1 | tee "$results/loop.log" | tail -40
python3 bench/bench_prompt_logprobs.py --json "$results/prompt_logprobs.json" 2>&1 |
  tee "$results/prompt_logprobs.log" | tail -80
if (($(nvidia-smi --list-gpus | wc -l) > 1)); then
  python3 -m torch.distributed.run --nproc-per-node 2 bench/bench_distributed.py \
    --json "$results/distributed.json" 2>&1 | tee "$results/distributed.log" | tail -60
fi
python3 bench/bench_step.py --json "$results/step.json" --time-limit "${STEP_SECONDS:-300}" \
  ${STEP_ARGS:-} 2>&1 | tee "$results/step.log" | tail -150
step_status=${PIPESTATUS[0]}
exit $((status ? status : step_status))
