"""PolicyRunner: any accepted policy as one call per step, `act()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from pycollect._core import Leaf
from pycollect.devices import CPU
from pycollect.envs.base import EnvBatch
from pycollect.extras import Extra, ExtraValues, Kind
from pycollect.extras_delivery import read_values, with_current
from pycollect.layout import Key, is_delivered, torch_dtype
from pycollect.policy.assemble import Samples, assemble, run_plainly
from pycollect.policy.calling import AS_IT_IS, Calling
from pycollect.policy.crossing import Crossing
from pycollect.policy.modules import unwrap
from pycollect.policy.outputs import (
    check_inputs,
    check_output_keys,
    output_leaves,
)
from pycollect.policy.own_entries import IS_INIT, STEP_COUNT, OwnEntries
from pycollect.policy.plan import Fingerprint, chain_of
from pycollect.policy.random_runner import RandomRunner
from pycollect.policy.states import Form, PolicyState, StateForms
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
from pycollect.policy.weights import check_on_device
from pycollect.policy.wrap import wants_tensordict, wrap

Act: TypeAlias = Callable[[], tuple[torch.Tensor, ...]]
Finishers: TypeAlias = list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]

_MOST_TRIES = 64  # of the forms that the states may have


class PolicyRunner:
    """A policy bound to the tensors that hold the current observation.

    Use, for every rollout: `refresh(steps)`, then `act = runner.act`, then `act()` once per step,
    under `torch.no_grad()` and `set_interaction_type(...)`.

    Attributes:
        outputs: the leaves that are recorded, those of the action among them, with the dtypes and
            shapes of one frame of one env; fixed at construction.
        inputs: the observation keys that the policy reads.
        act: calls the policy on the current observation and returns one tensor per output, with the
            env's batch shape ([*frame] or [P, *frame]) and, for actions, the space's dtype, where
            the env asks for it. The tensors may be written again by the next call: copy what is to
            stay. May be another function after `refresh`.
        reuses_memory: True if `act` returns the very same tensors each time.
        slow_path: True if the policy is called with a TensorDict per step.
        states: what the policy passes on to its next call; `act` returns their next values, in this
            order, behind those of `outputs`.
        through_env: next values of states that are the env's own (see `passes_states_on`), with the
            keys ("next", ...); `act` returns them last, for the env alone.
        extra_outputs: what it returns without a fixed shape and numeric dtype, see `said`.
    """

    states: tuple[PolicyState, ...] = ()
    through_env: tuple[Leaf, ...] = ()
    extra_outputs: tuple[Extra, ...] = ()

    def __init__(
        self,
        policy: Any,
        env: EnvBatch,
        current: Mapping[Key, torch.Tensor],
        policy_state: Mapping[Any, Any] | None = None,
        extras: ExtraValues | None = None,
        counts_steps: bool = False,
        calling: Calling = AS_IT_IS,
        device: torch.device | None = None,
    ) -> None:
        self.policy = policy
        self._calling = calling
        device = CPU if device is None else device
        self._crossing = Crossing(device, CPU)
        self._env = env
        self._own = OwnEntries(env, counts_steps)
        self._current = {leaf.key: current[leaf.key] for leaf in env.observation}
        self._given = dict(self._current)
        self._private: dict[Key, Any] = {}  # what the policy, given a TensorDict, noted there last
        self._lead = (env.num_envs,) if env.batched else ()
        self._extras: ExtraValues = {} if extras is None else extras
        self._extra_keys = tuple(extra.key for extra in (*env.extras, *env.action_extras))
        nodes = (extra for extra in env.action_extras if extra.kind is Kind.NODE)
        self._taken = tuple(extra.key for extra in (*env.extras, *nodes))
        self._said: ExtraValues = {}
        self._watched: tuple[nn.Module, ...] = ()
        self._samples: Samples = {}
        self.outputs: tuple[Leaf, ...] = ()
        check_on_device(policy, device)
        with torch.no_grad():
            program = self._program()
            forms = self._state_forms(program, policy_state)
            program, values = self._probe_in_forms(program, forms)
            self.inputs = tuple(self._current)
            if program is not None:
                self.inputs = tuple(key for key in program.read if key in self._current)
            self._carried = {state.leaf.key: _source(state, values) for state in self.states}
            self.through_env = tuple(
                Leaf(("next", *leaf.key), leaf.dtype, leaf.shape)
                for leaf in env.observation
                if ("next", *leaf.key) in values
            )
            passed_on = {*self._carried.values(), *(leaf.key for leaf in self.through_env)}
            delivered = {
                key: value
                for key, value in values.items()
                if is_delivered(key) and key not in passed_on
            }
            check_output_keys((*delivered, *self._carried), env)
            self.outputs = output_leaves(delivered, env, device)
            self._raw = {key: _Raw.of(value) for key, value in values.items()}
            self._bind(program)

    @property
    def is_init(self) -> torch.Tensor | None:
        """Bool [1] or [P, 1], which the Recorder keeps true where a trajectory begins.

        None for a policy that does not read it.
        """
        return self._own.given.get(IS_INIT)

    @property
    def step_count(self) -> torch.Tensor | None:
        """Int64 [1] or [P, 1], in which the Recorder counts the steps of each trajectory.

        None for a policy that does not read it.
        """
        return self._own.given.get(STEP_COUNT)

    def refresh(self, steps: int) -> None:
        """To be called before each rollout of at most `steps` steps.

        Looks whether the policy is still what it was taken for (parameters, hooks, layers, training
        mode) and builds `act` anew if not. Raises ValueError if its output keys have changed.
        """
        if self._fingerprint.still_true(self._watched):
            return
        check_on_device(self.policy, self._crossing.there)
        with torch.no_grad():
            self._bind(self._program())

    def forget(self) -> None:
        """Drop what the policy noted for its next call under keys that begin with "_"."""
        self._private = {}

    def _program(self) -> Program | None:
        """The policy taken apart, None where it is to be called with a TensorDict."""
        policy = self.policy
        if wants_tensordict(policy):
            try:
                if not isinstance(policy, TensorDictModuleBase):
                    return None
                program = unwrap(policy)
            except CannotUnwrapError:
                return None
            if any(_holds(key, self._current) for key in program.read):
                return None  # it reads a part of the TensorDict that is no leaf
            if any(_overlaps(key, self._extra_keys) for key in (*program.read, *program.written)):
                return None
        else:
            keys = [leaf.key for leaf in self._env.observation]
            program = wrap(policy, keys, [leaf.key for leaf in self._env.action])
        return program

    def _state_forms(
        self, program: Program | None, policy_state: Mapping[Any, Any] | None
    ) -> dict[Key, Sequence[Form]]:
        """The states with their possible forms, after a check of all keys; gives own entries."""
        read, written = self._keys_of(program)
        forms = StateForms(self.policy, self._env, policy_state).find(read, written, self._env)
        nexts = {("next", *key) for key in forms}
        self._check_written(key for key in written if key not in nexts)
        known = (*self._current, *forms)
        asked = [*(read or ()), *([IS_INIT] if _asks_for_is_init(self.policy) else [])]
        for key in asked:
            if self._own.offers(key) and not _overlaps(key, known):
                self._given[key] = self._own.give(key)
        if program is None:  # what it reads may be a part of the TensorDict, or its own output
            read = [key for key in read or () if not _overlaps(key, (*known, *written))]
        others = (key for key in read or () if not _overlaps(key, self._extra_keys))
        check_inputs((key for key in others if key not in (*forms, *self._own.given)), self._env)
        return forms

    def _check_written(self, keys: Iterable[Key]) -> None:
        check_output_keys((key for key in keys if not self._is_envs(key)), self._env)

    def _is_envs(self, key: Key) -> bool:
        """True for the next value of a state that the env itself passes on."""
        return self._env.passes_states_on and key[0] == "next" and key[1:] in self._current

    def _keys_of(self, program: Program | None) -> tuple[Sequence[Key] | None, Sequence[Key]]:
        """What the policy reads and writes; a policy that does not say what it reads: None."""
        if program is not None:
            return program.read, program.written
        policy = self.policy
        if not (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
            return None, ()
        return [as_key(key) for key in policy.in_keys], [as_key(key) for key in policy.out_keys]

    def _probe_in_forms(
        self, program: Program | None, forms: Mapping[Key, Sequence[Form]]
    ) -> tuple[Program | None, Values]:
        """Call the policy, with its states in each of their forms until one fits.

        Returns the program, None if it turned out that it needs a TensorDict, and its outputs.
        """
        tries = list(islice(product(*forms.values()), _MOST_TRIES))
        failure: Exception | None = None
        for choice in tries:
            self._give_states(dict(zip(forms, choice, strict=True)))
            try:
                return self._probe_either(program)
            except Exception as error:
                if len(tries) == 1:
                    raise
                failure = failure or error
        raise ValueError(
            f"policy: the shape of its state(s) {show_all(forms)} was not found; with "
            f"{[list(form.shape) for form in tries[0]]} it came to this: {failure}; "
            "give policy_state={key: shape}"
        ) from failure

    def _give_states(self, forms: Mapping[Key, Form]) -> None:
        self.states = tuple(form.state(key, self._env) for key, form in forms.items())
        self._given.update({state.leaf.key: state.current for state in self.states})
        drawn = [form.draw is not None for form in forms.values()]
        pairs = zip(forms.values(), self.states, strict=True)
        self._redrawn = [pair for pair, again in zip(pairs, drawn, strict=True) if again]

    def _probe_either(self, program: Program | None) -> tuple[Program | None, Values]:
        values = None if program is None else self._probe(program)
        if values is None:
            program, values = None, self._probe_with_tensordict()
        for state in self.states:
            _check_next(state, values[_source(state, values)])
        return program, values

    def _probe(self, program: Program) -> Values | None:
        """Call every step once, plainly. None if something came that only a TensorDict carries."""
        fresh = {key: self._crossing.over(tensor) for key, tensor in self._given.items()}
        try:
            with self._undisturbed():
                self._samples, values = run_plainly(program, fresh)
        except CannotUnwrapError:
            return None
        return {key: values[key] for key in (*program.written, *self._unwritten(program.written))}

    def _unwritten(self, written: Iterable[Key]) -> list[Key]:
        """States that the policy reads and does not write: they stay as they are."""
        keys = [state.leaf.key for state in self.states if state.next_key not in written]
        return [key for key in keys if key not in written]

    def _probe_with_tensordict(self) -> Values:
        while True:
            try:
                return self._outputs_with_tensordict()
            except KeyError as error:  # it did not say that it reads it
                missing = self._own.missing(error)
                if missing is None or _overlaps(missing, self._given):
                    raise
            self._given[missing] = self._own.give(missing)

    def _outputs_with_tensordict(self) -> Values:
        with self._undisturbed():
            td = self._tensordict()
            given = td.clone()
            out = _called(self.policy, td)
        for leaf in self._env.observation:
            came = out.get(leaf.key, None)
            if came is not None and not _equal(came, given[leaf.key]):
                raise ValueError(
                    f"policy: it writes {show(leaf.key)}, which is the environment's; "
                    "use another key"
                )
        entries = {key: _entry(out, key) for key in self._new_keys(out)}
        values = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
        self.extra_outputs = self._extras_among(entries)
        self._check_passed_on((*values, *(extra.key for extra in self.extra_outputs)))
        values.update({key: out.get(key) for key in self._unwritten(values)})
        return values

    def _extras_among(self, entries: Mapping[Key, Any]) -> tuple[Extra, ...]:
        """The outputs that are no leaves: objects, tensors of changing shapes, parts of nodes."""
        extras = [
            Extra(key, Kind.OBJECT if value is not None else Kind.RAGGED)
            for key, value in entries.items()
            if not isinstance(value, torch.Tensor) and is_delivered(key)
        ]
        keys = {extra.key for extra in extras}
        odd = [leaf.key for leaf in self._env.action if leaf.key in keys]
        if odd:
            raise ValueError(f"policy: expected tensors, but {show_all(odd)} hold other data")
        nodes = [extra for extra in self._env.action_extras if extra.kind is Kind.NODE]
        own = [extra.key for extra in self._env.action_extras if extra.kind is not Kind.NODE]
        missing = [key for key in own if key not in entries]
        if missing:
            raise ValueError(
                f"policy: it returns no {show_all(missing)}, which the environment needs; "
                f"it returns {show_all(entries)}"
            )
        return (*extras, *nodes)

    def _check_passed_on(self, written: Iterable[Key]) -> None:
        """Check what the policy writes; a state that it did not announce would be lost silently."""
        nexts = {state.next_key for state in self.states}
        others = [key for key in written if key not in nexts and not self._is_envs(key)]
        check_output_keys(others, self._env)
        unknown = [key for key in others if key[0] == "next"]
        if unknown and not hasattr(self.policy, "in_keys"):
            raise ValueError(
                f"policy: it writes {show(unknown[0])} and does not say whether it reads "
                f"{show(unknown[0][1:])}: give policy_state={{{show(unknown[0][1:])}: shape}}, or "
                "the policy in_keys and out_keys"
            )

    def _bind(self, program: Program | None) -> None:
        """Make `act` for the program, and remember what it rests on."""
        self.slow_path = program is None
        self.reuses_memory = False
        self._watched = () if program is None else _watched(program)
        self._fingerprint = Fingerprint(self._watched)
        finish = self._finishers()
        if program is None:
            self.act: Act = self._slow_act(finish)
            if self._redrawn:
                self.act = self._redrawing(self.act)
            return
        known = {*self.inputs, *self._carried, *self._own.given}
        unread = [key for key in program.read if key not in known]
        if unread:
            raise PolicyOutputError(
                f"policy: it read {show_all(known)} at construction, now also {show_all(unread)}"
            )
        wanted = self._wanted()
        written = {key for key in program.written if is_delivered(key) or key in wanted}
        written.update(key for key in self._carried.values() if key in self._carried)
        if set(wanted) != written:
            raise PolicyOutputError(
                f"policy: it returned {show_all(wanted)} at construction, now {show_all(written)}"
            )
        given = {key: self._given[key] for key in program.read}
        crosses = self._crossing.is_needed(given.values())
        given = self._crossing.mirrors(given) if crosses else given
        with self._undisturbed():
            act, self.reuses_memory = assemble(
                self._calling.of_program(program), given, wanted, self._samples, finish
            )
        self.act = self._crossing.around(act) if crosses else act
        if self._redrawn:
            self.act = self._redrawing(self.act)

    def _undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed(self.policy, self._crossing.there)

    def _wanted(self) -> list[Key]:
        """What `act` returns: outputs, then the states' next values, then what the env takes."""
        outputs = (leaf.key for leaf in self.outputs)
        return [*outputs, *self._carried.values(), *(leaf.key for leaf in self.through_env)]

    def _finishers(self) -> Finishers:
        """What is done to single outputs after each call: actions cast, parameters detached.

        A state that the policy does not write is copied, as it is the memory that is written next.
        """
        finish: Finishers = []
        for place, leaf in enumerate(self.outputs):
            raw = self._raw[leaf.key]
            if raw.requires_grad:
                finish.append((place, torch.Tensor.detach))
            if raw.lazy:
                finish.append((place, _resolve))
            if raw.dtype is not torch_dtype(leaf.dtype):
                finish.append((place, _caster(leaf, raw.dtype)))
        for place, (key, source) in enumerate(self._carried.items(), len(self.outputs)):
            if key == source:
                finish.append((place, torch.Tensor.clone))
            elif self._raw[source].requires_grad:
                finish.append((place, torch.Tensor.detach))
        return finish

    def _redrawing(self, act: Act) -> Act:
        """Also draw anew how the states of the next trajectories begin."""

        def act_and_draw() -> tuple[torch.Tensor, ...]:
            outs = act()
            for form, state in self._redrawn:
                state.initial.copy_(form.drawn(self._env))
            return outs

        return act_and_draw

    def _slow_act(self, finish: Finishers) -> Act:
        keys = self._wanted()
        expected = {key for key in keys if key not in self._carried}
        expected.update(extra.key for extra in self.extra_outputs if extra.kind is not Kind.NODE)
        policy = self._calling.of_whole(self.policy)
        crosses = self._crossing.is_needed(self._given.values())

        def act() -> tuple[torch.Tensor, ...]:
            out = _called(policy, self._tensordict().update(self._private))
            new = self._new_keys(out)
            self._private = {key: out.get(key) for key in new if not is_delivered(key)}
            came = {key for key in new if is_delivered(key) or key in expected}
            if came != expected:
                raise PolicyOutputError(
                    f"policy: expected the output key(s) {show_all(keys)}, as at construction; "
                    f"{show_all(came - expected)} came in addition, "
                    f"{show_all(expected - came)} is missing"
                )
            self._said = read_values(out, self.extra_outputs, self._lead)
            values = [out.get(key) for key in keys]
            for place, function in finish:
                values[place] = function(values[place])
            return self._crossing.back(values) if crosses else tuple(values)

        return act

    def _tensordict(self) -> TensorDictBase:
        """The current observation, copied: the policy may keep what it is given."""
        batch = self._lead
        over, there = self._crossing.over, self._crossing.there
        entries: dict[Any, Any] = {key: over(tensor) for key, tensor in self._given.items()}
        device = None if there.type == "cpu" else there
        td: TensorDictBase = TensorDict(entries, batch_size=batch, device=device)
        for key, node in self._env.nodes.items():
            if node.shape and td.get(key, None) is not None:
                td.get(key).batch_size = torch.Size([*batch, *node.shape])
        if self._extras:
            td = with_current(td, self._extras, self._env.extras, self._lead)
        return td

    def _new_keys(self, out: TensorDictBase) -> list[Key]:
        keys: Iterable[Any] = out.keys(include_nested=True, leaves_only=True, is_leaf=_is_leaf)
        new = (key for key in map(as_key, keys) if key not in self._given)
        return [key for key in new if not any(key[: len(own)] == own for own in self._taken)]

    def said(self) -> ExtraValues:
        """The extra outputs of the last call of `act`, a value per env."""
        return self._said


