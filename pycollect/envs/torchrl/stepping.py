"""Faster versions of an EnvBase's step methods, prepared once from its specs.

`EnvBase.step` and `step_mdp` find the entries anew in every step and traverse each TensorDict
several times. For a small environment, this takes longer than the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.layout import Key, as_key, dotted, torch_dtype
from pycollect.data.slabs import set_unchecked, unchecked_tensordict
from pycollect.envs.torchrl.gym import Unwrapped, inner_spec
from pycollect.envs.torchrl.specs import name_of, spec_leaves

# Transforms that decide which environments are stepped, and how often.
_STEPPING = ("ConditionalPolicySwitch", "ConditionalSkip", "MultiAction")

Step: TypeAlias = Callable[[Any], Any]
"""Function from one TensorDict to another."""

Tree: TypeAlias = dict[str, Any]
"""Nested keys: ``None`` stands for a leaf, a dict for a node."""

Entries: TypeAlias = Mapping[str, Any]
"""Live view of one level of a TensorDict."""

_NOTHING: Tree = {}


def make_following(env: Any) -> Step:
    """Return a function like `env._step`, for a root without "next" and "_step".

    A TransformedEnv's transforms are called in the same way. A GymEnv below them is stepped through
    the Gymnasium environment inside.
    """
    original: Step = env._step
    if type(env) is not TransformedEnv or "_step" in vars(env):
        return original
    base, transform = env.base_env, env.transform
    parts = [part for part in transform.modules() if isinstance(part, Transform)]
    plain = all(map(_inverts_nothing, parts))
    if not plain and not all(map(is_torchrl_transform, parts)):  # another transform may add "_step"
        return original
    step = _gym_step(base) or _completed_step(base)
    invert = _shallow_copy if plain else transform.inv

    def following(root: Any) -> Any:
        inverted = invert(root)
        return transform._step(inverted, step(inverted))

    return following


def is_torchrl_transform(transform: Transform) -> bool:
    """Return whether it is one of TorchRL's transforms, and not one that decides about steps."""
    kind = type(transform)
    return kind.__module__.startswith("torchrl.envs.") and kind.__name__ not in _STEPPING


def make_complete(env: Any) -> Step:
    """Return a function like `env._step_proc_data`, which reshapes rewards and completes flags."""
    entries = _sized(env, env.full_done_spec) + _sized(env, env.full_reward_spec)
    return _completer(entries, env._step_proc_data)


def make_advance(env: Any) -> Step:
    """Return a function like `env.step_mdp`, which makes the next step's root.

    As in TorchRL, the new root keeps entries of the old one that "next" does not replace. If specs
    have dynamic shapes, or if a node is not a plain TensorDict, TorchRL's method is called.
    """
    specs = (env.observation_spec, env.full_done_spec, env.full_reward_spec, env.full_state_spec)
    names = [list(spec.keys(True, True)) for spec in specs]
    static = [list(spec.keys(True, True, step_mdp_static_only=True)) for spec in specs]
    if names != static:
        fallback: Step = env.step_mdp
        return fallback
    observations, flags, rewards, states = ([as_key(name) for name in group] for group in names)
    taken = _tree([*observations, *flags, *(key for key in rewards if key in states)])
    resets = [(*key[:-1], "_reset") for key in flags]
    others = [key for key in rewards if key not in states]
    dropped = _tree([("next",), *flags, *resets, *others])

    def advance(stepped: Any) -> Any:
        try:
            before = _entries_of(stepped)
            root = unchecked_tensordict(_kept(before, dropped), stepped)
            _merge(root, _entries_of(before["next"]), taken)
        except _UnsupportedEntryError:
            return env.step_mdp(stepped)
        return root

    return advance


def make_maybe_reset(env: Any) -> Step:
    """Return a function like `env.maybe_reset`, which otherwise reads all flags in every step.

    As in TorchRL, if there are flags at the root, nested flags are ignored.
    """
    fallback: Step = env.maybe_reset
    flags = [leaf.key for leaf in spec_leaves(env.full_done_spec, env.batch_size)]
    deciding = [key for key in flags if len(key) == 1]
    is_plain = all(
        getattr(type(env), name) is getattr(EnvBase, name) for name in ("maybe_reset", "any_done")
    )
    if not (is_plain and 0 < len(deciding) < len(flags)):
        return fallback
    entries = _Lookup(deciding)

    def maybe_reset(root: Any) -> Any:
        values = entries.of(root)
        if values is None or any(value.any() for value in values):
            return fallback(root)
        return root

    return maybe_reset


