"""The table keeps conversations bound, serves waiting turns in order, and leaves no reservations behind."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.engines import Role
from placement.priorities import QUANTUM
from placement.routing.placer_settings import FirstTurns, PlacingPolicy
from placement.routing.prefix_map import PromptPrefix
from placement.routing.receipts import Refusal, RefusalReason
from router.directory.api.messages import Ask, Placed, TurnEnded
from router.directory.journal import Journal, Row
from router.directory.table import BindingTable
from router.directory.waiting import MAX_WAITING, Waiter
from router.identity import prefix_chain as chains
from tests.support.engines import info, placer, state

SEED = chains.seed("s", "m")


def table(
    ttl_s: float = 100.0, decoders: int = 2, kv_tokens: int = 10_000, **placing: object
) -> BindingTable:
    made = BindingTable(ttl_s, placer(**placing))
    made.engine_up(info("p0", Role.PREFILL))
    for number in range(decoders):
        made.engine_up(info(f"d{number}", kv_tokens=kv_tokens))
    return made


def nobody(outcome: Placed | Refusal) -> None:
    raise AssertionError(f"settled {outcome}")


def ask(key: str, tokens: int = 1000, **more: Any) -> Ask:
    return Ask(**{"key": key, "gateway": "g", "prompt_tokens": tokens, "wait_s": 0.0, **more})


def place(made: BindingTable, asked: Ask, now: float = 0.0) -> Placed:
    outcome = made.place(asked, now, nobody)
    assert isinstance(outcome, Placed), outcome
    return outcome


def test_a_conversation_is_placed_once_and_keeps_its_decoder() -> None:
    made = table()
    first = place(made, ask("c"))
    assert first.prefiller == "p0"
    assert not first.known
    place(made, ask("other"))
    again = place(made, ask("c"))
    assert (again.engine, again.prefiller, again.known) == (first.engine, None, True)


def test_a_conversation_leaves_a_draining_decoder_once_none_of_its_turns_runs() -> None:
    made = table()
    left = place(made, ask("c", turn=1)).engine
    made.engine_state(state(left, 1, draining=True), 0.0)
    # The gateway asks for the next turn before the directory hears of the end of turn 1.
    assert place(made, ask("c", turn=2)).engine == left
    moved = place(made, ask("c", turn=3, alone=True))
    assert moved.engine != left
    assert (moved.cause, moved.prefiller, moved.known) == ("moved", left, True)
    receipt: Any = moved.note["receipt"]
    move = {"reason": "drain", "source": left, "context_tokens": 0, "sends": True, "waits_s": None}
    assert receipt["move"] == move
    assert (left, "c") not in made.effects().releases, "the former decoder still has to send the KV"
    made.prefill_done("c", 1.0, 1000, 900)
    assert (left, "c") in made.effects().releases


def test_a_conversation_never_moves_twice_within_a_minute() -> None:
    made = table(decoders=3)
    left = place(made, ask("c", turn=1)).engine
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=1000, completion_tokens=10), turn=1)
    made.engine_state(state(left, 1, draining=True), 2.0)
    there = place(made, ask("c", turn=2), 10.0).engine
    made.turn_ended("c", "g", 11.0, TurnEnded(prompt_tokens=1100, completion_tokens=10), turn=2)
    made.engine_state(state(there, 1, draining=True), 12.0)
    assert place(made, ask("c", turn=3), 69.9).engine == there
    made.turn_ended("c", "g", 69.95, TurnEnded(prompt_tokens=1200, completion_tokens=10), turn=3)
    assert place(made, ask("c", turn=4), 70.0).engine not in (left, there)


def test_a_moved_conversation_is_computed_again_if_decoders_cannot_send_kv() -> None:
    made = table(policy=PlacingPolicy.COLLOCATED)
    left = place(made, ask("c", turn=1)).engine
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=1000, completion_tokens=10), turn=1)
    made.engine_state(state(left, 1, draining=True), 2.0)
    moved = place(made, ask("c", turn=2), 3.0)
    receipt: Any = moved.note["receipt"]
    assert (moved.cause, moved.prefiller, receipt["move"]["sends"]) == ("moved", None, False)
    made.turn_ended("c", "g", 4.0, TurnEnded(prompt_tokens=1100, completion_tokens=10), turn=2)
    assert (left, "c") in made.effects().releases


def test_the_receipt_says_that_the_least_loaded_decoder_was_chosen() -> None:
    made = table()
    made.engine_state(state("d0", 1, live=5000), 0.0)
    placed = place(made, ask("c"))
    assert placed.engine == "d1"
    receipt: Any = placed.note["receipt"]
    assert receipt["decoder"]["chosen"]["kv_in_use"] == 0
    assert [other["kv_in_use"] for other in receipt["decoder"]["runners_up"]] == [5000]


def test_a_fork_starts_beside_its_parent_while_there_is_capacity() -> None:
    made = table()
    parent = place(made, ask("parent", 3000))
    child = place(made, ask("child", 3000, parent="parent"))
    assert child.engine == parent.engine
    made.engine_state(state(parent.engine, 1, live=9000), 0.0)
    assert place(made, ask("late", 3000, parent="parent")).engine != parent.engine


def test_waiting_turns_of_one_class_are_served_in_order_of_arrival() -> None:
    made = table(decoders=1)
    place(made, ask("big", 9000))
    got: list[tuple[str, Placed | Refusal]] = []
    for key, tokens in (("large", 5000), ("small", 100), ("tiny", 10)):
        waiting = made.place(
            ask(key, tokens, wait_s=50.0), 1.0, lambda outcome, key=key: got.append((key, outcome))
        )
        assert isinstance(waiting, Waiter)
    made.serve_waiting(2.0)
    assert got == []
    made.end("big", "deleted", 3.0)
    made.serve_waiting(3.0)
    assert [key for key, _ in got] == ["large", "small", "tiny"]
    assert all(isinstance(outcome, Placed) for _, outcome in got)


def test_waiting_turns_go_in_order_of_class_but_no_class_starves() -> None:
    made = table(decoders=1)
    place(made, ask("big", 9000))
    got: list[str] = []
    waits = (("old", 0.0, 0.0), ("plain", 20.0, 0.0), ("gold", 35.0, 30.0), ("low", 1.0, -60.0))
    for key, at, queue_weight in waits:
        asked = ask(key, 2000, wait_s=90.0, queue_weight=queue_weight)
        assert isinstance(made.place(asked, at, lambda outcome, key=key: got.append(key)), Waiter)
    made.end("big", "deleted", 40.0)
    # A turn that goes before all waiting turns is placed immediately; any other waits behind them.
    assert isinstance(made.place(ask("first", 2000, wait_s=9.0, queue_weight=50.0), 40.0, nobody), Placed)
    assert isinstance(made.place(ask("last", 2000, wait_s=9.0), 40.0, lambda outcome: None), Waiter)
    made.serve_waiting(40.0)
    assert got == ["old", "gold", "plain"][: len(got)] and len(got) == 3


def test_a_lasting_backlog_of_a_lower_class_does_not_delay_a_higher_class() -> None:
    """All waiting turns have waited for longer than the 10 s by which the class weights differ."""
    made, got = table(decoders=1), list[str]()
    place(made, ask("big", 9000))
    for number in range(40):
        waits(made, f"c{number}", 8000, got, at=number / 10)
    now, running = 20.0, "big"
    for number in range(8):
        waits(made, f"gold{number}", 8000, got, at=now, queue_weight=10.0)
        for _ in range(2):  # one place for each class
            made.end(running, "deleted", now)
            made.serve_waiting(now)
            running = got[-1]
            now += 1.0
    assert got[:2] == ["c0", "gold0"], "nothing of the other class was served for 10 s"
    assert got[2:] == [key for number in range(1, 8) for key in (f"gold{number}", f"c{number}")]


def test_a_turn_of_a_higher_class_passes_the_queues_of_prefillers() -> None:
    made = table(kv_tokens=10**9, max_prefill_wait_s=1.0)
    count = 0
    while isinstance(made.place(ask(f"c{count}", 20_000), 0.0, nobody), Placed):
        count += 1
    gold = place(made, ask("gold", 20_000, queue_weight=8.0))
    made.prefill_done("gold", 0.0)
    again = place(made, ask("gold", 50_000, queue_weight=8.0, uncached_tokens=40_000))
    for placed in (gold, again):
        receipt: Any = placed.note["receipt"]
        assert receipt["prefiller"]["chosen"]["wait_s"] == 0.0


def test_lower_classes_get_some_turns_while_a_higher_class_fills_the_fleet() -> None:
    made, got = table(decoders=1), list[str]()
    place(made, ask("big", 9000))
    for number in range(4):
        waits(made, f"c{number}", 8000, got, at=0.0)
    for number in range(60):
        waits(made, f"gold{number}", 8000, got, at=0.0, queue_weight=10.0)
    running = "big"
    for now in range(11, 51):
        made.end(running, "deleted", float(now))
        made.serve_waiting(float(now))
        running = got[-1]
    at = [number for number, key in enumerate(got) if key.startswith("c")]
    assert len(at) == 4 and all(after - before == 11 for before, after in pairwise(at))


def waits(made: BindingTable, key: str, tokens: int, got: list[str], at: float = 1.0, **more: Any) -> None:
    asked = ask(key, tokens, wait_s=90.0, turn=made.waiting + 1000, **more)
    assert isinstance(made.place(asked, at, lambda outcome: got.append(key)), Waiter)


def test_waiting_turns_are_served_fairly_among_owners() -> None:
    """One owner's twenty turns arrived first; another owner's two are served within the first round."""
    made, got = table(decoders=1, kv_tokens=30_000), list[str]()
    place(made, ask("big", 28_000))
    for number in range(20):
        waits(made, f"flood:{number}", 1000, got)
    for number in range(2):
        waits(made, f"other:{number}", 1000, got)
    made.end("big", "deleted", 2.0)
    made.serve_waiting(2.0)
    assert len(got) == 22
    assert max(got.index("other:0"), got.index("other:1")) <= QUANTUM // 1000 + 1


def test_only_uncached_tokens_of_a_turn_count_against_its_owners_share() -> None:
    made, got, head = table(decoders=1, kv_tokens=40_000), list[str](), (PromptPrefix(b"system", 6_900),)
    place(made, ask("a:first", 7_000, prefixes=head))
    place(made, ask("big", 30_000))
    for number in range(5):
        waits(made, f"b:{number}", 7_000, got)
        waits(made, f"a:{number}", 7_000, got, prefixes=head)
    for key in ("a:first", "big"):
        made.end(key, "deleted", 2.0)
    made.serve_waiting(2.0)
    assert [key[0] for key in got] == ["b", "a", "a", "a", "a"]


def test_flows_of_one_owner_are_served_fairly() -> None:
    made, got = table(decoders=1, kv_tokens=30_000), list[str]()
    place(made, ask("big", 28_000))
    for number in range(20):
        waits(made, f"a:x{number}", 1000, got, flow="x")
    waits(made, "a:y", 1000, got, flow="y")
    made.end("big", "deleted", 2.0)
    made.serve_waiting(2.0)
    assert got.index("a:y") <= QUANTUM // 1000


def test_turns_of_another_owner_pass_a_large_waiting_turn_for_one_quantum_only() -> None:
    """One owner's turn needs more KV than is free. Another owner's turns pass it, up to one quantum."""
    made, got = table(decoders=1, kv_tokens=60_000), list[str]()
    place(made, ask("a:big", 30_000))
    waits(made, "a:large", 28_000, got)
    passing = [made.place(ask(f"b:{n}", 1000, wait_s=9.0, turn=n), 2.0, lambda _: None) for n in range(1, 20)]
    assert sum(isinstance(outcome, Placed) for outcome in passing) == QUANTUM // 1000
    made.end("a:big", "deleted", 3.0)
    made.serve_waiting(3.0)
    assert got == ["a:large"]  # whatever passed it, it is placed once there is capacity


def test_one_owner_can_fill_only_its_share_of_the_queue() -> None:
    made, got = table(decoders=1), list[str]()
    place(made, ask("big", 9000))
    share = 10 / MAX_WAITING
    for number in range(10):
        waits(made, f"flood:{number}", 5000, got, waiting_share=share)
    refused = made.place(ask("flood:more", 5000, wait_s=9.0, waiting_share=share, turn=1), 1.0, nobody)
    assert isinstance(refused, Refusal) and refused.reason is RefusalReason.NO_CAPACITY
    waits(made, "other:1", 5000, got, waiting_share=share)


def test_a_turn_that_waited_until_its_limit_is_refused_with_the_reason() -> None:
    made = table(decoders=1)
    place(made, ask("big", 9000))
    got: list[Placed | Refusal] = []
    made.place(ask("waits", 5000, wait_s=10.0), 0.0, got.append)
    made.serve_waiting(9.9)
    assert not got
    made.serve_waiting(10.0)
    assert isinstance(got[0], Refusal)
    assert got[0].reason is RefusalReason.NO_CAPACITY
    assert got[0].retry_after_s > 0
    assert made.waiting == 0


def test_a_turn_that_can_never_fit_is_refused_immediately() -> None:
    outcome = table().place(ask("huge", 50_000, wait_s=60.0), 0.0, nobody)
    assert isinstance(outcome, Refusal)
    assert outcome.reason is RefusalReason.TOO_LARGE


def test_an_engines_new_epoch_voids_its_bindings_but_not_the_conversations() -> None:
    made = table()
    placed = place(made, ask("c"))
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=10, completion_tokens=5))
    made.engine_up(info(placed.engine, epoch=2))
    assert made.binding("c") is None
    again = place(made, ask("c"))
    assert again.cause == "rebound"
    assert not again.known


def test_an_unreachable_engine_that_returns_in_its_epoch_keeps_its_conversations() -> None:
    made = table()
    first = place(made, ask("stays")).engine
    other = place(made, ask("goes")).engine
    assert place(made, ask("goes", lost=(other, 1))).engine == first
    made.engine_state(state(other, 1), 1.0)
    assert place(made, ask("leaves")).engine == other
    for engine in (first, other):
        made.engine_down(engine)
    made.engine_up(info(other))
    assert place(made, ask("goes")).engine == other  # bound to another engine meanwhile
    made.end("leaves", "deleted", 2.0)
    made.effects()
    made.engine_up(info(first))
    assert made.binding("stays") is None
    for engine in (first, other):
        made.engine_state(state(engine, 2), 3.0)
    again = made.binding("stays")
    assert again is not None and (again.engine, again.epoch) == (first, 1)
    effects = made.effects()
    assert sorted(effects.releases) == [(first, "goes"), (other, "leaves")]
    assert len(effects.rows) == 3  # rows of the engine, the conversation and its binding
    assert place(made, ask("stays")).cause == "bound"


def test_an_engine_that_returns_in_a_new_epoch_gets_no_conversation_back() -> None:
    made = table(decoders=1)
    place(made, ask("c"))
    made.engine_down("d0")
    made.engine_up(info("d0", epoch=2))
    made.engine_state(state("d0", 1, epoch=2), 1.0)
    assert made.binding("c") is None and not made.effects().releases


def test_no_turn_is_placed_on_an_unreachable_decoder_until_it_reports() -> None:
    made = table()
    placed = place(made, ask("c"))
    moved = place(made, ask("c", lost=(placed.engine, placed.epoch)))
    assert moved.engine != placed.engine
    assert place(made, ask("more")).engine == moved.engine
    made.engine_state(state(placed.engine, 1), 1.0)
    assert place(made, ask("after")).engine == placed.engine


def test_only_conversations_without_a_running_turn_end_after_their_lifetime() -> None:
    made = table(ttl_s=100.0)
    place(made, ask("runs"), 0.0)
    place(made, ask("idle"), 0.0)
    made.turn_ended("idle", "g", 10.0, TurnEnded(prompt_tokens=5, completion_tokens=5))
    made.effects()
    assert made.expire(109.0) == 0
    assert made.expire(111.0) == 1
    effects = made.effects()
    assert effects.ended == [("idle", "idle")]
    assert [key for _, key in effects.releases] == ["idle"]
    assert made.binding("runs") is not None
    described = made.describe("idle")
    assert described is not None
    assert described["state"] == "ended"


def test_a_first_turn_leaves_no_reservation_when_its_gateway_is_lost() -> None:
    made = table()
    placed = place(made, ask("half"))
    whole = place(made, ask("whole"))
    made.turn_ended("whole", "g", 1.0, TurnEnded(prompt_tokens=5, completion_tokens=5))
    assert made.kv_in_use(placed.engine) > 0
    made.gateway_gone("g", 2.0)
    assert made.kv_in_use(placed.engine) == (
        made.kv_in_use(whole.engine) if placed.engine == whole.engine else 0
    )
    assert made.binding("half") is None
    assert made.binding("whole") is not None


def test_a_prefiller_computes_a_large_later_turn_for_the_same_decoder() -> None:
    made = table()
    placed = place(made, ask("c"))
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=1100, completion_tokens=5))
    again = place(made, ask("c", 9400, uncached_tokens=9000))
    assert (again.engine, again.prefiller, again.known) == (placed.engine, "p0", True)
    assert again.cause == "redisaggregated"
    described = made.describe("c")
    assert described is not None
    assert described["transfers"] == 2


def test_a_prefills_estimate_omits_the_prefix_that_its_prefiller_has_cached() -> None:
    made = table(first_turns=FirstTurns.ELASTIC)

    def again(uncached: int) -> float:
        placed = place(made, ask("c", 9400, uncached_tokens=uncached))
        seconds = placed.note["receipt"]["prefiller"]["chosen"]["prefill_s"]
        made.prefill_done("c", 1.0)
        return float(seconds)

    place(made, ask("c", 4000))
    made.prefill_done("c", 0.05, tokens=4100)
    made.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=4100, completion_tokens=5))
    whole, broken, shared = again(9400), again(9000), again(5300)
    assert shared < broken < whole, "the shared prefix is at most what was computed before"
    made.engine_up(info("p0", Role.PREFILL, epoch=2))
    assert again(5300) == whole, "an engine that has restarted has nothing"


def test_a_gateway_is_notified_when_another_one_serves_its_conversation() -> None:
    made = table()
    place(made, ask("c"))
    made.effects()
    made.turn_began("c", "other", chains.of_text(SEED, b"x").end, 1.0)
    assert made.effects().foreign == [("g", "c")]


def test_after_a_restart_only_a_repeated_request_for_the_same_turn_is_placed_anew() -> None:
    """Other turns run where the conversation is bound, even if the journal holds no turn's end."""
    made = table()
    made.effects()  # discard the announcements of its engines, which are repeated below
    end = chains.of_text(SEED, b"prompt").end
    first = place(made, ask("c", end=end))
    written = made.effects().rows
    restarted = table()
    restarted.replay(written)
    later = place(restarted, ask("c", end=chains.of_text(SEED, b"prompt and more").end, again=True))
    assert (later.known, later.engine) == (True, first.engine)
    restarted = table()
    restarted.replay(written)
    assert place(restarted, ask("c", end=end)).known
    restarted = table()
    restarted.replay(written)
    again = place(restarted, ask("c", end=end, again=True))
    assert (again.known, again.prefiller) == (False, "p0")
    # The directory did not restart, only its answer was lost: the turn must not count twice.
    once_more = place(restarted, ask("c", end=end, again=True))
    assert not once_more.known
    restarted.turn_ended("c", "g", 1.0, TurnEnded(prompt_tokens=10, completion_tokens=1))
    assert not restarted.running_at("c")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
