#!/usr/bin/env bash
# run_gpu.sh PART: on a machine with an NVIDIA GPU and torch, one part of what is to be seen there.
# Each ends within LIMIT seconds, and no part needs another one's results:
#   figures  what the machine is, the core's own GPU tests, the quick benchmark, then all GPU tests
#   bench    the benchmark but for the part below, then the quick one again, for the spread
#   torchrl  collectors with a policy on the GPU beside TorchRL's; needs torchrl
#   tools    compute-sanitizer on the core's GPU tests, ncu on the kernel
# Each builds the wheel first, unless WHEEL names one (figures leaves it in OUT). No network is
# needed where scikit-build-core, pybind11, cmake, ninja and a C++20 compiler are installed. What is
# missing of tensordict, pyvers, gymnasium and torchrl can be brought as wheels.
#   PYTHON   the interpreter that has torch, numpy, pytest, pytest-timeout, psutil [python3]
#   OUT      where figures go, and log.txt of everything that is printed [gpu-results]
#   WHEEL    a wheel of pycollect that is there
#   WHEELS   a folder of wheels to install beside it, without looking for what they need
#   LIMIT    seconds [580]
set -uo pipefail
part=${1:?expected figures, bench, torchrl or tools}
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-gpu-results}")
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
limit=${LIMIT:-580}
mkdir -p "$out"
status=0

step() { # name, seconds at most, command...: prints the end of what it prints
  local name=$1 most=$2 began=$SECONDS left=$((limit - SECONDS)) text
  shift 2
  if [ $left -lt 10 ]; then
    echo "$name: left out, the time is over" | tee -a "$out/log.txt"
    status=1
    return 1
  fi
  text=$(mktemp)
  timeout -k 5 $((left < most ? left : most)) "$@" >"$text" 2>&1
  local rc=$?
  { echo "== $part: $name: rc $rc, $((SECONDS - began)) s"; cat "$text"; } >>"$out/log.txt"
  echo "== $name: rc $rc, $((SECONDS - began)) s"
  tail -n "${TAIL:-40}" "$text"
  rm -f "$text"
  [ $rc -eq 0 ] || status=1
  return $rc
}

site=$(mktemp -d)
work=$(mktemp -d)
trap 'rm -rf "$site" "$work"' EXIT
to_site=("$python" -m pip install -q --no-deps --no-index --no-compile --no-cache-dir --upgrade --target "$site")
if [ -n "${WHEELS:-}" ]; then
  step brought 60 "${to_site[@]}" "$WHEELS"/*.whl || exit 1
fi
wheel=${WHEEL:-}
if [ -z "$wheel" ]; then
  step wheel 200 "$python" -m pip wheel . -q --no-deps --no-build-isolation -w "$out" || exit 1
  wheel=$(ls -t "$out"/pycollect_rl-*.whl | head -n 1)
fi
step install 60 "${to_site[@]}" "$wheel" || exit 1
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# The tests run beside the sources, which are not to be imported in the wheel's place.
cp -r tests csrc pyproject.toml "$work"
cd "$work"
tests=("$python" -m pytest -q -p no:cacheprovider -m "cuda and not slow")
of_the_core=(tests/test_cuda_uploader.py tests/test_cuda_gather.py)
# Tests before it have had the kernel compiled and kept.
bench=(env CUDA_CACHE_DISABLE=1 "$python" -m pycollect bench gpu)

case $part in
figures)
  step machine 60 "$python" -c \
    "from pycollect.bench.machine import machine; [print(f'{k}: {v}') for k, v in machine().items()]"
  step core 80 "${tests[@]}" --timeout=30 "${of_the_core[@]}"
  TAIL=120 step quick 150 "${bench[@]}" --quick --parts host steps splits gathers collectors \
    --json "$out/quick.json"
  mapfile -t files < <(grep -l 'mark\.cuda' tests/*.py)
  step tests 300 "${tests[@]}" --timeout=90 --durations=15 "${files[@]}"
  ;;
bench)
  TAIL=120 step bench 480 "${bench[@]}" --parts host steps splits gathers collectors \
    --json "$out/gpu.json"
  TAIL=120 step again 150 "${bench[@]}" --quick --parts host steps splits gathers \
    --json "$out/again.json"
  ;;
torchrl)
  TAIL=60 step torchrl 560 "${bench[@]}" --parts nature --json "$out/nature.json"
  ;;
tools)
  for tool in memcheck initcheck; do
    step $tool 200 compute-sanitizer --tool $tool --target-processes all \
      "${tests[@]}" --timeout=150 "${of_the_core[@]}"
  done
  # One launch for each width of frames.
  TAIL=200 step ncu 150 ncu --clock-control none -k pycollect_gather --set full "$python" -c "
import torch
from pycollect.bench.gathers import WIDTHS, Case
for width in WIDTHS:
    Case(width, 256e6, torch.device('cuda', 0)).by_the_core()
torch.cuda.synchronize()"
  ;;
*)
  echo "expected figures, bench, torchrl or tools, got $part" >&2
  exit 2
  ;;
esac
exit $status
