"""Idle conversations leave a draining or a hot decoder with their KV; a turn that begins voids the move."""

from dataclasses import replace
from typing import Any

from placement.routing.placer_settings import PlacerSettings
from placement.routing.receipts import Refusal
from router.directory.api.messages import Placed, TurnEnded
from router.directory.moving import AT_ONCE, TRIES, IdleMove
from router.directory.table import BindingTable
from router.directory.waiting import Waiter
from tests.router.directory.test_table import ask, place, table
from tests.support.engines import info, state


def idle(made: BindingTable, key: str, turn: int, now: float = 0.0) -> str:
    """Give a conversation one turn, so that it is idle afterwards, and return its decoder."""
    engine = place(made, ask(key, turn=turn), now).engine
    made.turn_ended(key, "g", now, TurnEnded(prompt_tokens=1000, completion_tokens=10), turn=turn)
    return engine


def drained(made: BindingTable, engine: str, on: bool = True, seq: int = 1) -> None:
    made.engine_state(state(engine, seq, draining=on), 0.0)


def one_move(made: BindingTable, now: float) -> IdleMove:
    (move,) = made.idle_moves.begin(now)
    return move


def test_an_idle_conversation_is_bound_to_the_decoder_that_received_its_kv() -> None:
    made = table()
    left = idle(made, "c", 1)
    assert made.idle_moves.begin(1.0) == []
    drained(made, left)
    move = one_move(made, 1.0)
    assert (move.source.engine, move.target.engine != left) == (left, True)
    assert made.idle_moves.begin(1.5) == [], "the move is in progress"
    made.effects()
    assert made.idle_moves.end(move, True, 2.0)
    told: Any = made.describe("c")
    assert told["decoder"] == move.target.engine
    assert told["placements"][-1]["cause"] == "moved"
    assert told["placements"][-1]["receipt"]["move"]["reason"] == "drain"
    effects = made.effects()
    assert effects.releases == [(left, "c")] and effects.rows
    assert place(made, ask("c", turn=2), 3.0).engine == move.target.engine


def test_a_turn_cancels_a_move_and_the_sent_kv_is_released() -> None:
    made = table(decoders=3)
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    moved = place(made, ask("c", turn=2), 1.5)
    assert moved.cause == "moved"
    made.effects()
    assert not made.idle_moves.end(move, True, 2.0)
    releases = made.effects().releases
    assert releases == ([] if moved.engine == move.target.engine else [(move.target.engine, "c")])
    assert made.binding("c").engine == moved.engine  # type: ignore[union-attr]


def test_a_conversation_whose_kv_could_not_be_sent_stays_on_its_decoder() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    for attempt in range(TRIES):
        move = one_move(made, 1.0 + attempt)
        assert made.kv_in_use(move.target.engine) > 0
        assert not made.idle_moves.end(move, False, 1.5 + attempt)
        assert made.kv_in_use(move.target.engine) == 0
    assert made.idle_moves.begin(9.0) == [], "the number of tries is limited"
    assert made.binding("c").engine == left  # type: ignore[union-attr]
    drained(made, left, on=False, seq=2)
    assert made.idle_moves.begin(10.0) == []
    drained(made, left, seq=3)
    assert one_move(made, 11.0).key == "c", "the next drain tries again"


def test_a_conversation_stays_if_the_target_of_its_move_has_restarted() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    made.engine_up(info(move.target.engine, epoch=2))
    assert not made.idle_moves.end(move, True, 2.0)
    assert made.binding("c").engine == left  # type: ignore[union-attr]


def test_a_few_idle_conversations_are_sent_at_a_time_most_recently_used_first() -> None:
    made = table(decoders=1, kv_tokens=100_000)
    for number in range(AT_ONCE + 2):
        idle(made, f"c{number}", number + 1, now=float(number))
    place(made, ask("running", turn=99), 50.0)
    made.engine_up(info("d1", kv_tokens=100_000))
    drained(made, "d0")
    begun = [move.key for move in made.idle_moves.begin(51.0)]
    assert begun == [f"c{number}" for number in range(AT_ONCE + 1, 1, -1)]


def test_an_idle_conversation_moves_at_most_once_a_minute() -> None:
    made = table()
    left = idle(made, "c", 1)
    drained(made, left)
    move = one_move(made, 1.0)
    assert made.idle_moves.end(move, True, 2.0)
    drained(made, move.target.engine)
    assert made.idle_moves.begin(3.0) == []
    drained(made, left, on=False, seq=2)
    assert made.idle_moves.begin(61.9) == []
    assert one_move(made, 62.0).target.engine == left


TOKENS_PER_S = 1000.0


