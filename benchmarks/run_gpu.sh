#!/usr/bin/env bash
# run_gpu.sh: on a machine with an NVIDIA GPU and torch: builds the wheel, runs the tests that need
# the GPU and the GPU benchmark. Needs no network where scikit-build-core, pybind11, cmake, ninja and
# a C++20 compiler are installed, or a wheel is given. All is written to $OUT (default: gpu-results).
#   PYTHON   the interpreter that has torch, gymnasium, pytest and psutil [python3]
#   WHEEL    a wheel that is there, instead of building one
#   QUICK    1: the quick benchmark
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-gpu-results}")
python=$(command -v "${PYTHON:-python3}")
mkdir -p "$out"
status=0

step() { # name, command...
  local name=$1 began=$SECONDS
  shift
  "$@" >"$out/$name.log" 2>&1
  local rc=$?
  echo "$name: rc $rc, $((SECONDS - began)) s" | tee -a "$out/steps.txt"
  [ $rc -eq 0 ] || { status=1; tail -n 30 "$out/$name.log"; }
  return $rc
}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
wheel=${WHEEL:-}
if [ -z "$wheel" ]; then
  step wheel "$python" -m pip wheel . --no-deps --no-build-isolation -w "$out" || exit 1
  wheel=$(ls -t "$out"/pycollect-*.whl | head -n 1)
fi
step install "$python" -m pip install --no-deps --no-index --target "$site" "$wheel" || exit 1
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
# The tests run beside the sources, which are not to be imported in the wheel's place.
work=$(mktemp -d)
trap 'rm -rf "$site" "$work"' EXIT
cp -r tests pyproject.toml "$work"
cd "$work"
step machine "$python" -c "import torch; print(torch.__version__, torch.cuda.get_device_name())"
mapfile -t files < <(grep -l 'mark\.cuda' tests/*.py)
step tests timeout 480 "$python" -m pytest "${files[@]}" -m cuda -q -p no:cacheprovider
step bench timeout 400 "$python" -m pycollect bench gpu ${QUICK:+--quick} --json "$out/gpu.json"
cat "$out/bench.log"
exit $status
