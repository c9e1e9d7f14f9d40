"""The compiled core of pycollect.

`_Array` stands for what the core can look into without a copy: a numpy array, a torch tensor,
anything else with the buffer protocol or `__dlpack__`. Where data is moved, the GIL is released.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, final

import numpy as np
import numpy.typing as npt

_Array: TypeAlias = Any
_Key: TypeAlias = tuple[str, ...]
_Address: TypeAlias = tuple[int, int, int, int, int]
_Tensor = TypeVar("_Tensor")

__version__: str

@final
class Leaf:
    """One tensor of a frame; immutable.

    Attributes:
        key: its path in a batch, at least one name.
        dtype: "bool", "uint8", "int8", ..., "float16", "bfloat16", "float32", ..., "complex128".
        shape: of one frame of one env.

    Raises:
        ValueError: an unknown dtype, or more than 16 dimensions.
        TypeError: a key that is not a tuple of strings.
    """

    def __init__(self, key: _Key, dtype: str, shape: Sequence[int]) -> None: ...
    @property
    def key(self) -> _Key: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Layout:
    """The ordered leaves of a batch; immutable.

    Attributes:
        fingerprint: equal for equal leaves in equal order, on every machine.

    Raises:
        ValueError: no leaf, an empty key, a key twice, or a key inside another.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None: ...
    @property
    def leaves(self) -> list[Leaf]: ...
    @property
    def fingerprint(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Placement:
    """Where the leaves of a layout lie in a slab of B workers, P envs and T steps; immutable.

    The order in memory is [B, P, T] ("stack") or [P, B, T] ("time").

    Raises:
        ValueError: an extent below 1, another order, or a size past 64 bits.
    """

    def __init__(
        self, layout: Layout, workers: int, envs: int, steps: int, order: str = "stack"
    ) -> None: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def bytes(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def envs(self) -> int: ...
    @property
    def steps(self) -> int: ...

@final
class RolloutHeader:
    """What a rollout says of itself, after it was checked against its placement.

    Attributes:
        incarnation: how many times the worker was replaced.
        sequence: of the rollout within the incarnation, from 0.
        frames: collected ones; uncollected cells are not counted.
        generation: of the slab when it was lent for this rollout.
    """

    @property
    def worker(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def policy_version(self) -> int: ...
    @property
    def envs(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def generation(self) -> int: ...

@final
class Slab:
    """A lease of one batch's memory. The memory goes back to its pool when the last view is gone.

    Attributes:
        generation: the how many-th lending of this memory it is, from 1.
        memory: what it lies in, which others may hold too.
    """

    @property
    def placement(self) -> Placement: ...
    @property
    def bytes(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def memory(self) -> Memory: ...
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it, headers included, writable; the array holds the slab."""

    def header(self, row: int = 0) -> RolloutHeader:
        """The checked header of that worker's rollout.

        Raises:
            ValueError: the first number in it that does not fit.
            IndexError: there is no such row.
        """

    def lengths(self, row: int = 0) -> list[int]:
        """The valid lengths of that rollout, one per env: fewer than T where it was stopped."""

    def tensors(
        self, batch_shape: Sequence[int], tensor_type: type[_Tensor]
    ) -> tuple[_Tensor, ...]:
        """One contiguous tensor per leaf, [*batch_shape, *frame]; each holds the slab.

        Args:
            batch_shape: of as many frames as the slab has.
            tensor_type: torch.Tensor, which the core does not import by itself.
        """

@final
class PoolStats:
    """How many blocks of memory a pool took so far, has lent now, and holds free."""

    @property
    def created(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def free(self) -> int: ...

@final
class SlabPool:
    """Lends slabs of one placement. Thread-safe.

    Args:
        max_free: how many blocks are kept for reuse.
        poison: fill each block with 0xA5 when it comes back.
        allocate: gives memory, an array of so many bytes that is aligned to 64, which is held as
            long as it is used; None: private memory.

    Raises:
        ValueError: `max_free` below 0, or, when memory is taken, memory that is not aligned.
    """

    def __init__(
        self,
        placement: Placement,
        max_free: int,
        poison: bool = False,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None: ...
    def acquire(self) -> Slab:
        """A free slab, or fresh memory where none is free; its contents are whatever was there."""

    @property
    def placement(self) -> Placement: ...
    def stats(self) -> PoolStats: ...

@final
class MemoryPool:
    """Lends slabs of any placement over memory that is used again. Thread-safe.

    Args:
        max_free: how many blocks are kept; when one more comes back, the oldest goes.
        poison: fill each block with 0xA5 when it comes back.
    """

    def __init__(self, max_free: int, poison: bool = False) -> None: ...
    def acquire(self, placement: Placement) -> Slab: ...
    def stats(self) -> PoolStats: ...

class SharedMemoryError(RuntimeError):
    """The system does not permit shared memory here, or not between these two processes."""

def shared_memory_why_not() -> str:
    """Why this process cannot share memory with its workers; empty where it can.

    It tries one page. A worker can still find that it may not: `Memory.attach` raises then.
    """

def available_memory() -> tuple[int, str]:
    """How many bytes can still be taken, and whose limit that is: "MemAvailable", for one.

    The least of what the machine has available, what memory cgroups leave, and this process's
    limits.
    """

@final
class Memory:
    """A block of host memory; where it is shared, other processes of the same user can attach it.

    Attributes:
        address: (pid, fd, inode, offset, bytes), where another process finds it; None for memory
            that is not shared.
    """

    @staticmethod
    def share(bytes: int) -> Memory:
        """New shared memory without a name, zeroed and touched.

        Raises:
            SharedMemoryError: it is not permitted here.
            ValueError: memory cannot hold it; with both numbers.
        """

    @staticmethod
    def attach(address: _Address) -> Memory:
        """Another process's shared memory, mapped here until its last holder lets go.

        Raises:
            SharedMemoryError: it cannot be opened, or its creator has let it go.
        """

    @property
    def bytes(self) -> int: ...
    @property
    def address(self) -> _Address | None: ...
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it, writable; the array holds the memory."""

    def slab(self, placement: Placement, generation: int) -> Slab:
        """This memory seen as a slab that another process has lent; its end recycles nothing.

        Raises:
            ValueError: the memory is smaller than the placement.
        """

@final
class SharedSlabPool:
    """Shared slabs that workers write and users get. Thread-safe.

    If all slabs are lent, the pool adds one.

    Args:
        working: slabs for the workers, at least 1.
        spare: slabs that may be the user's at a time; past that, batches are delivered as copies.
        poison: fill each block with 0xA5 when it comes back.

    Attributes:
        copied: how many batches were delivered as private copies.

    Raises:
        SharedMemoryError: shared memory is not permitted here.
        ValueError: memory cannot hold the slabs; with both numbers.
    """

    def __init__(
        self, placement: Placement, working: int, spare: int, poison: bool = False
    ) -> None: ...
    def acquire(self) -> Slab:
        """Return a free slab, or a new one if all are lent. Its contents are undefined.

        Raises:
            ValueError: memory cannot hold the new slab; with both numbers.
            CudaError: the slabs are pinned, and the driver does not register the new one.
        """

    def pin(self, device: int) -> None:
        """Have a CUDA device read the slabs where they are, until pool and slabs are gone.

        Before the first slab is lent.

        Raises:
            ValueError: there is no such device.
            CudaError: the driver does not register the memory, which stays as it was.
        """

    def deliver(self, slab: Slab) -> Slab:
        """That slab for the user to keep, or a private copy where too few would remain.

        Raises:
            ValueError: a slab that this pool has not lent.
        """

    @property
    def placement(self) -> Placement: ...
    @property
    def copied(self) -> int: ...
    def stats(self) -> PoolStats: ...

@final
class SharedNumber:
    """A number from 0 on that other threads, and the processes that share its memory, see."""

    value: int
    def __init__(self) -> None: ...

@final
class Uninterrupted:
    """A block in which Python calls no signal handler; it calls them at the end of the block.

    For changes that must happen together. Blocks may be nested; the end of the outermost one
    counts. In other threads than the main one, which never call handlers, a block has no effect.
    """

    def __init__(self) -> None: ...
    def __enter__(self) -> None:
        """Raises KeyboardInterrupt, or what else a handler raises, where a signal is pending."""

    def __exit__(self, error: object, value: object, traceback: object, /) -> None:
        """Raises KeyboardInterrupt where SIGINT came within."""

def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies.

    A descendant is then found even if it has detached itself: a daemon, or a process with a session
    of its own. Forks of this process do not inherit this.
    """

def kill_descendants() -> None:
    """Kill all descendants of this process, which must have called `adopt_orphans`.

    Gives up after two seconds: a process that is blocked in the kernel dies later.
    """

def end_with_process(pid: int) -> None:
    """Kill this process and all its descendants once that process is gone.

    This process becomes the leader of a process group of its own and adopts orphans.

    Raises:
        RuntimeError: there is no such process, or no thread can start to watch it.
    """

def merge_freed_memory() -> None:
    """Have malloc merge small blocks of this process as they are freed.

    glibc otherwise leaves the splinters of aligned allocations, as those of tensors are, and merges
    all of them when somebody next asks for a kilobyte.
    """

@final
class Bell:
    """What all workers of a driver ring, and what it sleeps on. Thread-safe.

    Who only wants to be served knocks, and is not counted among those who ring. Who rings counts
    among those who knock, too, and for as many as may be waited for.

    Args:
        address: of another process's; None: a new one.

    Attributes:
        count: how often it was rung.
        knocks: how many knocks there were.
    """

    def __init__(self, address: _Address | None = None) -> None: ...
    @property
    def address(self) -> _Address: ...
    @property
    def count(self) -> int: ...
    def ring(self) -> None: ...
    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` is no longer `seen`; return whether it is not.

        It also ends after that time, and when a signal arrives.
        """

    @property
    def knocks(self) -> int: ...
    def knock(self, times: int = 1) -> None: ...
    def wait_knock(self, heard: int, seconds: float, number: int = 1) -> bool:
        """Sleep until there are `number` more `knocks` than `heard`; return whether there are.

        It also ends after that time, and when a signal arrives. For one thread at a time.
        """

@final
class Mailbox:
    """The driver's end: short messages to one worker, and their answers, in order.

    Args:
        capacity: how many questions there may be whose answers were not taken.

    Attributes:
        address: for the WorkerMailbox.
        asked: how many questions were asked: the last one's number.
        answered: how many of them were answered, whether or not that was taken.
        steps: how many the worker has made, see `WorkerMailbox`.
        has_answer: whether the oldest question whose answer was not taken has one.
        ASK_BYTES: the longest question, or published message.
        ANSWER_BYTES: the longest answer.
    """

    ASK_BYTES: int
    ANSWER_BYTES: int
    def __init__(self, capacity: int) -> None: ...
    @property
    def address(self) -> _Address: ...
    @property
    def asked(self) -> int: ...
    @property
    def answered(self) -> int: ...
    @property
    def has_answer(self) -> bool: ...
    def ask(self, message: bytes) -> int:
        """Ask, and return the question's number, from 1.

        Raises:
            ValueError: the message is too long.
            RuntimeError: `capacity` is exhausted.
        """

    def take_answer(self) -> bytes:
        """The answer to the oldest question that has none taken; RuntimeError if there is none."""

    def publish(self, message: bytes) -> None:
        """Put a message where the worker finds it whenever it looks, in the last one's place.

        Raises:
            ValueError: the message is too long.
        """

    @property
    def steps(self) -> int: ...
    def stop(self, number: int) -> None:
        """Rollouts of the questions up to that one are to end after their current step."""

@final
class WorkerMailbox:
    """The worker's end, for one thread.

    Attributes:
        number: of the question that is to be answered next.
        stop: up to which question rollouts are to end after their current step.
        steps: what is counted up with each step, so that the driver sees that something happens.
    """

    def __init__(self, mailbox: _Address, bell: _Address) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def stop(self) -> SharedNumber: ...
    @property
    def steps(self) -> SharedNumber: ...
    def wait_ask(self, seconds: float) -> bool:
        """Sleep until there is a question; return whether there is. Ends as `Bell.wait_knock`."""

    def published(self) -> bytes:
        """The message that was published last, whole; empty before the first."""

    def question(self) -> bytes:
        """The oldest question, which stays until it is answered; RuntimeError without one."""

    def answer(self, message: bytes) -> None:
        """Answer it, and ring.

        Raises:
            ValueError: the message is too long.
            RuntimeError: there is no question.
        """

@final
class ServerSlots:
    """The server's end of slots, through each of which one worker asks again and again.

    For one thread at a time; whoever made them may add to them while a server in another process,
    which has attached them, answers.

    Args:
        address: of another process's; None: new ones, none yet.

    Attributes:
        address: for the WorkerSlots, and for a server in another process.
        BYTES: the longest question, or answer.
    """

    BYTES: int
    def __init__(self, address: _Address | None = None) -> None: ...
    @property
    def address(self) -> _Address: ...
    def __len__(self) -> int: ...
    def add(self) -> int:
        """Make one more, and return its number; ValueError past 1024."""

    def asking(self) -> list[int]:
        """The numbers of those with a question that was not answered, in their order.

        `question` and `answer` are about these questions: who takes a dead worker's place may have
        asked another one meanwhile.
        """

    def with_message(self) -> list[int]:
        """Those of them whose question is more than an empty message."""

    def question(self, slot: int) -> bytes | None:
        """The question; RuntimeError if `asking` found none.

        Returns:
            None if the replacement of a dead worker has asked another question.
        """

    def answer(self, slot: int, message: bytes = b"", note: int = 0) -> None:
        """Answer it, with a number beside the message, and wake the worker.

        Raises:
            ValueError: the message is too long.
            RuntimeError: `asking` found no question, or it was answered.
        """

    def answer_all(self, slots: Sequence[int], note: int) -> None:
        """Answer all of these with that number and nothing else, or none; raises likewise."""

@final
class WorkerSlot:
    """The worker's end, for one thread. Who takes a dead worker's place goes on with its slot.

    Args:
        slots: the address of the ServerSlots.
        slot: its number.
        bell: on which the server sleeps.

    Attributes:
        note: the number beside the last answer.
    """

    def __init__(self, slots: _Address, slot: int, bell: _Address) -> None: ...
    def ask(self, message: bytes = b"", seconds: float = 0) -> bool:
        """Ask, and knock, urgently where there is a message; then `wait_answer`.

        Raises:
            ValueError: the message is too long.
            RuntimeError: the question before was not answered.
        """

    def wait_answer(self, seconds: float) -> bool:
        """Sleep until it is answered; return whether it is. Ends as `Bell.wait_knock`."""

    def answer(self) -> bytes:
        """The answer to the last question; RuntimeError where there is none."""

    @property
    def note(self) -> int: ...

@final
class RolloutControl:
    """What others may do to a rollout while it runs, and see of it.

    Args:
        stop: once it has come to `number`, the rollout ends with the step that is being recorded.
            The cells behind its end are uncollected then: zeros, ("collector", "traj_ids") -1.
        min_steps: it does not end before it has so many.
        steps: counted up with each step.

    Attributes:
        is_stopped: whether `stop` has come to `number`.
    """

    def __init__(
        self,
        stop: SharedNumber | None = None,
        number: int = 0,
        min_steps: int = 1,
        steps: SharedNumber | None = None,
    ) -> None: ...
    @property
    def is_stopped(self) -> bool: ...
    def count_step(self) -> None:
        """Count `steps` up: what a Recorder does, and whoever has others record."""

@final
class StepEach:
    """Steps environments one after the other, in the caller's thread. Not thread-safe.

    Each result is copied before the next environment steps.

    Args:
        steps: of each of P environments; returns (observation, reward, terminated, truncated,
            info).
        convert: of each: called with an observation that is no array of the form of the one that
            was stored before; returns the array that is meant.
        to_action: what makes an action of a row of the actions, an array also where that has no
            dimensions. None: the row is one, as a numpy scalar there.
        observations: memory for the observations, [P, *frame].

    Raises:
        ValueError: not as many of each.
    """

    def __init__(
        self,
        steps: Sequence[Callable[[Any], Any]],
        convert: Sequence[Callable[[Any], Any]],
        to_action: Callable[[Any], Any] | None,
        observations: npt.NDArray[Any],
    ) -> None: ...
    def __call__(
        self, actions: Any
    ) -> tuple[
        npt.NDArray[Any], npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]
    ]:
        """Step each with its row of `actions`, [P, *action].

        Returns:
            Observations [P, *frame], rewards float64 [P], terminated and truncated bool [P]; the
            same arrays in every call.

        Raises:
            ValueError: a step returned another number of values, or several rewards or flags.
            TypeError: a reward or a flag that is no number.
            IndexError: fewer rows than environments.
            Exception: what an environment raised.
        """

@final
class CompiledEnv:
    """P environments of another extension module, which has them by `pycollect/python_env.h`.

    They are stepped without the GIL; what they throw is raised as their module translates it. Not
    thread-safe.

    Args:
        owner: an object of such a class.

    Attributes:
        num_envs: P.
        num_seeds: how many seeds `seed` takes.
        observation: the leaves of one environment's observation.
        action: those of its action.
        observations: [P, *shape] each: what the environments wrote last; the same memory each time.
        outcome: reward float64 [P], terminated and truncated bool [P], likewise.

    Raises:
        ValueError: the module was compiled against a `python_env.h` of another form; no
            environment; an observation of a dtype that NumPy does not have.
    """

    def __init__(self, owner: Any) -> None: ...
    @property
    def num_envs(self) -> int: ...
    @property
    def num_seeds(self) -> int: ...
    @property
    def observation(self) -> list[Leaf]: ...
    @property
    def action(self) -> list[Leaf]: ...
    @property
    def observations(self) -> tuple[npt.NDArray[Any], ...]: ...
    @property
    def outcome(
        self,
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]: ...
    def seed(self, seeds: Sequence[int]) -> None:
        """Seed the environments, which are to be reset then."""

    def reset_all(self) -> None:
        """Begin a new episode in each."""

    def reset(self, done: npt.NDArray[np.bool_]) -> None:
        """Begin a new episode where `done`, [P], is set.

        Raises:
            ValueError: not as many flags.
        """

    def step(self, actions: Sequence[_Array]) -> None:
        """Step each, by `actions` [P, *shape] in the order of the leaves.

        Raises:
            ValueError: more or fewer arrays, or one of another shape.
        """

@final
class Recorder:
    """Writes the steps of P envs into a slab. Not thread-safe.

    Args:
        layout: the leaves of a frame, those that every batch has among them.
        observations: (key, current, live) each. `current`, contiguous, [*obs] or [P, *obs] where
            batched, always holds the observation to act on; where not `live`, only between
            rollouts. None where there is ("next", key) alone. A key may stand there in both ways:
            its root and its ("next", key), if that is a leaf, are then written for themselves.
        outputs: the keys of the policy's outputs. What is recorded at the root of an observation or
            state of such a key is the output.
        envs: P.
        batched: arrays have a leading dimension P.
        max_frames_per_traj: truncate a trajectory at that length; 0: never.
        skips_after_done: the step after a done is a dummy, whose cell stays uncollected.
        set_truncated: flag the last collected frame of every env in every rollout.
        states: (key, current, initial, recorded) each: what the policy passes on to its next call.
            `initial` is one frame, or one per env. Where not `recorded`, no leaf has it.
        is_init: bool [1] or [P, 1]: whether the next step is a trajectory's first.
        step_count: int64 [1] or [P, 1]: how many steps its trajectory has had; the layout has it.
        given: which of the values that `take` is given the env is given.
        scalars: of these, values of shape () become numpy scalars. Only where all have it.
        convert: called with an observation given to `record` that differs from the one before in
            more than its address; returns the array that is meant. None: it is taken as it is.
        elsewhere: the keys of leaves that others write into the slab, after `finish`; here only
            their uncollected cells are cleared.
        ends: the keys of the observations of which any value that is set ends an env's episode.
            Where there are some, reward and flags of a step are not looked at, and nowhere else.
        rewards: with `ends`, the keys of those whose values, added up, are a step's reward.
        leaves_out_dummies: with `skips_after_done`, dummies take no cells. An env that ended falls
            behind the others, and is to be stepped without them at the end, see `behind`; only one
            that `max_frames_per_traj` cut is to be reset.
        all_envs: how many envs the worker has, where others are recorded beside these P; 0: P.
        first_env: which of them is the first of these.

    Raises:
        ValueError: the layout lacks a leaf that a batch has, or has one that nobody writes; `ends`
            or `rewards` name no observation; rewards without ends.
    """

    def __init__(
        self,
        layout: Layout,
        observations: Sequence[tuple[_Key, _Array | None, bool]],
        outputs: Sequence[_Key],
        envs: int,
        batched: bool,
        max_frames_per_traj: int = 0,
        skips_after_done: bool = False,
        set_truncated: bool = False,
        states: Sequence[tuple[_Key, _Array, _Array, bool]] = (),
        is_init: _Array | None = None,
        step_count: _Array | None = None,
        given: Sequence[int] = (),
        scalars: bool = False,
        convert: Callable[[Any], _Array] | None = None,
        elsewhere: Sequence[_Key] = (),
        ends: Sequence[_Key] = (),
        rewards: Sequence[_Key] = (),
        leaves_out_dummies: bool = False,
        all_envs: int = 0,
        first_env: int = 0,
    ) -> None: ...
    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """[P], after a step: must be reset now. The same memory each time."""

    @property
    def behind(self) -> npt.NDArray[np.bool_]:
        """[P], where dummies are left out: steps of these envs alone are recorded, as the rollout
        lacks frames of them. The same memory each time.
        """

    @property
    def steps_left(self) -> int:
        """How many steps the rollout needs at least."""

    @property
    def frames(self) -> int:
        """Steps of single envs recorded since construction, dummies not counted."""

    def restart(self, observation: _Array | tuple[_Array, ...]) -> None:
        """Every env was reset: open trajectories just end."""

    def begin(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        control: RolloutControl = ...,
        steps: int = 0,
    ) -> None:
        """The next steps go to `row` of this slab, until `finish` or `abandon`.

        Args:
            steps: how many there are; 0: as many as the slab has. The cells behind the last are
                uncollected.

        Raises:
            ValueError: a slab of another layout or another P, or one with fewer steps.
            RuntimeError: `restart` was never called.
        """

    def set_policy_version(self, version: int) -> None:
        """The frames from the next step on were acted by that version of the policy.

        The header keeps that of the rollout's first frame.
        """

    def stop(self, beside: Sequence[Recorder]) -> bool:
        """End a rollout that was stopped with the step that is next; return whether it was so.

        Recorders of all of a worker's envs end themselves; those of some do not, so that all end
        with the same step.

        Args:
            beside: the recorders of the other envs.
        """

    def take(self, values: tuple[_Array, ...]) -> Any:
        """Keep what the policy returned for the step that is recorded next.

        Args:
            values: the outputs, the states for the next step, and what only the env is given.

        Returns:
            New numpy arrays of those values that `given` names: the array itself where there is
            one, else a tuple. The env may keep them and write into them.

        Raises:
            ValueError: too few.
            TypeError: a dtype that numpy does not have.
        """

    def record(self, result: Iterable[Any]) -> int:
        """`step`, of what the env returned for the action that was taken.

        Args:
            result: observation, reward, terminated, truncated; with `convert`, also the env's info,
                which is not looked at.

        Raises:
            ValueError: as `step`, and for more or fewer entries.
            RuntimeError: as `step`, and where nothing was taken.
        """

    def step(
        self,
        observation: _Array | tuple[_Array, ...],
        reward: _Array,
        terminated: _Array,
        truncated: _Array,
        outputs: _Array | tuple[_Array, ...],
        states: tuple[_Array, ...] = (),
    ) -> int:
        """Record a step and return how many envs must be reset now, see `done`.

        If the rollout was stopped and ends with this step: -1 minus that number.

        Args:
            observation: the true successor, one array or a tuple in the order of `observations`.
            outputs: what the policy chose the step's action with, in the order of `outputs`.
            states: for the next step, in the order of `states`.

        Raises:
            ValueError: a shape or dtype that does not fit, named by its key.
            RuntimeError: no rollout has begun, or it is full.
        """

    def step_env(self, env: CompiledEnv, values: tuple[_Array, ...]) -> int:
        """Step environments, record that, and reset those whose episode ended.

        All but reading `values` is done without the GIL.

        Args:
            values: what the policy returned, as for `take`; the actions, in `env`'s order, are
                those of the outputs that `given` names.

        Returns:
            What `step` does, of environments that were reset since.

        Raises:
            ValueError: as `take` and `step`; actions of another shape.
            RuntimeError: as `step`.
        """

    def reset(self, observation: _Array | tuple[_Array, ...]) -> None:
        """The envs that `done` names were reset: only their rows are read."""

    def finish(
        self, worker: int, incarnation: int, sequence: int, beside: Sequence[Recorder] = ()
    ) -> RolloutHeader:
        """Complete the rollout, write its header into the slab, and let the slab go.

        Args:
            beside: where these are some of the worker's envs, the recorders of the others, which
                let the slab go, too.

        Raises:
            RuntimeError: before the last step of any, or where envs of the rollout are missing.
        """

    def abandon(self) -> None:
        """Let the slab go, its rollout unfinished."""

    def take_episodes(self) -> list[tuple[int, float, int]]:
        """(env, return, length in frames) of the episodes that ended since the last call."""

def copy(dst: _Array, src: _Array) -> None:
    """Copy one array into another of equal shape, whatever strides and dtypes.

    Raises:
        ValueError: the shapes differ, or `dst` is read-only.
    """

def place_rollout(
    slab: Slab, row: int, rollout: npt.NDArray[np.uint8], placement: Placement
) -> RolloutHeader:
    """Copy one worker's rollout into its row of a batch's slab; return its header.

    Args:
        rollout: the bytes of a slab of one worker; may be read-only.
        placement: that slab's. One with fewer steps than the batch is padded: zeros, and
            ("collector", "traj_ids") -1.

    Raises:
        ValueError: the bytes do not fit their placement, or it not the batch's; nothing was
            written then.
    """

def join_rollouts(
    target: Slab, row: int, slab: Slab, worker: int, incarnation: int, sequence: int
) -> RolloutHeader:
    """Copy a whole batch of several workers into a row of another as the rollout of one worker.

    Workers become envs, [W, P, T] to [W*P, T], or follow each other along time, [P, W, T] to
    [P, W*T], whichever the placements say. The header has the frames and valid lengths of all, and
    the oldest policy version.

    Args:
        slab: the batch, with the headers of its rollouts.
        worker: of the header, as the two that follow.

    Raises:
        ValueError: a header or the target does not fit; nothing was written then.
        IndexError: there is no such row.
    """

def compact(target: Slab, slab: Slab) -> None:
    """Copy a batch whose rollouts ended early, without the cells behind their ends.

    Args:
        target: of one worker, the batch's P, and as many steps as all valid lengths together.
        slab: the batch, with the headers of its rollouts.

    Raises:
        ValueError: a header or the target does not fit; nothing was written then.
    """

@final
class TrajectoryIds:
    """Maps workers' trajectory ids to global ones, without gaps, in the order they are seen."""

    def __init__(self) -> None: ...
    @staticmethod
    def from_state(
        state: tuple[int, Sequence[tuple[int, Sequence[int], Sequence[int]]]],
    ) -> TrajectoryIds:
        """Go on from a `state`; ValueError for one that no run can have come to."""

    def renumber(self, worker: int, ids: _Array) -> None:
        """Renumber a rollout's ids, int64 [P, T], in place; -1 stays.

        Raises:
            ValueError: ids that a worker cannot have given; nothing was changed then.
        """

    def forget(self, worker: int) -> None:
        """The worker was replaced: its open trajectories end, its local ids begin anew."""

    @property
    def next(self) -> int:
        """The number of trajectories so far."""

    def state(self) -> tuple[int, list[tuple[int, list[int], list[int]]]]:
        """`next`, and (worker, local ids, global ids) of the open trajectories, -1 for none."""

@final
class SplitPlan:
    """The trajectories of one batch, in row-major order; immutable.

    Args:
        done: bool, of the batch's shape, or with dimensions of extent 1 behind it; or None.
        ids: int64, likewise. One of these two is needed.
        mask: bool, likewise: False for a cell without a frame.
        batch_dims: the number of batch dimensions, time last.

    Attributes:
        count: N, the number of trajectories.
        longest: the length of the longest, 0 where there is none.
        frames: the sum of the lengths.

    Raises:
        ValueError: neither done nor ids, or one that does not fit.
    """

    def __init__(
        self,
        done: _Array | None,
        ids: _Array | None = None,
        mask: _Array | None = None,
        *,
        batch_dims: int,
    ) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """[count + 1]: trajectory i is [offsets[i], offsets[i + 1]) in the flat form."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[count]."""

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """[count]: where each lies; batch dimensions but the last, counted as one."""

    def padded(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Each source [*batch, *frame] into its target [count, longest, *frame], padded by zeros.

        Raises:
            ValueError: a shape that does not fit; nothing was written then.
        """

    def flat(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Each source [*batch, *frame] into its target [frames, *frame]; errors as `padded`."""

    def mask(self, target: _Array) -> None:
        """True where a cell of bool [count, longest] is a frame, else False."""

    def pad(self, target: _Array, value: int) -> None:
        """Set the padding of a leaf [count, longest, *frame] to another value than zero."""

@final
class MultiStepPlan:
    """How far each frame of a batch looks ahead; immutable.

    Frame t of a segment of L frames leads to frame min(t + n_steps - 1, L - 1), both included.
    Uncollected cells lead to themselves, by no step, and no frame looks into one.

    Raises:
        ValueError: n_steps below 1.
    """

    def __init__(self, split: SplitPlan, n_steps: int) -> None: ...
    def shift(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Each source [*batch, *frame] into its target: what lies where a cell leads to.

        Raises:
            ValueError: a shape that does not fit; nothing was written then.
        """

    def sum(self, gamma: float, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Each source into its target: the sum of gamma^k times what lies k cells ahead.

        Summed in double precision and rounded once; zero in uncollected cells. Errors as `shift`.
        """

    def steps(self, target: _Array) -> None:
        """By how many steps a cell of int64 [*batch] looks ahead: 1 to n, 0 if uncollected."""

    def discounts(self, gamma: float, target: _Array) -> None:
        """gamma to the power of the steps of a cell of [*batch], 1 if uncollected; any dtype."""

    def nonterminal(self, target: _Array) -> None:
        """Whether a cell of bool [*batch] is a frame with another one behind it."""

class CudaError(RuntimeError):
    """A call of CUDA's driver that failed: the call, its error's name, number and text."""

def cuda_why_not() -> str:
    """Why CUDA cannot be used here; empty where it can. Found once per process."""

@final
class Upload:
    """A copy under way. Thread-safe."""

    def done(self) -> bool:
        """Whether it is complete, as the host sees it; its source may be written again then."""

    def wait(self) -> None:
        """Sleep until it is."""

    def hold_back(self, stream: int) -> None:
        """What that stream is given from now on waits for it; the host does not."""

@final
class CudaEvent:
    """The end of what a stream was given so far. Thread-safe.

    A thread may ask it while another one captures a CUDA graph, which torch's own would end.

    Args:
        device: its index.
        stream: of that device; a CUstream as a number.
        polls: `wait` polls for some 200 microseconds before it sleeps (default: ``False``).

    Raises:
        ValueError: there is no such device.
        CudaError: CUDA is not available, or refuses.
    """

    def __init__(self, device: int, stream: int, polls: bool = False) -> None: ...
    def done(self) -> bool:
        """Whether that is done, as the host sees it."""

    def wait(self) -> None:
        """Sleep until it is; poll first if it `polls`."""

    def hold_back(self, stream: int) -> None:
        """What that stream is given from now on waits for it; the host does not."""

@final
class Uploader:
    """Copies host memory to a device, on a stream of its own and in order. Thread-safe.

    Raises:
        ValueError: there is no such device.
        CudaError: CUDA is not available.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> int:
        """Of the copies: a CUstream as a number."""

    def upload(
        self, source: _Array, target: int, consumer: int, after: int | None = None
    ) -> Upload:
        """Have an array copied to an address on the device.

        Args:
            source: contiguous; held until the copy is complete on the host.
            target: has room for it.
            consumer: a stream, whose work from now on waits for the copy.
            after: a stream, for whose work so far the copy waits.

        Raises:
            ValueError: `source` is not contiguous, or not in host memory.
            CudaError: a call failed; `source` is let go once nothing reads it.
        """

    def release_finished(self) -> int:
        """Let go of the sources of complete copies; return how many copies are under way."""

    def wait(self) -> None:
        """Sleep until all copies are complete."""

@final
class Registration:
    """Shared memory that is pinned while this exists, which keeps it.

    Raises:
        CudaError: it cannot be pinned, or is already.
    """

    def __init__(self, memory: Memory, device: int) -> None: ...

def host_memory(device: int, bytes: int) -> Memory:
    """Pinned memory of that size, uninitialised, which every device reads and writes by itself.

    Raises:
        ValueError: less than one byte.
        CudaError: it is not to be had.
    """

@final
class DeviceGather:
    """Split and n-step plans carried out on a CUDA device, by one launch for all leaves; immutable.

    Arrays lie on the device. Types are not cast; targets are contiguous, and so are a source's
    frames, whose rows lie at equal distances. Calls return at once: the stream does the work.

    Raises:
        ValueError: there is no such device; in calls, what does not fit, and nothing was sent then.
        CudaError: CUDA is not available, or a call failed.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @staticmethod
    def workspace_bytes(plan: SplitPlan | MultiStepPlan, leaves: int, target_bytes: int) -> int:
        """How large the workspace of a call has to be.

        Args:
            leaves: how many.
            target_bytes: of all targets together.
        """

    def padded(
        self,
        plan: SplitPlan,
        sources: Sequence[_Array],
        targets: Sequence[_Array],
        workspace: _Array,
        stream: int,
    ) -> None:
        """As `SplitPlan.padded`.

        Args:
            workspace: memory of the device, which is used until the stream has done the work.
            stream: a CUstream as a number.
        """

    def flat(
        self,
        plan: SplitPlan,
        sources: Sequence[_Array],
        targets: Sequence[_Array],
        workspace: _Array,
        stream: int,
    ) -> None:
        """As `SplitPlan.flat`; arguments as `padded`."""

    def ahead(
        self,
        plan: MultiStepPlan,
        gamma: float,
        moved: Sequence[_Array],
        moved_to: Sequence[_Array],
        summed: Sequence[_Array],
        summed_to: Sequence[_Array],
        workspace: _Array,
        stream: int,
    ) -> None:
        """As `MultiStepPlan.shift` of `moved` and `MultiStepPlan.sum` of `summed`.

        Sums are of float32 and float64, and made term by term: in the last bit of double precision
        they may differ from the host's.
        """