def waits(made: BindingTable, seq: int, now: float, **seconds: float) -> None:
    """Report from each decoder named in `seconds` that its prompts wait for that many seconds."""
    for engine, wait_s in seconds.items():
        tokens = int(wait_s * TOKENS_PER_S)
        report = replace(state(engine, seq), waiting_prompt_tokens=tokens, prompt_tokens_per_s=TOKENS_PER_S)
        assert made.engine_state(report, now)


def hot_fleet(conversations: int = 4, *, relieve_hot: bool = True) -> BindingTable:
    """Return a fleet whose decoder d0 has conversations and waiting prompts, while d1 has neither."""
    made = table(decoders=1, kv_tokens=100_000, relieve_hot=relieve_hot)
    for number in range(conversations):
        idle(made, f"c{number}", number + 1, now=float(number))
    made.engine_up(info("d1", kv_tokens=100_000))
    for second in range(10):
        waits(made, second + 1, float(second), d0=4.0, d1=0.0)
    return made


def test_a_quarter_of_the_conversations_leaves_a_hot_decoder_at_a_time() -> None:
    made = hot_fleet()
    move = one_move(made, 10.0)
    assert (move.key, move.source.engine, move.target.engine) == ("c3", "d0", "d1"), "the last used first"
    assert made.effects().foreign == [("g", "c3")], "the gateway has to ask for the next turn's placement"
    assert made.idle_moves.begin(10.5) == [], "the next move waits for the effect of the first"
    assert made.idle_moves.end(move, True, 11.0)
    told: Any = made.describe("c3")
    receipt = told["placements"][-1]["receipt"]
    assert (receipt["move"]["reason"], receipt["decoder"]["why"]) == ("hot", "waits_less")
    there_s, here_s = receipt["move"]["waits_s"]
    assert there_s < 0.1 and 3.0 < here_s <= 4.0
    waits(made, 11, 16.0, d0=4.0, d1=0.0)
    assert one_move(made, 16.0).key == "c2"


def test_a_turn_waits_for_the_end_of_a_move_off_a_hot_decoder() -> None:
    made = hot_fleet()
    answers: list[Placed | Refusal] = []
    move = one_move(made, 10.0)
    waiter = made.place(ask("c3", turn=9, wait_s=60.0), 10.1, answers.append)
    assert isinstance(waiter, Waiter)
    made.serve_waiting(10.2)
    assert answers == []
    assert made.idle_moves.end(move, True, 10.5)
    made.serve_waiting(10.5)
    (answer,) = answers
    assert isinstance(answer, Placed)
    assert (answer.engine, answer.prefiller, answer.known) == ("d1", None, True)


def test_a_turn_stays_on_a_hot_decoder_if_the_move_fails() -> None:
    made = hot_fleet()
    answers: list[Placed | Refusal] = []
    move = one_move(made, 10.0)
    made.place(ask("c3", turn=9, wait_s=60.0), 10.1, answers.append)
    assert not made.idle_moves.end(move, False, 15.0)
    made.serve_waiting(15.0)
    (answer,) = answers
    assert isinstance(answer, Placed) and answer.engine == "d0"
    made.turn_ended("c3", "g", 16.0, TurnEnded(prompt_tokens=1000, completion_tokens=10), turn=9)
    waits(made, 11, 21.0, d0=4.0, d1=0.0)
    assert one_move(made, 21.0).key != "c3", "a conversation is not tried again within a minute"


def test_conversations_stay_unless_prompts_wait_long_and_less_on_another_decoder() -> None:
    made = hot_fleet()
    waits(made, 11, 10.0, d0=4.0, d1=4.0)
    assert made.idle_moves.begin(16.0) == [], "prompts wait on both decoders"
    waits(made, 12, 17.0, d0=0.0, d1=0.0)
    assert made.idle_moves.begin(40.0) == [], "the burst is over"
    waits(made, 13, 41.0, d0=0.9, d1=0.0)
    assert made.idle_moves.begin(60.0) == [], "a transfer is not worth it"


def test_parked_and_running_conversations_stay_on_a_hot_decoder() -> None:
    made = hot_fleet(2)
    place(made, ask("c1", turn=9), 9.5)
    assert made.conversations.park("c0", "d0")
    assert made.idle_moves.begin(10.0) == []


def test_conversations_stay_on_a_hot_decoder_by_default() -> None:
    assert not PlacerSettings().relieve_hot
    assert hot_fleet(relieve_hot=False).idle_moves.begin(10.0) == []


def test_conversations_do_not_move_to_a_full_decoder_or_to_one_where_prompts_wait() -> None:
    made = hot_fleet()
    made.engine_up(info("d2", kv_tokens=100_000))
    waits(made, 11, 10.0, d2=3.0)
    waits(made, 12, 12.0, d0=4.0, d2=3.0)
    report = replace(state("d1", 12, live=99_000), prompt_tokens_per_s=TOKENS_PER_S)
    assert made.engine_state(report, 12.0)
    assert made.idle_moves.begin(13.0) == [], "d1 is full, and prompts wait on d2"
