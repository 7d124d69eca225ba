"""Inequalities (1) and (2) of the conversation paper hold for its own example and for random plans."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.sizing.provisioning import Bound, Capacity, Means, ProvisioningError, prefillers_for, provision

PAPER = Capacity(prefill_tokens_per_s=25_000, decode_tokens_per_s=1_000, decoder_kv_tokens=300_000)
SWE = Means(first_turn_tokens=15_000, decoder_tokens=1_000, resident_s=15, peak_kv_tokens=16_000)

means = st.builds(
    Means,
    first_turn_tokens=st.floats(100, 1e5),
    decoder_tokens=st.floats(10, 1e5),
    resident_s=st.floats(0.1, 1e4),
    peak_kv_tokens=st.floats(100, 3e5),
)


def test_the_papers_example_needs_the_papers_number_of_decoders() -> None:
    plan = provision(SWE, PAPER)
    assert plan.saturating_rate == pytest.approx(1.667, abs=0.001)
    assert plan.by_throughput == pytest.approx(1.67, abs=0.01)
    assert plan.decoders == 2 and plan.slots == pytest.approx(18.75)
    assert plan.load.saturates_first == "prefillers"


@given(means, st.integers(1, 50))
def test_both_inequalities_hold_and_no_decoder_is_superfluous(mean: Means, prefillers: int) -> None:
    plan = provision(mean, PAPER, prefillers)
    assert plan.decoders * PAPER.decode_tokens_per_s >= plan.rate * mean.decoder_tokens
    assert plan.decoders * plan.slots >= plan.rate * mean.resident_s * (1 - 1e-12)
    assert plan.decoders - 1 <= max(plan.by_throughput, plan.by_memory)
    assert plan.load.prefill == pytest.approx(1) and max(plan.load.decode, plan.load.memory) <= 1
    assert (plan.bound is Bound.MEMORY) == (plan.by_memory > plan.by_throughput)


@given(means, st.floats(0.01, 1))
def test_a_fleet_that_parks_kv_never_needs_more_decoders(mean: Means, share: float) -> None:
    parked = replace(mean, resident_s=mean.resident_s * share)
    assert provision(parked, PAPER).decoders <= provision(mean, PAPER).decoders


@given(st.floats(0.1, 100))
def test_the_computed_number_of_prefillers_carries_the_given_rate(rate: float) -> None:
    count = prefillers_for(SWE, PAPER, rate)
    assert provision(SWE, PAPER, count, rate).load.prefill <= 0.9 + 1e-9


def test_an_impossible_plan_is_refused_with_a_reason() -> None:
    with pytest.raises(ProvisioningError, match="not one fits"):
        provision(replace(SWE, peak_kv_tokens=400_000), PAPER)
    with pytest.raises(ProvisioningError, match="above zero"):
        provision(replace(SWE, resident_s=0), PAPER)
