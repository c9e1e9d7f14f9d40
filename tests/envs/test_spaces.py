"""Spaces as leaves, conversion of observations, and random actions drawn in bulk."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import refused

from pycollect._core import Leaf
from pycollect.data.extras import Extra, Kind
from pycollect.envs.random_actions import make_sampler
from pycollect.envs.single import conform_scalar
from pycollect.envs.spaces import (
    RESERVED_OBSERVATIONS,
    action_leaves,
    conform,
    leaf_spaces,
    make_flatten,
    make_unflatten,
    observation_extras,
    observation_leaves,
)

BOX = spaces.Box(-1, 1, (3,), np.float32)


def nested_spaces() -> st.SearchStrategy[spaces.Space]:
    plain = st.one_of(
        st.builds(
            lambda shape, dtype: spaces.Box(0, 9, tuple(shape), dtype),
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from([np.float32, np.float64, np.uint8, np.int32, np.int64]),
        ),
        st.builds(
            lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)
        ),
        st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 5), min_size=1, max_size=3)),
        st.just(spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[-1, 0], [1, 2]])),
        st.builds(spaces.MultiBinary, st.integers(1, 4)),
    )
    keys = st.sampled_from(["a", "b", "c", "observation", "0"])
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.builds(spaces.Dict, st.dictionaries(keys, inner, min_size=1, max_size=3)),
            st.builds(spaces.Tuple, st.lists(inner, min_size=1, max_size=3)),
        ),
        max_leaves=5,
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return np.array_equal(a, b)


class TestLeaves:
    def test_a_plain_space_is_one_leaf(self) -> None:
        assert observation_leaves(BOX) == (Leaf(("observation",), "float32", (3,)),)
        assert action_leaves(spaces.Discrete(3)) == (Leaf(("action",), "int64", ()),)
        assert action_leaves(spaces.MultiBinary([2, 3])) == (Leaf(("action",), "int8", (2, 3)),)

    def test_nested_spaces_keep_their_order_and_names(self) -> None:
        space = spaces.Dict(
            [("z", BOX), ("a", spaces.Tuple((spaces.Discrete(2), spaces.Dict(k=BOX))))]
        )
        below = [("z",), ("a", "0"), ("a", "1", "k")]
        order = below if next(iter(space.spaces)) == "z" else [*below[1:], below[0]]
        assert [leaf.key for leaf in observation_leaves(space)] == order
        assert [leaf.key for leaf in action_leaves(space)] == [("action", *key) for key in order]

    def test_a_tuple_at_the_top_has_numbers_as_keys(self) -> None:
        leaves = observation_leaves(spaces.Tuple((BOX, spaces.Discrete(2))))
        assert [leaf.key for leaf in leaves] == [("0",), ("1",)]

    @pytest.mark.parametrize("key", sorted(RESERVED_OBSERVATIONS))
    def test_reserved_keys_are_refused_at_the_top_only(self, key: str) -> None:
        with refused(ValueError, "observation_space") as caught:
            observation_leaves(spaces.Dict({key: BOX}))
        assert f"'{key}'" in str(caught.value)
        assert observation_leaves(spaces.Dict({"x": spaces.Dict({key: BOX})}))[0].key == ("x", key)

    @pytest.mark.parametrize(
        ("space", "extra"),
        [
            (spaces.Text(5), Extra(("t",))),
            (spaces.Graph(BOX, BOX), Extra(("t",))),
            (spaces.Sequence(spaces.Text(5)), Extra(("t",))),
            (spaces.Sequence(BOX), Extra(("t",), Kind.RAGGED, torch.float32, (-1, 3))),
            (
                spaces.Sequence(spaces.Discrete(4), stack=True),
                Extra(("t",), Kind.RAGGED, torch.int64, (-1,)),
            ),
        ],
    )
    def test_leaves_without_a_fixed_shape_are_extras(self, space: Any, extra: Extra) -> None:
        observation = spaces.Dict({"t": space, "x": BOX})
        assert [leaf.key for leaf in observation_leaves(observation)] == [("x",)]
        assert observation_extras(observation) == (extra,)
        with refused(ValueError, "action_space") as caught:
            action_leaves(observation)
        assert "'t'" in str(caught.value)

    def test_a_space_of_any_other_class_is_an_extra(self) -> None:
        class Mission(gymnasium.Space[str]):
            """A space like MiniGrid's."""

        space = spaces.Dict({"image": BOX, "mission": Mission()})
        assert [leaf.key for leaf in observation_leaves(space)] == [("image",)]
        assert observation_extras(space) == (Extra(("mission",)),)

    def test_other_spaces_are_refused(self) -> None:
        with refused(ValueError, "action_space") as caught:
            action_leaves(spaces.OneOf((BOX, spaces.Discrete(2))))
        assert "OneOf" in str(caught.value)
        with refused(ValueError, "observation_space"):
            observation_leaves(spaces.Dict({}))
        with refused(ValueError, "observation_space") as caught:
            observation_leaves(spaces.Dict({"x": spaces.Tuple(())}))
        assert "'x'" in str(caught.value)
        with refused(ValueError, "observation_space") as caught:
            observation_leaves(spaces.Dict({7: BOX}))
        assert "7" in str(caught.value)
        with refused(ValueError, "observation_space"):
            observation_leaves(spaces.Box(0, 1, (2,), np.longdouble))
        with refused(TypeError, "observation_space"):
            observation_leaves("Box")  # type: ignore[arg-type]

    @given(nested_spaces())
    def test_flatten_and_unflatten_are_inverse(self, space: spaces.Space) -> None:
        value = space.sample()
        flat = make_flatten(space)(value)
        leaves = leaf_spaces(space, ("root",), "space")
        assert [np.shape(entry) for entry in flat] == [leaf.shape for leaf, _ in leaves]
        assert all(child.contains(entry) for (_, child), entry in zip(leaves, flat, strict=True))
        assert equal(make_unflatten(space)(flat), value)

    def test_a_missing_entry_is_named(self) -> None:
        flatten = make_flatten(spaces.Dict({"x": BOX, "y": BOX}))
        with refused(ValueError, "observation") as caught:
            flatten({"x": np.zeros(3)})
        assert "'y'" in str(caught.value)
        with refused(ValueError, "observation") as caught:
            flatten(np.zeros(3))
        assert "'x'" in str(caught.value)


