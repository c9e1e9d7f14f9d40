"""EnvBatch: the common interface of P environments that step together."""

from __future__ import annotations

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import CompiledEnv, Leaf, Recorder
from pycollect.data.devices import CPU
from pycollect.data.extras import Extra, ExtraValues
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key, Node
from pycollect.envs.random_actions import Sampler, make_sampler

Arrays: TypeAlias = Any
"""One array if there is one leaf, otherwise a tuple of arrays in the order of the leaves.

The shape of each is `[P, *frame]` if the environments are batched, otherwise `[*frame]`. Without a
batch, a leaf of shape () may be a Python scalar.
"""

BoolArray: TypeAlias = npt.NDArray[np.bool_]

ReadInfo: TypeAlias = Callable[[Key], list[Any] | npt.NDArray[Any]]
"""A function that returns an entry of the last info: one value or `NOTHING` per environment."""


class FastStep(NamedTuple):
    """A step without conversions; the caller converts an observation only if it must."""

    step: Callable[[Any], Sequence[Any]]  # its own `step`: observation, reward, two flags or more
    convert: Callable[[Any], Arrays]  # for an observation that is not yet the expected array
    scalars: bool  # whether `step` takes an action of shape () as a numpy scalar
    names: tuple[Any, ...] = ()  # keys of the leaves, if an observation is a flat dict
    extra_names: tuple[Any, ...] = ()  # keys of its extras, in the order of `EnvSpec.extras`


class AutoresetCalls(NamedTuple):
    """A step of environments that reset themselves in the same step."""

    step: Callable[[Arrays], Any]  # the environment's own `step`
    record: Callable[[Any], int]  # records its result; returns how many environments to reset


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What P environments are. Can be pickled; wrappers use ``dataclasses.replace``.

    Attributes:
        batch_size: Batch dimensions before time. () for one `gymnasium.Env`, which makes batches
            [T]; else batches are [P, T], even if P is 1, or [a, b, T] with P = a * b.
        observation: Leaves of one environment's observation, in the order of the space. The key is
            ("observation",) for a plain space. A Dict space keeps its keys, nested; the entries of
            a Tuple have the keys "0", "1", ...
        action: Leaves of one environment's action: ("action",), or ("action", k, ...) if nested.
        action_space: Action space of one environment. ``None`` only if the EnvBatch draws random
            actions itself.
        reward: Leaf of one environment's reward; unused if `own_flags`.
        skips_after_done: Whether a finished row resets itself in the following step, which is
            then an uncollected cell of the batch. `reset_done` is not available in this case. True
            for a vector environment in NEXT_STEP mode that is not known to honor `reset_mask`.
        can_reset: Whether single rows can be reset at any time; required by `max_frames_per_traj`.
        ends: Keys of flags in `observation`; an episode ends when any of them is set. If there are
            any, reward and flags have keys and shapes of the environment's choice, the leaves of
            `rewards` are `step_only`, and `step` returns ``None`` for reward and both flags.
        rewards: Keys of the rewards in `step_only`; used only if there are `ends`.
        step_only: Leaves that a step returns and a reset does not; they are recorded only under
            "next". In `Arrays` they follow the observation; a reset returns any values for them.
        root_only: Keys of observations that are recorded only at the root. The value that a step
            returns is the next step's root; a value under "next" is one of the `step_only` leaves.
        takes_tensors: Whether `step` takes torch tensors instead of numpy arrays.
        casts_actions: Whether a policy's actions are cast to the dtypes of `action`. Otherwise they
            are recorded and passed to `step` in the policy's dtype.
        passes_states_on: Whether a policy may write ("next", k) for an observation key k. `step`
            takes that value and returns it as the next observation's k.
        extras: Entries of an observation without a fixed shape and numeric dtype.
        flag_extras: Keys of those that are flags.
        step_extras, action_extras: Such entries of only a step, and of the action.
        device: Device on which the environments step. Inputs and outputs are on the host, except
            the observations of `device_keys`.
        device_keys: Keys of the observations that are returned as tensors on `device`.
        nodes: Nested TensorDicts by key, if they have more batch dimensions than the batch, or are
            tensorclasses.
    """

    batch_size: tuple[int, ...]
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    action_space: gymnasium.Space[Any] | None = None
    reward: Leaf = ONE_REWARD
    skips_after_done: bool = False
    can_reset: bool = True
    ends: tuple[Key, ...] = ()
    rewards: tuple[Key, ...] = ()
    step_only: tuple[Leaf, ...] = ()
    root_only: frozenset[Key] = frozenset()
    takes_tensors: bool = False
    casts_actions: bool = True
    passes_states_on: bool = False
    extras: tuple[Extra, ...] = ()
    flag_extras: frozenset[Key] = frozenset()
    step_extras: tuple[Extra, ...] = ()
    action_extras: tuple[Extra, ...] = ()
    nodes: Mapping[Key, Node] = field(default_factory=dict)
    device: torch.device = CPU
    device_keys: frozenset[Key] = frozenset()

    @property
    def num_envs(self) -> int:
        """P."""
        return math.prod(self.batch_size)

    @property
    def rows(self) -> tuple[int, ...]:
        """Leading dimensions of a step's arrays: () for one environment, (P,) for a batch."""
        return (self.num_envs,) if self.batch_size else ()

    @property
    def own_flags(self) -> bool:
        """Whether the environment chooses the keys and shapes of reward and flags; see `ends`."""
        return bool(self.ends)


