"""StepEach: environments of one list, stepped one after another."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from raising import refused

from pycollect._core import StepEach

SHARED = np.zeros(2, np.float32)
"""In which all environments below show their observations."""


def step_of(number: int, **changed: Any) -> Callable[[Any], Any]:
    """Return an environment's `step`, which observes its number and the sum of its actions."""
    total = 0

    def step(action: Any) -> Any:
        nonlocal total
        total += int(np.asarray(action).sum())
        SHARED[:] = number, total
        result = {"observation": SHARED, "reward": float(total), "end": False, "cut": False}
        return (*{**result, **changed}.values(), {})

    return step


def as_float32(value: Any) -> Any:
    return np.asarray(value, np.float32)


def step_each(*steps: Callable[[Any], Any], to_action: Any = None) -> StepEach:
    memory = np.full((len(steps), 2), -1, np.float32)
    return StepEach(steps, [as_float32] * len(steps), to_action, memory)


def test_results_are_copied_if_environments_share_memory() -> None:
    each = step_each(step_of(0), step_of(1), step_of(2))
    for t in range(1, 4):
        observations, rewards, ends, cuts = each(np.array([1, 10, 100]))
        assert observations.tolist() == [[0, t], [1, 10 * t], [2, 100 * t]]
        assert rewards.tolist() == [t, 10 * t, 100 * t]
        assert rewards.dtype == np.float64
        assert not ends.any()
        assert not cuts.any()
        assert ends.dtype == cuts.dtype == np.bool_


@pytest.mark.parametrize("observation", [[3, 4], np.array([3, 4]), np.array([3.0, 4.0])])
def test_an_unexpected_array_is_converted_in_every_step(observation: Any) -> None:
    each = step_each(step_of(0, observation=observation), step_of(1))
    for _ in range(2):
        assert each([1, 1])[0][0].tolist() == [3, 4]


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), True])
def test_any_number_is_accepted_as_a_reward(number: Any) -> None:
    assert step_each(step_of(0, reward=number))([1])[1].tolist() == [float(number)]


@pytest.mark.parametrize("flag", [True, np.True_, 1, np.array(True)])
def test_any_truth_value_is_accepted_as_a_flag(flag: Any) -> None:
    _, _, ends, cuts = step_each(step_of(0, end=flag), step_of(0, cut=flag))([1, 1])
    assert ends.tolist() == [True, False]
    assert cuts.tolist() == [False, True]


def test_rewards_and_flags_may_be_arrays_of_one_element() -> None:
    values = {"reward": np.array([2.0]), "end": np.array([True]), "cut": np.array([[0]])}
    _, rewards, ends, cuts = step_each(step_of(0, **values))([1])
    assert (rewards.tolist(), ends.tolist(), cuts.tolist()) == ([2.0], [True], [False])


def test_a_row_of_indices_is_a_numpy_scalar() -> None:
    given: list[Any] = []
    whole = step_of(0)
    step_each(lambda action: given.append(action) or whole(action))(np.array([7]))
    assert [type(row) for row in given] == [np.int64]


@pytest.mark.parametrize("value", [None, "1.5", object(), np.array(["a"])])
@pytest.mark.parametrize(
    ("name", "word"), [("reward", "reward"), ("end", "terminated"), ("cut", "truncated")]
)
def test_values_that_are_not_numbers_are_refused_by_name(name: str, word: str, value: Any) -> None:
    with refused(TypeError, word):
        step_each(step_of(0, **{name: value}))([1])
    with refused(ValueError, word):
        step_each(step_of(0, **{name: np.zeros(2)}))([1])


def test_a_cycle_with_an_environment_is_garbage_collected() -> None:
    class Owned:
        owner: Any = None

        def step(self, action: Any) -> Any:
            return SHARED, 0.0, False, False, {}

    env = Owned()
    env.owner = step_each(env.step)
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None


def test_the_garbage_collector_may_run_during_construction() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            step_each(step_of(0), step_of(1))
    finally:
        gc.set_threshold(*thresholds)


def test_memory_for_other_numbers_of_environments_is_refused() -> None:
    with refused(ValueError, "convert", "observations"):
        StepEach([step_of(0)], [as_float32], None, np.zeros((2, 2), np.float32))
    with refused(ValueError, "convert", "observations"):
        StepEach([step_of(0)], [], None, np.zeros((1, 2), np.float32))
