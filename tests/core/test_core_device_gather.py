"""The device's gather compared with the host's; the fake driver runs the kernel on the host."""

from __future__ import annotations

from fake_cuda_support import run_with_fake

_SCENE = """
rng = np.random.default_rng(0)
gather = _core.DeviceGather(0)
FRAMES = [("bool", ()), ("int16", (3,)), ("float32", (5,)), ("uint8", (64,)), ("int64", (2, 3)),
          ("float32", (0,)), ("uint8", (84, 84))]

def batch(shape):
    done = rng.random(shape) < 0.2
    ids = np.where(rng.random(shape) < 0.1, -1, 5)
    leaves = [rng.integers(0, 2, (*shape, *f)).astype(d) if d == "bool"
              else rng.integers(-99, 99, (*shape, *f)).astype(d) for d, f in FRAMES]
    return _core.SplitPlan(done, ids, batch_dims=len(shape)), leaves

def room(plan, targets):
    size = _core.DeviceGather.workspace_bytes(plan, len(targets), sum(t.nbytes for t in targets))
    return OnDevice(np.zeros(size + 64, np.uint8))

def aligned(device_array):
    array = device_array.array
    skip = -array.ctypes.data % 64
    return OnDevice(array[skip:])

def there(arrays):
    return [OnDevice(array) for array in arrays]

def refused(text, call):
    try:
        call()
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""


def test_split_is_equal_to_the_hosts_by_one_launch() -> None:
    run_with_fake(
        _SCENE
        + """
for shape in [(40,), (5, 30), (2, 3, 25), (3, 0), (4, 1)]:
    plan, leaves = batch(shape)
    for form, lead in [("padded", (plan.count, plan.longest)), ("flat", (plan.frames,))]:
        expected, targets = (
            [np.full((*lead, *frame), 1, dtype) for dtype, frame in FRAMES] for _ in range(2)
        )
        getattr(plan, form)(leaves, expected)
        before = len([line for line in log() if line.startswith("cuLaunchKernel")])
        workspace = aligned(room(plan, targets))
        getattr(gather, form)(plan, there(leaves), there(targets), workspace, 0)
        after = len([line for line in log() if line.startswith("cuLaunchKernel")])
        assert after == before + (plan.frames > 0), (shape, before, after)
        for got, want in zip(targets, expected):
            np.testing.assert_array_equal(got, want)
"""
    )


def test_n_step_is_equal_to_the_hosts_by_one_launch() -> None:
    run_with_fake(
        _SCENE
        + """
for shape in [(40,), (5, 30), (2, 3, 25)]:
    for n in (1, 3, 100):
        split, leaves = batch(shape)
        plan = _core.MultiStepPlan(split, n)
        rewards = [rng.standard_normal((*shape, *f)).astype(d)
                   for d, f in [("float32", (1,)), ("float64", (2,))]]
        moved, expected = [np.empty_like(x) for x in leaves], [np.empty_like(x) for x in leaves]
        sums, totals = [np.empty_like(x) for x in rewards], [np.empty_like(x) for x in rewards]
        plan.shift(leaves, expected)
        plan.sum(0.9, rewards, totals)
        before = len([line for line in log() if line.startswith("cuLaunchKernel")])
        gather.ahead(plan, 0.9, there(leaves), there(moved), there(rewards), there(sums),
                     aligned(room(plan, moved + sums)), 0)
        assert len([line for line in log() if line.startswith("cuLaunchKernel")]) == before + 1
        for got, want in zip(moved, expected):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_allclose(sums[0], totals[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(sums[1], totals[1], rtol=1e-14, atol=1e-14)
"""
    )


def test_mismatched_arguments_are_refused() -> None:
    run_with_fake(
        _SCENE
        + """
plan, leaves = batch((5, 30))
source, target = leaves[2], np.empty((plan.count, plan.longest, 5), np.float32)
workspace = aligned(room(plan, [target]))

def padded(source, target, workspace=workspace):
    gather.padded(plan, [source], [target], workspace, 0)

refused("source 0", lambda: padded(source, OnDevice(target)))
refused("target 0", lambda: padded(OnDevice(source), OnDevice(target[1:])))
refused("float32",
        lambda: padded(OnDevice(source), OnDevice(target.astype(np.float64))))
refused("workspace: ",
        lambda: padded(OnDevice(source), OnDevice(target), workspace.array))
small = OnDevice(workspace.array[:64])
refused("workspace: ",
        lambda: padded(OnDevice(source), OnDevice(target), small))
assert not [line for line in log() if line.startswith("cuLaunchKernel")]
"""
    )
