"""Under overload groups of engines share layers, and after it they restore their whole models."""

from dataclasses import replace

import pytest

from placement.engines import SplitState
from placement.overload.drop_plan import DropLimits, EngineShape, NotDropped
from placement.overload.signal import OverloadReason, OverloadState
from placement.overload.split_orders import SharingDecoder, SplitOrders, split_orders
from placement.scheduling.latency_model import LatencyModel

SHAPE = EngineShape(
    layers=8,
    layer_bytes=3e6,
    kv_tokens=1_000,
    kv_bytes_per_token=8_192,
    activation_bytes=1_024,
    link_bytes_per_s=1e9,
    latency=LatencyModel(1e-5, 1e-9, 1e-7, 0.01),
)
LIMITS = DropLimits(tbt_s=1.0)
OVER = OverloadState.initial()
LACKING = OverloadState(True, OverloadReason.KV_SHORT, 1.5, 0.9, 0.0, lacking_tokens=500)


PARTNERS = {"a": "b", "b": "a", "c": "d", "d": "c"}  # of engines that share their layers


def decoder(
    name: str, epoch: int = 0, held: float = 900, tier: str = "decode", partners: str = ""
) -> SharingDecoder:
    """Build a decoder's report; `partners` are the engines that share its layers."""
    others = tuple(f"{one}:1" for one in partners or PARTNERS.get(name, "")) if epoch else ()
    now = SHAPE.kv_each(1 + len(others))
    split = SplitState(f"{name}:1", SHAPE, epoch, now, newest=epoch, partners=others)
    return SharingDecoder(name, tier, held, 4, split)


def test_an_overload_pairs_engines_with_whole_models() -> None:
    made = split_orders(LACKING, [decoder("a"), decoder("b", held=800)], LIMITS)
    assert made == SplitOrders(drops=(("a", "b"),))


def test_no_more_engines_share_than_the_lacking_kv_and_the_reserve_need() -> None:
    four = [decoder(name) for name in "abcd"]
    assert len(split_orders(LACKING, four, LIMITS).drops) == 1
    more = replace(LACKING, lacking_tokens=2_000)
    assert len(split_orders(more, four, LIMITS).drops) == 2


def trio(held: float = 900) -> list[SharingDecoder]:
    return [
        decoder("a", 7, held, partners="bc"),
        decoder("b", 7, held, partners="ac"),
        decoder("c", 7, held, partners="ab"),
    ]


def test_more_than_two_engines_share_when_two_do_not_suffice() -> None:
    much = replace(LACKING, lacking_tokens=100_000)
    assert split_orders(much, [decoder(name) for name in "abc"], LIMITS).drops == (("c", "a", "b"),)
    four = split_orders(much, [decoder(name) for name in "abcd"], LIMITS).drops
    assert [sorted(group) for group in four] == [["a", "b", "c", "d"]]
    six = split_orders(much, [decoder(name) for name in "abcdef"], LIMITS).drops
    assert sorted(map(len, six)) == [2, 4]


def test_a_group_of_three_is_restored_as_soon_as_one_member_is_gone() -> None:
    assert split_orders(OVER, trio(held=100), LIMITS) == SplitOrders(restores=(("a", "b", "c"),))
    assert split_orders(OVER, [*trio(held=100)[:2], trio(held=1_200)[2]], LIMITS) == SplitOrders()
    assert split_orders(LACKING, trio()[1:], LIMITS) == SplitOrders(restores=(("b", "c"),))
    whole_again = [decoder("a"), *trio()[1:]]
    assert split_orders(LACKING, whole_again, LIMITS) == SplitOrders(restores=(("b", "c"),))
    leaving = [replace(trio()[0], leaving=True), *trio()[1:]]
    assert split_orders(LACKING, leaving, LIMITS) == SplitOrders(restores=(("a", "b", "c"),))


def test_kv_that_a_pair_gained_is_subtracted_from_the_lacking_kv() -> None:
    pair = [decoder("a", epoch=7), decoder("b", epoch=7)]
    assert split_orders(LACKING, pair, LIMITS) == SplitOrders()


