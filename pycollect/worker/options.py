"""The arguments that configure a worker, except its environment and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from pycollect import checks as check
from pycollect.arguments import argument, asked, flag, made_of
from pycollect.data.cast import ObservationCast
from pycollect.data.devices import Devices
from pycollect.envs.info import InfoKeys, check_info_keys
from pycollect.envs.make_vector import parse_autoreset
from pycollect.policy.calling import CallOptions
from pycollect.policy.states import check_policy_state

PreHook = Callable[[], Any]
PostHook = Callable[[TensorDictBase], Any]

PRE, POST = "pre_collect_hook", "post_collect_hook"


def _check_autoreset(name: str, value: Any) -> Any:
    """Return None or an autoreset mode, given as Gymnasium's enum or its name in any case."""
    parse_autoreset(value, name)
    return value


@dataclass(frozen=True)
class WorkerOptions:
    """The arguments that configure a worker, except its environment and policy."""

    frames: int = 0  # share of a batch; each of P environments makes ``ceil(frames / P)`` steps
    mask: bool = False  # record ("collector", "mask") in any case, because rollouts may be padded
    devices: Devices = field(default_factory=Devices)  # of environments and policy
    stays: bool = False  # the slab has no space for entries on the environments' device
    compress: bool = False  # compress rollouts that leave the machine
    autoreset_mode: Any = argument(
        None,
        _check_autoreset,
        """Autoreset mode of a vector environment whose metadata does not contain one: "NEXT_STEP",
        "SAME_STEP", "DISABLED" or Gymnasium's enum. Defaults to ``None``: the mode in the
        metadata.""",
    )
    final_observation: Literal["unknown"] | None = argument(
        None,
        partial(check.check_choice, allowed=(None, "unknown")),
        """"unknown" for a vector environment that resets in the same step and does not return the
        last observation of an episode, as many simulators on GPUs. The entry ("next",
        "observation_valid"), bool [P, T, 1], is then False in frames whose ("next", "observation")
        belongs to the next episode. Defaults to ``None``: an error names the environment when such
        an episode ends.""",
    )
    env_groups: int = argument(
        1,
        check.check_env_groups,
        """With 2, one half of the environments steps while the policy acts for the other half.
        `create_env_fn` is called once per half, or is a list of two callables. Each call returns a
        vector environment that steps in other threads or processes, such as AsyncVectorEnv, EnvPool
        or AtariVectorEnv. P counts the environments of both halves. With ``inference="central"``,
        the environments may also step in their worker, and a longer list is cut in two.""",
    )
    info_keys: InfoKeys = made_of(
        check_info_keys,
        info_keys=asked(
            None,
            """Entries of Gymnasium's ``info`` to record under "next": strings, or tuples for nested
            dicts. A number or numeric array in the first step becomes a tensor, which is zero in
            steps without that entry. Other entries become NonTensorData, which is ``None`` in steps
            without them. An entry that the first step lacks also becomes NonTensorData, with a
            warning. To record it as a tensor, pass a dict of dtypes, ``{("episode", "r"):
            torch.float32}``; it is a scalar if the first step lacks it. A warning names entries
            that no step of the first episode has. An integer that does not fit its dtype is an
            error. Defaults to ``None``: nothing is recorded.""",
            accepts="AskedInfo | None",
        ),
    )
    max_frames_per_traj: int = argument(
        None,
        check.check_count,
        """Truncate and reset a trajectory after this many steps, and record "step_count". ``None``
        or 0 sets no limit.""",
    )
    reset_at_each_iter: bool = flag(False, "Reset all environments at the start of every rollout.")
    set_truncated: bool = flag(
        False,
        """Set the truncated flag of each environment's last frame in every rollout. With
        `trajs_per_batch`, the flag completes a trajectory.""",
    )
    policy_state: Mapping[Any, Any] | None = made_of(
        check_policy_state,
        policy_state=asked(
            None,
            """Recurrent states of the policy by key: the shape for one environment, or the first
            value. Needed only if no primer and no LSTM, GRU or RNN layer of the policy defines
            them.""",
            accepts="Mapping[Any, Any] | None",
        ),
    )
    exploration_type: InteractionType = argument(
        InteractionType.RANDOM,
        check.check_exploration,
        """How actions are drawn from the policy: DETERMINISTIC, RANDOM, MODE or MEAN, as an
        ExplorationType or its name.""",
        accepts="InteractionType | str",
    )
    track_policy_version: bool = argument(  # WeightOptions has its text and its check
        False, lambda _, value: bool(value), accepts="bool"
    )
    registers: bool = flag(
        False,
        """Append to TorchRL environments the transforms that TorchRL's recurrent modules in the
        policy require: an InitTracker and the primers of their states. Without them, the collector
        keeps these states itself. No effect with ``inference="central"``.""",
        name="auto_register_policy_transforms",
    )
    num_threads: int | None = argument(
        None,
        check.check_positive_or_none,
        "Number of torch threads while collecting. Defaults to ``None``: unchanged.",
    )
    cast: ObservationCast | None = made_of(  # StreamOptions has its texts
        ObservationCast.checked, observation_dtype=asked(None), observation_scale=asked(None)
    )
    compact: bool = flag(
        False,
        """Omit ("next", key) of observations and recurrent states. The next step's root entry is
        the same, except at the end of a trajectory, whose last observation is lost. Rewards and
        flags are always recorded.""",
        name="compact_obs",
    )
    call_options: CallOptions = made_of(
        CallOptions.checked,
        compile_policy=asked(
            None,
            """Call the policy through ``torch.compile``. A dict contains its arguments, and
            "warmup": the number of calls before compilation, 1 by default.""",
            accepts="bool | Mapping[str, Any] | None",
        ),
        cudagraph_policy=asked(
            None,
            """Replay the policy's modules as CUDA graphs. A dict contains "warmup": the number of
            calls before capture, 2 by default. Without CUDA this has no effect, with a warning.""",
            accepts="bool | Mapping[str, Any] | None",
        ),
        trust_policy=asked(
            None,
            "Call the policy with the TensorDict, whatever the names of its parameters.",
            accepts="bool | None",
        ),
    )
    init_fn: Callable[[], Any] | None = argument(
        None,
        check.check_callable,
        "Function without arguments that is called before the environments are made.",
    )
    pre_collect_hook: Callable[[], Any] | None = argument(
        None,
        check.check_callable,
        "Function without arguments that is called before each batch is collected.",
    )
    post_collect_hook: Callable[[TensorDictBase], Any] | None = argument(
        None, check.check_callable, "Function that is called with each batch before it is returned."
    )
