"""The compiled core of pycollect.

`_Array` stands for an array that the core reads without a copy: a numpy array, a torch tensor, or
any other object with the buffer protocol or `__dlpack__`. The GIL is released while data is moved.
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
        key: Path in a batch, at least one name.
        dtype: "bool", "uint8", "int8", ..., "float16", "bfloat16", "float32", ..., "complex128".
        shape: Shape for one frame of one environment.

    Raises:
        ValueError: If the dtype is unknown or the shape has more than 16 dimensions.
        TypeError: If the key is not a tuple of strings.
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
        fingerprint: Hash of the leaves and their order, the same on every machine.

    Raises:
        ValueError: If there are no leaves, or a key is empty, occurs twice or lies inside another
            key.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None: ...
    @property
    def leaves(self) -> list[Leaf]: ...
    @property
    def fingerprint(self) -> int: ...
    def __len__(self) -> int: ...

@final
class Placement:
    """The positions of a layout's leaves in a slab of B workers, P envs and T steps; immutable.

    The order in memory is [B, P, T] ("stack") or [P, B, T] ("time").

    Raises:
        ValueError: If an extent is below 1, the order is unknown, or the size exceeds 64 bits.
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
    """The header of a rollout, checked against its placement.

    Attributes:
        incarnation: Number of earlier replacements of the worker.
        sequence: Number of the rollout within the incarnation, from 0.
        frames: Number of collected frames, without uncollected cells.
        generation: Generation of the slab when it was lent for this rollout.
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
    """A lease of one batch's memory. The memory returns to its pool when the last view is gone.

    Attributes:
        generation: Number of times that this memory was lent, starting at 1.
        memory: The underlying memory, which may have other holders.
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
        """Return all bytes, including headers, as a writable array that holds the slab."""

    def header(self, row: int = 0) -> RolloutHeader:
        """Return the checked header of a worker's rollout.

        Raises:
            ValueError: If a number in it does not fit.
            IndexError: If the row does not exist.
        """

    def write_header(
        self,
        row: int,
        worker: int,
        incarnation: int,
        sequence: int,
        policy_version: int,
        frames: int,
        steps: int,
    ) -> RolloutHeader:
        """Write and return the header of a rollout that other code recorded.

        Args:
            frames: Number of collected frames.
            steps: Valid length of every environment.

        Raises:
            ValueError: If a number does not fit.
            IndexError: If the row does not exist.
        """

    def lengths(self, row: int = 0) -> list[int]:
        """Return the rollout's valid length per environment; less than T after an early stop."""

    def tensors(
        self, batch_shape: Sequence[int], tensor_type: type[_Tensor]
    ) -> tuple[_Tensor, ...]:
        """Return one contiguous tensor per leaf, [*batch_shape, *frame]; each holds the slab.

        Args:
            batch_shape: A shape with as many elements as the slab has frames.
            tensor_type: torch.Tensor. It is an argument because the core does not import torch.
        """

@final
class PoolStats:
    """Numbers of memory blocks of a pool: created so far, lent now, and free."""

    @property
    def created(self) -> int: ...
    @property
    def lent(self) -> int: ...
    @property
    def free(self) -> int: ...

@final
class SlabPool:
    """A pool of slabs with one placement. Thread-safe.

    Args:
        max_free: Maximum number of blocks kept for reuse.
        poison: Fill each returned block with 0xA5 (default: ``False``).
        allocate: Return an array of this many bytes, aligned to 64. The array is held as long as it
            is used. Defaults to ``None``: private memory.

    Raises:
        ValueError: If `max_free` is below 0. When memory is taken: if it is not aligned.
    """

    def __init__(
        self,
        placement: Placement,
        max_free: int,
        poison: bool = False,
        allocate: Callable[[int], npt.NDArray[np.uint8]] | None = None,
    ) -> None: ...
    def acquire(self) -> Slab:
        """Return a free slab, or fresh memory if none is free. Its contents are undefined."""

    @property
    def placement(self) -> Placement: ...
    def stats(self) -> PoolStats: ...

@final
class MemoryPool:
    """A pool of reusable memory for slabs of any placement. Thread-safe.

    Args:
        max_free: Maximum number of blocks kept; when one more comes back, the oldest is freed.
        poison: Fill each returned block with 0xA5 (default: ``False``).
    """

    def __init__(self, max_free: int, poison: bool = False) -> None: ...
    def acquire(self, placement: Placement) -> Slab: ...
    def stats(self) -> PoolStats: ...

class SharedMemoryError(RuntimeError):
    """The system does not permit shared memory here, or not between these two processes."""

def shared_memory_why_not() -> str:
    """Return why this process cannot share memory with its workers; empty if it can.

    This tests one page. A worker may still be denied access; `Memory.attach` then raises.
    """

def available_memory() -> tuple[int, str]:
    """Return how many bytes can still be allocated, and the name of the lowest limit.

    Limits are the available memory of the machine ("MemAvailable"), the memory cgroups, and this
    process's own limits.
    """

