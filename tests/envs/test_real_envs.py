"""Environments of other packages: batches compared with a loop over the environment itself.

Both have the same seed and the same actions. A test is skipped if its package is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from collect_support import (
    CENTRAL,
    CENTRAL_ASYNC,
    IN_PROCESS,
    MULTI_ASYNC,
    MULTI_STACK,
    RAY_CENTRAL,
    STACK,
    Way,
    collecting,
    marks_of,
)
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule

from pycollect import SyncDataCollector
from pycollect.bench.simulator import PointMasses

SEED = 5
ENVS = 4


def collected(make: Any, frames: int, **arguments: Any) -> TensorDictBase:
    """Collect a batch with random actions."""
    with SyncDataCollector(make, None, frames_per_batch=frames, **arguments) as collector:
        collector.set_seed(SEED)
        batch = collector.next()
    assert batch is not None
    assert batch["next", "done"].any()
    return batch


def as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, torch.Tensor) else np.array(value)


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Mapping):
        for name, value in theirs.items():
            assert_same(ours[name], value)
    elif isinstance(theirs, str):
        assert ours == theirs
    else:
        expected = torch.as_tensor(as_array(theirs)).to(ours.dtype)
        torch.testing.assert_close(ours, expected.reshape(ours.shape), rtol=0, atol=0)


def assert_shown(ours: TensorDictBase, theirs: Any) -> None:
    assert_same(ours if isinstance(theirs, Mapping) else ours["observation"], theirs)


def act(*observations: torch.Tensor, dims: int, choices: int) -> Any:
    """Return random actions; each of an environment or agent has observations of `dims` dims."""
    drawn = [torch.randint(choices, own.shape[: own.ndim - dims]) for own in observations]
    return tuple(drawn) if len(drawn) > 1 else drawn[0]


def compare_one(batch: TensorDictBase, env: Any) -> None:
    """Compare [T] frames of a `gymnasium.Env`."""
    shown, _ = env.reset(seed=SEED)
    for frame in batch.unbind(0):
        assert_shown(frame, shown)
        shown, reward, terminated, truncated, _ = env.step(frame["action"].numpy()[()])
        assert_shown(frame["next"], shown)
        values = {"reward": reward, "terminated": terminated, "truncated": truncated}
        assert_same(frame["next"], {**values, "done": terminated or truncated})
        if terminated or truncated:
            shown, _ = env.reset()


def compare_agents(batch: TensorDictBase, env: Any) -> None:
    """Compare [T] frames of a PettingZoo environment in which all agents act until the end."""
    groups: dict[str, list[str]] = {}
    for agent in env.possible_agents:
        groups.setdefault(agent.rpartition("_")[0], []).append(agent)
    places = {agent: (name, i) for name, own in groups.items() for i, agent in enumerate(own)}
    shown, _ = env.reset(seed=SEED)
    for frame in batch.unbind(0):
        actions = {agent: int(frame[name, "action"][i]) for agent, (name, i) in places.items()}
        for agent, (name, i) in places.items():
            assert frame[name, "mask"][i]
            assert_same(frame[name, "observation"][i], shown[agent])
        shown, rewards, terminated, truncated, _ = env.step(actions)
        for agent, (name, i) in places.items():
            following = frame["next", name][i]
            assert_same(following["observation"], shown[agent])
            assert_same(following["reward"], rewards[agent])
            assert_same(following["terminated"], terminated[agent])
            assert_same(following["truncated"], truncated[agent])
        assert bool(frame["next", "done"]) == (not env.agents)
        if not env.agents:
            shown, _ = env.reset()


def compare_rows(batch: TensorDictBase, env: Any, own: Callable[[torch.Tensor], Any]) -> None:
    """Compare [P, T] frames of a tensor vector environment, with actions converted by `own`."""
    shown, _ = env.reset(seed=SEED)
    for frame in batch.unbind(1):
        assert_same(frame["observation"], shown)
        shown, reward, terminated, truncated, info = env.step(own(frame["action"].contiguous()))
        ended = torch.from_numpy(as_array(terminated | truncated))
        values = {"reward": reward, "terminated": terminated, "truncated": truncated, "done": ended}
        assert_same(frame["next"], values)
        final = info.get("final_obs", info.get("final_observation"))
        following = frame["next", "observation"]
        assert_same(following[~ended], as_array(shown)[~ended])
        if final is not None:
            assert_same(following[ended], as_array(final)[ended])
        elif ("next", "observation_valid") in batch.keys(True):
            assert_same(frame["next", "observation_valid"], ~ended)
        else:
            assert_same(following[ended], as_array(shown)[ended])
            if ended.all():
                shown, _ = env.reset()
            elif ended.any():
                shown, _ = env.reset(options={"reset_mask": ended})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "MiniGrid-GoToDoor-5x5-v0"])
def test_minigrid(name: str) -> None:
    pytest.importorskip("minigrid")
    compare_one(collected(name, 600), gymnasium.make(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deep-sea-treasure-v0", "resource-gathering-v0"])
def test_mo_gymnasium(name: str) -> None:
    mo_gymnasium = pytest.importorskip("mo_gymnasium")
    batch = collected(lambda: mo_gymnasium.make(name), 200)
    assert batch["next", "reward"].shape[-1] > 1
    compare_one(batch, mo_gymnasium.make(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Snake-v1", "Game2048-v1"])
def test_jumanji(name: str) -> None:
    pytest.importorskip("jumanji")
    batch = collected(partial(_jumanji, name), 300)
    assert (name == "Snake-v1") == ("step_count" in batch.keys(True))
    compare_one(batch, _jumanji(name))


@pytest.mark.slow
@pytest.mark.parametrize("api", ["parallel_env", "env"])
@pytest.mark.parametrize(
    "name", ["simple_spread_v3", "simple_tag_v3", "simple_speaker_listener_v4"]
)
def test_mpe2(name: str, api: str) -> None:
    module = pytest.importorskip(f"mpe2.{name}")
    compare_agents(collected(getattr(module, api), 60), module.parallel_env())


class Real(NamedTuple):
    """An environment of another package and a policy for it.

    Attributes:
        package: Package that must be installed.
        make: Creates an environment.
        compare: Compares frames [T], or [P, T] of a vector environment, with an environment.
        inputs: Keys of observations, one for each key of an action.
        outputs: Keys of actions.
        dims: Number of dimensions of such an observation, of one agent if there are several.
        choices: Number of actions.
        envs: P of a vector environment; 0 for one environment.
    """

    package: str
    make: Callable[[], Any]
    compare: Callable[[TensorDictBase, Any], None]
    inputs: list[Any]
    outputs: list[Any]
    dims: int
    choices: int
    envs: int = 0

    def policy(self) -> TensorDictModule:
        choose = partial(act, dims=self.dims, choices=self.choices)
        return TensorDictModule(choose, in_keys=self.inputs, out_keys=self.outputs)


def _minigrid() -> Any:
    import minigrid  # noqa: F401 (registers its environments)

    return gymnasium.make("MiniGrid-GoToDoor-5x5-v0")


def _treasure() -> Any:
    import mo_gymnasium

    return mo_gymnasium.make("deep-sea-treasure-v0")


def _tag() -> Any:
    from mpe2 import simple_tag_v3

    return simple_tag_v3.parallel_env()


def _jumanji(name: str = "Snake-v1") -> Any:
    import jumanji
    from jumanji.wrappers import JumanjiToGymWrapper

    return JumanjiToGymWrapper(jumanji.make(name))


def _cart_poles() -> Any:
    import gymnax
    from gymnax.wrappers import GymnaxToVectorGymWrapper

    env, parameters = gymnax.make("CartPole-v1")
    return GymnaxToVectorGymWrapper(env, ENVS, parameters)


def compare_jax_rows(batch: TensorDictBase, env: Any) -> None:
    import jax

    compare_rows(batch, env, jax.dlpack.from_dlpack)


AGENT_KEYS = [[(name, key) for name in ("adversary", "agent")] for key in ("observation", "action")]
REAL = {
    "minigrid": Real("minigrid", _minigrid, compare_one, ["direction"], ["action"], 0, 7),
    "mo_gymnasium": Real("mo_gymnasium", _treasure, compare_one, ["observation"], ["action"], 1, 4),
    "mpe2": Real("mpe2", _tag, compare_agents, *AGENT_KEYS, 1, 5),
    "jumanji": Real("jumanji", _jumanji, compare_one, ["grid"], ["action"], 3, 4),
    "gymnax": Real(
        "gymnax", _cart_poles, compare_jax_rows, ["observation"], ["action"], 1, 2, ENVS
    ),
}


SPAWNED = replace(MULTI_STACK, name="multi sync spawned", arguments={"start_method": "spawn"})
WAYS = (
    IN_PROCESS,
    MULTI_STACK,
    SPAWNED,
    MULTI_ASYNC[1],
    CENTRAL,
    CENTRAL_ASYNC,
    STACK,
    RAY_CENTRAL,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, id=way.name, marks=marks_of(way)) for way in WAYS]
)
@pytest.mark.parametrize("name", REAL)
def test_every_way(name: str, way: Way) -> None:
    real = REAL[name]
    pytest.importorskip(real.package)
    frames = 60 if name == "mpe2" else 400
    arguments = {"autoreset_mode": "SameStep"} if real.envs else {}
    with collecting(
        way, lambda worker: real.make, real.policy(), frames=frames, **arguments
    ) as collector:
        collector.set_seed(SEED, static_seed=True)
        batch = collector.next()
    rows = [own for _, _, own in way.rows(batch, max(real.envs, 1), batched=bool(real.envs))]
    if real.envs:
        rows = [torch.stack(rows[i : i + ENVS]) for i in range(0, len(rows), ENVS)]
    for own in rows:
        assert own["next", "done"].any()
        real.compare(own, real.make())


@pytest.mark.slow
def test_gymnax() -> None:
    """JAX arrays are converted through DLPack."""
    pytest.importorskip("gymnax")
    batch = collected(_cart_poles, 60 * ENVS, autoreset_mode="SameStep")
    compare_jax_rows(batch, _cart_poles())


@cache
def pendulum() -> Any:
    """Return functions for a batch of Brax environments; they take a minute to compile."""
    import jax
    from brax import envs

    env = envs.create("inverted_pendulum", episode_length=20, batch_size=ENVS)
    return jax.jit(env.reset), jax.jit(env.step), env.observation_size, env.action_size


class Brax(VectorEnv[Any, Any, Any]):
    """A Brax environment, with SAME_STEP autoreset and without final observations."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self) -> None:
        self._reset, self._step, observation, action = pendulum()
        self.num_envs = ENVS
        self.single_observation_space = Box(-np.inf, np.inf, (observation,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (action,), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        import jax

        self._state = self._reset(jax.random.key(0 if seed is None else seed))
        return self._state.obs, {}

    def step(self, actions: Any) -> Any:
        self._state = state = self._step(self._state, actions)
        truncated = state.info["truncation"].astype(bool)
        return state.obs, state.reward, state.done.astype(bool) & ~truncated, truncated, {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:final_observation")
def test_brax() -> None:
    pytest.importorskip("brax")
    jax = pytest.importorskip("jax")
    batch = collected(Brax, 60 * ENVS, final_observation="unknown")
    compare_rows(batch, Brax(), jax.dlpack.from_dlpack)


class Vmas(VectorEnv[Any, Any, Any]):
    """A VMAS scenario with torch tensors [P, agents, k] and one reward for all agents."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, scenario: str) -> None:
        import vmas

        self._env = vmas.make_env(scenario, ENVS, max_steps=25, terminated_truncated=True)
        self.num_envs = ENVS
        observation, action = self._env.observation_space, self._env.action_space
        shape = (len(observation), *observation[0].shape)
        self.single_observation_space = Box(-np.inf, np.inf, shape, np.float32)
        self.single_action_space = Box(-1.0, 1.0, (len(action), *action[0].shape), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if options is None:
            shown = self._env.reset(seed=seed)
            self._env.steps += torch.arange(ENVS)  # so that rows end one after another
            return torch.stack(shown, 1), {}
        for row in options["reset_mask"].nonzero().flatten().tolist():
            shown = self._env.reset_at(row)
        return torch.stack(shown, 1), {}

    def step(self, actions: torch.Tensor) -> Any:
        shown, rewards, terminated, truncated, _ = self._env.step(list(actions.unbind(1)))
        return torch.stack(shown, 1), torch.stack(rewards).sum(0), terminated, truncated, {}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["simple_spread", "balance"])
def test_vmas(scenario: str) -> None:
    pytest.importorskip("vmas")
    compare_rows(collected(lambda: Vmas(scenario), 60 * ENVS), Vmas(scenario), torch.clone)


class Simulator(PointMasses):
    """A simulator in which rows end one after another.

    Args:
        final: Whether it returns final observations; Isaac Lab does not.
    """

    def __init__(self, final: bool) -> None:
        super().__init__(ENVS)
        self._final = final

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self._age += torch.arange(ENVS)
        return result

    def step(self, actions: torch.Tensor) -> Any:
        *values, info = super().step(actions)
        return *values, info if self._final else {}


@pytest.mark.filterwarnings("ignore:final_observation")
@pytest.mark.parametrize("final", [True, False])
def test_a_simulator_that_resets_in_the_same_step(final: bool) -> None:
    make = partial(Simulator, final)
    batch = collected(make, 450 * ENVS, final_observation=None if final else "unknown")
    compare_rows(batch, make(), torch.clone)