class _Raw(NamedTuple):
    """What an output was like when the policy was first called.

    Attributes:
        lazy: torch negates or conjugates it only when it is read.
    """

    dtype: torch.dtype
    requires_grad: bool
    lazy: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> _Raw:
        return cls(value.dtype, value.requires_grad, value.is_neg() or value.is_conj())


def _called(policy: Any, td: TensorDictBase) -> TensorDictBase:
    out = policy(td)
    if not isinstance(out, TensorDictBase):
        raise PolicyOutputError(
            f"policy: expected the TensorDict back, but a {type(out).__name__} came"
        )
    return out


def _resolve(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().resolve_neg()


def _entry(td: TensorDictBase, key: Key) -> Any:
    """The entry; None for one whose tensors differ in shape."""
    try:
        return td.get(key)
    except RuntimeError:
        return None


def _is_leaf(kind: type) -> bool:
    """Tensors, and what is no tensor at all, which has to be seen to be refused."""
    return issubclass(kind, torch.Tensor) or bool(getattr(kind, "_is_non_tensor", False))


def make_policy_runner(
    policy: Any,
    env: EnvBatch,
    current: Mapping[Key, torch.Tensor],
    rng: np.random.Generator | Sequence[np.random.Generator] | None = None,
    policy_state: Mapping[Any, Any] | None = None,
    extras: ExtraValues | None = None,
    counts_steps: bool = False,
    calling: Calling = AS_IT_IS,
    device: torch.device | None = None,
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
        policy_state: shapes of one env, or first values, of the policy's states by key, for those
            that neither a primer nor an RNN layer of the policy tells.
        extras: the current observation's, kept up to date like `current`.
        counts_steps: whoever collects counts the steps of each trajectory in `step_count`.
        calling: whether its modules are compiled or captured.
        device: where its parameters lie; None: on the CPU, where what `act` returns lies.

    The policy is called once, on copies, with the interaction type that is set at the time, to
    learn its outputs; distributions of known kinds and chains of known layers are called more often
    to prove their fast forms. Random generators and buffers are put back. Training mode is left
    as it is.

    Raises ValueError, TypeError or NotImplementedError that name the key, what was expected and
    what came.
    """
    if policy is None:
        if policy_state:
            raise ValueError("policy_state: expected a policy with states, but policy is None")
        return RandomRunner(env, rng)
    if not callable(policy) or isinstance(policy, type):
        raise TypeError(
            "policy: expected a TensorDictModule, an nn.Module, a callable or None, "
            f"but {policy!r} came"
        )
    return PolicyRunner(policy, env, current, policy_state, extras, counts_steps, calling, device)


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


def _holds(key: Key, leaves: Iterable[Key]) -> bool:
    """True if a leaf lies inside the key."""
    return any(len(leaf) > len(key) and leaf[: len(key)] == key for leaf in leaves)


def _asks_for_is_init(policy: Any) -> bool:
    """True if a module names it apart from its in_keys, as TorchRL's noise processes do."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(getattr(module, "is_init_key", None) == IS_INIT[0] for module in modules)


def _source(state: PolicyState, values: Mapping[Key, torch.Tensor]) -> Key:
    """Where a state's next value is found; one that is not written stays as it is."""
    return state.next_key if state.next_key in values else state.leaf.key


def _check_next(state: PolicyState, value: torch.Tensor) -> None:
    given = state.current
    if value.shape != given.shape or value.dtype != given.dtype:
        raise ValueError(
            f"policy: its state {show(state.leaf.key)} was given as {given.dtype} "
            f"{list(given.shape)} and came back as {value.dtype} {list(value.shape)}; "
            "expected the same"
        )


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