async def test_replaying_the_journal_restores_the_same_table(seed: int) -> None:
    rng = random.Random(seed)
    made = table(decoders=3)
    written: list[Row] = []
    now = 0.0
    for _ in range(rng.randrange(80)):
        now += rng.random() * 5
        key = f"c{rng.randrange(10)}"
        match rng.randrange(6):
            case 0 | 1:
                end = chains.of_text(SEED, rng.randbytes(rng.randrange(600))).end
                made.place(ask(key, rng.randrange(800), end=end), now, nobody)
            case 2:
                made.turn_ended(
                    key, "g", now, TurnEnded(prompt_tokens=rng.randrange(100), completion_tokens=3)
                )
            case 3:
                made.end(key, "deleted", now)
            case 4:
                made.expire(now)
            case 5:
                engine = f"d{rng.randrange(3)}"
                known = made.fleet.info(engine)
                made.engine_up(info(engine, epoch=(known.epoch if known else 0) + 1))
        written += made.effects().rows
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal")
        for row in written:
            journal.append(row)
        await journal.close()
        left = Journal(Path(folder) / "journal")
        rows = left.read()
        await left.close()
    for of in (written, rows):
        again = BindingTable(100.0, placer())
        again.replay(of)
        same(made, again)


def same(made: BindingTable, again: BindingTable) -> None:
    for number in range(10):
        key = f"c{number}"
        assert again.binding(key) == made.binding(key)
        one, other = made.conversations.get(key), again.conversations.get(key)
        assert (one is None) == (other is None)
        if one and other:
            assert (one.turns, one.used_at) == (other.turns, other.used_at)
            assert orjson.dumps(one.notes) == orjson.dumps(other.notes)
        assert again.nodes.tip(key) == made.nodes.tip(key)


