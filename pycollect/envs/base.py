"""EnvBatch: any accepted environment seen as P envs with one reset and one step."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from pycollect._core import CompiledEnv, Leaf
from pycollect.data.extras import Extra, ExtraValues
from pycollect.data.frame import ONE_REWARD
from pycollect.data.layout import Key, Node
from pycollect.envs.random_actions import ActionSampler

Arrays: TypeAlias = Any
"""The array itself where there is one leaf, else a tuple of arrays in the order of the leaves.

Batched: `[P, *frame]` each. Not batched: `[*frame]`, and a leaf of shape () may be a Python scalar.
"""

BoolArray: TypeAlias = npt.NDArray[np.bool_]


class Sampler(Protocol):
    """Draws the random actions of many steps at once.

    Attributes:
        leaves: of an action, in the order of the arrays that `draw` returns.
    """

    leaves: tuple[Leaf, ...]

    def draw(
        self, steps: int, rng: np.random.Generator | Sequence[np.random.Generator]
    ) -> tuple[npt.NDArray[Any], ...]:
        """The actions of `steps` steps, [steps, P, *action] or [steps, *action] each."""
        ...


class Direct(NamedTuple):
    """A shorter way than `EnvBatch.step`, for whoever converts what needs it.

    Attributes:
        step: the env's own; returns its observation, reward, flags, and what else it has.
        convert: what makes `Arrays` of an observation that is not the array that is expected.
        scalars: an action of shape () is a numpy scalar, not an array.
    """

    step: Callable[[Any], Sequence[Any]]
    convert: Callable[[Any], Arrays]
    scalars: bool


class EnvBatch(ABC):
    """P environments that are stepped together; an episode's end never resets by itself.

    Every kind of environment is brought to the same form: `step` gives the true successor of each
    row, also at an episode's end, and `reset_done` then resets exactly the rows that it is told.
    The only exception is `skips_after_done`, see there.

    Returned arrays may be buffers that the environment writes again in its next call: copy at once.
    Not thread-safe.

    Attributes:
        num_envs: P.
        batched: False for one `gymnasium.Env` (batches [T]); True otherwise ([P, T], also P == 1).
        observation: the leaves of one env's observation, in the space's order. The key is
            ("observation",) for a plain space, else the Dict's keys, nested as there; a Tuple's
            entries have the keys "0", "1", ...
        action: the leaves of one env's action: ("action",), or ("action", k, ...) when nested.
        action_space: the action space of one env; None where `action` says all.
        reward: the leaf of one env's reward; unused where the env has flags of its own.
        skips_after_done: True for a vector env in NEXT_STEP mode that is not known to honour
            `reset_mask`: it resets a finished row by itself in the step that follows, so that this
            step of that row is a dummy (an uncollected cell). `reset_done` is not available then.
        steps_rows: True for a vector env in NEXT_STEP mode that can step some rows without the
            others, see `step_rows`: a row that ended may be left to reset itself, in the step that
            the others make next, and catches up with them later.
        overlaps: True where the envs step elsewhere, so that a step can be begun by `send` and
            awaited by `receive`, with something else done in between.
        can_reset: whether single rows can be reset at any time (`max_frames_per_traj` needs it).
        ends: the keys of the flags among `observation`, of which any that is set ends an episode.
            Where there are some, reward, done, terminated and truncated have keys and shapes of the
            env's own, those of `rewards` are `step_only`, and `step` returns None in their places.
        rewards: the keys of the rewards among `step_only`, where the env has flags of its own.
        step_only: leaves that a step gives and a reset does not; they lie under "next" alone. In
            `Arrays` they follow the observation, also in those of a reset (any values there).
        root_only: the keys of observations that are recorded at the root alone: what a step gives
            of them is the next step's root, and what is under "next", if anything, is `step_only`.
        takes_tensors: `step` is given torch tensors instead of numpy arrays.
        casts_actions: a policy's actions are cast to the dtypes of `action`; else they are recorded
            and given to `step` in its own.
        passes_states_on: a policy may write ("next", k) for a key k of the observation; `step` is
            given it, and it comes back as the next observation's k.
        time_limit: episodes are known to end after some number of steps.
        extras: what belongs to an observation and has no fixed shape and numeric dtype.
        step_extras: the same of what a step alone gives.
        action_extras: the same of the action.
        device: where it steps. What it gives and takes is on the host, but for `staying`.
        staying: the keys of the observations that it gives as tensors on its device.
        original: what the user passed, or its callable returned; a list where there were several.
        nodes: nested TensorDicts of more batch dimensions than the batch, or of a class of their
            own, by key.
        specs: the TorchRL environment whose specs hold for it; None where there are none.
        compiled: what a recorder steps itself, see `Recorder.step_env`; None where it cannot.
    """

    num_envs: int
    batched: bool
    observation: tuple[Leaf, ...]
    action: tuple[Leaf, ...]
    action_space: gymnasium.Space[Any] | None
    reward: Leaf = ONE_REWARD
    skips_after_done: bool = False
    steps_rows: bool = False
    overlaps: bool = False
    can_reset: bool = True
    ends: tuple[Key, ...] = ()
    rewards: tuple[Key, ...] = ()
    step_only: tuple[Leaf, ...] = ()
    root_only: frozenset[Key] = frozenset()
    takes_tensors: bool = False
    casts_actions: bool = True
    passes_states_on: bool = False
    time_limit: bool = False
    extras: tuple[Extra, ...] = ()
    step_extras: tuple[Extra, ...] = ()
    action_extras: tuple[Extra, ...] = ()
    nodes: Mapping[Key, Node] = MappingProxyType({})
    device: torch.device = torch.device("cpu")
    staying: frozenset[Key] = frozenset()
    specs: Any = None
    compiled: CompiledEnv | None = None
    original: Any = None

    @property
    def own_flags(self) -> bool:
        """Whether reward and flags have keys and shapes of the env's own, see `ends`."""
        return bool(self.ends)

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The batch dimensions before time: () for one env, (P,) for a batch."""
        return (self.num_envs,) if self.batched else ()

    @property
    def num_seeds(self) -> int:
        """How many seeds `reset` takes: P, or fewer for a batch that one seed is enough for."""
        return self.num_envs

    def truncate_after(self, frames: int) -> bool:
        """Ask the env to truncate trajectories itself after so many frames; before any reset.

        False: it does not, and whoever records has to.
        """
        return False

    def given(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        """Which of the policy's outputs `step` is to be given, in that order: here the action's."""
        return tuple(leaf.key for leaf in self.action)

    @property
    def draws_ahead(self) -> bool:
        """Whether `action_sampler` draws random actions; else `random_action` does."""
        return True

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """The next step's random actions, [*action] or [P, *action] each, on the env's device.

        Where they depend on the state, or on a generator that others draw from, too.
        """
        raise NotImplementedError

    def action_sampler(self) -> Sampler:
        """What draws random actions for this env, where it `draws_ahead`."""
        assert self.action_space is not None
        return ActionSampler(self.action_space, self.num_envs, self.batched)

    @property
    def direct(self) -> Direct | None:
        """A shorter way to step, where there is one."""
        return None

    def shown(self) -> ExtraValues:
        """The extras that the last `reset`, `step` or `reset_done` gave, a value per env.

        They may be the env's own objects. After a reset the `step_extras` are missing, after
        `reset_done` only the rows that were reset mean anything.
        """
        return {}

    def hear(self, said: ExtraValues) -> None:  # noqa: B027 (most envs take leaves alone)
        """What the policy says beside its leaves: to be called before `step`."""

    def draw_extras(self) -> ExtraValues:
        """The `action_extras` of a random action, to be called after the sampler's `draw`."""
        return {}

    @abstractmethod
    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset every env, with `num_seeds` seeds if any, and return the observations.

        Raises:
            ValueError: that is not the number of seeds.
        """

    @abstractmethod
    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step every env; return (true next observation, reward, terminated, truncated).

        `action` belongs to the env from then on and has the dtypes of `self.action`, unless
        `casts_actions` is False. Reward and flags are scalars where the env is not batched, else
        arrays [P]. The reward is [k] or [P, k] where `reward` has k > 1 numbers.
        """

    @abstractmethod
    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset exactly the envs where `done` (bool [P]) is set; only their rows mean anything.

        To be called after `step` and before the next one, for every env that ended there and for
        those that the collector itself wants to cut (where `can_reset` says so).
        """

    def send(self, action: Arrays) -> None:
        """Begin a step, where the env `overlaps`; `step` in all else."""
        raise NotImplementedError

    def receive(self) -> tuple[Arrays, Any, Any, Any]:
        """Wait for the step that was begun; returns what `step` does.

        A `reset` before it drops that step.
        """
        raise NotImplementedError

    def step_rows(self, action: Arrays, rows: BoolArray) -> tuple[Arrays, Any, Any, Any]:
        """Step the envs where `rows` (bool [P]) is set, where the env `steps_rows`.

        All is as for `step`, with P rows; only those that were stepped mean anything.
        """
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Close the envs. Idempotent; errors of an env that is already broken are swallowed."""


