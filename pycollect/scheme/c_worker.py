"""The worker that collects."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycollect.arguments import completed_by
from pycollect.checks import check_fraction, check_positive
from pycollect.data.compression import Packed, import_lz4, pack
from pycollect.scheme import names
from pycollect.scheme.episodes import EpisodeInfos, EpisodeReturns, is_test_due, mean_return
from pycollect.scheme.messages import StopListener
from pycollect.scheme.protocols import (
    Actor,
    ActorFactory,
    Algorithm,
    AlgorithmFactory,
    Data,
    Storage,
    StorageFactory,
    TestEnvsFactory,
    TrainEnvsFactory,
    VecEnv,
)
from pycollect.scheme.worker_set import Worker, check_weights, resolved_weights


class CWorker(Worker):
    """Step a vector environment with an algorithm's actor, and store the steps.

    The factories are called in this order: training environments, test environments, actor,
    algorithm, storage. Then ``algo.start_steps`` steps are stored.

    Attributes:
        index_worker: Index of the worker in its set.
        index_parent: Index of the gradient worker that it collects for.
        fraction_samples, compress_data_to_send: The arguments.
        device: Device of the worker, a torch.device.
        actor: The actor, a :class:`~pycollect.scheme.protocols.Actor`.
        algo: The algorithm, an Algorithm.
        envs_train: Training environments, a VecEnv, or ``None``.
        envs_test: Test environments, a VecEnv, or ``None``.
        storage: The storage, a Storage.
        iter: Number of rollouts collected so far.
        actor_version: Version of the current weights.
        update_every: Steps of the vector environment in one rollout.
        updates_per_iter: Number of updates of the actor per rollout.
        samples_collected: Steps of single environments since the last rollout.
        obs: Latest observations ``[P, ...]``.
        rhs: Latest hidden states.
        done: Latest done flags ``[P, 1]``.

    Args:
        index_worker: Index of the worker in its set.
        index_parent: Index of the gradient worker that it collects for.
        algo_factory: Makes an algorithm from the device, the actor and the training environments.
        actor_factory: Makes an actor from the device.
        storage_factory: Makes a storage from the device, the actor, the algorithm and the training
            environments.
        fraction_samples: Share of a rollout's steps, 0 to 1, that must be collected before it may
            end early (default: 1.0).
        compress_data_to_send: Return the result of `collect_data` compressed, as :class:`Packed`
            (default: ``False``).
        train_envs_factory: Makes environments for collection, or returns ``None``, from the device,
            `index_worker` and `index_parent`. By default the worker has none.
        test_envs_factory: Makes environments for evaluation, or returns ``None``, from the same
            arguments and ``"test"``. By default the worker has none.
        initial_weights: Initial weights in the form of `CWorker.set_weights`. Defaults to ``None``:
            the actor's own.
        device: "cpu" or "cuda:number". ``None`` means CUDA if it is available (default: ``None``).
    """

    def __init__(
        self,
        index_worker: int,
        index_parent: int,
        algo_factory: AlgorithmFactory,
        actor_factory: ActorFactory,
        storage_factory: StorageFactory,
        fraction_samples: float = 1.0,
        compress_data_to_send: bool = False,
        train_envs_factory: TrainEnvsFactory = names.nothing,
        test_envs_factory: TestEnvsFactory = names.nothing,
        initial_weights: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__(index_worker)
        if self.is_remote:
            torch.seed()  # new processes start with the same seed, so all would draw alike
        self.index_parent = index_parent
        self.fraction_samples = check_fraction("fraction_samples", fraction_samples)
        self.compress_data_to_send = compress_data_to_send
        if compress_data_to_send:
            import_lz4("compress_data_to_send")
        self.device = names.device_here("device", device)
        self.envs_train: Any = None
        self.envs_test: Any = None
        try:
            self.envs_train = self._made("envs_train", train_envs_factory)
            self.envs_test = self._made("envs_test", test_envs_factory)
            self.actor = self._made("actor", actor_factory)
            self.algo = self._made("algo", algo_factory)
            self.storage = self._made("storage", storage_factory)
            self._begin(initial_weights)
        except BaseException:
            self.stop()
            raise
        self.print_worker_info()

    def _made(self, attribute: str, factory: Callable[..., Any]) -> Any:
        """Call the factory of a component with the components it depends on."""
        place = (self.device, self.index_worker, self.index_parent)
        if attribute.startswith("envs"):
            mode = ("test",) if attribute == "envs_test" else ()
            envs = factory(*place, *mode)
            name = attribute.removeprefix("envs_") + "_envs_factory"
            return envs and names.check_made(name, envs, VecEnv)
        if attribute == "actor":
            return names.check_made("actor_factory", factory(self.device), Actor)
        if attribute == "algo":
            algo = factory(self.device, self.actor, self.envs_train)
            return names.check_made("algo_factory", algo, Algorithm)
        storage = factory(self.device, self.actor, self.algo, self.envs_train)
        return names.check_made("storage_factory", storage, Storage)

    def _measure(self) -> None:
        """Set the steps of a rollout, from the algorithm or else the storage, and its updates."""
        self.update_every = int(self.algo.update_every or self.storage.max_size)
        self.updates_per_iter = self.algo.num_mini_batch * self.algo.num_epochs

    def _begin(self, initial_weights: Any) -> None:
        self.actor.try_load_from_checkpoint()
        self.iter = self.actor_version = 0
        self.samples_collected = self._stored = 0  # since the storage was emptied
        self._measure()
        self._returns = EpisodeReturns()
        self._has_failed = False  # set while a collection runs, so that it stays set if that raises
        self._num_envs: int | None = None  # of the storage
        self._check_number(self.envs_train)
        if initial_weights is not None:
            self._load_weights("initial_weights", initial_weights)
        if self.envs_train:
            self._restart()
            self._collect_steps(int(self.algo.start_steps), ())
            self._has_failed = False

    def _restart(self) -> None:
        self._returns.restart()
        self.obs, self.rhs, self.done = self.actor.actor_initial_states(self.envs_train.reset())

    def collect_data(
        self, listen_to: Sequence[str] = (), data_to_cpu: bool = True
    ) -> tuple[Data, dict[str, Any]] | Packed:
        """Collect one rollout of `update_every` steps.

        If the last one ended with an exception, drop its steps and reset the environments first.

        Args:
            listen_to: Message keys. If :func:`~pycollect.scheme.broadcast_message` sends
                ``b"stop"`` to one of them, the rollout ends after the current step, but not before
                it has `fraction_samples` of its steps (default: none).
            data_to_cpu: Passed to the storage: return data on the CPU (default: ``True``).

        Returns:
            A tuple of the storage's data and a dict. If the rollout ended early, the data are
            copies of the valid rows only. The dict is::

                {
                    "Episodes": means over ended episodes, by the environments' names of numbers;
                        the return "r" is "TrainReward", and an evaluation adds "TestReward",
                    "Time": {"DataCollection": seconds},
                    "ActorVersion": {"DataCollection": version},
                    "NumberSamples": steps of single environments,
                }

            With `compress_data_to_send`, the tuple is returned as :class:`Packed`.

        Raises:
            RuntimeError: The worker has no training environments.
            TypeError: `listen_to` is not a list of strings.
        """
        start = time.perf_counter()
        if self._has_failed:
            self._empty_storage()
        episodes, ended_early = self._collect_steps(self.update_every, listen_to)
        info: dict[str, Any] = {
            names.EPISODES: episodes,
            names.TIME: {names.COLLECTION: time.perf_counter() - start},
            names.VERSION: {names.COLLECTION: self.actor_version},
            names.NUMSAMPLES: self.samples_collected,
        }
        data = self.storage.get_all_buffer_data(data_to_cpu)
        if ended_early:
            data = names.valid_rows(data, self._stored)
        if self.envs_test and is_test_due(self.algo, self.iter, self.updates_per_iter):
            info[names.EPISODES][names.TEST_REWARD] = self.evaluate()
        result = pack((data, info)) if self.compress_data_to_send else (data, info)
        self._empty_storage()
        self.iter += 1
        self._has_failed = False
        return result

    def _empty_storage(self) -> None:
        self.storage.reset()
        self.samples_collected = self._stored = 0

    def collect_train_data(
        self, num_steps: int | None = None, listen_to: Sequence[str] = ()
    ) -> tuple[float, float]:
        """Collect steps and add them to the stored ones.

        Args:
            num_steps: Steps of the vector environment. ``None`` means `update_every` (default:
                ``None``).
            listen_to: Message keys that can end the collection early, as in `collect_data`
                (default: none).

        Returns:
            The duration in seconds, and the mean return of the last 100 training episodes, nan
            before the first has ended.

        Raises:
            RuntimeError: The worker has no training environments.
            TypeError, ValueError: `num_steps` is not a positive int, or `listen_to` is not a list
                of strings.
        """
        start = time.perf_counter()
        steps = self.update_every if num_steps is None else check_positive("num_steps", num_steps)
        self._collect_steps(steps, listen_to)
        self._has_failed = False
        return time.perf_counter() - start, self._returns.mean

    def _collect_steps(self, steps: int, listen_to: Sequence[str]) -> tuple[dict[str, Any], bool]:
        """Store that many steps; return means of episode numbers, and whether it ended early."""
        if not self.envs_train:
            raise RuntimeError(
                f"worker {self.index_worker} has no training environments; if there are remote "
                "workers, call their methods instead"
            )
        least = max(1, names.share(self.fraction_samples, steps))
        stop, infos, taken = StopListener(listen_to), EpisodeInfos(), 0
        if self._has_failed:  # the environments may be ahead of `obs`
            self._restart()
        self._has_failed = True
        self.actor.eval()
        try:
            for taken in range(1, steps + 1):
                self._step(infos)
                if least <= taken < steps and stop.heard:
                    break
        finally:
            self.actor.train()
        return infos.means(), taken < steps

    def _step(self, infos: EpisodeInfos) -> None:
        act, clipped, rhs2, others = self.algo.acting_step(self.obs, self.rhs, self.done)
        obs2, reward, done2, info = self.envs_train.step(clipped)
        self.storage.insert_transition(
            {
                names.OBS: self.obs,
                names.RHS: self.rhs,
                names.DONE: self.done,
                names.ACT: act,
                names.REW: reward,
                names.OBS2: obs2,
                names.RHS2: rhs2,
                names.DONE2: done2,
                names.INFO: info,
                **others,
            }
        )
        ended = torch.nonzero(done2, as_tuple=False)[:, 0].tolist()
        infos.add(info, ended)
        self._returns.add(reward, ended)
        self.obs, self.rhs, self.done = obs2, rhs2, done2
        self._stored += 1
        self.samples_collected += self.envs_train.num_envs

    def evaluate(self) -> float:
        """Return the mean return of ``algo.num_test_episodes`` test episodes.

        Actions are deterministic. The number of episodes of each environment is fixed in advance,
        so that short episodes do not count more than long ones.

        Raises:
            RuntimeError: The worker has no test environments.
        """
        if not self.envs_test:
            raise RuntimeError(
                f"worker {self.index_worker} has no test environments; pass test_envs_factory"
            )
        return mean_return(self.algo, self.actor, self.envs_test, self.algo.num_test_episodes)

    def set_weights(self, actor_weights: Any) -> None:
        """Load weights and their version.

        Args:
            actor_weights: ``{"ActorVersion": number, "ActorWeights": weights}``, with weights in
                the form of `get_weights()`.

        Raises:
            TypeError: `actor_weights` is not such a dict.
            ValueError: Names or shapes differ from the actor's weights; nothing was changed.
        """
        self._load_weights("actor_weights", actor_weights)

    def _load_weights(self, name: str, given: Any) -> None:
        weights = resolved_weights(name, given)
        check_weights(name, weights[names.WEIGHTS], self.actor.state_dict())
        self.actor.load_state_dict(weights[names.WEIGHTS])
        self.actor_version = weights[names.VERSION]

    def update_algorithm_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the algorithm.

        Args:
            parameter_name: Name of the attribute.
            new_parameter_value: New value.

        Raises:
            AttributeError: No attribute has this name.
        """
        names.check_parameter("parameter_name", self.algo, parameter_name)
        self.algo.update_algorithm_parameter(parameter_name, new_parameter_value)
        self._measure()

    @completed_by(update_algorithm_parameter)
    def update_storage_parameter(self, parameter_name: str, new_parameter_value: Any) -> None:
        """Set an attribute of the storage.

        Args:
            ...: See update_algorithm_parameter.
        """
        names.check_parameter("parameter_name", self.storage, parameter_name)
        self.storage.update_storage_parameter(parameter_name, new_parameter_value)
        self._measure()

    def replace_agent_component(
        self, component_name: str, new_component_factory: Callable[..., Any]
    ) -> None:
        """Replace a component by a new one.

        Other components that hold the old one as `actor`, `algo` or `envs` get the new one. New
        training environments are reset first, and the old ones are closed. An optimizer keeps the
        old actor's parameters, so if the worker learns, also replace the algorithm.

        Args:
            component_name: "Algorithm", "Actor", "Storage", "TrainEnvironment" or
                "TestEnvironment", or the attribute: algo, actor, storage, envs_train, envs_test.
            new_component_factory: Factory of the new component, with the same arguments as the
                constructor's factory.

        Raises:
            AttributeError: The component is unknown.
            TypeError: The factory is not callable.
            ValueError: It makes another number of training environments than the storage has. The
                old ones are kept.
        """
        attribute = names.attribute_of(component_name)
        names.check_callable("new_component_factory", new_component_factory)
        old = getattr(self, attribute)
        new = self._made(attribute, new_component_factory)
        if attribute == "envs_train":
            self._check_number(new)
        setattr(self, attribute, new)
        held_as = names.HELD_AS.get(attribute)
        for owner in (self.algo, self.storage):
            if held_as and old is not None and getattr(owner, held_as, None) is old:
                setattr(owner, held_as, new)
        if attribute in ("envs_train", "envs_test") and old:
            old.close()
        if attribute == "storage":
            self.samples_collected = self._stored = 0
        self._measure()
        if attribute in ("envs_train", "actor") and self.envs_train:
            self._restart()

    def _check_number(self, envs: Any) -> None:
        """Close new training environments and raise if their number does not fit the storage."""
        number = envs.num_envs if envs else self._num_envs
        if self._num_envs not in (None, number):
            envs.close()
            raise ValueError(
                f"new_component_factory: expected {self._num_envs} training environments, as "
                f"before, got {number}"
            )
        self._num_envs = number

    def stop(self) -> None:
        """Close all environments. Idempotent."""
        for attribute in ("envs_train", "envs_test"):
            envs = getattr(self, attribute)
            setattr(self, attribute, None)
            if envs:
                envs.close()