@final
class Memory:
    """A block of host memory. Other processes of the same user can attach it if it is shared.

    Attributes:
        address: (pid, fd, inode, offset, bytes) for other processes; ``None`` if the memory is not
            shared.
    """

    @staticmethod
    def share(bytes: int) -> Memory:
        """Create shared memory without a name, zeroed and touched.

        Raises:
            SharedMemoryError: If it is not permitted here.
            ValueError: If the available memory is too small; the message has both numbers.
        """

    @staticmethod
    def share_copy(data: bytes | npt.NDArray[np.uint8]) -> Memory:
        """Copy contiguous bytes into new shared memory; raises as `share` does."""

    @staticmethod
    def attach(address: _Address) -> Memory:
        """Map another process's shared memory, until its last holder here releases it.

        Raises:
            SharedMemoryError: If it cannot be opened, or if its creator has released it.
        """

    @property
    def bytes(self) -> int: ...
    @property
    def address(self) -> _Address | None: ...
    def array(self) -> npt.NDArray[np.uint8]:
        """Return all bytes as a writable array that holds the memory."""

    def slab(self, placement: Placement, generation: int) -> Slab:
        """Return this memory as a slab that another process has lent; its end recycles nothing.

        Raises:
            ValueError: If the memory is smaller than the placement.
        """

@final
class SharedSlabPool:
    """A pool of shared slabs that workers write and users keep. Thread-safe.

    If all slabs are lent, the pool adds one.

    Args:
        working: Number of slabs for the workers, at least 1.
        spare: Number of slabs that the user may hold at a time; further batches are delivered as
            copies.
        poison: Fill each returned slab with 0xA5 (default: ``False``).

    Attributes:
        copied: Number of batches delivered as private copies.

    Raises:
        SharedMemoryError: If shared memory is not permitted here.
        ValueError: If the available memory is too small; the message has both numbers.
    """

    def __init__(
        self, placement: Placement, working: int, spare: int, poison: bool = False
    ) -> None: ...
    def acquire(self) -> Slab:
        """Return a free slab, or a new one if all are lent. Its contents are undefined.

        Raises:
            ValueError: If the available memory is too small for a new slab; the message has both
                numbers.
            CudaError: If the slabs are pinned and the driver does not register the new one.
        """

    def pin(self, device: int) -> None:
        """Let a CUDA device read the slabs without a copy, until the pool and all slabs are gone.

        Call it before the first slab is lent.

        Raises:
            ValueError: If the device does not exist.
            CudaError: If the driver does not register the memory. Nothing has changed then.
        """

    def deliver(self, slab: Slab) -> Slab:
        """Return this slab for the user to keep, or a private copy if the user holds enough slabs.

        Raises:
            ValueError: If this pool has not lent the slab.
        """

    @property
    def placement(self) -> Placement: ...
    @property
    def copied(self) -> int: ...
    def stats(self) -> PoolStats: ...

@final
class SharedNumber:
    """A number that threads, and processes that share its memory, read and write; initially 0."""

    value: int
    def __init__(self) -> None: ...

@final
class Uninterrupted:
    """A context in which Python calls no signal handler; handlers run at its end.

    Use it for changes that must happen together. Contexts may be nested; handlers run at the end of
    the outermost one. It has no effect in threads other than the main thread, which never call
    handlers.
    """

    def __init__(self) -> None: ...
    def __enter__(self) -> None:
        """Enter. Raises KeyboardInterrupt, or a handler's exception, if a signal is pending."""

    def __exit__(self, error: object, value: object, traceback: object, /) -> None:
        """Exit. Raises KeyboardInterrupt if SIGINT arrived inside the context."""

