"""A drop plan keeps each layer once per group, adds KV to each engine, and merges no more than needed."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.overload.drop_plan import DropLimits, EngineShape, Member, NotDropped, plan_drop
from placement.scheduling.latency_model import LatencyModel

MODEL = LatencyModel(per_token=1.4e-4, per_attended=5e-9, per_context=1.2e-7, constant=0.02)
SHAPE = EngineShape(
    layers=48,
    layer_bytes=0.55e9,
    kv_tokens=220_000,
    kv_bytes_per_token=196_608,
    activation_bytes=10_240,
    link_bytes_per_s=20e9,
    latency=MODEL,
)
LIMITS = DropLimits(tbt_s=0.5, reserve=0.0)
shapes = st.builds(
    EngineShape,
    layers=st.integers(1, 80),
    layer_bytes=st.floats(1e6, 5e9),
    kv_tokens=st.integers(1_000, 1_000_000),
    kv_bytes_per_token=st.floats(1e3, 1e6),
    activation_bytes=st.just(10_240.0),
    link_bytes_per_s=st.just(1e15),
    latency=st.just(LatencyModel(0, 0, 0, 1.0)),
)


def alone(count: int, held: float = 200_000, running: int = 100) -> list[list[Member]]:
    return [[Member(f"d{index}", held - index, running)] for index in range(count)]


@given(shapes, st.integers(1, 12))
def test_every_layer_is_held_by_exactly_one_engine_of_a_group(shape: EngineShape, engines: int) -> None:
    kept = shape.kept(engines)
    assert len(kept) == engines
    assert [layer for layers in kept for layer in layers] == list(range(shape.layers))


@given(shapes, st.integers(1, 12))
def test_the_kv_of_all_members_fits_beside_the_kept_layers_of_each_engine(
    shape: EngineShape, engines: int
) -> None:
    """A kept layer has a region for every member, in the memory of its own KV and of the dropped layers."""
    if engines > shape.layers:
        return
    layer_kv, each = shape.kv_bytes_per_token / shape.layers, shape.kv_each(engines)
    has = shape.kv_tokens * shape.kv_bytes_per_token
    for layers in shape.kept(engines):
        takes = len(layers) * engines * each * layer_kv
        assert takes <= (has + (shape.layers - len(layers)) * shape.layer_bytes) * (1 + 1e-9)


@given(shapes, st.integers(2, 12), st.floats(0, 1e7), st.integers(2, 6))
def test_a_plan_merges_whole_groups_and_gives_each_engine_more_kv(
    shape: EngineShape, count: int, lacking: float, most: int
) -> None:
    made = plan_drop(alone(count), shape, lacking, DropLimits(10.0, most, exchange_s=1e9, reserve=0.0))
    merged = [engine for group in made.merged for engine in group.engines]
    assert len(merged) == len(set(merged))
    for group in made.merged:
        assert 2 <= len(group.engines) <= min(most, shape.layers)
        assert group.kv_tokens > shape.kv_tokens and len(group.layers) == len(group.engines)
    gained = sum(len(group.engines) * (group.kv_tokens - shape.kv_tokens) for group in made.merged)
    assert made.gained_tokens == gained
    assert (gained >= lacking) == (made.why_no_more is NotDropped.ENOUGH)


@given(st.integers(2, 9))
def test_a_larger_demand_never_merges_fewer_engines(count: int) -> None:
    plans = [plan_drop(alone(count), SHAPE, lacking, LIMITS) for lacking in range(0, 1_000_000, 50_000)]
    for less, more in pairwise(plans):
        assert less.gained_tokens <= more.gained_tokens


def test_a_plan_for_no_lacking_kv_merges_no_groups() -> None:
    made = plan_drop(alone(4), SHAPE, 0, LIMITS)
    assert not made.merged and made.why_no_more is NotDropped.ENOUGH


def test_the_fullest_engines_pair_first_and_the_others_stay_whole() -> None:
    made = plan_drop(alone(4), SHAPE, 10_000, LIMITS)
    assert [group.engines for group in made.merged] == [("d0", "d1")]
    assert made.merged[0].layers == (range(24), range(24, 48))


def test_a_pair_of_the_papers_engines_gains_the_memory_of_half_the_layers() -> None:
    pair = plan_drop(alone(2), SHAPE, 1, LIMITS).merged[0]
    assert pair.kv_tokens == pytest.approx(220_000 + 24 * 0.55e9 / 196_608, abs=2)
    assert pair.whole_s < pair.split_s < 1.5 * pair.whole_s
    assert pair.exchange_s == pytest.approx(0.5 * 200_000 * 196_608 / 20e9)


def test_two_pairs_merge_when_pairs_do_not_gain_enough_kv() -> None:
    made = plan_drop(alone(4), SHAPE, 300_000, LIMITS)
    assert [len(group.engines) for group in made.merged] == [4]
    three = plan_drop(alone(3), SHAPE, 1e9, LIMITS)
    assert [len(group.engines) for group in three.merged] == [3] and three.why_no_more is NotDropped.ALONE
    assert (
        plan_drop(alone(4), SHAPE, 300_000, replace(LIMITS, most_engines=2)).why_no_more is NotDropped.LARGEST
    )


def test_a_plan_gains_a_reserve_beyond_the_lacking_kv() -> None:
    made = plan_drop(alone(4), SHAPE, 10_000, replace(LIMITS, reserve=0.2))
    assert len(made.merged) == 2 and made.gained_tokens > 0.2 * 4 * 220_000
    assert not plan_drop(alone(4), SHAPE, 0, replace(LIMITS, reserve=0.2)).merged


def test_existing_groups_do_not_grow_and_the_kv_they_gained_counts_towards_the_reserve() -> None:
    pair = [Member("a", 1e5, 50), Member("b", 1e5, 50)]
    groups = [pair, [Member("c", 2e5, 50)], [Member("d", 2e5, 50)]]
    assert [group.engines for group in plan_drop(groups, SHAPE, 1e6, LIMITS).merged] == [("c", "d")]
    assert plan_drop(groups[:2], SHAPE, 1, LIMITS).why_no_more is NotDropped.SPLIT
    reserve = replace(LIMITS, reserve=0.3)  # less than the pair has gained already
    assert plan_drop(groups, SHAPE, 1, reserve).gained_tokens == 2 * (SHAPE.kv_each(2) - SHAPE.kv_tokens)


def test_the_hop_time_of_a_group_includes_a_message_to_each_other_engine_and_back() -> None:
    hop = SHAPE.hop_s + 10 * SHAPE.activation_bytes / SHAPE.link_bytes_per_s
    assert [round(SHAPE.hops_s(size, 10) / hop) for size in (1, 2, 3, 4)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("shape", "limits", "why"),
    [
        (replace(SHAPE, latency=None), LIMITS, NotDropped.UNMEASURED),
        (replace(SHAPE, link_bytes_per_s=1e8), LIMITS, NotDropped.LINK),
        (replace(SHAPE, link_bytes_per_s=2e9), LIMITS, NotDropped.LINK),
        (SHAPE, replace(LIMITS, tbt_s=0.05), NotDropped.TBT),
        (replace(SHAPE, layer_bytes=0.0), LIMITS, NotDropped.NO_GAIN),
        (replace(SHAPE, layers=1), LIMITS, NotDropped.LARGEST),
    ],
)
def test_a_merge_that_breaks_a_limit_is_not_made_and_the_reason_is_named(
    shape: EngineShape, limits: DropLimits, why: NotDropped
) -> None:
    made = plan_drop(alone(4), shape, 1e6, limits)
    assert not made.merged and made.why_no_more is why


def test_engines_pair_without_the_one_whose_kv_cannot_be_moved_in_time() -> None:
    groups = [[Member("full", 219_000, 100)], *alone(3, held=50_000)]
    made = plan_drop(groups, SHAPE, 1e6, replace(LIMITS, exchange_s=0.6))
    assert made.merged and all("full" not in group.engines for group in made.merged)