def test_groups_that_share_layers_do_not_grow_and_the_reason_is_named() -> None:
    much = replace(LACKING, lacking_tokens=100_000)
    pairs = [decoder("a", 7), decoder("b", 7), decoder("c", 8), decoder("d", 8)]
    assert split_orders(much, pairs, LIMITS) == SplitOrders(why_no_more=NotDropped.SPLIT)
    one_more = [*pairs[:2], decoder("e")]
    assert split_orders(much, one_more, LIMITS) == SplitOrders(why_no_more=NotDropped.SPLIT)
    two_more = [*pairs[:2], decoder("e"), decoder("f")]
    assert split_orders(much, two_more, LIMITS).drops == (("e", "f"),)


def test_engines_of_different_tiers_do_not_share_layers() -> None:
    made = split_orders(LACKING, [decoder("a"), decoder("b", tier="other")], LIMITS)
    assert made == SplitOrders(why_no_more=NotDropped.ALONE)


def test_engines_without_a_latency_model_keep_their_whole_models() -> None:
    unmeasured = replace(SHAPE, latency=None)
    two = [replace(one, split=replace(one.split, shape=unmeasured)) for one in (decoder("a"), decoder("b"))]
    assert split_orders(LACKING, two, LIMITS) == SplitOrders(why_no_more=NotDropped.UNMEASURED)


def test_a_pair_is_restored_after_the_overload_if_its_kv_fits() -> None:
    pair = [decoder("a", epoch=7), decoder("b", epoch=7)]
    assert split_orders(OVER, pair, LIMITS) == SplitOrders(restores=(("a", "b"),))
    full = [decoder("a", epoch=7, held=1_200), decoder("b", epoch=7)]
    assert split_orders(OVER, full, LIMITS) == SplitOrders()


def test_two_pairs_with_equal_epochs_are_kept_apart() -> None:
    four = [decoder(name, epoch=7, held=100) for name in "acbd"]
    assert split_orders(OVER, four, LIMITS) == SplitOrders(restores=(("a", "b"), ("c", "d")))
    leaving = [replace(four[0], leaving=True), *four[1:]]
    assert split_orders(LACKING, leaving, LIMITS) == SplitOrders(restores=(("a", "b"),))
    assert split_orders(OVER, four[1:], LIMITS) == SplitOrders(restores=(("b",),))  # its peer is gone


@pytest.mark.parametrize("state", [OVER, LACKING])
def test_an_engine_whose_peer_is_gone_is_restored(state: OverloadState) -> None:
    left = [decoder("a", epoch=7), decoder("b")]
    assert split_orders(state, left, LIMITS) == SplitOrders(restores=(("a",),))


def test_a_leaving_engine_is_in_no_pair() -> None:
    pair = [replace(decoder("a", epoch=7), leaving=True), decoder("b", epoch=7)]
    assert split_orders(LACKING, pair, LIMITS) == SplitOrders(restores=(("a", "b"),))
    whole = [replace(decoder("a"), leaving=True), decoder("b")]
    assert split_orders(LACKING, whole, LIMITS).drops == ()


def test_an_engine_that_failed_an_order_gets_no_order_to_drop() -> None:
    three = [decoder("a"), decoder("b"), decoder("c")]
    assert split_orders(LACKING, three, LIMITS, unwilling={"a"}).drops == (("b", "c"),)


@pytest.mark.parametrize("state", [OVER, LACKING])
def test_no_group_is_restored_for_a_missing_member_while_a_decoder_is_silent(state: OverloadState) -> None:
    left = [decoder("a", epoch=7), decoder("b", held=100)]
    assert split_orders(state, left, LIMITS, silent=True).restores == ()
    two_more = [*left, decoder("c")]
    made = split_orders(replace(LACKING, lacking_tokens=10_000), two_more, LIMITS, silent=True)
    assert made.drops == (("c", "b"),)  # the engine with the silent peer gets no new partner


def test_a_pair_with_an_engine_that_failed_an_order_is_left_as_it_is() -> None:
    pair = [decoder("a", epoch=7), decoder("b", epoch=7)]
    assert split_orders(OVER, pair, LIMITS, unwilling={"b"}) == SplitOrders()
    assert split_orders(OVER, [decoder("a", epoch=7)], LIMITS, unwilling={"a"}) == SplitOrders()
    much = replace(LACKING, lacking_tokens=100_000)
    made = split_orders(much, [*pair, decoder("c")], LIMITS, unwilling={"b"})
    assert made == SplitOrders(why_no_more=NotDropped.ALONE)
