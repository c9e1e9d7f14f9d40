#!/usr/bin/env bash
# gpu_call.sh first|second|STEP...: run tests and measurements on a machine with an NVIDIA GPU, within
# a time limit. Call it in the repository's root; it needs no network.
#   first    575 s at most: the machine, the core's tests, copies and gathers, environments on the GPU, collectors of 14, 1 and 8
#            processes with a Nature CNN on the GPU, all GPU tests, the rest of the collectors
#   second   the remaining time: collectors of 14 processes again for the spread, processes of CartPole and Pong
#            on all cores, memcheck of the core's tests, the host's costs
#   STEP     machine core headline simulator collectors scaling tests rest torchrl again memcheck host
# A step that runs out of time is interrupted; its figures so far are kept.
#   PYTHON   the interpreter that has torch, numpy, pytest, pytest-timeout, psutil [python3]
#   WHEELS   a folder with wheels of missing packages and of pycollect, which is built here if its wheel is missing [.whl]
#   OUT      the folder for the figures (*.json) and the whole output (log.txt) [gpu-results]
#   DEVICE   [cuda:0]; "cpu" is a dry run
#   QUICK    if not empty, a tenth of the time for each figure, and collectors of one process only
#   LIMIT    seconds [565; 260 of the second]
set -uo pipefail
case ${1:-} in
  first) steps=(machine core headline simulator collectors tests rest) limit=${LIMIT:-565} ;;
  second) steps=(machine again scaling memcheck host) limit=${LIMIT:-260} ;;
  '') echo "expected first, second, or steps" >&2; exit 2 ;;
  *) steps=("$@") limit=${LIMIT:-565} ;;
esac
root=$PWD
out=$(realpath -m "${OUT:-gpu-results}")
wheels=$(realpath -m "${WHEELS:-.whl}")
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")
device=${DEVICE:-cuda:0}
quick=() counts=(14 1 8) scales=(1 2 4 8 14)
[ -z "${QUICK:-}" ] || quick=(--quick) counts=(1) scales=(1)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

left() { echo $((limit - SECONDS)); }

step() { # name, seconds at most, lines to show, command...
  local name=$1 most=$2 lines=$3 began=$SECONDS rc
  shift 3
  if [ "$(left)" -lt 10 ]; then
    echo "== $name: skipped, no time left" | tee -a "$out/log.txt"
    status=1
    return 1
  fi
  [ "$(left)" -lt "$most" ] && most=$(left)
  # SIGINT first, so that pytest prints its summary.
  timeout -s INT -k 8 "$most" "$@" >"$work/text" 2>&1
  rc=$?
  local title="== $name: rc $rc, $((SECONDS - began)) s, at $SECONDS s"
  { echo "$title" && cat "$work/text"; } >>"$out/log.txt"
  echo "$title"
  tail -n "$lines" "$work/text" | cut -c 1-300
  [ $rc -eq 0 ] || status=1
  return $rc
}

into=("$python" -m pip install -q --no-deps --no-index --no-compile --no-cache-dir --upgrade
  --target "$work/site")
if compgen -G "$wheels/*.whl" >/dev/null; then
  step wheels 60 5 "${into[@]}" "$wheels"/*.whl || exit 1
fi
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_COMPILE_THREADS=1 # or its processes would look like leaked workers
# Tests run in a copy without pycollect/, so that they import the wheel.
mkdir "$work/here"
cp -r "$root"/{tests,csrc,pyproject.toml} "$work/here"
cd "$work/here" || exit 1
if ! step "first import" 90 3 "$python" -c "import torch, pycollect; print(pycollect.__file__)"; then
  built=("$python" -m pip wheel "$root" -q --no-deps --no-build-isolation -w "$work")
  step build 200 5 "${built[@]}" && step install 60 5 "${into[@]}" "$work"/pycollect_rl-*.whl || exit 1
fi
tests=("$python" -m pytest -q -p no:cacheprovider -m "cuda and not slow" --tb=short)
jobs=() # of all tests, several at once
"$python" -c "import xdist" 2>/dev/null && jobs=(-n 8 --dist loadgroup)
of_the_core=(tests/core/test_cuda_uploader.py tests/data/test_cuda_gather.py)

bench() { # name of the file, seconds at most, arguments of `bench gpu`...
  local name=$1 most=$2
  shift 2
  # Disable the driver's cache of compiled kernels, because the tests have filled it.
  step "$name" "$most" 60 env CUDA_CACHE_DISABLE=1 "$python" -m pycollect bench gpu "${quick[@]}" \
    --device "$device" --json "$out/$name.json" --parts "$@"
}

best=("central, captured" central "a policy each" "AsyncVectorEnv loop" "policy alone" TorchRL)

for own in "${steps[@]}"; do
  case $own in
    machine)
      step machine 60 40 "$python" -c \
        "from pycollect.bench.report import machine; [print(f'{k}: {v}') for k, v in machine().items()]
from pycollect import cuda; print('the core:', cuda.why_not() or 'has CUDA')"
      ;;
    core) step "core's tests" 90 12 "${tests[@]}" --timeout=30 "${of_the_core[@]}" ;;
    headline) bench headline 120 steps gathers ;;
    simulator) bench simulator 60 simulator ;;
    collectors)
      for count in "${counts[@]}"; do
        bench "collectors-$count" 130 collectors --workers "$count" --sides "${best[@]}"
      done
      ;;
    tests)
      mapfile -t files < <(grep -lr --include='*.py' 'mark\.cuda' tests)
      step tests 200 40 "${tests[@]}" "${jobs[@]}" --timeout=90 --durations=10 "${files[@]}"
      ;;
    rest)
      bench rest 200 collectors --workers "${counts[0]}" --sides \
        "environments alone" "a policy each, beside torchrl" "start() without a learner" \
        "start() beside a learner" "a policy each, captured" "policy alone, captured"
      ;;
    torchrl)
      for count in "${counts[@]}"; do
        bench "torchrl-$count" 90 collectors --workers "$count" --sides \
          TorchRL "TorchRL, storing there" "TorchRL, AsyncBatchedCollector"
      done
      ;;
    again) bench again 90 collectors --workers "${counts[0]}" --sides "${best[@]}" ;;
    scaling)
      # Without TorchRL, whose processes are slow to start.
      cp -r "$work/site" "$work/plain" && rm -rf "$work"/plain/torchrl*
      for env in CartPole-v1 ale_py:ALE/Pong-v5; do
        step "scaling of $env" 90 60 env PYTHONPATH="$work/plain" "$python" -m pycollect bench cpu \
          "${quick[@]}" --env "$env" --workers "${scales[@]}" --json "$out/scaling-${env##*/}.json"
      done
      ;;
    memcheck)
      step memcheck 120 12 compute-sanitizer --tool memcheck --target-processes all \
        "${tests[@]}" --timeout=100 "${of_the_core[@]}"
      ;;
    host) bench host 60 host splits ;;
    *) echo "unknown step: $own" >&2; exit 2 ;;
  esac
done
echo "== $SECONDS s in all; status $status"
exit $status