@final
class FairLock:
    """A reentrant lock that serves threads in the order of their arrival.

    With ``threading.RLock``, a thread that releases and reacquires the lock starves the others. Use
    the lock in a ``with`` statement, in the process that created it. The exception of a signal
    handler never leaves it locked.

    When the program ends, `keep_others_out` suspends all other threads that use such a lock.
    Otherwise a thread that runs code of torch while the interpreter ends would abort the process.

    Attributes:
        is_own_process: Whether this process created the lock, and is not a fork of that process.
        is_busy: Whether a thread holds the lock.
        n_waiting: Number of threads that wait for the lock.
    """

    def __init__(self) -> None: ...
    def __enter__(self) -> None:
        """Wait for the lock, without the GIL, and hold it.

        Raises:
            RuntimeError: In a fork of the process that created the lock.
            KeyboardInterrupt: If SIGINT arrives while the main thread waits; or the exception of
                another signal handler. The lock is not held then.
        """

    def __exit__(self, error: object, value: object, traceback: object, /) -> None:
        """Release the lock.

        Raises:
            RuntimeError: In a fork of the process that created the lock, if `error` is ``None``.
        """

    def enter_if_free(self) -> bool:
        """Enter if no thread holds the lock; return whether it was entered. Raises as entering."""

    def check_own_process(self) -> None:
        """Raise RuntimeError in a fork of the process that created the lock."""

    @property
    def is_own_process(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def n_waiting(self) -> int: ...
    @staticmethod
    def keep_others_out() -> None:
        """Suspend every thread except the calling one when it next enters or leaves a lock."""

    @staticmethod
    def await_others(timeout: float) -> None:
        """Wait for `timeout` seconds until other threads have left their locks or are suspended."""

def adopt_orphans() -> None:
    """Make this process the parent of each descendant when its own parent dies.

    A descendant is then found even if it has detached itself: a daemon, or a process with its own
    session. Forks of this process do not inherit this.
    """

def kill_descendants() -> None:
    """Kill all descendants of this process, which must have called `adopt_orphans`.

    Gives up after two seconds: a process that is blocked in the kernel dies later.
    """

def end_with_process(pid: int) -> None:
    """Kill this process and all its descendants when the process `pid` is gone.

    This process becomes the leader of its own process group and adopts orphans.

    Raises:
        RuntimeError: If the process does not exist, or the thread that watches it cannot start.
    """

def merge_freed_memory() -> None:
    """Make malloc merge small blocks of this process as they are freed.

    Otherwise glibc keeps the fragments of aligned allocations, such as tensor memory, and merges
    all of them at the next request for a kilobyte.
    """

@final
class Bell:
    """The signal of all workers to their driver, which sleeps on it. Thread-safe.

    Workers ring when they have an answer and knock when they need to be served. Knocks do not
    change `count`. A ring also counts as enough knocks to end every wait for knocks.

    Args:
        address: Address of another process's bell. Defaults to ``None``: a new bell.

    Attributes:
        count: Number of rings.
        knocks: Number of knocks.
    """

    def __init__(self, address: _Address | None = None) -> None: ...
    @property
    def address(self) -> _Address: ...
    @property
    def count(self) -> int: ...
    def ring(self) -> None: ...
    def wait_ring(self, seen: int, seconds: float) -> bool:
        """Sleep until `count` differs from `seen`; return whether it does.

        Also returns after `seconds`, and when a signal arrives.
        """

    def ring_when_gone(self, pid: int) -> None:
        """Ring when a process is gone, if the system offers a way to wait for that."""

    @property
    def knocks(self) -> int: ...
    def knock(self, times: int = 1) -> None: ...
    def wait_knock(self, heard: int, seconds: float, number: int = 1) -> bool:
        """Sleep until `knocks` exceeds `heard` by `number`; return whether it does.

        Also returns after `seconds`, and when a signal arrives. For one thread at a time.
        """

@final
class Mailbox:
    """The driver's end: short messages to one worker, and their answers, in order.

    Args:
        capacity: Maximum number of questions without a taken answer.

    Attributes:
        address: Argument for the WorkerMailbox.
        asked: Number of questions, which is also the number of the last one.
        answered: Number of answered questions, whether or not their answers were taken.
        steps: Number of the worker's steps, see `WorkerMailbox`.
        has_answer: Whether the next answer can be taken.
        ASK_BYTES: Maximum length of a question or a published message.
        ANSWER_BYTES: Maximum length of an answer.
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
        """Send a question and return its number, from 1.

        Raises:
            ValueError: If the message is too long.
            RuntimeError: If `capacity` is exhausted.
        """

    def take_answer(self) -> bytes:
        """Return the next answer, in the order of questions; RuntimeError if it has not arrived."""

    def publish(self, message: bytes) -> None:
        """Replace the message that the worker can read at any time.

        Raises:
            ValueError: If the message is too long.
        """

    @property
    def steps(self) -> int: ...
    def stop(self, number: int) -> None:
        """End the rollouts of all questions up to this number after their current step."""

@final
class WorkerMailbox:
    """The worker's end, for one thread.

    Attributes:
        number: Number of the next question to answer.
        stop: Number of the last question for which the rollout must end after its current step.
        steps: Number of steps, incremented with each step so that the driver sees progress.
    """

    def __init__(self, mailbox: _Address, bell: _Address) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def stop(self) -> SharedNumber: ...
    @property
    def steps(self) -> SharedNumber: ...
    def wait_ask(self, seconds: float) -> bool:
        """Sleep until a question is open; return whether one is. Ends as `Bell.wait_knock`."""

    def published(self) -> bytes:
        """Return the message that was published last, complete; empty before the first."""

    def question(self) -> bytes:
        """Return the oldest unanswered question; RuntimeError without one."""

    def answer(self, message: bytes) -> None:
        """Answer the oldest question and ring the bell.

        Raises:
            ValueError: If the message is too long.
            RuntimeError: If no question is open.
        """

@final
class ServerSlots:
    """The server's end of slots. Each worker makes its requests through one slot.

    For one thread at a time. The process that created the slots may add slots while a server in
    another process, which has attached them, answers.

    Args:
        address: Address of another process's slots. Defaults to ``None``: new memory without slots.

    Attributes:
        address: Argument for the WorkerSlots, and for a server in another process.
        BYTES: Maximum length of a request or an answer.
    """

    BYTES: int
    def __init__(self, address: _Address | None = None) -> None: ...
    @property
    def address(self) -> _Address: ...
    def __len__(self) -> int: ...
    def add(self) -> int:
        """Add a slot and return its number; ValueError if there are 1024 already."""

    def asking(self) -> list[int]:
        """Return the slots with an unanswered request, in order.

        `question` and `answer` refer to these requests: the replacement of a dead worker may have
        made another one since.
        """

    def with_message(self) -> list[int]:
        """Return the slots of `asking` with a message that is not empty."""

    def question(self, slot: int) -> bytes | None:
        """Return the message of a request; RuntimeError if `asking` found none.

        Returns:
            The message, or ``None`` if the replacement of a dead worker has made another request.
        """

    def asked_at(self, slot: int) -> float:
        """Return when the request was made, by `time.monotonic()`; raises as `question`."""

    def answer(self, slot: int, message: bytes = b"", note: int = 0) -> None:
        """Answer a request with a message and a number, and wake the worker.

        Raises:
            ValueError: If the message is too long.
            RuntimeError: If `asking` found no request, or it was answered already.
        """

    def answer_all(self, slots: Sequence[int], note: int) -> None:
        """Answer all of `slots` with a number only, or none of them. Raises as `answer`."""

@final
class WorkerSlot:
    """The worker's end of one slot, for one thread. A replacement of the worker continues with it.

    Args:
        slots: Address of the ServerSlots.
        slot: Number of the slot.
        bell: Address of the bell on which the server sleeps.

    Attributes:
        note: The number in the last answer.
    """

    def __init__(self, slots: _Address, slot: int, bell: _Address) -> None: ...
    def ask(self, message: bytes = b"", seconds: float = 0) -> bool:
        """Make a request and knock, urgently if there is a message; then `wait_answer`.

        Raises:
            ValueError: If the message is too long.
            RuntimeError: If the previous request was not answered.
        """

    def wait_answer(self, seconds: float) -> bool:
        """Sleep until the request is answered; return whether it is. Ends as `Bell.wait_knock`."""

    def answer(self) -> bytes:
        """Return the answer to the last request; RuntimeError without one."""

    @property
    def note(self) -> int: ...

@final
class RolloutControl:
    """Lets other threads or processes stop a rollout and follow its progress.

    Args:
        stop: When its value reaches `number`, the rollout ends with the step that is being
            recorded. The later cells are uncollected: zeros, ("collector", "traj_ids") -1.
        number: See `stop`.
        min_steps: Minimum number of steps before the rollout may end (default: 1).
        steps: Incremented with each step.

    Attributes:
        is_stopped: Whether `stop` has reached `number`.
        min_steps: Minimum number of steps before the rollout may end.
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
    @property
    def min_steps(self) -> int: ...
    def count_step(self) -> None:
        """Increment `steps`. A Recorder calls this; call it if other code records the steps."""

@final
class StepEach:
    """Steps environments one after the other, in the caller's thread. Not thread-safe.

    Each result is copied before the next environment steps.

    Args:
        steps: The step function of each of P environments; returns (observation, reward,
            terminated, truncated, info).
        convert: For each environment, a function that converts an observation to an array. Called
            with an observation whose form differs from the last stored one, or that is not an
            array.
        to_action: Converts a row of the actions, always an array, to an action. Defaults to
            ``None``: the row itself, as a numpy scalar if it has no dimensions.
        observations: Memory for the observations, [P, *frame].
        objectives: Number of rewards per environment and step, k. The rewards are returned as
            [P, k], or as [P] if k is 1 (default: 1).

    Raises:
        ValueError: If the numbers of environments differ.
    """

    def __init__(
        self,
        steps: Sequence[Callable[[Any], Any]],
        convert: Sequence[Callable[[Any], Any]],
        to_action: Callable[[Any], Any] | None,
        observations: npt.NDArray[Any],
        objectives: int = 1,
    ) -> None: ...
    def __call__(
        self, actions: Any
    ) -> tuple[
        npt.NDArray[Any], npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]
    ]:
        """Step each environment with its row of `actions`, [P, *action].

        Returns:
            Observations [P, *frame], rewards float64 [P] or [P, k], terminated and truncated bool
                [P]; the same arrays in every call.

        Raises:
            ValueError: If a step returned another number of values, or several rewards or flags.
            TypeError: If a reward or a flag is not a number.
            IndexError: If there are fewer rows than environments.
            Exception: The exception of an environment.
        """

