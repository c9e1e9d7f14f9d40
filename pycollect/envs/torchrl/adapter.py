"""Any `torchrl.envs.EnvBase` as an EnvBatch, with one TensorDict per step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import (
    Compose,
    EnvBase,
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)

from pycollect._core import Leaf
from pycollect.data.devices import CPU, accelerator
from pycollect.data.extras import Extra, ExtraValues, Kind, read_values, write_values
from pycollect.data.frame import FLAGS
from pycollect.data.layout import Key, dtype_name, torch_dtype
from pycollect.data.transfer import Fetch
from pycollect.envs import gymnasium_support as time_limit
from pycollect.envs.base import Arrays, BoolArray, EnvBatch, check_seeds
from pycollect.envs.single import close_quietly
from pycollect.envs.torchrl.specs import (
    as_key,
    check_device,
    check_root,
    draw,
    has_step_count,
    name_of,
    observation_leaves,
    spec_extras,
    spec_leaves,
    spec_nodes,
)
from pycollect.envs.torchrl.stepping import (
    make_advance,
    make_complete,
    make_following,
    make_maybe_reset,
    make_put,
    make_take,
)

_PLAIN = (Transform, Compose)


def has_hooks(env: Any) -> bool:
    """Whether anything follows a step and its `step_mdp`; a TransformedEnv always says so."""
    while type(env)._post_step_mdp_hooks is TransformedEnv._post_step_mdp_hooks:
        if any(_overrides(part, "_post_step_mdp_hooks") for part in env.transform.modules()):
            return True
        env = env.base_env
    return env._post_step_mdp_hooks is not None


def changed_by_hooks(
    env: Any, shown: tuple[Leaf, ...], others: Collection[Key]
) -> tuple[frozenset[Key], tuple[Leaf, ...]]:
    """What of an env's observations a recorded step has in a way of its own.

    A hook may change what is recorded of a step, the next root, or both. So each is recorded as it
    is found. What a step has is asked of `fake_tensordict`, by which TorchRL's collectors make room
    for a rollout; only where something rewrites the one or the other.

    Args:
        shown: the observations, without flags.
        others: keys of flags and rewards.

    Returns:
        The keys of those that are recorded at the root for themselves, and the leaves under "next".
    """
    if not (has_hooks(env) or _rewrites(env)):
        return frozenset(), ()
    following = env.fake_tensordict().get("next")
    entries = {as_key(name): value for name, value in following.items(True, True)}
    size = len(env.batch_size)
    leaves = tuple(
        Leaf(key, dtype_name(value.dtype), tuple(value.shape[size:]))
        for key, value in entries.items()
        if key not in others and isinstance(value, torch.Tensor)
    )
    return frozenset(leaf.key for leaf in shown), leaves


def _rewrites(env: Any) -> bool:
    while type(env).fake_tensordict is TransformedEnv.fake_tensordict:
        if any(_overrides(part, "transform_fake_tensordict") for part in env.transform.modules()):
            return True
        env = env.base_env
    return type(env).fake_tensordict is not EnvBase.fake_tensordict


def _overrides(part: Any, name: str) -> bool:
    own = getattr(part, name, getattr(Transform, name))
    return getattr(own, "__func__", own) not in [getattr(kind, name) for kind in _PLAIN]


Gather = Callable[[TensorDictBase], tuple[torch.Tensor, ...]]


class TorchRLEnv(EnvBatch):
    """An env of any batch size: [] is one env, [P] or [a, b] a batch of P = a * b.

    Keys, shapes, dtypes and encodings are those of its specs; flags and rewards are its own. It is
    stepped and reset as TorchRL's collectors do, with the TensorDict that they carry from step to
    step: it holds all root entries, so that states and a policy's outputs reach the env.
    """

    takes_tensors = True
    casts_actions = False
    passes_states_on = True

    def __init__(self, env: EnvBase) -> None:
        check_device(env)
        self._env: Any = env
        self.device = env.device or CPU
        self._closed = False
        self.batched = bool(env.batch_size)
        self.num_envs = env.batch_size.numel()
        self.action_space = None
        self._size = tuple(env.batch_size)
        self._carrier: Any = None  # the root of the next step
        self._shown: Any = None  # what came last: the carrier, or what is under "next"
        self._read_specs()

    def _read_specs(self) -> None:
        env = self._env
        self.observation = observation_leaves(env)
        flags = spec_leaves(env.full_done_spec, env.batch_size)
        self.ends = tuple(leaf.key for leaf in flags)
        rewards = spec_leaves(env.full_reward_spec, env.batch_size)
        self.rewards = tuple(leaf.key for leaf in rewards)
        shown = tuple(leaf for leaf in self.observation if leaf.key not in self.ends)
        self.root_only, changed = changed_by_hooks(env, shown, (*self.ends, *self.rewards))
        self.step_only = (*rewards, *changed)
        if self._is_elsewhere:  # flags decide about resets, wherever the env is
            keys = {leaf.key for leaf in shown if leaf.key[-1] not in FLAGS}
            self.staying = frozenset(keys - self.root_only)
        self.action = spec_leaves(env.full_action_spec, env.batch_size)
        self._action_names = [name_of(leaf.key) for leaf in self.action]
        self._gather_action = self._gather_there(self.action)
        self.given(self.action)
        specs = (env.observation_spec, env.full_done_spec, env.full_reward_spec)
        self.extras = tuple(
            extra for spec in specs[:2] for extra in spec_extras(spec, env.batch_size)
        )
        self.step_extras = spec_extras(env.full_reward_spec, env.batch_size)
        self.action_extras = spec_extras(env.full_action_spec, env.batch_size)
        self._beside = _leaves_in_nodes(self.extras, (*self.observation, *self.step_only))
        self.nodes = spec_nodes((*specs, env.full_action_spec), env.batch_size)
        self._gather_root = self._gather(self.observation)
        self._gather_next = self._gather((*self.observation, *self.step_only))
        self._gather_both = self._merging()
        rows = (self.num_envs,) if self.batched else ()
        self._no_rewards = tuple(
            torch.zeros((*rows, *leaf.shape), dtype=torch_dtype(leaf.dtype), device=CPU)
            for leaf in self.step_only
        )
        self._draws_by_spec = _draws_by_spec(env) and not self.action_extras
        self.resets_apart = _resets_apart(env)
        self._has_hooks = has_hooks(env)
        self._checks_types = env.run_type_checks
        if self.resets_apart:
            self._following, self._complete = make_following(env), make_complete(env)
            self._advance = make_advance(env)
            self._maybe_reset = make_maybe_reset(env)

    def _gather(self, leaves: Sequence[Leaf]) -> Gather:
        """What takes those leaves out of a TensorDict of the env's batch size, as rows [P, ...].

        They are on the host, wherever the env is, but for `staying`.
        """
        gather = self._gather_there(leaves)
        if not self._is_elsewhere:
            return gather
        fetch = Fetch(accelerator(self.device), self.device)
        places = [at for at, leaf in enumerate(leaves) if leaf.key not in self.staying]

        def gather_and_fetch(td: TensorDictBase) -> tuple[torch.Tensor, ...]:
            values = list(gather(td))
            for place, value in zip(places, fetch([values[at] for at in places]), strict=True):
                values[place] = value
            return tuple(values)

        return gather_and_fetch

    def _merging(self) -> Callable[[TensorDictBase, TensorDictBase], tuple[torch.Tensor, ...]]:
        """What takes a step's leaves from what is under "next", `root_only` ones from the root."""
        own = [leaf for leaf in self.observation if leaf.key in self.root_only]
        rest = [leaf for leaf in self.observation if leaf.key not in self.root_only]
        of_root, of_next = self._gather(own), self._gather((*rest, *self.step_only))
        are_own = [leaf.key in self.root_only for leaf in self.observation]

        def merge(following: TensorDictBase, root: TensorDictBase) -> tuple[torch.Tensor, ...]:
            roots, nexts = iter(of_root(root)), iter(of_next(following))
            observation = [next(roots if is_own else nexts) for is_own in are_own]
            return (*observation, *nexts)

        return merge

    @property
    def _is_elsewhere(self) -> bool:
        return self.device.type != "cpu"

    def _gather_there(self, leaves: Sequence[Leaf]) -> Gather:
        names = [name_of(leaf.key) for leaf in leaves]
        if len(self._size) < 2:
            return make_take(names)
        dims = len(self._size) - 1
        return lambda td: tuple([td.get(name).flatten(0, dims) for name in names])

    @property
    def batch_size(self) -> tuple[int, ...]:
        """The env's own."""
        return self._size

    @property
    def num_seeds(self) -> int:
        """As many as `env.set_seed` uses: one, in a SerialEnv or ParallelEnv one per worker."""
        return _seeds_of(self._env)

    def truncate_after(self, frames: int) -> bool:
        """Append a StepCounter, as TorchRL's collectors do.

        Raises:
            ValueError: The environment already counts steps.
        """
        if has_step_count(self._env):
            raise ValueError(
                "max_frames_per_traj: adds the entry 'step_count', but the environment already has "
                "one; omit max_frames_per_traj, or remove the environment's StepCounter"
            )
        self._env = TransformedEnv(self._env, StepCounter(max_steps=frames))
        self._read_specs()
        return True

    def given(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        """All of the policy's outputs: states and transforms of the env may read any of them."""
        names = [name_of(leaf.key) for leaf in outputs]
        self._put = make_put(names, to_device=self._is_elsewhere)
        return tuple(leaf.key for leaf in outputs)

    @property
    def draws_ahead(self) -> bool:
        """Never: masks change with the state."""
        return False

    def random_action(self) -> tuple[torch.Tensor, ...]:
        """The env's own random actions, from torch's global generator."""
        if not self._draws_by_spec:
            try:
                return self._gather_action(self._env.rand_action(self._carrier))
            except RuntimeError:  # of a TransformedEnv whose transforms change the action
                if not _changes_actions(self._env):
                    raise
        # Leaf by leaf: to draw from the whole spec builds a TensorDict, which takes far longer.
        spec = self._env.input_spec["full_action_spec"]
        values = [draw(spec[name]) for name in self._action_names]
        flat = len(self._size) - 1
        return tuple([value.flatten(0, flat) for value in values] if flat > 0 else values)

    def shown(self) -> ExtraValues:
        """See `EnvBatch.shown`."""
        values = read_values(self._shown, (*self.extras, *self.step_extras), self._size)
        for key, names in self._beside.items():
            values[key] = [node.exclude(*names) for node in values[key]]
        return values

    def hear(self, said: ExtraValues) -> None:
        """Whatever the policy says goes to the env; see `EnvBatch.hear`."""
        for key, values in said.items():
            write_values(self._carrier, key, values, self._size)

    def draw_extras(self) -> ExtraValues:
        """What `rand_action` has just drawn; see `EnvBatch.draw_extras`."""
        return read_values(self._carrier, self.action_extras, self._size)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset all; with seeds, `env.set_seed` goes before, which chains from the first one."""
        if seeds is not None:
            first, *others = check_seeds(seeds, self.num_seeds)
            self._env.set_seed(first, static_seed=bool(others) and set(others) == {first})
        with torch.no_grad():
            self._carrier = self._shown = self._env.reset()
        check_root(self._carrier, self.observation)
        return (*self._gather_root(self._carrier), *self._no_rewards)

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        """Step with the outputs that `given` named, as tensors; see `EnvBatch.step`."""
        carrier, env = self._carrier, self._env
        if len(self._size) > 1:
            action = tuple([value.unflatten(0, self._size) for value in action])
        self._put(carrier, action)
        if not self.resets_apart:
            stepped, self._carrier = env.step_and_maybe_reset(carrier)
        else:
            stepped = self._step(carrier)
            self._carrier = self._advance(stepped)
            if self._has_hooks:
                stepped, self._carrier = env._post_step_mdp_hooks(stepped, self._carrier)
        self._shown = following = stepped.get("next")
        if self.root_only:
            return self._gather_both(following, self._carrier), None, None, None
        return self._gather_next(following), None, None, None

    def _step(self, carrier: Any) -> Any:
        """`env.step`, without what that does to a step which is complete already.

        TorchRL then brings rewards and flags to the shapes of their specs and adds flags that are
        missing; to look whether there is anything to do takes it as long as a small env's step.
        """
        env = self._env
        if self._checks_types or "next" in carrier or "_step" in carrier:
            return env.step(carrier)
        carrier.set("next", self._complete(self._following(carrier)))
        return carrier

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset what the flags of the last step tell, nested ones each on its own."""
        if self.resets_apart:
            self._carrier = self._maybe_reset(self._carrier)
        self._shown = self._carrier
        return (*self._gather_root(self._carrier), *self._no_rewards)

    def close(self) -> None:
        """Close the env; see `EnvBatch.close`."""
        if not self._closed:
            self._closed = True
            close_quietly(self._env)


def _leaves_in_nodes(extras: Sequence[Extra], leaves: Sequence[Leaf]) -> dict[Key, list[Any]]:
    """The leaves that lie inside of an extra, in the slab all the same, by the extra's key."""
    return {
        extra.key: [
            name_of(leaf.key[len(extra.key) :])
            for leaf in leaves
            if leaf.key[: len(extra.key)] == extra.key
        ]
        for extra in extras
        if extra.kind is Kind.NODE
    }


def _seeds_of(env: Any) -> int:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, SerialEnv):
        return sum(map(_seeds_of, env._envs))
    return env.num_workers if isinstance(env, ParallelEnv) else 1


