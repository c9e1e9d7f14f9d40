"""Workers that are alike: rows of one board, and the policy bound to some of them at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.layout import Key, dtype_name
from pycollect.inference.messages import FormedEnv, Joined, PolicyNeeds
from pycollect.inference.shared_io import ANSWER, Board, BoardForm
from pycollect.inference.states import StatesBeside
from pycollect.policy.calling import GraphPool
from pycollect.policy.runner import PolicyRunner, make_policy_runner
from pycollect.policy.signature import with_action_spec
from pycollect.policy.states import IS_INIT, STEP_COUNT


class ServedPolicy(NamedTuple):
    """The policy, and where it is called.

    Attributes:
        module: in any of the accepted forms.
        told: the caller named that device.
        graphs: Memory of its CUDA graphs, one for each number of rows. A call is complete on the
            host before the next one begins, but for copies that its stream makes.
    """

    module: Any
    device: torch.device
    told: bool
    graphs: GraphPool | None = None


class Group:
    """Workers that need the same of the policy. Their observations lie side by side on one board.

    Args:
        rows: workers that have room.
        first: the current observation of the one that came first, ``[P, *frame]`` by key.

    Raises:
        ValueError, TypeError: the policy does not fit, or does not take environments as a batch.
        NotImplementedError: what it keeps between calls cannot be kept for workers elsewhere.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        needs: PolicyNeeds,
        rows: int,
        first: Mapping[Key, torch.Tensor],
    ) -> None:
        self.needs = needs
        self._policy, self._rows = policy, rows
        self._row_of: dict[int, int] = {}  # by seat
        self._calls: dict[int, Call] = {}  # by the number of rows
        alike = {key: torch.cat([own] * rows) for key, own in first.items()}
        self._shape = self._runner(rows, alike)
        self._form = self._form_of(self._shape)
        self._board, self._memory = Board.shared(self._form)
        self._states: StatesBeside | None = None
        if _numbers_answers(self._shape):
            for key, own in first.items():  # the policy is called to learn its outputs
                self._board.read[key].copy_(own)
            runner, observed = self._bound(rows)
            self._states = StatesBeside(self._board, runner)
            self._calls[rows] = Call(runner, observed, self._board, self._states)

    def _runner(self, rows: int, current: Mapping[Key, torch.Tensor]) -> PolicyRunner:
        """The policy bound to observations of so many workers."""
        needs, (module, device, told, graphs) = self.needs, self._policy
        env = FormedEnv(needs.env, rows)
        runner = make_policy_runner(
            with_action_spec(module, env),
            env,
            current,
            policy_state=dict(needs.state_forms),
            counts_steps=needs.counts_steps,
            call_options=replace(needs.call_options.for_device(device), pool=graphs),
            device=device,
            explicit_device=told,
            cast=needs.cast,
            keeps_states=True,
        )
        _check_runner(runner)
        assert isinstance(runner, PolicyRunner)
        return runner

    def _form_of(self, runner: PolicyRunner) -> BoardForm:
        own = {IS_INIT: runner.is_init, STEP_COUNT: runner.step_count}
        numbers = [ANSWER] if _numbers_answers(runner) else []
        return BoardForm(
            read=(
                *self.needs.env.observation,
                *(state.leaf for state in runner.states),
                *numbers,
                *(Leaf(key, dtype_name(t.dtype), (1,)) for key, t in own.items() if t is not None),
            ),
            written=(
                *runner.outputs,
                *(state.next_leaf for state in runner.states),
                *numbers,
                *runner.through_env,
            ),
            rows=self._rows,
            envs=self.needs.env.num_envs,
        )

    def has_room(self, seat: int) -> bool:
        """Whether a worker can have a row here: a new one, or that of whom it replaces."""
        return seat in self._row_of or len(self._row_of) < self._rows

    def join(self, seat: int) -> Joined:
        """Give a worker its row."""
        row = self._row_of[seat] = self._row_for(seat)
        address, runner = self._memory.address, self._shape
        assert address is not None, "memory: expected shared memory"
        return Joined(
            address,
            self._form,
            row,
            runner.inputs,
            runner.outputs,
            tuple((state.leaf, state.initial.to(CPU)) for state in runner.states),
            runner.through_env,
            tuple(leaf.key for leaf in self._form.read if leaf.key in (IS_INIT, STEP_COUNT)),
            numbered=self._states is not None,
        )

    def _row_for(self, seat: int) -> int:
        """Its own, whoever comes first: what the policy draws for a worker depends on its row."""
        if seat in self._row_of:
            return self._row_of[seat]
        free = [row for row in range(self._rows) if row not in self._row_of.values()]
        return seat if seat in free else free[0]

    def leave(self, seat: int) -> None:
        """A worker needs no row here any more."""
        self._row_of.pop(seat, None)

    def refresh(self) -> None:
        """Look whether the policy has changed, before the next calls."""
        for call in self._calls.values():
            call.runner.refresh(1)

    def call(self, seats: Sequence[int]) -> None:
        """Call the policy once, for these workers."""
        rows = sorted(self._row_of[seat] for seat in seats)
        call = self._calls.get(len(rows))
        if call is None:
            call = self._calls[len(rows)] = self._call_for(len(rows))
        call(rows)

    def _call_for(self, rows: int) -> Call:
        return Call(*self._bound(rows), self._board, self._states)

    def _bound(self, rows: int) -> tuple[PolicyRunner, dict[Key, torch.Tensor]]:
        """The policy for so many workers, and what it reads; for all of them it is the board."""
        keys = [leaf.key for leaf in self.needs.env.observation]
        observed = {key: self._board.read[key].flatten(0, 1) for key in keys}
        if rows < self._rows:
            count = rows * self.needs.env.num_envs
            observed = {key: own[:count].clone() for key, own in observed.items()}
        return self._runner(rows, observed), observed


