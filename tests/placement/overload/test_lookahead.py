"""Micro-batches of lookahead: everything once, in order, and as long as one another as the work allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.overload.lookahead import LEAST_TOKENS, Forecast, by_tokens, cut_to, lookahead, own_level
from placement.scheduling.latency_model import BatchWork, LatencyModel

MODEL = LatencyModel(1.4e-4, 5e-9, 1.2e-7, 0.02, per_before=1e-9, per_request=1e-5)
decoding = st.lists(
    st.lists(st.tuples(st.just(1), st.integers(1, 5_000)), max_size=20).map(BatchWork.of),
    min_size=1,
    max_size=4,
)
prompts = st.lists(st.tuples(st.integers(1, 4_000), st.integers(0, 30_000)), max_size=8)


@given(decoding, prompts)
def test_every_token_of_a_prompt_is_in_one_micro_batch_after_those_before_it(
    rows: list[BatchWork], given_prompts: list[tuple[int, int]]
) -> None:
    formed = lookahead(MODEL, rows, given_prompts)
    done = [0] * len(given_prompts)
    for pieces in formed.pieces:
        for piece in pieces:
            assert piece.context == given_prompts[piece.prompt][1] + done[piece.prompt]
            done[piece.prompt] += piece.new_tokens
    assert done == [tokens for tokens, _ in given_prompts]
    assert len(formed.pieces) == len(rows)


@given(decoding, prompts)
def test_no_micro_batch_is_much_longer_than_equal_shares(
    rows: list[BatchWork], given_prompts: list[tuple[int, int]]
) -> None:
    formed = lookahead(MODEL, rows, given_prompts)
    whole = sum(MODEL.seconds(work) for work in rows)
    whole += sum(MODEL.seconds(BatchWork().plus(*prompt)) - MODEL.constant for prompt in given_prompts)
    longest = max((context + tokens for tokens, context in given_prompts), default=0)
    # What a cut costs, and what is too short to be cut off.
    cut = MODEL.per_context * longest + LEAST_TOKENS * (MODEL.per_token + 6e-9 * longest) + MODEL.per_request
    alone = max(MODEL.seconds(work) for work in rows)
    assert formed.longest_s <= max(alone, whole / len(rows)) + (len(rows) + 8) * cut


def test_equal_tokens_take_unequal_time_and_lookahead_makes_them_equal() -> None:
    rows = [BatchWork.of([(1, 1_500)] * 50)] * 2
    long, short = (1_024, 30_000), (1_024, 0)
    counted = by_tokens(MODEL, rows, [[long], [short]])
    looked = lookahead(MODEL, rows, [long, short])
    assert counted.bubble > 0.1 and looked.bubble < 0.01
    assert looked.longest_s < counted.longest_s


def test_a_prompt_of_one_engine_is_computed_by_both_halves() -> None:
    rows = [BatchWork.of([(1, 1_000)] * 10)] * 2
    formed = lookahead(MODEL, rows, [(2_000, 0)])
    first, second = (sum(piece.new_tokens for piece in pieces) for pieces in formed.pieces)
    assert first == pytest.approx(1_000, rel=0.05) and first + second == 2_000


def test_nothing_to_do_takes_no_time() -> None:
    assert lookahead(MODEL, [BatchWork(), BatchWork()], []).longest_s == 0
    assert by_tokens(MODEL, [BatchWork()], [[]]).bubble == 0


def test_each_cuts_to_what_members_take_on_average() -> None:
    busy, calm = Forecast(0.1, 0.9), Forecast(0.3, 0.3)
    assert own_level(busy, [calm]) == pytest.approx(0.6)
    assert own_level(calm, [busy]) == pytest.approx(0.6)  # which it does not reach: it has no prompts
    assert own_level(busy, []) == 0.9  # nobody waits: as its own budget lets it
    assert own_level(busy, [busy, busy]) == pytest.approx(0.9)


def test_nobody_cuts_below_what_decodes_anywhere() -> None:
    assert own_level(Forecast(0.0, 0.5), [Forecast(1.0, 1.0), Forecast(0.0, 0.0)]) == 1.0


def test_prompts_keep_a_member_s_share_beside_long_decoding() -> None:
    assert own_level(Forecast(1.0, 2.0), [Forecast(0.1, 0.1)]) == pytest.approx(1.5)


@given(decoding.map(lambda rows: rows[0]), prompts, st.floats(0, 2))
def test_prompts_are_cut_from_behind_and_the_first_goes_on(
    row: BatchWork, asked: list[tuple[int, int]], level: float
) -> None:
    taken = cut_to(MODEL, row, asked, level)
    assert len(taken) == len(asked)
    whole = [left == tokens for left, (tokens, _) in zip(taken, asked, strict=True)]
    cut = whole.index(False) if False in whole else len(asked)
    assert not any(taken[cut + 1 :])
    if asked:
        assert taken[0] >= min(LEAST_TOKENS, asked[0][0])
    work = row
    for tokens, (_, context) in zip(taken, asked, strict=True):
        work = work.plus(tokens, context) if tokens else work
    alone = row.plus(taken[0], asked[0][1]) if asked else row
    assert MODEL.seconds(work) <= max(level, MODEL.seconds(alone)) * (1 + 1e-9)


def test_equal_levels_make_batches_equally_long() -> None:
    """Two engines that know of each other, one with a long prompt and both with turns that decode."""
    row = BatchWork.of([(1, 1_500)] * 50)
    wanted = MODEL.seconds(row.plus(2_048, 10_000))
    first, second = Forecast(MODEL.seconds(row), wanted), Forecast(MODEL.seconds(row), wanted - 0.2)
    level = own_level(first, [second])
    (tokens,) = cut_to(MODEL, row, [(2_048, 10_000)], level)
    assert MODEL.seconds(row.plus(tokens, 10_000)) == pytest.approx(level, abs=2 * MODEL.per_token)
    assert own_level(second, [first]) == level


@pytest.mark.parametrize(
    "said",
    [None, 1.0, [], [1.0], [0.1, 0.2, 0.3], ["a", 1.0], [float("nan"), 1.0], [0.0, float("inf")], [-1.0, 1.0],
     [0.5, 0.1], [True, 1.0], [0.1, 1e9]],
)  # fmt: skip
def test_what_is_no_forecast_is_known(said: object) -> None:
    assert Forecast.of(said) is None
    assert Forecast.of([0.25, 1]) == (0.25, 1.0)
