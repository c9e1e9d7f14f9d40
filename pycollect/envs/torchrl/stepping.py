"""One step of an EnvBase, without looking again at what its specs have told already.

`EnvBase.step` and `step_mdp` find out at every step which entries there are, and go through each
TensorDict several times. For a small environment that takes longer than its own step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.layout import Key, dotted, torch_dtype
from pycollect.data.slabs import set_unchecked, unchecked_tensordict
from pycollect.envs.torchrl.gym import form_of, unwrapped_by
from pycollect.envs.torchrl.specs import as_key, name_of, spec_leaves

# Transforms that decide themselves which environments are stepped, and how often.
_STEPPING = ("ConditionalPolicySwitch", "ConditionalSkip", "MultiAction")

Step: TypeAlias = Callable[[Any], Any]
"""From one TensorDict to another."""

Tree: TypeAlias = dict[str, Any]
"""Keys by name: None is a leaf, a dict what is nested."""

Entries: TypeAlias = Mapping[str, Any]
"""One level of a TensorDict, live."""

_NOTHING: Tree = {}


def make_following(env: Any) -> Step:
    """`env._step`, for a root that has neither "next" nor "_step": what comes under "next".

    A TransformedEnv's transforms are called as it calls them; a GymEnv below them is stepped
    through the Gymnasium env inside.
    """
    own: Step = env._step
    if type(env) is not TransformedEnv or "_step" in vars(env):
        return own
    base, transform = env.base_env, env.transform
    parts = [part for part in transform.modules() if isinstance(part, Transform)]
    plain = all(map(_inverts_nothing, parts))
    if not plain and not all(map(is_torchrls, parts)):  # one may put "_step" into the root
        return own
    step = _gym_step(base) or _completed_step(base)
    invert = _shallow_copy if plain else transform.inv

    def following(root: Any) -> Any:
        given = invert(root)
        return transform._step(given, step(given))

    return following


def is_torchrls(transform: Transform) -> bool:
    """Whether it is one of TorchRL's own that leave it to the env when it is stepped."""
    kind = type(transform)
    return kind.__module__.startswith("torchrl.envs.") and kind.__name__ not in _STEPPING


def make_complete(env: Any) -> Step:
    """`env._step_proc_data`: rewards and flags in the shapes of their specs, none missing."""
    return _completer(_flags_of(env) + _sized(env, env.full_reward_spec), env._step_proc_data)


def make_advance(env: Any) -> Step:
    """`env.step_mdp`: the next step's root. The rule is that of TorchRL's `step_mdp`, by which
    what the new root does not replace stays in it.

    Specs that change under it, and TensorDicts of other kinds, are left to TorchRL.
    """
    specs = (env.observation_spec, env.full_done_spec, env.full_reward_spec, env.full_state_spec)
    names = [list(spec.keys(True, True)) for spec in specs]
    static = [list(spec.keys(True, True, step_mdp_static_only=True)) for spec in specs]
    if names != static:
        otherwise: Step = env.step_mdp
        return otherwise
    observations, flags, rewards, states = ([as_key(name) for name in own] for own in names)
    taken = _tree([*observations, *flags, *(key for key in rewards if key in states)])
    resets = [(*key[:-1], "_reset") for key in flags]
    others = [key for key in rewards if key not in states]
    dropped = _tree([("next",), *flags, *resets, *others])

    def advance(stepped: Any) -> Any:
        try:
            before = _entries_of(stepped)
            root = unchecked_tensordict(_kept(before, dropped), stepped)
            _merge(root, _entries_of(before["next"]), taken)
        except _OtherKindError:
            return env.step_mdp(stepped)
        return root

    return advance


def make_maybe_reset(env: Any) -> Step:
    """`env.maybe_reset`, which goes through all flags to see whether any environment is reset.

    By its rule the root's flags decide alone, where there are some: those of parts are not asked.
    """
    otherwise: Step = env.maybe_reset
    flags = [leaf.key for leaf in spec_leaves(env.full_done_spec, env.batch_size)]
    deciding = [key for key in flags if len(key) == 1]
    is_plain = all(
        getattr(type(env), name) is getattr(EnvBase, name) for name in ("maybe_reset", "any_done")
    )
    if not (is_plain and 0 < len(deciding) < len(flags)):
        return otherwise
    entries = _Lookup(deciding)

    def maybe_reset(root: Any) -> Any:
        values = entries.of(root)
        if values is None or any(value.any() for value in values):
            return otherwise(root)
        return root

    return maybe_reset


class _OtherKindError(Exception):
    """A TensorDict holds something else than tensors and TensorDicts, or lacks an entry."""


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
        raise _OtherKindError
    entries: Entries = td.items().mapping  # a copy would take longer than what is done with it
    return entries


def _kept(old: Entries, dropped: Tree) -> dict[str, Any]:
    """What is not dropped. A node that loses all that it has is dropped itself."""
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
    """Put new entries into what is kept; a node there gets them where their batch sizes agree."""
    for name, within in taken.items():
        value: Any = new.get(name)
        if within is None:
            if type(value) is not torch.Tensor:
                raise _OtherKindError
            set_unchecked(td, name, value)
            continue
        inner, node = _entries_of(value), td.get(name, None)
        if type(node) is not TensorDict or node.batch_size != value.batch_size:
            node = unchecked_tensordict({}, value)
            set_unchecked(td, name, node)
        _merge(node, inner, within)