class EnvBatch(ABC):
    """P environments that step together and reset only on request.

    Every kind of environment gets the same interface. `step` returns the true next observation of
    each row, even at the end of an episode; `reset_done` then resets exactly the requested rows.
    The exceptions are `skips_after_done` and `autoreset_calls`.

    Returned arrays may be buffers that the next call overwrites, so copy them at once. Not
    thread-safe.

    Attributes:
        spec: What the environments are.
        steps_rows: Whether `step_rows` can step some rows without the others. True for some vector
            environments in NEXT_STEP mode: a row that ended may then reset itself while the other
            rows make their next step, and catches up later.
        overlaps: Whether `send` can begin a step and `receive` wait for it, because the
            environments step in other processes or threads.
        time_limit: Whether every episode is known to end after a limited number of steps.
        original: The environment that the user passed, or that the user's callable returned; a list
            if there are several.
        specs: The TorchRL environment whose specs apply, or ``None``.
        compiled: C++ environments that `Recorder.step_env` steps, or ``None``.
        owned: Objects that `close` closes.
    """

    spec: EnvSpec
    steps_rows: bool = False
    overlaps: bool = False
    time_limit: bool = False
    specs: Any = None
    compiled: CompiledEnv | None = None
    original: Any = None
    owned: Sequence[Any] = ()

    @property
    def num_seeds(self) -> int:
        """Number of seeds that `reset` takes: P, or fewer if one seed serves a whole batch."""
        return self.spec.num_envs

    def truncate_after(self, frames: int) -> bool:
        """Truncate trajectories from the first reset on; return ``False`` if only recorders can."""
        return False

    def bind_outputs(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        """Return the keys of the policy outputs that `step` takes, in order: the action's."""
        return tuple(leaf.key for leaf in self.spec.action)

    @property
    def draws_ahead(self) -> bool:
        """Whether `action_sampler` draws random actions ahead, instead of `random_action`."""
        return True

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """Return the next step's random actions on the device, each [*action] or [P, *action].

        Used if random actions depend on the state, or if they share a generator with other code.
        """
        raise NotImplementedError

    def action_sampler(self) -> Sampler:
        """Return the sampler of random actions; only if `draws_ahead`."""
        spec = self.spec
        assert spec.action_space is not None
        return make_sampler(spec.action_space, spec.num_envs, bool(spec.batch_size))

    @property
    def fast_step(self) -> FastStep | None:
        """The step without conversions, or ``None`` if there is none."""
        return None

    def autoreset_calls(self, recorder: Recorder) -> AutoresetCalls | None:
        """Return functions that leave the ends of episodes to the recorder.

        ``None`` if there are none, which is usual.
        """
        return None

    def tap_info(self) -> ReadInfo | None:
        """Keep Gymnasium's info of each step from now on; return ``None`` if there are no infos."""
        return None

    def current_extras(self) -> ExtraValues:
        """Return the extras of the last `reset`, `step` or `reset_done`, one value per environment.

        The values may be the environment's own objects. There are no `step_extras` after a reset.
        After `reset_done`, only the values of the reset rows are defined.
        """
        return {}

    def info_shape(self, key: Key) -> tuple[int, ...]:
        """Return the shape of a number in the info: (), or (agents,) for a group of agents."""
        return ()

    def pass_extras(self, extras: ExtraValues) -> None:  # noqa: B027 (most envs take only leaves)
        """Pass the extras of the policy's output; call this before `step`."""

    def draw_extras(self) -> ExtraValues:
        """Return the `action_extras` of the random action that was drawn last."""
        return {}

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset every environment, with `num_seeds` seeds if any; return the observations."""

    @abstractmethod
    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step every environment.

        Args:
            action: Action in the dtypes of `spec.action`, or in any dtype if not `casts_actions`.
                The environment may keep and overwrite it.

        Returns:
            The true next observation, the reward, terminated and truncated. Reward and flags are
            arrays [P], or scalars without a batch. The reward is [P, k] or [k] if `spec.reward` has
            k > 1 numbers.
        """

    @abstractmethod
    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset exactly the rows of `done` (bool [P]); return observations, defined only there.

        Call this after each `step` in which an episode ended or, if `can_reset`, in which the
        collector cuts a trajectory.
        """

    def send(self, action: Arrays) -> None:
        """Begin a step; only if `overlaps`. See `step` for the argument."""
        raise NotImplementedError

    def receive(self) -> tuple[Arrays, Any, Any, Any]:
        """Wait for the step that `send` began, and return its result as `step` does.

        A `reset` between `send` and `receive` discards the step.
        """
        raise NotImplementedError

    def step_rows(self, action: Arrays, rows: BoolArray) -> tuple[Arrays, Any, Any, Any]:
        """Step the environments selected by `rows` (bool [P]); only if `steps_rows`.

        Arguments and return values have P rows, as for `step`; only the stepped rows are defined.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the environments in `owned`. Idempotent; ignores errors of broken environments."""
        owned, self.owned = self.owned, ()
        for env in owned:
            close_quietly(env)


_OLD_GYM = "; if the environment uses Gym's old interface, wrap it for Gymnasium"


def random_step(env: EnvBatch) -> tuple[Arrays, Any, Any, Any]:
    """Reset all environments and make one step with actions that are equal in every run."""
    env.reset()
    if env.draws_ahead:
        actions = tuple(leaf[0] for leaf in env.action_sampler()(1, np.random.default_rng(0)))
    else:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            actions = tuple(action.numpy() for action in env.random_action())
    return env.step(actions[0] if len(actions) == 1 else actions)


def is_wrapped(env: Any) -> bool:
    """Return whether wrappers, which may change observations and rewards, are around an env."""
    return getattr(env, "unwrapped", env) is not env


def reset_env(env: Any, seed: Any) -> Any:
    """Reset an environment, with a seed unless that is ``None``.

    If `reset` has no parameter `seed`, call the environment's method `seed`, as TorchRL does.
    """
    if seed is None:
        return env.reset()
    if _takes_seed(env.reset):
        return env.reset(seed=seed)
    if not callable(getattr(env, "seed", None)):
        raise TypeError(
            f"seed: {env} cannot be seeded, because reset() has no parameter 'seed' and there is "
            "no method seed(); add the parameter, or do not call set_seed"
        )
    env.seed(seed)
    return env.reset()


def _takes_seed(reset: Any) -> bool:
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):  # a C function has no signature
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    return "seed" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def observation_of(result: Any) -> Any:
    """Return the observation from the result of ``reset``; TypeError if it is not a pair."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"reset: expected (observation, info), got {type(result).__name__}{_OLD_GYM}"
        )
    return result[0]


def step_values(result: Any) -> Any:
    """Return the result of a step if it has five values; TypeError or ValueError if not."""
    if isinstance(result, (tuple, list)) and len(result) == 5:
        return result
    count = len(result) if isinstance(result, (tuple, list)) else type(result).__name__
    raise (ValueError if isinstance(count, int) else TypeError)(
        "step: expected 5 values (observation, reward, terminated, truncated, info), got "
        f"{count}{_OLD_GYM}"
    )


def close_quietly(env: Any) -> None:
    """Close `env` and ignore errors, which would hide the error that broke the environment."""
    with contextlib.suppress(Exception):
        env.close()


def seed_each(seeds: Sequence[int] | None, count: int) -> list[Any]:
    """Return one seed per environment, a Python int as Gymnasium requires, or ``None`` for each."""
    if seeds is None:
        return [None] * count
    if len(seeds) != count:
        raise ValueError(f"seeds: expected one per environment ({count}), got {len(seeds)}")
    return [int(seed) for seed in seeds]
