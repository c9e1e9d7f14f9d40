"""Any `torchrl.envs.EnvBase` as an EnvBatch that is stepped with TensorDicts."""

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
from pycollect.data.layout import Key, as_key, dtype_name, torch_dtype
from pycollect.data.upload import Fetch
from pycollect.envs import gymnasium_support as time_limit
from pycollect.envs.base import Arrays, BoolArray, EnvBatch, EnvSpec, seed_each
from pycollect.envs.torchrl.specs import (
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


def has_hooks(env: Any) -> bool:
    """Return whether hooks run after `step_mdp`; a TransformedEnv always has the attribute."""
    while type(env)._post_step_mdp_hooks is TransformedEnv._post_step_mdp_hooks:
        if any(_overrides(part, "_post_step_mdp_hooks") for part in env.transform.modules()):
            return True
        env = env.base_env
    return env._post_step_mdp_hooks is not None


def changed_by_hooks(
    env: Any, observations: tuple[Leaf, ...], others: Collection[Key]
) -> tuple[frozenset[Key], tuple[Leaf, ...]]:
    """Return the observations whose root and "next" entries must be recorded separately.

    A hook may change the recorded step, the next root, or both. If there are hooks, or if
    `fake_tensordict` or `step_and_maybe_reset` is overridden, all observations (without flags) are
    therefore recorded in both places: keys at the root, and leaves under "next" as
    `fake_tensordict` has them, except `others`, the keys of flags and rewards.
    """
    steps_itself = not type(env).step_and_maybe_reset.__module__.startswith("torchrl.")
    if not (has_hooks(env) or _rewrites(env) or steps_itself):
        return frozenset(), ()
    following = env.fake_tensordict().get("next")
    entries = {as_key(name): value for name, value in following.items(True, True)}
    size = len(env.batch_size)
    leaves = tuple(
        Leaf(key, dtype_name(value.dtype), tuple(value.shape[size:]))
        for key, value in entries.items()
        if key not in others and isinstance(value, torch.Tensor)
    )
    return frozenset(leaf.key for leaf in observations), leaves


def _rewrites(env: Any) -> bool:
    while type(env).fake_tensordict is TransformedEnv.fake_tensordict:
        if any(_overrides(part, "transform_fake_tensordict") for part in env.transform.modules()):
            return True
        env = env.base_env
    return type(env).fake_tensordict is not EnvBase.fake_tensordict


def _overrides(part: Any, name: str) -> bool:
    method = getattr(part, name, getattr(Transform, name))
    plain = getattr(Transform, name), getattr(Compose, name)
    return getattr(method, "__func__", method) not in plain


Gather = Callable[[TensorDictBase], tuple[torch.Tensor, ...]]


class TorchRLEnv(EnvBatch):
    """An `EnvBase` of any batch size: [] is one environment, [P] or [a, b] a batch of P = a * b.

    Keys, shapes, dtypes and encodings come from its specs, including those of flags and rewards.
    As in TorchRL's collectors, one TensorDict is carried from step to step. It holds all root
    entries, so that recurrent states and all policy outputs reach the environment.
    """

    def __init__(self, env: EnvBase) -> None:
        check_device(env)
        self._env: Any = env
        self._device = env.device or CPU
        self._size = tuple(env.batch_size)
        self._carrier: Any = None  # the root of the next step
        self._last_td: Any = None  # result of the last call: the carrier, or its "next"
        self._read_specs()

    def _make_spec(self) -> EnvSpec:
        env, size = self._env, self._env.batch_size
        observation = observation_leaves(env)
        ends = tuple(leaf.key for leaf in spec_leaves(env.full_done_spec, size))
        reward_leaves = spec_leaves(env.full_reward_spec, size)
        rewards = tuple(leaf.key for leaf in reward_leaves)
        others = tuple(leaf for leaf in observation if leaf.key not in ends)
        root_only, changed = changed_by_hooks(env, others, (*ends, *rewards))
        staying = {leaf.key for leaf in others if leaf.key[-1] not in FLAGS}  # resets need flags
        specs = (env.observation_spec, env.full_done_spec, env.full_reward_spec)
        return EnvSpec(
            batch_size=tuple(size),
            observation=observation,
            action=spec_leaves(env.full_action_spec, size),
            ends=ends,
            rewards=rewards,
            step_only=(*reward_leaves, *changed),
            root_only=root_only,
            takes_tensors=True,
            casts_actions=False,
            passes_states_on=True,
            extras=tuple(extra for part in specs[:2] for extra in spec_extras(part, size)),
            flag_extras=frozenset(extra.key for extra in spec_extras(specs[1], size)),
            step_extras=spec_extras(env.full_reward_spec, size),
            action_extras=spec_extras(env.full_action_spec, size),
            nodes=spec_nodes((*specs, env.full_action_spec), size),
            device=self._device,
            device_keys=frozenset(staying - root_only) if self._is_on_device else frozenset(),
        )

    def _read_specs(self) -> None:
        """Make the spec, and all functions that depend on it or on the environment's transforms."""
        env = self._env
        self.owned, self.time_limit = [env], has_time_limit(env)
        self.spec = spec = self._make_spec()
        self._action_names = [name_of(leaf.key) for leaf in spec.action]
        self._gather_action = self._gather_on_device(spec.action)
        self.bind_outputs(spec.action)
        stepped = (*spec.observation, *spec.step_only)
        self._leaves_of_extras = _leaves_in_nodes(spec.extras, stepped)
        self._gather_root, self._gather_next = self._gather(spec.observation), self._gather(stepped)
        self._gather_both, self._has_root_only = self._merging(), bool(spec.root_only)
        self._no_rewards = tuple(
            torch.zeros((*spec.rows, *leaf.shape), dtype=torch_dtype(leaf.dtype), device=CPU)
            for leaf in spec.step_only
        )
        self._draws_by_spec = _draws_by_spec(env) and not spec.action_extras
        self.resets_separately = _resets_separately(env)
        self._has_hooks = has_hooks(env)
        self._checks_types = env.run_type_checks
        if self.resets_separately:
            self._following, self._complete = make_following(env), make_complete(env)
            self._advance = make_advance(env)
            self._maybe_reset = make_maybe_reset(env)

    def _gather(self, leaves: Sequence[Leaf]) -> Gather:
        """Return a function that reads leaves from the environment's TensorDict, as rows [P, ...].

        The function copies leaves to the host, except those of `device_keys`.
        """
        gather = self._gather_on_device(leaves)
        if not self._is_on_device:
            return gather
        fetch = Fetch(accelerator(self._device), self._device)
        places = [i for i, leaf in enumerate(leaves) if leaf.key not in self.spec.device_keys]

        def gather_and_fetch(td: TensorDictBase) -> tuple[torch.Tensor, ...]:
            values = list(gather(td))
            for place, value in zip(places, fetch([values[i] for i in places]), strict=True):
                values[place] = value
            return tuple(values)

        return gather_and_fetch

    def _merging(self) -> Callable[[TensorDictBase, TensorDictBase], tuple[torch.Tensor, ...]]:
        """Return a function that reads `root_only` leaves from the root, others from "next"."""
        spec = self.spec
        are_root_only = [leaf.key in spec.root_only for leaf in spec.observation]
        root_only = [leaf for leaf in spec.observation if leaf.key in spec.root_only]
        rest = [leaf for leaf in spec.observation if leaf.key not in spec.root_only]
        gather_root, gather_next = self._gather(root_only), self._gather((*rest, *spec.step_only))

        def merge(following: TensorDictBase, root: TensorDictBase) -> tuple[torch.Tensor, ...]:
            roots, nexts = iter(gather_root(root)), iter(gather_next(following))
            observation = [next(roots if at_root else nexts) for at_root in are_root_only]
            return (*observation, *nexts)

        return merge

    @property
    def _is_on_device(self) -> bool:
        return self._device.type != "cpu"

    def _gather_on_device(self, leaves: Sequence[Leaf]) -> Gather:
        names = [name_of(leaf.key) for leaf in leaves]
        if len(self._size) < 2:
            return make_take(names)
        dims = len(self._size) - 1
        return lambda td: tuple([td.get(name).flatten(0, dims) for name in names])

    @property
    def num_seeds(self) -> int:
        """Number of seeds that `env.set_seed` uses: one, or one per worker of a batched env."""
        return _seeds_of(self._env)

    def truncate_after(self, frames: int) -> bool:
        """Append a StepCounter, as TorchRL's collectors do."""
        if has_step_count(self._env):
            raise ValueError(
                "max_frames_per_traj: adds the entry 'step_count', but the environment already has "
                "one; omit max_frames_per_traj, or remove the environment's StepCounter"
            )
        self._env = TransformedEnv(self._env, StepCounter(max_steps=frames))
        self._read_specs()
        return True

    def bind_outputs(self, outputs: tuple[Leaf, ...]) -> tuple[Key, ...]:
        """Return the keys of all policy outputs, because states and transforms may read any."""
        names = [name_of(leaf.key) for leaf in outputs]
        self._put = make_put(names, to_device=self._is_on_device)
        return tuple(leaf.key for leaf in outputs)

    @property
    def draws_ahead(self) -> bool:
        """``False``, because action masks may depend on the state."""
        return False

    def random_action(self) -> tuple[torch.Tensor, ...]:
        if not self._draws_by_spec:
            try:
                return self._gather_action(self._env.rand_action(self._carrier))
            except RuntimeError:  # raised by a TransformedEnv if a transform changes the action
                if not _changes_actions(self._env):
                    raise
        # Leaf by leaf, because `rand` of the whole spec builds a TensorDict, which is far slower.
        spec = self._env.input_spec["full_action_spec"]
        values = [draw(spec[name]) for name in self._action_names]
        flat = len(self._size) - 1
        return tuple([value.flatten(0, flat) for value in values] if flat > 0 else values)

    def current_extras(self) -> ExtraValues:
        values = read_values(self._last_td, (*self.spec.extras, *self.spec.step_extras), self._size)
        for key, names in self._leaves_of_extras.items():
            values[key] = [node.exclude(*names) for node in values[key]]
        return values

    def pass_extras(self, extras: ExtraValues) -> None:
        for key, values in extras.items():
            write_values(self._carrier, key, values, self._size)

    def draw_extras(self) -> ExtraValues:
        return read_values(self._carrier, self.spec.action_extras, self._size)

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Reset all environments, after `env.set_seed` with the first seed if there are any."""
        if seeds is not None:
            set_seed(self._env, seeds, self.num_seeds)
        with torch.no_grad():
            self._carrier = self._last_td = self._env.reset()
        check_root(self._carrier, self.spec.observation)
        return (*self._gather_root(self._carrier), *self._no_rewards)

    def step(self, action: Arrays) -> tuple[Arrays, Any, Any, Any]:
        carrier, env = self._carrier, self._env
        if len(self._size) > 1:
            action = tuple([value.unflatten(0, self._size) for value in action])
        self._put(carrier, action)
        if not self.resets_separately:
            stepped, self._carrier = env.step_and_maybe_reset(carrier)
        else:
            stepped = self._step(carrier)
            self._carrier = self._advance(stepped)
            if self._has_hooks:
                stepped, self._carrier = env._post_step_mdp_hooks(stepped, self._carrier)
        self._last_td = following = stepped.get("next")
        if self._has_root_only:
            return self._gather_both(following, self._carrier), None, None, None
        return self._gather_next(following), None, None, None

    def _step(self, carrier: Any) -> Any:
        """Step like `env.step`, but skip its post-processing if the result is complete.

        TorchRL reshapes rewards and flags according to their specs and adds missing flags. Its
        check whether this is necessary takes as long as a step of a small environment.
        """
        env = self._env
        if self._checks_types or "next" in carrier or "_step" in carrier:
            return env.step(carrier)
        carrier.set("next", self._complete(self._following(carrier)))
        return carrier

    def reset_done(self, done: BoolArray) -> Arrays:
        """Reset according to the flags of the last step, including nested flags."""
        if self.resets_separately:
            self._carrier = self._maybe_reset(self._carrier)
        self._last_td = self._carrier
        return (*self._gather_root(self._carrier), *self._no_rewards)


def _leaves_in_nodes(extras: Sequence[Extra], leaves: Sequence[Leaf]) -> dict[Key, list[Any]]:
    """Return, by key of an extra, the leaves inside that extra that are recorded in the slab."""
    return {
        extra.key: [
            name_of(leaf.key[len(extra.key) :])
            for leaf in leaves
            if leaf.key[: len(extra.key)] == extra.key
        ]
        for extra in extras
        if extra.kind is Kind.NODE
    }


def set_seed(env: Any, seeds: Sequence[int], count: int) -> None:
    """Seed an `EnvBase` as TorchRL does, before any reset: by the first seed."""
    first, *others = seed_each(seeds, count)
    env.set_seed(first, static_seed=bool(others) and set(others) == {first})


def _seeds_of(env: Any) -> int:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    if isinstance(env, SerialEnv):
        return sum(map(_seeds_of, env._envs))
    return env.num_workers if isinstance(env, ParallelEnv) else 1


def _draws_by_spec(env: Any) -> bool:
    """Return whether `rand_action` only draws from the action spec, as EnvBase does."""
    while isinstance(env, TransformedEnv):
        if type(env).rand_action is not TransformedEnv.rand_action:
            return False
        env = env.base_env
    return type(env).rand_action is EnvBase.rand_action


def _changes_actions(env: Any) -> bool:
    is_transformed = isinstance(env, TransformedEnv)
    return is_transformed and bool(env.full_action_spec != env.base_env.full_action_spec)


def _resets_separately(env: Any) -> bool:
    """Return whether `step_and_maybe_reset` is exactly step, step_mdp, hooks and maybe_reset.

    A separate reset happens after the step was recorded, so that the environment may reuse its
    buffers. Batched environments, compiled ones, and those with autoreset do both at once.
    """
    kind = type(env)
    names = ("step", "step_mdp", "_step_proc_data", "step_and_maybe_reset", "_step_and_maybe_reset")
    plain = all(getattr(kind, name, None) is getattr(EnvBase, name, None) for name in names)
    state = vars(env)
    return (
        plain
        and hasattr(env, "_post_step_mdp_hooks")
        and state.get("_compiled_step_and_maybe_reset") is None
        and not state.get("_torchrl_native_autoreset", False)
    )


def has_time_limit(env: Any) -> bool:
    """Return whether a `StepCounter` or the Gymnasium environment inside limits every episode.

    A batched environment looks up unknown attributes in all its workers, so none are read from it.
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