def make_take(names: Sequence[Any]) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """What takes the entries of those names out of a TensorDict."""
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
    """What sets the entries of those names in a TensorDict.

    It checks the first tensors itself; those that follow are taken to have the same shapes. Where
    they have not, the Recorder refuses the step.

    Args:
        to_device: they may lie elsewhere than the TensorDict, which then brings them over.
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
    """Entries of TensorDicts by name. One look at all of a node costs less than `get` of one."""

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
        """The entries; None where one is missing, or some node is of another kind."""
        try:
            _, opened = self._open(td)
            return [opened[above][name] for above, name in self._places]
        except (KeyError, _OtherKindError):
            return None

    def put(self, td: Any, values: Sequence[torch.Tensor]) -> bool:
        """Set them without a check; False where some node is missing or of another kind."""
        try:
            nodes, _ = self._open(td)
        except (KeyError, _OtherKindError):
            return False
        for (above, name), value in zip(self._places, values, strict=True):
            set_unchecked(nodes[above], name, value)
        return True

    def _open(self, td: Any) -> tuple[list[Any], list[Entries]]:
        """All nodes in which entries lie, by their numbers, and what is in them."""
        nodes, opened = [td], [_entries_of(td)]
        for above, name in self._nodes:
            nodes.append(opened[above][name])
            opened.append(_entries_of(nodes[-1]))
        return nodes, opened


def _flags_of(env: Any) -> list[tuple[Any, torch.Size]]:
    return _sized(env, env.full_done_spec)


def _sized(env: Any, spec: Any) -> list[tuple[Any, torch.Size]]:
    size = tuple(env.batch_size)
    leaves = spec_leaves(spec, env.batch_size)
    return [(name_of(leaf.key), torch.Size((*size, *leaf.shape))) for leaf in leaves]


def _completer(entries: Sequence[tuple[Any, torch.Size]], otherwise: Step) -> Step:
    """`otherwise`, but for a step that has all those entries in their shapes, or all of them but
    "terminated", which is then "done".
    """
    shapes = dict(entries)

    def fit(names: Iterable[Any], values: Sequence[Any]) -> bool:
        return [value.shape for value in values] == [shapes[name] for name in names]

    whole = _Lookup(list(shapes))
    rest = [name for name in shapes if name != "terminated"]
    but_terminated = _Lookup(rest)
    may_miss = "done" in rest and len(rest) < len(shapes)

    def complete(following: Any) -> Any:
        values = whole.of(following)
        if values is not None:
            return following if fit(shapes, values) else otherwise(following)
        values = but_terminated.of(following) if may_miss else None
        if values is None or "truncated" in following or not fit(rest, values):
            return otherwise(following)
        following.set("terminated", values[rest.index("done")])
        return following

    return complete


def _completed_step(env: Any) -> Step:
    """A step as transforms are given it: no flag is missing."""
    step = make_following(env)
    complete = _completer(
        _flags_of(env), lambda following: env._complete_done(env.full_done_spec, following)
    )
    return lambda root: complete(step(root))


def _inverts_nothing(part: Any) -> bool:
    kind = type(part)
    if kind is Compose:
        return True  # its parts tell
    is_plain = kind.inv is Transform.inv and kind._inv_call is Transform._inv_call
    return is_plain and not part.in_keys_inv


def _shallow_copy(td: Any) -> Any:
    try:
        return unchecked_tensordict(_kept(_entries_of(td), {}), td)
    except _OtherKindError:
        return td.copy()


def _gym_step(env: Any) -> Step | None:
    """`_step` of a GymEnv through the Gymnasium env inside; None where `form_of` knows none."""
    form = form_of(env)
    if form is None or env.device not in (None, CPU):
        return None
    batch = unwrapped_by(env, form)
    if any(len(leaf.key) > 1 for leaf in batch.observation):
        return None
    inner, leaves, device = batch.step, batch.observation, env.device
    form_of_last: Any = None  # random actions may have another than a policy's

    def step(root: Any) -> Any:
        nonlocal form_of_last
        action = root.get("action").detach().numpy()
        if (action.dtype, action.shape) != form_of_last:
            form_of_last = action.dtype, action.shape
            batch.given((Leaf(("action",), action.dtype.name, action.shape),))
        values, reward, terminated, truncated = inner(action)
        entries = _tensors(leaves, values if type(values) is tuple else (values,))
        entries["reward"] = torch.tensor(reward, dtype=torch.float32).reshape(1)
        entries["truncated"] = torch.tensor([bool(truncated)])
        entries["done"] = torch.tensor([bool(terminated or truncated)])
        entries["terminated"] = torch.tensor([bool(terminated)])
        return unchecked_tensordict(entries, root, device)

    return step


def _tensors(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Copies, as the environment may write into its own arrays again."""
    return {
        leaf.key[0]: torch.tensor(value, dtype=torch_dtype(leaf.dtype))
        for leaf, value in zip(leaves, values, strict=True)
    }