class TestConform:
    leaf = Leaf(("x", "y"), "float32", (2,))

    def test_a_matching_value_is_passed_through(self) -> None:
        value = np.zeros(2, np.float32)
        assert conform(value, self.leaf, (2,)) is value

    @pytest.mark.parametrize("value", [np.ones(2), np.ones(2, ">f4"), np.ones(2, int), [1.0, 1.0]])
    def test_safe_casts(self, value: Any) -> None:
        result = conform(value, self.leaf, (2,))
        assert result.dtype == np.float32
        assert result.dtype.isnative
        assert result.tolist() == [1, 1]

    def test_integers_are_cast_if_they_keep_their_values(self) -> None:
        leaf = Leaf(("x",), "uint8", (2,))
        assert conform(np.array([0, 255]), leaf, (2,)).dtype == np.uint8
        for value in (np.array([0, 256]), np.array([-1, 0]), np.array([0.0, 1.0])):
            with refused(ValueError, "observation") as caught:
                conform(value, leaf, (2,))
            assert "uint8" in str(caught.value)
            assert "'x'" in str(caught.value)

    def test_another_shape_or_kind_is_an_error(self) -> None:
        with refused(ValueError, "observation") as caught:
            conform(np.zeros(3), self.leaf, (2,), "env 7")
        assert "env 7" in str(caught.value)
        assert "('x', 'y')" in str(caught.value)
        with refused(ValueError, "observation") as caught:
            conform(np.zeros(2, np.complex64), self.leaf, (2,))
        assert "complex64" in str(caught.value)
        with refused(ValueError, "observation"):
            conform([[1.0], [1.0, 2.0]], self.leaf, (2,))
        with refused(ValueError, "observation"):
            conform(None, self.leaf, (2,))

    @pytest.mark.parametrize("value", [7, np.int32(7), np.array(7), True + 6])
    def test_scalars(self, value: Any) -> None:
        result = conform_scalar(value, Leaf(("x",), "int64", ()))
        assert type(result) is int
        assert result == 7

    @pytest.mark.parametrize("value", [7.0, "7", np.zeros(2, int), None])
    def test_no_scalars(self, value: Any) -> None:
        with refused(ValueError, "observation") as caught:
            conform_scalar(value, Leaf(("x",), "int64", ()))
        assert "'x'" in str(caught.value)


