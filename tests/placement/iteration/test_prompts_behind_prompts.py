"""A prompt's last piece and the prompts behind it share an iteration, unless that makes the latest later."""

from placement.iteration.interface import RequestView, ServingSettings
from placement.iteration.latency import BatchWork
from placement.iteration.online import PromptQueue
from placement.iteration.policies import make_policy
from tests.placement.iteration.views import MODEL, arrived, fill, offline, online, view


def last_piece(due_in: float, left: int = 50) -> RequestView:
    return online("ends", 1000 + left, 1000, last_token=None, arrival=9.5 + due_in)


def given(*requests: RequestView, waiting: tuple[RequestView, ...]) -> dict[str, int]:
    return fill(make_policy(ServingSettings()), view(*requests, waiting=waiting))


def test_one_that_would_be_late_beside_the_next_is_alone_and_in_time() -> None:
    tokens = given(last_piece(due_in=0.02), waiting=(arrived("next", 1500),))
    assert tokens == {"ends": 50, "next": 0}


def test_nor_do_those_behind_the_next_or_offline_work_have_its_place() -> None:
    behind = (arrived("next", 1500), arrived("third", 20))
    tokens = given(last_piece(due_in=0.02), offline("off"), waiting=behind)
    assert tokens == {"ends": 50, "off": 0, "next": 0, "third": 0}


def test_requests_that_decode_keep_their_token() -> None:
    tokens = given(online("a"), last_piece(due_in=0.02), waiting=(arrived("next", 1500),))
    assert tokens == {"a": 1, "ends": 50, "next": 0}


def test_one_that_is_in_time_anyway_shares_its_iteration() -> None:
    tokens = given(last_piece(due_in=0.4), waiting=(arrived("next", 1500),))
    assert tokens == {"ends": 50, "next": 1500}


def test_it_is_not_alone_where_the_next_would_then_be_the_latest() -> None:
    tokens = given(last_piece(due_in=0.02), waiting=(arrived("next", 1500, at=9.3),))
    assert tokens == {"ends": 50, "next": 1500}


def test_what_the_latest_is_late_by_counts_every_iteration_beside_the_requests() -> None:
    requests = BatchWork.of([(1, 99)] * 4)
    queue = PromptQueue(requests, 100, MODEL)
    first, second = arrived("first", 150, at=10.0), arrived("second", 50, at=9.9)
    prompts_s = sum(MODEL.seconds(BatchWork.of([(n, 0)])) - MODEL.constant for n in (150, 50))
    expected = 10.0 + prompts_s + 3 * MODEL.seconds(requests) - second.deadline()
    assert abs(queue.lateness((first, second), 0, 10.0) - expected) < 1e-9
    assert queue.lateness((first, second), 60, 10.0) < expected - MODEL.seconds(requests)