def test_the_end_of_a_turn_may_arrive_before_its_beginning() -> None:
    """If a client leaves early, the report of its turn's end can overtake the request for its placement."""
    made = table()
    made.turn_ended("c", "g", 0.0, TurnEnded(prompt_tokens=0, completion_tokens=0), turn=7)
    outcome = made.place(ask("c", turn=7), 0.1, nobody)
    assert isinstance(outcome, Refusal)
    assert len(made.conversations) == 0
    place(made, ask("c", turn=8))
    made.turn_ended("c", "g", 0.2, TurnEnded(prompt_tokens=5, completion_tokens=5), turn=8)
    made.turn_ended("c", "g", 0.2, TurnEnded(prompt_tokens=0, completion_tokens=0), turn=8)  # reported twice
    place(made, ask("c", turn=9))
    assert made.running_at("c")


def test_a_request_that_arrives_again_after_its_turn_ended_starts_no_turn() -> None:
    """The second request arrives late, on a connection that the gateway no longer uses."""
    made = table()
    place(made, ask("c", turn=7))
    made.turn_ended("c", "g", 0.2, TurnEnded(prompt_tokens=5, completion_tokens=5), turn=7)
    assert isinstance(made.place(ask("c", turn=7), 0.3, nobody), Refusal)
    assert not made.running_at("c")


def test_a_repeated_request_of_a_turn_that_lost_its_decoder_waits_at_a_restarted_directory() -> None:
    made = table(decoders=1)
    place(made, ask("c", turn=7))
    made.turn_ended("c", "g", 0.2, TurnEnded(prompt_tokens=5, completion_tokens=5), turn=7)
    again = BindingTable(100.0, placer())
    again.replay(made.effects().rows)
    again.fleet.await_no_longer()
    lost = ask("c", turn=8, lost=("d0", 1), wait_s=5.0)
    assert isinstance(again.place(lost, 1.0, nobody), Waiter)
    assert isinstance(again.place(replace(lost, again=True), 1.1, nobody), Waiter)
