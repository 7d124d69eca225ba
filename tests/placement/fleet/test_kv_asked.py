"""What the placer takes as asked for and given: idle KV gives way, and a larger pool is not for ever."""

from dataclasses import replace

from placement.fleet.answers import Refusal, RefusalReason
from placement.fleet.placer import FirstTurn, Placement
from placement.overload.signal import OverloadReason
from tests.support.engines import info, placer, state


def test_idle_conversations_on_the_host_make_no_overload() -> None:
    idle = placer()
    idle.engine_up(info("d0"))
    idle.observe(replace(state("d0", seq=1, live=9_000), idle_tokens=6_000), 0.0)
    seen = idle.look(1.0, refused_tokens=4_000)
    assert (seen.overloaded, seen.reason) == (False, OverloadReason.YIELDS)

    running = placer()
    running.engine_up(info("d0"))
    running.observe(state("d0", seq=1, live=9_000), 0.0)
    assert running.look(1.0, refused_tokens=4_000).overloaded


def test_kv_that_parameters_gave_holds_more_conversations_but_none_that_could_not_stay() -> None:
    made = placer()
    made.engine_up(info("d0"))
    made.observe(state("d0", seq=1, live=8_000), 0.0)
    assert isinstance(made.place(FirstTurn("a", 3_000), 0.0), Refusal)
    made.resized("d0", 14_000)
    assert isinstance(made.place(FirstTurn("a", 3_000), 0.0), Placement)
    large = made.place(FirstTurn("b", 12_000), 0.0)
    assert isinstance(large, Refusal) and large.reason is RefusalReason.TOO_LARGE
    made.release("a", 0.0)
    made.resized("d0", 10_000)
    assert isinstance(made.place(FirstTurn("c", 3_000), 0.0), Refusal)


def test_a_decoder_that_drains_stays_closed_whatever_its_size() -> None:
    made = placer()
    made.engine_up(info("d0"))
    made.observe(state("d0", seq=1, draining=True), 0.0)
    made.resized("d0", 20_000)
    assert isinstance(made.place(FirstTurn("a", 100), 0.0), Refusal)