def _draws_by_spec(env: Any) -> bool:
    """Whether `rand_action` is what EnvBase has it do: to draw from the action spec."""
    while isinstance(env, TransformedEnv):
        if type(env).rand_action is not TransformedEnv.rand_action:
            return False
        env = env.base_env
    return type(env).rand_action is EnvBase.rand_action


def _changes_actions(env: Any) -> bool:
    if not isinstance(env, TransformedEnv):
        return False
    return bool(env.full_action_spec != env.base_env.full_action_spec)


def _resets_apart(env: Any) -> bool:
    """Whether `step_and_maybe_reset` is step, step_mdp, the hooks and maybe_reset, and no more.

    Reset apart, an env that reuses its buffers does so only after the step was recorded. Batched
    envs do both at once in their own way, so do compiled ones and those that reset themselves.
    """
    kind = type(env)
    plain = all(
        getattr(kind, name, None) is getattr(EnvBase, name, None)
        for name in ("step_and_maybe_reset", "_step_and_maybe_reset", "step", "step_mdp")
    )
    state = vars(env)
    return (
        plain
        and hasattr(env, "_post_step_mdp_hooks")
        and state.get("_compiled_step_and_maybe_reset") is None
        and not state.get("_torchrl_native_autoreset", False)
    )


def has_time_limit(env: Any) -> bool:
    """A `StepCounter` with `max_steps`, or the Gymnasium env inside; False where it is not known.

    Batched envs answer unknown attributes by asking all of theirs, so none are tried on them.
    """
    while isinstance(env, TransformedEnv):
        transforms = env.transform if hasattr(env.transform, "__iter__") else [env.transform]
        if any(isinstance(t, StepCounter) and t.max_steps for t in transforms):
            return True
        env = env.base_env
    if isinstance(env, SerialEnv):
        inner = vars(env).get("_envs") or []
        return bool(inner) and all(map(has_time_limit, inner))
    return isinstance(env, GymWrapper) and time_limit.has_time_limit(env._env)