class _UnsupportedEntryError(Exception):
    """A TensorDict has an entry that is neither a tensor nor a TensorDict, or lacks an entry."""


def _tree(keys: Iterable[Key]) -> Tree:
    tree: Tree = {}
    for key in keys:
        node = tree
        for name in key[:-1]:
            node = node.setdefault(name, {})
        node[key[-1]] = None
    return tree


def _entries_of(td: Any) -> Entries:
    if type(td) is not TensorDict:
        raise _UnsupportedEntryError
    entries: Entries = td.items().mapping  # not copied, because a copy would dominate the cost
    return entries


def _kept(old: Entries, dropped: Tree) -> dict[str, Any]:
    """Return the entries that are not dropped, without nodes that lose all their entries."""
    entries: dict[str, Any] = {}
    for name, value in old.items():
        inner = dropped.get(name, _NOTHING)
        if inner is None:
            continue
        if type(value) is not torch.Tensor:
            rest = _kept(_entries_of(value), inner)
            if inner and not rest:
                continue
            value = unchecked_tensordict(rest, value)
        entries[name] = value
    return entries


def _merge(td: TensorDict, new: Entries, taken: Tree) -> None:
    """Put new entries into `td`; a node with another batch size is replaced."""
    for name, children in taken.items():
        value: Any = new.get(name)
        if children is None:
            if type(value) is not torch.Tensor:
                raise _UnsupportedEntryError
            set_unchecked(td, name, value)
            continue
        inner, node = _entries_of(value), td.get(name, None)
        if type(node) is not TensorDict or node.batch_size != value.batch_size:
            node = unchecked_tensordict({}, value)
            set_unchecked(td, name, node)
        _merge(node, inner, children)