@final
class CompiledEnv:
    """P environments of another extension module that uses `pycollect/python_env.h`.

    They are stepped without the GIL. Their exceptions are raised as their module translates them.
    Not thread-safe.

    Args:
        owner: An object of a class made by `python_env`.

    Attributes:
        num_envs: P.
        num_seeds: Number of seeds that `seed` takes.
        observation: Leaves of one environment's observation.
        action: Leaves of one environment's action.
        observations: The last observations, [P, *shape] each, in the same memory each time.
        outcome: The last rewards, float64 [P], terminated and truncated, bool [P]; the same memory
            each time.

    Raises:
        ValueError: If the module was compiled with another form of `python_env.h`, if it has no
            environments, or if an observation has a dtype that NumPy lacks.
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
        """Seed the environments with `num_seeds` seeds. Reset them afterwards.

        Raises:
            ValueError: If the number of seeds is not `num_seeds`.
        """

    def reset_all(self) -> None:
        """Begin a new episode in each environment."""

    def reset(self, done: npt.NDArray[np.bool_]) -> None:
        """Begin a new episode in the environments with `done` set, [P].

        Raises:
            ValueError: If the number of flags is not P.
        """

    def step(self, actions: Sequence[_Array]) -> None:
        """Step each environment with `actions`, [P, *shape] in the order of the leaves.

        Raises:
            ValueError: If the number of arrays or a shape does not fit.
        """

@final
class Recorder:
    """Writes the steps of P environments into a slab. Not thread-safe.

    Args:
        layout: Leaves of a frame, including those of every batch.
        observations: (key, current, live) for each observation. `current`, contiguous, [*obs] or
            [P, *obs] if batched, is memory that always holds the observation for the next action;
            if not `live`, only between rollouts. It is ``None`` if there is only ("next", key). A
            key may occur in both ways: one entry then writes the root, the other writes ("next",
            key), if that is a leaf.
        outputs: Keys of the policy's outputs. If an observation or a state has the same key, its
            root is the output.
        envs: P.
        batched: Whether arrays have a leading dimension P.
        max_frames_per_traj: Truncate a trajectory at this length; 0 never truncates (default: 0).
        skips_after_done: Whether the step after a done is a dummy step, whose cell stays
            uncollected.
        set_truncated: Flag the last collected frame of every environment in every rollout.
        states: (key, current, initial, recorded) for each value that the policy passes to its next
            call. `initial` is one frame, or one per environment. If not `recorded`, it has no leaf.
        is_init: Memory, bool [1] or [P, 1], for whether the next step is the first of a trajectory.
        step_count: Memory, int64 [1] or [P, 1], for the steps so far in the trajectory. The layout
            must have this leaf.
        given: Indices of the values of `take` that are passed to the environment.
        scalars: Whether these values become numpy scalars. All of them must have the shape ().
        convert: Converts an observation to an array. Called by `record` if the observation differs
            from the previous one in more than its address. Defaults to ``None``: no conversion.
        names: Keys of the leaves if an observation is a dict. If its entries differ from the
            previous ones only in their values, `record` reads them without `convert`.
        elsewhere: Keys of leaves that other code writes into the slab after `finish`. Only their
            uncollected cells are cleared here.
        ends: Keys of observations that end an episode if any of their values is set. If there are
            any, the reward and flags of a step are ignored.
        rewards: With `ends`, keys of observations whose values add up to the reward of a step.
        leaves_out_dummies: With `skips_after_done`, dummy steps take no cells. An environment that
            ended falls behind the others and must be stepped without them at the end, see `behind`.
            Only an environment cut by `max_frames_per_traj` must be reset.
        all_envs: Number of the worker's environments if several recorders share them; 0: P.
        first_env: Index of this recorder's first environment among them.

    Raises:
        ValueError: If the layout lacks a leaf that a batch has, or has one that nothing writes; if
            `ends` or `rewards` name no observation; if there are rewards without ends.
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
        names: Sequence[Any] = (),
        elsewhere: Sequence[_Key] = (),
        ends: Sequence[_Key] = (),
        rewards: Sequence[_Key] = (),
        leaves_out_dummies: bool = False,
        all_envs: int = 0,
        first_env: int = 0,
    ) -> None: ...
    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """Whether each environment must be reset after a step, [P]. The same memory each time."""

    @property
    def behind(self) -> npt.NDArray[np.bool_]:
        """Whether the rollout lacks frames of each environment, [P]. The same memory each time.

        With `leaves_out_dummies`, only the steps of these environments are recorded.
        """

    @property
    def steps_left(self) -> int:
        """Minimum number of steps that the rollout still needs."""

    @property
    def frames(self) -> int:
        """Number of steps of single environments since construction, without dummy steps."""

    def restart(self, observation: _Array | tuple[_Array, ...]) -> None:
        """Start new trajectories after a reset of all environments. Open ones just end."""

    def begin(
        self,
        slab: Slab,
        row: int,
        policy_version: int,
        control: RolloutControl = ...,
        steps: int = 0,
    ) -> None:
        """Start a rollout: the next steps go to `row` of this slab, until `finish` or `abandon`.

        Args:
            slab: Slab of the same layout and P.
            row: Row of the slab.
            policy_version: Policy version of the first frames.
            control: Lets others stop the rollout and follow its progress.
            steps: Number of steps. The cells after the last one are uncollected. Defaults to 0: as
                many as the slab has.

        Raises:
            ValueError: If the slab has another layout or another P, or fewer steps.
            RuntimeError: If `restart` was never called.
        """

    def set_policy_version(self, version: int) -> None:
        """Set the policy version of the frames from the next step on.

        The header keeps the version of the rollout's first frame.
        """

    def stop(self, beside: Sequence[Recorder]) -> bool:
        """End a stopped rollout of several recorders with the next step; return whether it ends.

        A recorder of all environments of a worker ends a stopped rollout itself. Recorders of some
        of them do not, so that all end with the same step.

        Args:
            beside: The recorders of the other environments.
        """

    def take(self, values: tuple[_Array, ...]) -> Any:
        """Keep the policy's return values for the step that is recorded next.

        Args:
            values: The outputs, the states for the next step, and values for the environment only.

        Returns:
            New numpy arrays of the values that `given` selects: an array if there is one, otherwise
                a tuple. The environment may keep and change them.

        Raises:
            ValueError: If there are too few values.
            TypeError: If numpy lacks a dtype.
        """

    def record(self, result: Iterable[Any]) -> int:
        """Record a step from the environment's return value and the values passed to `take`.

        Args:
            result: Observation, reward, terminated, truncated. With `convert`, also the info, which
                is ignored.

        Raises:
            ValueError: As `step`, and if there are more or fewer entries.
            RuntimeError: As `step`, and without a preceding `take`.
        """

    def record_autoreset(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, last: Any
    ) -> int | None:
        """Record a step in which environments have reset themselves where their episodes ended.

        No environment has to be reset afterwards.

        Args:
            observation: Observations for the next action.
            reward: Float32 or float64 [P].
            terminated: Bool [P].
            truncated: Bool [P].
            last: Last observations of the episodes that ended, like `observation`. Other rows are
                not read. ``None`` if the environment returned none.

        Returns:
            0, or -1 if the rollout was stopped and ends here. ``None`` if nothing was recorded: an
            array needs a cast, last observations are missing, or the rollout has states,
            `is_init`, step counts or `max_frames_per_traj`. Then call `record` and `reset`.

        Raises:
            RuntimeError: As `step`, and without a preceding `take`.
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
        """Record a step and return the number of environments that must be reset now, see `done`.

        If the rollout was stopped and ends with this step, return -1 minus that number.

        Args:
            observation: The true successor, one array or a tuple in the order of `observations`.
            outputs: The outputs that chose the step's action, in the order of `outputs`.
            states: For the next step, in the order of `states`.

        Raises:
            ValueError: If a shape or dtype does not fit; the message names the key.
            RuntimeError: If no rollout has begun, or it is full.
        """

    def step_env(self, env: CompiledEnv, values: tuple[_Array, ...]) -> int:
        """Step environments, record the step, and reset the ones with an ended episode.

        Only reading `values` needs the GIL.

        Args:
            values: The policy's return values, as for `take`. The outputs that `given` selects are
                the actions, in the order of `env`.

        Returns:
            The result of `step`; the environments it counts have been reset already.

        Raises:
            ValueError: As `take` and `step`, and if actions have another shape.
            RuntimeError: As `step`.
        """

    def reset(self, observation: _Array | tuple[_Array, ...]) -> None:
        """Pass the observations after a reset of the environments in `done`. Only their rows are
        read.
        """

    def finish(
        self, worker: int, incarnation: int, sequence: int, beside: Sequence[Recorder] = ()
    ) -> RolloutHeader:
        """Complete the rollout, write its header into the slab, and release the slab.

        Args:
            beside: If this recorder has some of the worker's environments: the recorders of the
                others, which release the slab as well.

        Raises:
            RuntimeError: If any recorder has steps left, or if environments of the rollout are
                missing.
        """

    def abandon(self) -> None:
        """Release the slab of an unfinished rollout.

        If an observation is not live, `restart` must follow before `begin`.
        """

    def take_episodes(self) -> list[tuple[int, float | list[float], int]]:
        """Return (environment, return, length) of each episode ended since the last call.

        If a frame has several rewards, the return is a list with the sum of each.
        """

def copy(dst: _Array, src: _Array) -> None:
    """Copy one array into another of equal shape, with any strides and dtypes.

    Raises:
        ValueError: If the shapes differ, or `dst` is read-only.
    """

def place_rollout(
    slab: Slab, row: int, rollout: npt.NDArray[np.uint8], placement: Placement
) -> RolloutHeader:
    """Copy one worker's rollout into its row of a batch's slab; return its header.

    Args:
        rollout: The bytes of a slab of one worker; may be read-only.
        placement: The placement of this slab. If it has fewer steps than the batch, the rest is
            padded: zeros, and ("collector", "traj_ids") -1.

    Raises:
        ValueError: If the bytes do not fit their placement or the placement does not fit the batch.
            Nothing was written then.
    """

def join_rollouts(
    target: Slab, row: int, slab: Slab, worker: int, incarnation: int, sequence: int
) -> RolloutHeader:
    """Copy a whole batch of several workers into a row of another, as the rollout of one worker.

    Workers become environments, [W, P, T] to [W*P, T], or are concatenated along time, [P, W, T] to
    [P, W*T]; the placements determine which. The header has the frames and valid lengths of all,
    and the oldest policy version.

    Args:
        slab: The batch, with the headers of its rollouts.
        worker: Worker of the new header.
        incarnation: Incarnation of the new header.
        sequence: Sequence number of the new header.

    Raises:
        ValueError: If a header or the target does not fit. Nothing was written then.
        IndexError: If the row does not exist.
    """

def compact(target: Slab, slab: Slab) -> None:
    """Copy a batch whose rollouts ended early, without its uncollected cells.

    Args:
        target: A slab of one worker, with the batch's P and as many steps as all valid lengths add
            up to.
        slab: The batch, with the headers of its rollouts.

    Raises:
        ValueError: If a header or the target does not fit. Nothing was written then.
    """

@final
class TrajectoryIds:
    """Maps workers' trajectory ids to global ones, without gaps, in the order they are seen."""

    def __init__(self) -> None: ...
    @staticmethod
    def from_state(
        state: tuple[int, Sequence[tuple[int, Sequence[int], Sequence[int]]]],
    ) -> TrajectoryIds:
        """Continue from a saved `state`; ValueError if no run can produce it."""

    def renumber(self, worker: int, ids: _Array) -> None:
        """Replace a rollout's ids, int64 [P, T], by global ones in place; -1 stays.

        Raises:
            ValueError: If a worker cannot have given these ids. Nothing was changed then.
        """

    def issue(self, count: int) -> int:
        """Number `count` new trajectories, whose ids the caller writes; return the first id."""

    def forget(self, worker: int) -> None:
        """End the open trajectories of a replaced worker; its local ids start again."""

    @property
    def next(self) -> int:
        """Number of trajectories so far."""

    def state(self) -> tuple[int, list[tuple[int, list[int], list[int]]]]:
        """Return `next`, and (worker, local ids, global ids) of open trajectories; -1: none."""

