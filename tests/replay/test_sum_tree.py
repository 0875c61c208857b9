"""The sum tree against running sums of a plain array."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_accel.replay.sum_tree import SumTree

sizes = st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 3000]))


@st.composite
def written(draw, values):
    """A tree after several writes, repeated indices among them, and the array it stands for."""
    size = draw(sizes)
    tree, array = SumTree(size), np.zeros(size)
    for _ in range(draw(st.integers(1, 4))):
        indices = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=60))
        new = draw(st.lists(values, min_size=len(indices), max_size=len(indices)))
        tree.set(np.array(indices), np.array(new, float))
        for i, value in zip(indices, new):
            array[i] = value
        if draw(st.booleans()):
            assert np.isclose(tree.total, array.sum())
    return tree, array


@given(written(st.integers(0, 5)), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_finds_what_a_search_in_the_cumulative_sum_finds(case, seed):
    tree, array = case
    np.testing.assert_array_equal(tree.values, array)
    assert tree.total == array.sum()  # of small integers: exact
    if array.sum() == 0:
        return
    points = np.random.default_rng(seed).random(200) * array.sum()
    points = np.concatenate([points, np.arange(array.sum())])  # also the edges
    expected = np.searchsorted(array.cumsum(), points, side="right")
    np.testing.assert_array_equal(tree.find(points), expected)
    np.testing.assert_array_equal(tree.get(expected), array[expected])


@given(written(st.sampled_from([0.0, 1e-12, 0.1, 1 / 3, 1e9])))
@settings(max_examples=150, deadline=None)
def test_never_finds_an_empty_place_whatever_is_lost_in_rounding(case):
    tree, array = case
    if not array.any():
        return
    edges = np.concatenate([[0.0], array.cumsum()])
    points = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, 0)])
    found = tree.find(np.clip(points, 0, tree.total))
    assert (array[found] > 0).all()


@given(written(st.floats(0, 1e6)))
@settings(max_examples=60, deadline=None)
def test_a_tree_rebuilt_from_its_values_is_the_same_to_the_last_bit(case):
    tree, array = case
    rebuilt = SumTree(tree.size)
    rebuilt.set(np.arange(tree.size), array)
    assert rebuilt.total == tree.total
    if tree.total > 0:
        points = np.linspace(0, tree.total, 500)
        np.testing.assert_array_equal(rebuilt.find(points), tree.find(points))


def test_many_single_writes_between_two_searches_are_all_counted():
    tree = SumTree(10_000)
    for i in range(10_000):
        tree.set(np.array([i]), 1.0)
    assert tree.total == 10_000