_OLD_GYM = "; if the environment uses Gym's old interface, wrap it for Gymnasium"


def random_step(env: EnvBatch) -> tuple[Arrays, Any, Any, Any]:
    """Reset all envs and make one step with actions that are the same in every run."""
    env.reset()
    actions = tuple(leaf[0] for leaf in env.action_sampler().draw(1, np.random.default_rng(0)))
    return env.step(actions[0] if len(actions) == 1 else actions)


def reset_env(env: Any, seed: Any = None) -> Any:
    """Reset an environment, with a seed if one is given.

    If `reset` has no parameter `seed`, call the environment's method `seed`, as TorchRL does.

    Raises:
        TypeError: A seed is given, but the environment takes none.
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
    except (TypeError, ValueError):  # a function of C has no signature
        return True
    kinds = [one.kind for one in parameters.values()]
    return "seed" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def observation_of(result: Any) -> Any:
    """Return the observation from the result of ``reset``; TypeError if it is not a pair."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(
            f"reset: expected (observation, info), got {type(result).__name__}{_OLD_GYM}"
        )
    return result[0]


_SEQUENCES = (tuple, list)


def step_values(result: Any) -> Any:
    """Return the result of a step if it has five values; TypeError or ValueError if not."""
    if type(result) in _SEQUENCES and len(result) == 5:
        return result
    if isinstance(result, _SEQUENCES) and len(result) == 5:  # a named tuple
        return result
    count = len(result) if isinstance(result, _SEQUENCES) else type(result).__name__
    raise (ValueError if isinstance(count, int) else TypeError)(
        "step: expected 5 values (observation, reward, terminated, truncated, info), got "
        f"{count}{_OLD_GYM}"
    )


def check_seeds(seeds: Sequence[int], count: int) -> list[int]:
    """Return `seeds` as Python ints, which Gymnasium requires.

    Raises:
        ValueError: The number of seeds is not `count`.
    """
    if len(seeds) != count:
        raise ValueError(f"seeds: expected one per environment ({count}), got {len(seeds)}")
    return [int(seed) for seed in seeds]
