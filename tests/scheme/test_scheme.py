"""CWorker and CWorkerSet with small components over Gymnasium, in this process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from raising import refused, warned
from scheme_support import ACTIONS, OBSERVATION, Counting, off_policy, on_policy

from pycollect import scheme
from pycollect.scheme import CWorker, CWorkerSet, Worker, WorkerSet
from pycollect.scheme.gym import ActorCritic, GymEnvs, QNetwork, RolloutStorage
from pycollect.scheme.messages import StopListener

SIGNATURES = {
    CWorker: "index_worker index_parent algo_factory actor_factory storage_factory "
    "fraction_samples compress_data_to_send train_envs_factory test_envs_factory initial_weights "
    "device",
    CWorkerSet: "num_workers index_parent algo_factory actor_factory storage_factory local_device "
    "initial_weights fraction_samples total_parent_workers compress_data_to_send "
    "train_envs_factory test_envs_factory worker_remote_config",
    CWorkerSet.create_factory: "num_workers algo_factory actor_factory storage_factory "
    "test_envs_factory train_envs_factory total_parent_workers col_fraction_samples "
    "compress_data_to_send col_worker_resources",
    CWorker.collect_data: "self listen_to data_to_cpu",
    CWorker.collect_train_data: "self num_steps listen_to",
    CWorker.replace_agent_component: "self component_name new_component_factory",
    CWorker.update_algorithm_parameter: "self parameter_name new_parameter_value",
    CWorker.update_storage_parameter: "self parameter_name new_parameter_value",
    CWorker.set_weights: "self actor_weights",
    Worker.as_remote: "num_cpus num_gpus memory object_store_memory resources",
    WorkerSet: "worker worker_params index_parent_worker worker_remote_config num_workers "
    "local_device initial_weights add_local_worker total_parent_workers",
}


@pytest.mark.parametrize("what", SIGNATURES, ids=lambda what: what.__qualname__)
def test_signatures_equal_the_original(what: Any) -> None:
    names = list(inspect.signature(what).parameters)
    # If a class was made a Ray actor, Ray adds an argument to its methods.
    assert [name for name in names if name != "_ray_trace_ctx"] == SIGNATURES[what].split()


def worker_of(**factories: Any) -> CWorker:
    return CWorker(0, 0, device="cpu", **factories)


def steps_seen(data: dict[str, Any], row: int, env: int) -> list[float]:
    return data["Observation"][row, env].tolist()


def telling_envs(closed: list[str]) -> Callable[..., GymEnvs]:
    """Return a factory of environments that append to `closed` when they are closed."""

    class Envs(GymEnvs):
        def close(self) -> None:
            closed.append("closed")
            super().close()

    def make(device: torch.device, *place: int) -> GymEnvs:
        return Envs([Counting], device)

    return make


class TestData:
    def test_on_policy_rows_follow_each_other(self) -> None:
        worker = worker_of(**on_policy())
        first, info = worker.collect_data()
        kept = first["Observation"].clone()
        assert first["Observation"].shape == (13, 2, 2)
        assert [steps_seen(first, t, 0) for t in range(7)] == [
            *([0, t] for t in range(5)),
            *([1, t] for t in range(2)),
        ]
        assert first["Done"][:, 0, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
        assert set(info) == {"Episodes", "Time", "ActorVersion", "NumberSamples"}
        assert info["NumberSamples"] == 24
        assert info["Time"]["DataCollection"] > 0
        assert info["Episodes"]["TrainReward"] == np.mean([5, 7, 5])
        second, _ = worker.collect_data()
        assert torch.equal(second["Observation"][0], kept[-1])  # nothing is lost between the two
        worker.stop()

    def test_off_policy_successors_are_true(self) -> None:
        worker = worker_of(**off_policy(update_every=6, start_steps=3))
        data, info = worker.collect_data()
        assert data["Observation"].shape == (9, 2, 2)  # includes the steps before the first rollout
        assert info["NumberSamples"] == 18
        assert data["NextObservation"][4, 0].tolist() == [0, 5]
        assert data["Observation"][5, 0].tolist() == [1, 0]
        assert data["NextDone"][:, 0, 0].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
        assert worker.collect_data()[0]["Observation"].shape == (6, 2, 2)
        worker.stop()

    def test_the_environment_gets_actions_of_a_box_clipped(self) -> None:
        space = Box(-0.5, 0.25, (1,), np.float32)
        taken = []

        class Continuous(Counting):
            action_space = space

            def step(self, action: Any) -> Any:
                taken.append(action.copy())
                return super().step(action)

        worker = worker_of(
            **on_policy(size=20)
            | {
                "train_envs_factory": lambda device, *_: GymEnvs([Continuous], device),
                "actor_factory": ActorCritic.create_factory(OBSERVATION, space, 8),
            }
        )
        data, _ = worker.collect_data()
        worker.stop()
        actions = data["Action"][:20, 0].numpy()
        assert np.array_equal(np.array(taken), actions.clip(space.low, space.high))
        assert (actions < space.low).any()
        assert (actions > space.high).any()

    @pytest.mark.parametrize("algorithm", [on_policy, off_policy])
    def test_observations_without_dimensions(self, algorithm: Any) -> None:
        space = Box(-1000, 1000, (), np.float32)

        class Scalar(Counting):
            observation_space = space

            def _seen(self) -> Any:
                return np.float32(self._step)

        actor = ActorCritic if algorithm is on_policy else QNetwork
        worker = worker_of(
            **algorithm()
            | {
                "train_envs_factory": lambda device, *_: GymEnvs([Scalar] * 2, device),
                "actor_factory": actor.create_factory(space, ACTIONS, 8),
            }
        )
        data, _ = worker.collect_data()
        worker.stop()
        assert data["Observation"][:5].T.tolist() == [[0, 1, 2, 3, 4]] * 2

    def test_a_truncated_end_is_bootstrapped(self) -> None:
        worker = worker_of(**on_policy(truncates=True, gamma=0.5))
        data, _ = worker.collect_data()
        with torch.no_grad():
            _, value = worker.actor(torch.tensor([[0.0, 5.0]]))
        assert data["Reward"][4, 0, 0].item() == pytest.approx(1 + 0.5 * value.item())
        assert data["Reward"][3, 0, 0].item() == 1
        off = worker_of(**off_policy(truncates=True, update_every=6))
        transitions, _ = off.collect_data()
        assert not transitions["NextDone"].any()
        assert transitions["NextObservation"][4, 0].tolist() == [0, 5]
        worker.stop()
        off.stop()

    def test_train_data_without_tests(self) -> None:
        worker = worker_of(**on_policy())
        seconds, train_perf = worker.collect_train_data(3)
        assert seconds > 0
        assert np.isnan(train_perf)  # no episode has ended
        assert worker.collect_train_data()[1] == np.mean([5, 7, 5, 7, 5])
        assert worker.samples_collected == 30
        worker.stop()

    def test_versions_of_collected_data(self) -> None:
        worker = worker_of(**on_policy())
        weights = {name: torch.zeros_like(w) for name, w in worker.get_weights().items()}
        worker.set_weights({"ActorVersion": 3, "ActorWeights": weights})
        data, info = worker.collect_data()
        assert info["ActorVersion"] == {"DataCollection": 3}
        assert not data["Value"][:12].any()
        with refused(TypeError, "actor_weights") as caught:
            worker.set_weights(weights)
        assert "'ActorVersion'" in str(caught.value)
        worker.stop()

    @pytest.mark.parametrize(
        ("change", "error", "given"),
        [
            (
                lambda weights: {"w": weights.pop("policy.0.bias"), **weights},
                ValueError,
                "policy.0.bias",
            ),
            (
                lambda weights: {**weights, "policy.0.bias": torch.ones(3)},
                ValueError,
                "policy.0.bias",
            ),
            (list, TypeError, "'ActorWeights'"),
        ],
    )
    def test_weights_of_another_actor_change_nothing(
        self, change: Any, error: Any, given: str
    ) -> None:
        worker = worker_of(**on_policy())
        before = {name: weight.clone() for name, weight in worker.get_weights().items()}
        other = change({name: torch.ones_like(weight) for name, weight in before.items()})
        with refused(error, "actor_weights") as caught:
            worker.set_weights({"ActorVersion": 3, "ActorWeights": other})
        assert given in str(caught.value)
        assert worker.actor_version == 0
        assert all(
            torch.equal(weight, before[name]) for name, weight in worker.get_weights().items()
        )
        worker.stop()
        with refused(error, "initial_weights") as caught:
            worker_of(**on_policy(), initial_weights={"ActorVersion": 3, "ActorWeights": other})
        assert given in str(caught.value)


class TestEvaluation:
    def test_short_episodes_count_no_more_than_long_ones(self) -> None:
        """Four episodes of two environments: two each, although one ends its own sooner."""
        worker = worker_of(**on_policy((1, 50), num_test_episodes=4))
        assert worker.evaluate() == np.mean([1, 1, 50, 50])
        worker.stop()

    def test_tests_run_when_they_are_due(self) -> None:
        worker = worker_of(
            **on_policy(num_test_episodes=2, num_epochs=2, num_mini_batch=3, test_every=9)
        )
        tested = ["TestReward" in worker.collect_data()[1]["Episodes"] for _ in range(4)]
        assert tested == [True, True, False, True]  # updates 0 to 5, 6 to 11, 12 to 17, 18 to 23
        worker.stop()


class TestComponents:
    def test_unknown_names_raise(self) -> None:
        worker = worker_of(**on_policy())
        with refused(AttributeError, "component_name") as caught:
            worker.replace_agent_component("actr", lambda device: None)
        assert "'actor'" in str(caught.value)
        assert "'actr'" in str(caught.value)
        with refused(AttributeError, "parameter_name") as caught:
            worker.update_algorithm_parameter("gama", 0.5)
        assert "'gamma'" in str(caught.value)
        assert "'gama'" in str(caught.value)
        with refused(AttributeError, "parameter_name") as caught:
            worker.update_storage_parameter("size", 5)
        assert "'size'" in str(caught.value)
        with refused(TypeError, "new_component_factory"):
            worker.replace_agent_component("actor", 3)
        with refused(TypeError, "num_steps"):
            worker.collect_train_data("a")
        with refused(ValueError, "num_steps"):
            worker.collect_train_data(0)
        with refused(TypeError, "listen_to"):
            worker.collect_data(listen_to="abc")
        worker.update_algorithm_parameter("gamma", 0.5)
        assert worker.algo.gamma == 0.5
        worker.stop()

    @pytest.mark.parametrize("name", ["Actor", "actor"])
    def test_another_actor_acts(self, name: str) -> None:
        worker = worker_of(**on_policy())
        worker.replace_agent_component(name, ActorCritic.create_factory(OBSERVATION, ACTIONS, 4))
        assert worker.algo.actor is worker.storage.actor is worker.actor
        assert worker.actor.policy[0].out_features == 4
        worker.collect_data()
        worker.stop()

    def test_a_rollout_has_the_new_length_of_the_storage_or_the_algorithm(self) -> None:
        worker = worker_of(**on_policy())
        worker.update_storage_parameter("max_size", 24)
        data, info = worker.collect_data()
        assert info["NumberSamples"] == 48
        assert data["Reward"][:, 0, 0].tolist() == [1] * 24 + [0]
        worker.update_algorithm_parameter("update_every", 6)
        data, info = worker.collect_data()
        assert info["NumberSamples"] == 12
        assert data["Reward"][:, 0, 0].tolist() == [1] * 6 + [0]
        assert data["Observation"][:2, 0].tolist() == [[4, 4], [5, 0]]
        worker.update_algorithm_parameter("num_epochs", 3)
        assert worker.updates_per_iter == 3
        worker.stop()

    def test_a_rollout_is_as_long_as_another_storage(self) -> None:
        worker = worker_of(**on_policy())
        worker.replace_agent_component("Storage", RolloutStorage.create_factory(4))
        data, info = worker.collect_data()
        assert info["NumberSamples"] == 8
        assert data["Observation"].shape == (5, 2, 2)
        worker.stop()

    def test_other_environments_begin_with_a_reset(self) -> None:
        worker = worker_of(**on_policy((5, 7)))
        worker.collect_data()
        worker.replace_agent_component("TrainEnvironment", on_policy((3, 4))["train_envs_factory"])
        data, info = worker.collect_data()
        assert data["Observation"][:5, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
        assert info["NumberSamples"] == 24
        worker.stop()

    def test_another_number_of_environments_is_refused(self) -> None:
        """The storage has a fixed number of environments; after the error the old ones continue."""
        worker = worker_of(**on_policy((5, 7)))
        first, _ = worker.collect_data()
        last = first["Observation"][-1].clone()
        closed: list[str] = []
        make = telling_envs(closed)
        with refused(ValueError, "new_component_factory"):
            worker.replace_agent_component("TrainEnvironment", make)
        assert closed == ["closed"]
        assert torch.equal(worker.collect_data()[0]["Observation"][0], last)
        worker.replace_agent_component("envs_train", lambda *place: None)
        with refused(ValueError, "new_component_factory"):
            worker.replace_agent_component("TrainEnvironment", make)
        worker.stop()

    def test_environments_are_closed_if_a_later_factory_fails(self) -> None:
        closed: list[str] = []
        make = telling_envs(closed)
        factories = {**on_policy(), "train_envs_factory": make}
        factories["actor_factory"] = lambda device: 1 / 0
        with pytest.raises(ZeroDivisionError):
            worker_of(**factories)
        assert closed == ["closed"]

    @pytest.mark.parametrize(
        ("factory", "lacks"),
        [
            ("train_envs_factory", "num_envs"),
            ("actor_factory", "actor_initial_states"),
            ("algo_factory", "update_every"),
            ("storage_factory", "insert_transition"),
        ],
    )
    def test_a_component_that_lacks_a_method_is_refused(self, factory: str, lacks: str) -> None:
        with refused(TypeError, factory) as caught:
            worker_of(**{**on_policy(), factory: lambda *arguments: [1]})
        assert lacks in str(caught.value)


class BoomError(Exception):
    """Raised by a component in a test."""


class TestExceptions:
    """After an exception, the next rollout is complete and starts with a reset."""

    @pytest.mark.parametrize("kind", [BoomError, KeyboardInterrupt])
    @pytest.mark.parametrize(
        ("component", "method"),
        [
            ("envs_train", "step"),
            ("actor", "forward"),
            ("algo", "acting_step"),
            ("storage", "insert_transition"),
            ("storage", "get_all_buffer_data"),
            ("envs_test", "step"),
        ],
    )
    @pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
    @pytest.mark.parametrize("call", [1, 5])
    def test_the_next_rollout_has_no_earlier_steps(
        self,
        monkeypatch: pytest.MonkeyPatch,
        component: str,
        method: str,
        before: bool,
        call: int,
        kind: Any,
    ) -> None:
        worker = worker_of(**on_policy(num_test_episodes=2))
        calls = []
        original = getattr(getattr(worker, component), method)

        def failing(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if before and len(calls) == number:
                raise kind
            result = original(*args, **kwargs)
            if len(calls) == number:
                raise kind
            return result

        number = 1 if method == "get_all_buffer_data" else call
        monkeypatch.setattr(getattr(worker, component), method, failing)
        with pytest.raises(kind):
            worker.collect_data()
        assert worker.actor.training
        monkeypatch.undo()
        data, info = worker.collect_data()
        assert info["NumberSamples"] == 24
        seen = [steps_seen(data, t, 0) for t in range(13)]
        episode = seen[0][0]
        assert episode >= 1
        assert seen == [[episode + t // 5, t % 5] for t in range(13)]
        assert steps_seen(worker.collect_data()[0], 0, 0) == seen[12]
        worker.stop()

    def test_transitions_for_training_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = worker_of(**off_policy(update_every=6))
        worker.collect_train_data(3)
        with monkeypatch.context() as patch:
            patch.setattr(worker.envs_train, "step", lambda action: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                worker.collect_train_data(3)
        worker.collect_train_data(3)
        data, _ = worker.collect_data()
        rows = data["Observation"][:6, 0].tolist()
        assert rows == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        worker.stop()


class TestStopping:
    def test_checks_for_a_stop_take_little_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def check(key: str) -> bytes | None:
            asked.append(key)
            threading.Event().wait(0.002)
            return b"stop" if len(asked) > 2 else b"start-continue"

        monkeypatch.setattr("pycollect.scheme.messages.check_message", check)
        listener = StopListener(["sync", "worker_0"])
        assert not listener.heard
        assert asked == ["sync", "worker_0"]
        assert not any(listener.heard for _ in range(10))  # each check is cached for a while
        assert len(asked) == 2
        while not listener.heard:
            threading.Event().wait(0.01)
        assert len(asked) == 3

    def test_the_valid_rows_of_a_rollout_that_ended_early(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = worker_of(**on_policy(), fraction_samples=0.25)
        worker.collect_data()  # its data must not appear later
        monkeypatch.setattr(StopListener, "heard", True)
        data, info = worker.collect_data(["sync"])
        assert info["NumberSamples"] == 3 * 2
        assert {name: len(leaf) for name, leaf in data.items()} == dict.fromkeys(data, 4)
        assert data["Observation"][:, 0].tolist() == [[2, 2], [2, 3], [2, 4], [3, 0]]
        assert data["Done"][:, 0, 0].tolist() == [0, 0, 0, 1]
        assert data["Reward"][:, 0, 0].tolist() == [1, 1, 1, 0]
        assert not data["LogProbability"][3].any()
        monkeypatch.undo()
        assert worker.collect_data()[0]["Observation"][0, 0].tolist() == [3, 0]
        worker.stop()

    def test_without_ray_no_stop_is_received(self) -> None:
        import ray

        if ray.is_initialized():
            pytest.skip("another test's Ray is there")
        assert scheme.check_message("sync") is None
        with pytest.raises(RuntimeError, match="sync"):
            scheme.broadcast_message("sync", b"stop")


class TestSets:
    @pytest.mark.parametrize("count", [0, 1])
    def test_none_and_one_are_local(self, count: int) -> None:
        make = CWorkerSet.create_factory(count, **on_policy())
        workers = make("cpu", None, 0)
        assert workers.remote_workers() == []
        assert workers.num_workers == count
        assert workers.worker_class is CWorker
        assert workers.local_worker().envs_train.num_envs == 2
        ((_, info),) = workers.collect_data()
        assert info["NumberSamples"] == 24
        workers.stop()
        workers.stop()
        with pytest.raises(RuntimeError, match="worker 0"):
            workers.collect_data()

    def test_the_first_of_several_parents_does_not_collect(self) -> None:
        make = CWorkerSet.create_factory(3, total_parent_workers=2, **on_policy())
        workers = make("cpu", None, 0)
        assert workers.num_workers == 0
        assert workers.local_worker().envs_train is None
        workers.stop()

    def test_refused_arguments(self) -> None:
        factories = on_policy()
        with refused(TypeError, "algo_factory"):
            CWorkerSet(0, 0, **{**factories, "algo_factory": (1, "PPO")})
        with refused(TypeError, "total_parent_workers"):
            CWorkerSet(0, 0, total_parent_workers="x", **factories)
        with refused(TypeError, "index_parent"):
            CWorkerSet(0, "a", **factories)
        with refused(ValueError, "fraction_samples"):
            CWorkerSet(0, 0, fraction_samples=2.0, **factories)
        with refused(ValueError, "worker_remote_config") as caught:
            CWorkerSet(0, 0, worker_remote_config={"gpus": 1}, **factories)
        assert "gpus" in str(caught.value)
        with refused(ValueError, "worker_remote_config") as caught:
            CWorkerSet(0, 0, worker_remote_config={"num_cpus": "many"}, **factories)
        assert "'num_cpus'" in str(caught.value)
        with pytest.raises(RuntimeError, match="terminate_worker"):
            worker_of(**factories).terminate_worker()

    def test_actions_that_a_component_cannot_choose_are_refused(self) -> None:
        several = Box(0, 1, (2, 2))
        for make, space in (
            (ActorCritic, Discrete(2, start=1)),
            (ActorCritic, several),
            (QNetwork, Discrete(2, start=1)),
            (QNetwork, several),
        ):
            with refused(ValueError, "action_space"):
                make(OBSERVATION, space)
        with refused(ValueError, "entry"):
            GymEnvs(Counting, torch.device("cpu"))  # neither a list nor a vector environment

    def test_seeds_and_numbers_of_environments_are_checked(self) -> None:
        with refused(ValueError, "seed"):
            GymEnvs([Counting], torch.device("cpu"), seed=-1)
        with refused(TypeError, "seed"):
            GymEnvs.create_factory(Counting, num_envs=1, seed="a")
        with refused(ValueError, "num_envs"):
            GymEnvs.create_factory(Counting, num_envs=0)

    def test_the_device_is_the_requested_one(self) -> None:
        workers = CWorkerSet(0, 0, local_device="cpu:0", **on_policy())
        assert workers.local_worker().device == torch.device("cpu:0") != torch.device("cpu")
        workers.stop()

    @pytest.mark.parametrize("device", ["tpu?", "cuda:99"])
    def test_a_device_that_is_not_here_is_refused(self, device: str) -> None:
        with refused(ValueError, "local_device") as caught:
            CWorkerSet(0, 0, local_device=device, **on_policy())
        assert device in str(caught.value)
        with refused(ValueError, "device") as caught:
            CWorker(0, 0, device=device, **on_policy())
        assert device in str(caught.value)

    @pytest.mark.parametrize(("device", "gpus"), [("cpu", None), ("cuda:0", 0.2)])
    def test_a_part_of_a_gpu_is_reserved_if_the_device_is_a_gpu(
        self, device: str, gpus: float | None
    ) -> None:
        workers = WorkerSet(
            CWorker, {}, 0, num_workers=0, local_device=device, add_local_worker=False
        )
        assert workers.remote_config["num_gpus"] == gpus
        assert workers.local_worker() is None
        workers.stop()

    def test_memory_of_the_object_store_is_a_warning(self) -> None:
        with warned("worker_remote_config"):
            workers = CWorkerSet(
                0, 0, worker_remote_config={"object_store_memory": 1}, **on_policy()
            )
        workers.stop()
        before = dict(scheme.default_remote_config)
        CWorkerSet(0, 0, worker_remote_config={"num_cpus": 7}, **on_policy()).stop()
        assert scheme.default_remote_config == before