def make_take(names: Sequence[Any]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """Return a function that reads the named entries of a TensorDict."""
    entries = _Lookup(names)

    def take(td: Any) -> tuple[torch.Tensor, ...]:
        values = entries.of(td)
        if values is None:
            return tuple([_entry_of(td, name) for name in names])
        return tuple(values)

    return take


def _entry_of(td: Any, name: Any) -> Any:
    value = td.get(name, None)
    if value is None:
        raise ValueError(
            f"create_env_fn: a step or reset did not return {dotted(as_key(name))!r}, an entry of "
            "the environment's specs. A transform that removes an entry must also override "
            "transform_observation_spec or transform_fake_tensordict"
        )
    return value


def make_put(names: Sequence[Any], to_device: bool) -> Callable[[Any, Sequence[Any]], None]:
    """Return a function that sets the named entries of a TensorDict.

    The function checks only the shapes of the first tensors. If later tensors have other shapes,
    the Recorder refuses the step. If tensors may be on another device, the TensorDict copies them.
    """
    places = _Lookup(names)
    must_check = True

    def put(td: Any, values: Sequence[Any]) -> None:
        nonlocal must_check
        if must_check or not places.put(td, values):
            for name, value in zip(names, values, strict=True):
                td.set(name, value)
            must_check = to_device

    return put


class _Lookup:
    """Looks up many entries of a TensorDict by name, faster than one `get` per entry."""

    def __init__(self, names: Sequence[Any]) -> None:
        numbers: dict[Key, int] = {(): 0}
        self._nodes: list[tuple[int, str]] = []
        self._places: list[tuple[int, str]] = []
        for key in map(as_key, names):
            for length in range(1, len(key)):
                if key[:length] not in numbers:
                    numbers[key[:length]] = len(numbers)
                    self._nodes.append((numbers[key[: length - 1]], key[length - 1]))
            self._places.append((numbers[key[:-1]], key[-1]))

    def of(self, td: Any) -> list[Any] | None:
        """Return the entries, or ``None`` if one is missing or a node is not a TensorDict."""
        try:
            _, opened = self._open(td)
            return [opened[above][name] for above, name in self._places]
        except (KeyError, _UnsupportedEntryError):
            return None

    def put(self, td: Any, values: Sequence[torch.Tensor]) -> bool:
        """Set the entries unchecked; return ``False`` if a node is missing or not a TensorDict."""
        try:
            nodes, _ = self._open(td)
        except (KeyError, _UnsupportedEntryError):
            return False
        for (above, name), value in zip(self._places, values, strict=True):
            set_unchecked(nodes[above], name, value)
        return True

    def _open(self, td: Any) -> tuple[list[Any], list[Entries]]:
        """Return all nodes that contain entries, by number, and the entries of each node."""
        nodes, opened = [td], [_entries_of(td)]
        for above, name in self._nodes:
            nodes.append(opened[above][name])
            opened.append(_entries_of(nodes[-1]))
        return nodes, opened


def _sized(env: Any, spec: Any) -> list[tuple[Any, torch.Size]]:
    size = tuple(env.batch_size)
    leaves = spec_leaves(spec, env.batch_size)
    return [(name_of(leaf.key), torch.Size((*size, *leaf.shape))) for leaf in leaves]


def _completer(entries: Sequence[tuple[Any, torch.Size]], fallback: Step) -> Step:
    """Return a function that completes a step's TensorDict, calling `fallback` only if necessary.

    If all entries are present in their shapes, nothing is done. If only "terminated" is missing, it
    is set to "done".
    """
    shapes = dict(entries)

    def fit(names: Iterable[Any], values: Sequence[Any]) -> bool:
        return [value.shape for value in values] == [shapes[name] for name in names]

    whole = _Lookup(list(shapes))
    rest = [name for name in shapes if name != "terminated"]
    without_terminated = _Lookup(rest)
    may_miss = "done" in rest and len(rest) < len(shapes)

    def complete(following: Any) -> Any:
        values = whole.of(following)
        if values is not None:
            return following if fit(shapes, values) else fallback(following)
        values = without_terminated.of(following) if may_miss else None
        if values is None or "truncated" in following or not fit(rest, values):
            return fallback(following)
        following.set("terminated", values[rest.index("done")])
        return following

    return complete


def _completed_step(env: Any) -> Step:
    """Return a step function with complete flags, as transforms expect."""
    step = make_following(env)
    complete = _completer(
        _sized(env, env.full_done_spec),
        lambda following: env._complete_done(env.full_done_spec, following),
    )
    return lambda root: complete(step(root))


def _inverts_nothing(part: Any) -> bool:
    kind = type(part)
    if kind is Compose:
        return True  # its transforms are checked separately
    is_plain = kind.inv is Transform.inv and kind._inv_call is Transform._inv_call
    return is_plain and not part.in_keys_inv


def _shallow_copy(td: Any) -> Any:
    try:
        return unchecked_tensordict(_kept(_entries_of(td), {}), td)
    except _UnsupportedEntryError:
        return td.copy()


def _gym_step(env: Any) -> Step | None:
    """Return `_step` of a GymEnv through the Gymnasium environment inside, if supported."""
    spec = inner_spec(env)
    if spec is None or env.device not in (None, CPU):
        return None
    batch = Unwrapped(env, spec)
    if any(len(leaf.key) > 1 for leaf in batch.spec.observation):
        return None
    inner, leaves, device = batch.step, batch.spec.observation, env.device
    last_form: Any = None  # dtype and shape; random actions may differ from a policy's

    def step(root: Any) -> Any:
        nonlocal last_form
        action = root.get("action").detach().numpy()
        if (action.dtype, action.shape) != last_form:
            last_form = action.dtype, action.shape
            batch.bind_outputs((Leaf(("action",), action.dtype.name, action.shape),))
        values, reward, terminated, truncated = inner(action)
        entries = _tensors(leaves, values if type(values) is tuple else (values,))
        entries["reward"] = torch.tensor(reward, dtype=torch.float32).reshape(1)
        entries["truncated"] = torch.tensor([bool(truncated)])
        entries["done"] = torch.tensor([bool(terminated or truncated)])
        entries["terminated"] = torch.tensor([bool(terminated)])
        return unchecked_tensordict(entries, root, device)

    return step


def _tensors(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return copies as tensors, because the environment may reuse its arrays."""
    return {
        leaf.key[0]: torch.tensor(value, dtype=torch_dtype(leaf.dtype))
        for leaf, value in zip(leaves, values, strict=True)
    }
