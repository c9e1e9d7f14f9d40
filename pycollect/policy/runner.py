"""PolicyRunner: any accepted policy as one call per step, `act()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect._core import Leaf
from pycollect.envs.base import EnvBatch
from pycollect.layout import Key, torch_dtype
from pycollect.policy.assemble import Samples, assemble, run_plainly
from pycollect.policy.modules import unwrap
from pycollect.policy.outputs import (
    check_inputs,
    check_output_keys,
    is_delivered,
    output_leaves,
)
from pycollect.policy.plan import Fingerprint, chain_of
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.steps import (
    CallStep,
    CannotUnwrapError,
    PolicyOutputError,
    Program,
    Values,
    as_key,
    show,
    show_all,
)
from pycollect.policy.undisturbed import undisturbed
from pycollect.policy.weights import check_on_cpu
from pycollect.policy.wrap import wants_tensordict, wrap

Act: TypeAlias = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class PolicyState:
    """What a policy passes on to its own next call: it reads `leaf.key`, writes ("next", ...).

    Attributes:
        leaf: the key as it is read, dtype and shape for one env.
        current: what the next call reads, [*frame] or [P, *frame]; the Recorder rewrites it.
        initial: its value at a trajectory's first step, [*frame] or [P, *frame].
    """

    leaf: Leaf
    current: torch.Tensor
    initial: torch.Tensor


class PolicyRunner:
    """A policy bound to the tensors that hold the current observation.

    Use, for every rollout: `refresh(steps)`, then `act = runner.act`, then `act()` once per step,
    under `torch.no_grad()` and `set_interaction_type(...)`.

    Attributes:
        outputs: the leaves that are recorded, those of the action among them, with the dtypes and
            shapes of one frame of one env; fixed at construction.
        inputs: the observation keys that the policy reads.
        act: calls the policy on the current observation and returns one tensor per output, with the
            env's batch shape ([*frame] or [P, *frame]) and, for actions, the space's dtype. The
            tensors may be written again by the next call: copy what is to stay. May be another
            function after `refresh`.
        reuses_memory: True if `act` returns the very same tensors each time.
        slow_path: True if the policy is called with a TensorDict per step.
        states: what the policy passes on to its next call; `act` returns their next values, in this
            order, behind those of `outputs`.
        is_init: bool [1] or [P, 1], which the Recorder keeps true where a trajectory begins; None
            for a policy that does not read it.
    """

    states: tuple[PolicyState, ...] = ()
    is_init: torch.Tensor | None = None

    def __init__(self, policy: Any, env: EnvBatch, current: Mapping[Key, torch.Tensor]) -> None:
        self.policy = policy
        self._env = env
        self._current = {leaf.key: current[leaf.key] for leaf in env.observation}
        self._watched: tuple[nn.Module, ...] = ()
        self._samples: Samples = {}
        self.outputs: tuple[Leaf, ...] = ()
        check_on_cpu(policy)
        with torch.no_grad():
            program = self._program()
            self.inputs = tuple(self._current) if program is None else program.read
            values = None if program is None else self._probe(program)
            if values is None:
                self.inputs = tuple(self._current)
                program, values = None, self._probe_with_tensordict()
            delivered = {key: value for key, value in values.items() if is_delivered(key)}
            self.outputs = output_leaves(delivered, env)
            self._raw = {key: (value.dtype, value.requires_grad) for key, value in values.items()}
            self._bind(program)

    def refresh(self, steps: int) -> None:
        """To be called before each rollout of at most `steps` steps.

        Looks whether the policy is still what it was taken for (parameters, hooks, layers, training
        mode) and builds `act` anew if not. Raises ValueError if its output keys have changed.
        """
        if self._fingerprint.still_true(self._watched):
            return
        check_on_cpu(self.policy)
        with torch.no_grad():
            self._bind(self._program())

    def _program(self) -> Program | None:
        """The policy taken apart, None where it is to be called with a TensorDict."""
        policy = self.policy
        if wants_tensordict(policy):
            self._check_declared(policy)
            try:
                if not isinstance(policy, TensorDictModuleBase):
                    return None
                program = unwrap(policy)
            except CannotUnwrapError:
                return None
            if not set(program.read) <= set(self._current):
                return None  # it reads a part of the TensorDict that is no leaf
        else:
            keys = [leaf.key for leaf in self._env.observation]
            program = wrap(policy, keys, [leaf.key for leaf in self._env.action])
        check_output_keys(program.written, self._env)
        check_inputs(program.read, self._env)
        return program

    def _check_declared(self, policy: Any) -> None:
        """Check the keys that a TensorDict policy says it reads and writes."""
        if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
            written = [as_key(key) for key in policy.out_keys]
            read = [as_key(key) for key in policy.in_keys]
            check_output_keys(written, self._env)
            inside = [key for key in read if _overlaps(key, (*written, *self._current))]
            check_inputs([key for key in read if key not in inside], self._env)

    def _probe(self, program: Program) -> Values | None:
        """Call every step once, plainly. None if something came that only a TensorDict carries."""
        fresh = {key: tensor.clone() for key, tensor in self._current.items()}
        try:
            with undisturbed(self.policy):
                self._samples, values = run_plainly(program, fresh)
        except CannotUnwrapError:
            return None
        return {key: values[key] for key in program.written}

    def _probe_with_tensordict(self) -> Values:
        with undisturbed(self.policy):
            td = self._tensordict()
            given = td.clone()
            out = self._call_with(td)
        for leaf in self._env.observation:
            came = out.get(leaf.key, None)
            if came is not None and not _equal(came, given[leaf.key]):
                raise ValueError(
                    f"policy: it writes {show(leaf.key)}, which is the environment's; "
                    "use another key"
                )
        values = {key: out.get(key) for key in self._new_keys(out)}
        check_output_keys(values, self._env)
        odd = [key for key, value in values.items() if not isinstance(value, torch.Tensor)]
        if odd:
            raise ValueError(f"policy: expected tensors, but {show_all(odd)} hold other data")
        return values

    def _bind(self, program: Program | None) -> None:
        """Make `act` for the program, and remember what it rests on."""
        self.slow_path = program is None
        self.reuses_memory = False
        self._watched = () if program is None else _watched(program)
        self._fingerprint = Fingerprint(self._watched)
        finish = self._finishers()
        if program is None:
            self.act: Act = self._slow_act(finish)
            return
        unread = [key for key in program.read if key not in self.inputs]
        if unread:
            raise PolicyOutputError(
                f"policy: it read {show_all(self.inputs)} at construction, now also "
                f"{show_all(unread)}"
            )
        wanted = [leaf.key for leaf in self.outputs]
        written = [key for key in program.written if is_delivered(key)]
        if set(wanted) != set(written):
            raise PolicyOutputError(
                f"policy: it returned {show_all(wanted)} at construction, now {show_all(written)}"
            )
        with undisturbed(self.policy):
            self.act, self.reuses_memory = assemble(
                program, self._current, wanted, self._samples, finish
            )

    def _finishers(self) -> list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]:
        """What is done to single outputs after each call: actions cast, parameters detached."""
        finish: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = []
        for place, leaf in enumerate(self.outputs):
            raw, requires_grad = self._raw[leaf.key]
            if requires_grad:
                finish.append((place, torch.Tensor.detach))
            if raw is not torch_dtype(leaf.dtype):
                finish.append((place, _caster(leaf, raw)))
        return finish

    def _slow_act(self, finish: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]) -> Act:
        keys = [leaf.key for leaf in self.outputs]
        expected = set(keys)

        def act() -> tuple[torch.Tensor, ...]:
            out = self._call_with(self._tensordict())
            came = {key for key in self._new_keys(out) if is_delivered(key)}
            if came != expected:
                raise PolicyOutputError(
                    f"policy: expected the output key(s) {show_all(keys)}, as at construction; "
                    f"{show_all(came - expected)} came in addition, "
                    f"{show_all(expected - came)} is missing"
                )
            values = [out.get(key) for key in keys]
            for place, function in finish:
                values[place] = function(values[place])
            return tuple(values)

        return act

    def _tensordict(self) -> TensorDict:
        """The current observation, copied: the policy may keep what it is given."""
        batch = [self._env.num_envs] if self._env.batched else []
        entries: dict[Any, Any] = {key: self._current[key].clone() for key in self.inputs}
        return TensorDict(entries, batch_size=batch)

    def _call_with(self, td: TensorDict) -> TensorDictBase:
        out = self.policy(td)
        if not isinstance(out, TensorDictBase):
            raise PolicyOutputError(
                f"policy: expected the TensorDict back, but a {type(out).__name__} came"
            )
        return out

    def _new_keys(self, out: TensorDictBase) -> list[Key]:
        keys: Iterable[Any] = out.keys(include_nested=True, leaves_only=True)
        return [key for key in map(as_key, keys) if key not in self._current]


def make_policy_runner(
    policy: Any,
    env: EnvBatch,
    current: Mapping[Key, torch.Tensor],
    rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
) -> PolicyRunner | RandomRunner:
    """A runner for a policy in any of the accepted forms.

    Args:
        policy: a TensorDictModuleBase; an nn.Module or callable over tensors, which returns the
            action(s); a callable that takes a TensorDict; None for random actions.
        env: whose leaves and batch shape the policy has to fit.
        current: one tensor per observation key, [*frame] for one env, [P, *frame] for a batch, that
            always holds the current observation: whoever collects writes into it. A first
            observation has to be there already.
        rng: for random actions, one or one per env; ignored where there is a policy.

    The policy is called once, on copies, with the interaction type that is set at the time, to
    learn its outputs; distributions of known kinds and chains of known layers are called more often
    to prove their fast forms. Random generators and buffers are put back. Training mode is left
    as it is.

    Raises ValueError, TypeError or NotImplementedError that name the key, what was expected and
    what came.
    """
    if policy is None:
        return RandomRunner(env, rng)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "policy: expected a TensorDictModule, an nn.Module, a callable or None, "
            f"but {policy!r} came"
        )
    return PolicyRunner(policy, env, current)


def _watched(program: Program) -> tuple[nn.Module, ...]:
    """The wrappers that were taken off, and the layers of what is, or might be, planned."""
    modules = list(program.watched)
    for step in program.steps:
        module = step.module if isinstance(step, CallStep) else None
        if module is not None and chain_of(module) is not None:
            modules.extend(module.modules())
    return tuple(dict.fromkeys(modules))


def _overlaps(key: Key, others: Iterable[Key]) -> bool:
    """True if the key is one of the others, or if one lies inside the other."""
    return any(key[: len(other)] == other[: len(key)] for other in others)


def _caster(leaf: Leaf, raw: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = torch_dtype(leaf.dtype)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not raw:
            raise PolicyOutputError(
                f"policy: {show(leaf.key)}: expected {raw}, as at construction, "
                f"but {tensor.dtype} came"
            )
        return tensor.to(dtype)

    return cast


def _equal(a: Any, b: torch.Tensor) -> bool:
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