class Call:
    """The policy's call for a number of workers: gathered from the board, called, written there.

    Args:
        runner: bound to the tensors of `observed`, which are all of the board's, or memory of its
            own for fewer.
        states: where they are kept on the policy's device; None: they are read from the board.
    """

    def __init__(
        self,
        runner: PolicyRunner,
        observed: Mapping[Key, torch.Tensor],
        board: Board,
        states: StatesBeside | None,
    ) -> None:
        self.runner = runner
        self._states = states
        own: dict[Key, torch.Tensor | None] = {
            **observed,
            IS_INIT: runner.is_init,
            STEP_COUNT: runner.step_count,
        }
        if states is None:
            own.update((state.leaf.key, state.current) for state in runner.states)
        self._copied = [
            (source, target)
            for key, source in board.read.items()
            if (target := own.get(key)) is not None and target.data_ptr() != source.data_ptr()
        ]
        self._written = [own for key, own in board.written.items() if key != ANSWER.key]
        self._rows = self._written[0].shape[0]

    def __call__(self, rows: Sequence[int]) -> None:
        """Call it for these rows of the board, in their order."""
        runner, count = self.runner, len(rows)
        index = None if count == self._rows else torch.tensor(rows, device=CPU)
        for source, target in self._copied:
            if index is None:
                target.copy_(source.flatten(0, 1))
            else:
                torch.index_select(source, 0, index, out=target.view(count, *source.shape[1:]))
        if self._states is not None:
            self._states.load(rows, runner)
        runner.forget()  # what one worker's policy noted is not for the next one's
        outs = runner.act()
        for out, target in zip(outs, self._written, strict=True):
            rows_of_out = out.view(count, *target.shape[1:])
            if index is None:
                target.copy_(rows_of_out)
            else:
                target.index_copy_(0, index, rows_of_out.to(target.dtype))
        if self._states is not None:
            self._states.store(rows, runner)


def _numbers_answers(runner: PolicyRunner) -> bool:
    """Whether states lie beside the policy, so that it has to be said what they follow from."""
    return runner.keeps_states and bool(runner.states)


def _check_runner(runner: Any) -> None:
    """Refuse policies that cannot act for several workers."""
    if not isinstance(runner, PolicyRunner):
        raise ValueError(
            "inference: 'central' needs a policy that reads observations, but this one draws "
            "random actions; use inference=None"
        )
    if runner.extra_outputs:
        names = [extra.key for extra in runner.extra_outputs]
        raise NotImplementedError(
            f"inference: 'central' needs a policy that returns tensors, but {names} hold other "
            "data; use inference=None"
        )
    if runner.has_random_states:
        raise NotImplementedError(
            "inference: 'central' needs the same initial state for every trajectory, but the "
            "policy's primer draws it at random; use inference=None"
        )