INF = np.inf
BOXES = [
    spaces.Box(-2, 5, (2,), np.float32),
    spaces.Box(-INF, INF, (2,), np.float64),
    spaces.Box(
        np.array([3.0, -INF, -INF, -1.0]), np.array([INF, -4.0, INF, 1.0]), dtype=np.float64
    ),
    spaces.Box(0, INF, (), np.float32),
    spaces.Box(-3, 4, (), np.float32),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-2, 2, (2, 2), np.int32),
    spaces.Box(np.array([0.0, -INF, 5.0]), np.array([3.0, 5.0, INF]), dtype=np.int32),
    spaces.Box(0, 1, (3,), np.bool_),
]
OTHERS = [
    spaces.Discrete(5),
    spaces.Discrete(3, start=-7),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiDiscrete([[2, 4], [3, 6]], start=[[1, -3], [0, 10]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
]


class TestRandomActions:
    @pytest.mark.parametrize("space", BOXES + OTHERS, ids=str)
    def test_distribution_is_that_of_sample(self, space: spaces.Space) -> None:
        count = 4000
        space.seed(1)
        ours = make_sampler(space, 4, True)(count // 4, np.random.default_rng(2))[0]
        theirs = np.stack([space.sample() for _ in range(count)])
        ours = ours.reshape(theirs.shape)
        assert ours.dtype == theirs.dtype
        assert all(space.contains(action) for action in ours[:200])
        ours, theirs = ours.astype(float), theirs.astype(float)
        spread = theirs.std(axis=0) + 1e-9
        # Means of 4,000 draws differ by 0.022 standard deviations; 6 times that is never reached.
        assert np.all(np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 0.14 * spread)
        for q in (0.1, 0.25, 0.5, 0.75, 0.9):
            distance = np.abs(np.quantile(ours, q, axis=0) - np.quantile(theirs, q, axis=0))
            step = 1.0 if np.dtype(space.dtype).kind in "iub" else 0.0
            assert np.all(distance <= 0.3 * spread + step)

    def test_every_integer_of_the_support_is_drawn(self) -> None:
        space = spaces.Tuple(
            (spaces.Discrete(4, start=-2), spaces.Box(-1, 2, (), np.int16), spaces.MultiBinary(1))
        )
        drawn = make_sampler(space, 1, False)(500, np.random.default_rng(0))
        assert [sorted(set(a.ravel().tolist())) for a in drawn] == [
            [-2, -1, 0, 1],
            [-1, 0, 1, 2],
            [0, 1],
        ]

    @settings(max_examples=60)
    @given(nested_spaces(), st.integers(0, 4), st.integers(1, 3), st.booleans())
    def test_shapes_and_support(
        self, space: spaces.Space, steps: int, envs: int, own: bool
    ) -> None:
        rngs = [np.random.default_rng(i) for i in range(envs)]
        drawn = make_sampler(space, envs, True)(steps, rngs if own else rngs[0])
        for leaf, array in zip(action_leaves(space), drawn, strict=True):
            assert array.shape == (steps, envs, *leaf.shape)
            assert array.dtype == np.dtype(leaf.dtype)
        unflatten = make_unflatten(space)
        for t in range(steps):
            for p in range(envs):
                assert space.contains(
                    unflatten(
                        [
                            np.int64(a[t, p])
                            if isinstance(child, spaces.Discrete)
                            else a[t, p, ...]
                            for a, (_, child) in zip(
                                drawn, leaf_spaces(space, (), "space"), strict=True
                            )
                        ]
                    )
                )

    def test_one_env_has_no_batch_dimension(self) -> None:
        for rng in (np.random.default_rng(0), [np.random.default_rng(0)]):
            (drawn,) = make_sampler(BOX, 1, False)(6, rng)
            assert drawn.shape == (6, 3)

    def test_an_env_with_its_own_generator_does_not_depend_on_the_others(self) -> None:
        def draw(envs: int) -> Any:
            rngs = [np.random.default_rng([5, i]) for i in range(envs)]
            return make_sampler(BOX, envs, True)(7, rngs)[0]

        assert np.array_equal(draw(4)[:, :2], draw(2))

    def test_the_number_of_generators_is_checked(self) -> None:
        with refused(ValueError, "rng"):
            make_sampler(BOX, 3, True)(1, [np.random.default_rng(0)] * 2)

    @pytest.mark.parametrize(
        ("low", "high", "dtype"),
        [
            (np.finfo(np.float64).min, np.finfo(np.float64).max, np.float64),
            (np.iinfo(np.int64).min, np.iinfo(np.int64).max, np.int64),
            (0, np.iinfo(np.uint64).max, np.uint64),
            (np.iinfo(np.int8).min, np.iinfo(np.int8).max, np.int8),
        ],
    )
    def test_whole_range_of_a_dtype(self, low: Any, high: Any, dtype: Any) -> None:
        space = spaces.Box(np.array([low], dtype), np.array([high], dtype), dtype=dtype)
        (drawn,) = make_sampler(space, 1, False)(1000, np.random.default_rng(0))
        middle = float(low) / 2 + float(high) / 2
        assert 400 < (drawn.astype(float) > middle).sum() < 600
        assert all(space.contains(action) for action in drawn)


@pytest.mark.parametrize(("dtype", "value"), [("uint8", 260), ("uint8", -1), ("int32", 1 << 31)])
def test_an_integer_that_the_dtype_cannot_hold_is_refused(dtype: str, value: int) -> None:
    with refused(ValueError, "observation"):
        conform_scalar(value, Leaf(("x",), dtype, ()))
