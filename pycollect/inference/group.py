"""Groups of clients with the same needs: the policy bound to their rows, and its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from pycollect._core import Leaf
from pycollect.data.devices import CPU
from pycollect.data.layout import Key, dtype_name, show_all, signed_view
from pycollect.inference.client import ANSWER, FRESH, IOLayout, JoinReply, SharedIO
from pycollect.policy.calling import GraphPool
from pycollect.policy.remote import PolicyNeeds
from pycollect.policy.runner import PolicyRunner
from pycollect.policy.signature import with_action_spec
from pycollect.policy.states import IS_INIT, STEP_COUNT


class ServedPolicy(NamedTuple):
    """The policy of an inference server, and its device.

    Attributes:
        module: The policy in any of the accepted forms.
        device: Device on which the policy is called.
        explicit: Whether the caller named that device.
        graphs: Memory of its CUDA graphs, one for each number of rows. Each call is complete on the
            host before the next one begins, except copies that its stream makes.
    """

    module: Any
    device: torch.device
    explicit: bool
    graphs: GraphPool | None = None


class KeptValues(NamedTuple):
    """Values that a call of the policy wrote for the next call of one client."""

    values: Mapping[Key, torch.Tensor]  # of all rows of that call, ``[rows * P, *value]`` by key
    place: int  # position of the client in that call
    rows: int  # number of rows in that call


def _joined(kept: Sequence[KeptValues], envs: int) -> Mapping[Key, torch.Tensor]:
    """Return the values of several clients with P = `envs`, joined in the order of the clients."""
    if not kept:
        return {}
    first = kept[0]
    each = enumerate(kept)
    if len(kept) == first.rows and all(
        own.values is first.values and own.place == place for place, own in each
    ):
        return first.values
    return {
        key: torch.cat([own.values[key][own.place * envs :][:envs] for own in kept])
        for key in first.values
        if all(key in own.values for own in kept)
    }


class PolicyGroup:
    """At most `rows` clients with equal needs, as rows of one `SharedIO`.

    `first` is the current observation of the first client, ``[P, *frame]`` by key.
    """

    def __init__(
        self, policy: ServedPolicy, needs: PolicyNeeds, rows: int, first: Mapping[Key, torch.Tensor]
    ) -> None:
        self.needs = needs
        self._policy, self._rows = policy, rows
        self._row_of: dict[int, int] = {}  # by client
        self._calls: dict[int, Call] = {}  # by number of rows
        repeated = {key: torch.cat([tensor] * rows) for key, tensor in first.items()}
        self._full = self._runner(rows, repeated)
        self._layout = self._layout_of(self._full)
        self._io, self._memory = SharedIO.shared(self._layout)
        self._fresh = self._io.read[FRESH.key].numpy()  # [rows, P, 1]
        self._kept: dict[int, KeptValues] = {}  # by row
        self._states: ServerStates | None = None
        if _numbers_answers(self._full):
            for key, tensor in first.items():  # making a runner calls the policy on them
                self._io.read[key].copy_(tensor)
            runner, observed = self._bound(rows)
            self._states = ServerStates(self._io, runner)
            self._calls[rows] = Call(runner, observed, self._io, self._states)

    def _runner(self, rows: int, current: Mapping[Key, torch.Tensor]) -> PolicyRunner:
        """Return the policy bound to the observations of this number of clients."""
        needs, (module, device, explicit, graphs) = self.needs, self._policy
        rows_of_all = (rows * needs.env.num_envs,)
        env = replace(needs.env, batch_size=rows_of_all, extras=(), step_extras=())
        policy = with_action_spec(module, env)
        if policy is None:
            raise ValueError(
                "inference: 'central' needs a policy that reads observations, but this one draws "
                "random actions; use inference=None"
            )
        try:
            call_options = replace(needs.call_options.for_device(device), pool=graphs)
            runner = PolicyRunner(
                policy,
                replace(needs, env=env, call_options=call_options),
                current,
                device=device,
                explicit_device=explicit,
                keeps_states=True,
            )
        except Exception as error:
            unsent = [extra.key for extra in needs.env.extras]
            if not unsent:
                raise
            raise ValueError(
                f"policy: the first call failed. With inference='central', it does not receive "
                f"{show_all(unsent)}, because only tensors of fixed shapes are sent to the policy; "
                f"use inference=None if it reads them: {error}"
            ) from error
        _check_outputs(runner)
        return runner

    def _layout_of(self, runner: PolicyRunner) -> IOLayout:
        numbers = [ANSWER] if _numbers_answers(runner) else []
        return IOLayout(
            read=(
                *self.needs.env.observation,
                *(state.leaf for state in runner.states),
                *numbers,
                FRESH,
                *(
                    Leaf(key, dtype_name(tensor.dtype), (1,))
                    for key, tensor in _collector_entries(runner).items()
                ),
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

    def has_room(self, client: int) -> bool:
        """Return whether a client has a row here or can get one."""
        return client in self._row_of or len(self._row_of) < self._rows

    def join(self, client: int) -> JoinReply:
        if client not in self._row_of:  # whatever the order of arrival: draws depend on the row
            free = [row for row in range(self._rows) if row not in self._row_of.values()]
            self._row_of[client] = client if client in free else free[0]
        row = self._row_of[client]
        address, runner = self._memory.address, self._full
        assert address is not None, "memory: expected shared memory"
        return JoinReply(
            address,
            self._layout,
            row,
            runner.inputs,
            runner.outputs,
            tuple((state.leaf, state.initial.to(CPU)) for state in runner.states),
            runner.through_env,
            tuple(_collector_entries(runner)),
            numbered=self._states is not None,
        )

    def leave(self, client: int) -> None:
        self._row_of.pop(client, None)

    def refresh(self) -> None:
        for call in self._calls.values():
            call.runner.refresh(1)

    def call(self, clients: Sequence[int]) -> None:
        """Call the policy once for these clients.

        If it keeps values for its next call, clients for which it has none get a separate call.
        """
        rows = sorted(self._row_of[client] for client in clients)
        later = [row for row in rows if row in self._kept and not self._fresh[row].any()]
        if later:
            self._call_for(later, [self._kept[row] for row in later])
        if first := [row for row in rows if row not in later]:
            self._call_for(first, ())

    def _call_for(self, rows: Sequence[int], kept: Sequence[KeptValues]) -> None:
        """Call the policy once for these rows, with the values that were kept for each."""
        count = len(rows)
        if count not in self._calls:
            self._calls[count] = Call(*self._bound(count), self._io, self._states)
        call, envs = self._calls[count], self.needs.env.num_envs
        call.runner.kept = _joined(kept, envs)
        call(rows)
        values = {
            key: value.clone()
            for key, value in call.runner.kept.items()
            if isinstance(value, torch.Tensor) and value.shape[:1] == (count * envs,)
        }
        if values:
            self._fresh[rows] = False
            self._kept.update((row, KeptValues(values, n, count)) for n, row in enumerate(rows))

    def _bound(self, rows: int) -> tuple[PolicyRunner, dict[Key, torch.Tensor]]:
        """Return the policy bound to this number of clients, and the tensors that it reads.

        For all clients, these tensors are views of the shared memory.
        """
        keys = [leaf.key for leaf in self.needs.env.observation]
        observed = {key: self._io.read[key].flatten(0, 1) for key in keys}
        if rows < self._rows:
            count = rows * self.needs.env.num_envs
            observed = {key: tensor[:count].clone() for key, tensor in observed.items()}
        return self._runner(rows, observed), observed


class Call:
    """Gathers the rows of some clients, calls the policy, and writes its outputs to their rows.

    Args:
        runner: The policy bound to the tensors of `observed`.
        observed: Observations that the policy reads: views of the shared memory for all clients,
            otherwise separate tensors.
        states: Recurrent states on the policy's device; ``None`` if they are in shared memory.
    """

    def __init__(
        self,
        runner: PolicyRunner,
        observed: Mapping[Key, torch.Tensor],
        io: SharedIO,
        states: ServerStates | None,
    ) -> None:
        self.runner = runner
        self._states = states
        inputs = {**observed, **_collector_entries(runner)}
        if states is None:
            inputs.update((state.leaf.key, state.current) for state in runner.states)
        self._copied = [
            (signed_view(source), signed_view(target))
            for key, source in io.read.items()
            if (target := inputs.get(key)) is not None and target.data_ptr() != source.data_ptr()
        ]
        self._written = [signed_view(io.written[key]) for key in io.written if key != ANSWER.key]
        self._rows = self._written[0].shape[0]

    def __call__(self, rows: Sequence[int]) -> None:
        """Call the policy for these rows, in their order."""
        runner, count = self.runner, len(rows)
        index = None if count == self._rows else torch.tensor(rows, device=CPU)
        for source, target in self._copied:
            if index is None:
                target.copy_(source.flatten(0, 1))
            else:
                torch.index_select(source, 0, index, out=target.view(count, *source.shape[1:]))
        if self._states is not None:
            self._states.load(rows, runner)
        outs = runner.act()
        for out, target in zip(outs, self._written, strict=True):
            rows_of_out = out.view(count, *target.shape[1:])
            if index is None:
                target.copy_(rows_of_out)
            else:
                target.index_copy_(0, index, rows_of_out.to(target.dtype))
        if self._states is not None:
            self._states.store(rows, runner)


def _collector_entries(runner: PolicyRunner) -> dict[Key, torch.Tensor]:
    """Return `is_init` and `step_count` if the collector, not an environment, writes them."""
    entries = {IS_INIT: runner.is_init, STEP_COUNT: runner.step_count}
    return {key: tensor for key, tensor in entries.items() if tensor is not None}


def _numbers_answers(runner: PolicyRunner) -> bool:
    """Return whether states stay with the policy, so that answers need numbers."""
    return runner.keeps_states and bool(runner.states)


def _check_outputs(runner: PolicyRunner) -> None:
    """Raise an error for policies that cannot act for several workers."""
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


_MOST_INDEXES = 256  # cached on the device
_NONE = -1  # no answer has this number


class ServerStates:
    """Keeps recurrent states of a runner of all rows on the policy's device from call to call.

    Answers are numbered, and each environment sends the number of the answer that it continues
    from. If that is its last answer, its states are kept here. Otherwise they are read from shared
    memory: a trajectory has started, a step was interrupted, or the last actions were random.
    """

    def __init__(self, io: SharedIO, runner: PolicyRunner) -> None:
        self._kept = [state.current for state in runner.states]
        self._sent = [io.read[state.leaf.key] for state in runner.states]
        self._asked, self._answered = (side[ANSWER.key] for side in (io.read, io.written))
        rows, self._envs = self._asked.shape[:2]
        self._by_row = [kept.view(rows, self._envs, *kept.shape[1:]) for kept in self._kept]
        self._number = 0  # number of the last answer
        self._last = torch.full_like(self._asked, _NONE)
        send = self._send = runner.send
        self._device_index = lru_cache(_MOST_INDEXES)(lambda rows: send([_index(rows)])[0])

    def load(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Copy the states of the call's rows to the runner before the call.

        If this call or a later step is interrupted, the next call reads the states from shared
        memory.
        """
        index = _index(rows)
        others = self._asked[index] != self._last[index]
        self._last[index] = _NONE  # until the answer is written
        if others.any():
            self._read(index, others)
        if not self._are_kept(runner):
            device_index = self._device_index(tuple(rows))
            for kept, state in zip(self._by_row, runner.states, strict=True):
                value = kept.index_select(0, device_index)
                state.current.view_as(value).copy_(value)

    def _read(self, index: torch.Tensor, others: torch.Tensor) -> None:
        """Read the states of the marked environments (``[rows, P, 1]``) from shared memory."""
        places = others.squeeze(-1).nonzero()
        envs = index[places[:, 0]] * self._envs + places[:, 1]
        values = [sent.flatten(0, 1)[envs] for sent in self._sent]
        device_envs, *device_values = self._send([envs, *values])
        for kept, value in zip(self._kept, device_values, strict=True):
            kept.index_copy_(0, device_envs, value)

    def store(self, rows: Sequence[int], runner: PolicyRunner) -> None:
        """Keep the new states of the call's rows after its outputs were written."""
        if not self._are_kept(runner):
            device_index = self._device_index(tuple(rows))
            for kept, state in zip(self._by_row, runner.states, strict=True):
                value = state.current.view(len(rows), *kept.shape[1:])
                kept.index_copy_(0, device_index, value)
        self._number += 1
        self._last[list(rows)] = self._number
        self._answered[list(rows)] = self._number

    def _are_kept(self, runner: PolicyRunner) -> bool:
        """Return whether the runner reads and writes the kept states themselves."""
        return runner.states[0].current is self._kept[0]


def _index(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(rows, device="cpu")