@final
class SplitPlan:
    """The trajectories of one batch, in row-major order; immutable.

    Args:
        done: bool, of the batch's shape, optionally followed by dimensions of extent 1; or
            ``None``.
        ids: int64, of the same shape; or ``None``. Either `done` or `ids` is required.
        mask: bool, of the same shape; or ``None``. False for cells without a frame.
        batch_dims: Number of batch dimensions, time last.

    Attributes:
        count: N, the number of trajectories.
        longest: Length of the longest trajectory, 0 without trajectories.
        frames: Sum of the lengths.

    Raises:
        ValueError: If both `done` and `ids` are missing, or if one does not fit.
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
        """Positions in the flat form, [count + 1]: trajectory i is [offsets[i], offsets[i + 1])."""

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Length of each trajectory, [count]."""

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Row of each trajectory, [count]; rows number all batch dimensions but the last as one."""

    def padded(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Copy each source [*batch, *frame] into its target [count, longest, *frame], padded by
        zeros.

        Raises:
            ValueError: If a shape does not fit. Nothing was written then.
        """

    def flat(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Copy each source [*batch, *frame] into a target [frames, *frame]; raises as `padded`."""

    def mask(self, target: _Array) -> None:
        """Write to bool [count, longest] whether each cell holds a frame."""

    def pad(self, target: _Array, value: int) -> None:
        """Fill the padding of a leaf [count, longest, *frame] with a value other than zero."""

@final
class MultiStepPlan:
    """The number of steps that each frame of a batch looks ahead; immutable.

    Frame t of a segment of L frames leads to frame min(t + n_steps - 1, L - 1), both included.
    Uncollected cells lead to themselves by zero steps, and no frame looks into one.

    Raises:
        ValueError: If n_steps is below 1.
    """

    def __init__(self, split: SplitPlan, n_steps: int) -> None: ...
    def shift(self, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Write, for each cell of a source [*batch, *frame], the frame that it leads to into its
        target.

        Raises:
            ValueError: If a shape does not fit. Nothing was written then.
        """

    def sum(self, gamma: float, sources: Sequence[_Array], targets: Sequence[_Array]) -> None:
        """Write, for each cell of a source, the sum of gamma^k times the frame k cells ahead.

        Sums are computed in double precision and rounded once; uncollected cells get zero. Errors
        as `shift`.
        """

    def steps(self, target: _Array) -> None:
        """Write the steps each cell looks ahead to int64 [*batch]: 1 to n, 0 if uncollected."""

    def discounts(self, gamma: float, target: _Array) -> None:
        """Write gamma to the power of `steps` to [*batch] of any dtype; 1 for uncollected cells."""

    def nonterminal(self, target: _Array) -> None:
        """Write to bool [*batch] whether each cell is a frame with another frame after it."""

class CudaError(RuntimeError):
    """A failed call of the CUDA driver: the call, and the error's name, number and text."""

def cuda_why_not() -> str:
    """Return why CUDA is not available; empty if it is. Determined once per process."""

@final
class Upload:
    """A copy in progress. Thread-safe."""

    def done(self) -> bool:
        """Return whether the host has seen the copy complete, so its source may be written."""

    def wait(self) -> None:
        """Sleep until the copy is complete."""

    def hold_back(self, stream: int) -> None:
        """Make later work of this stream wait for the copy; the host does not wait."""

@final
class CudaEvent:
    """Marks the work queued on a stream so far. Thread-safe.

    A thread may query it while another thread captures a CUDA graph; a query of torch's own event
    would end the capture.

    Args:
        device: Index of the device.
        stream: A stream of this device; a CUstream as a number.
        polls: Whether `wait` polls for some 200 microseconds before it sleeps (default: ``False``).

    Raises:
        ValueError: If the device does not exist.
        CudaError: If CUDA is not available or a call fails.
    """

    def __init__(self, device: int, stream: int, polls: bool = False) -> None: ...
    def done(self) -> bool:
        """Return whether the host has seen the marked work done."""

    def wait(self) -> None:
        """Sleep until the marked work is done; poll first if `polls`."""

    def hold_back(self, stream: int) -> None:
        """Make later work of this stream wait for the marked work; the host does not wait."""

@final
class Uploader:
    """Copies host memory to a device, on its own stream and in order. Thread-safe.

    Raises:
        ValueError: If the device does not exist.
        CudaError: If CUDA is not available.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> int:
        """Stream of the copies, a CUstream as a number."""

    def upload(
        self, source: _Array, target: int, consumer: int, after: int | None = None
    ) -> Upload:
        """Start a copy of an array to an address on the device.

        Args:
            source: A contiguous array, held until the copy is complete on the host.
            target: Address of large enough memory.
            consumer: A stream; its later work waits for the copy.
            after: A stream; the copy waits for its work so far (default: ``None``).

        Raises:
            ValueError: If `source` is not contiguous or not in host memory.
            CudaError: If a call failed. `source` is released once nothing reads it.
        """

    def release_finished(self) -> int:
        """Release the sources of completed copies; return the number of copies in progress."""

    def wait(self) -> None:
        """Sleep until all copies are complete."""

@final
class Registration:
    """Keeps shared memory pinned and alive while this object exists.

    Raises:
        CudaError: If the memory cannot be pinned, or is pinned already.
    """

    def __init__(self, memory: Memory, device: int) -> None: ...

def host_memory(device: int, bytes: int) -> Memory:
    """Allocate pinned memory, uninitialized, which every device can read and write directly.

    Raises:
        ValueError: If `bytes` is below 1.
        CudaError: If the driver cannot allocate it.
    """

@final
class DeviceGather:
    """Carries out split and n-step plans on a CUDA device, one launch for all leaves; immutable.

    Arrays are on the device. Types are not cast. Targets must be contiguous. The frames of a source
    must be contiguous, and its rows must lie at equal distances. Calls return at once; the stream
    does the work.

    Raises:
        ValueError: If the device does not exist. In calls: if an argument does not fit; nothing was
            sent then.
        CudaError: If CUDA is not available, or a call failed.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def device(self) -> int: ...
    @staticmethod
    def workspace_bytes(plan: SplitPlan | MultiStepPlan, leaves: int, target_bytes: int) -> int:
        """Return the required size of a call's workspace in bytes.

        Args:
            plan: Plan of the call.
            leaves: Number of leaves.
            target_bytes: Size of all targets together.
        """

    def padded(
        self,
        plan: SplitPlan,
        sources: Sequence[_Array],
        targets: Sequence[_Array],
        workspace: _Array,
        stream: int,
    ) -> None:
        """Do the same as `SplitPlan.padded` on the device.

        Args:
            workspace: Memory of the device, which is used until the stream has done the work.
            stream: A CUstream as a number.
        """

    def flat(
        self,
        plan: SplitPlan,
        sources: Sequence[_Array],
        targets: Sequence[_Array],
        workspace: _Array,
        stream: int,
    ) -> None:
        """Do the same as `SplitPlan.flat` on the device; arguments as `padded`."""

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
        """Do `MultiStepPlan.shift` for `moved` and `MultiStepPlan.sum` for `summed` on the device.

        Sums must be of float32 or float64. They are added term by term, so they may differ from the
        host's in the last bit of double precision.
        """
