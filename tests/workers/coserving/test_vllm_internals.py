"""An engine with an unsupported vLLM is refused at its start, before it can misbehave."""

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.engine.core import EngineCore

from kvtransfer.compat.relied_on import ReliedOn, UnsupportedVllmError, verify
from kvtransfer.compat.whole_graphs import GRAPHS
from workers.engine.compat import coserving_runner as runner_internals
from workers.engine.compat import coserving_scheduler as internals

TABLES = (internals.SCHEDULING, runner_internals.WORKING, GRAPHS)


def signatures() -> Iterator[tuple[ReliedOn, str, str]]:
    for table in TABLES:
        for owner, methods in table.signatures.items():
            yield from ((table, owner, name) for name in methods)


@pytest.mark.parametrize("table", TABLES, ids=["scheduling", "working", "graphs"])
def test_the_installed_vllm_is_the_supported_release(table: ReliedOn) -> None:
    verify(table)


@pytest.mark.parametrize(
    ("table", "path", "name"), signatures(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_vllm_with_a_changed_signature_is_refused(
    table: ReliedOn, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, owner = path.partition(":")
    monkeypatch.setattr(getattr(import_module(module), owner), name, lambda self, something_else: None)
    with pytest.raises(UnsupportedVllmError, match=rf"{owner}\.{name}.* is relied on, .*something_else"):
        verify(table)


def test_a_vllm_that_lacks_a_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineCore, "preprocess_add_request")
    with pytest.raises(UnsupportedVllmError, match=r"preprocess_add_request.* does not exist"):
        verify(internals.SCHEDULING)


def test_two_wrappers_of_the_forward_pass_both_take_effect() -> None:
    runner = SimpleNamespace()
    vars(runner)["_model_forward"] = lambda: ["model"]

    def named(name: str) -> Any:
        return lambda forward: lambda: [name, *forward(), name]

    for name in ("inner", "outer"):
        runner_internals.wrap_forward(cast(Any, runner), named(name))
    assert vars(runner)["_model_forward"]() == ["outer", "inner", "model", "inner", "outer"]


def queued(*asked: tuple[str, int]) -> tuple[internals.PolicyQueue, dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    queue, requests = internals.PolicyQueue(), {}
    for at, (key, priority) in enumerate(asked):
        params = SamplingParams(max_tokens=1)
        requests[key] = Request(key, [1], params, None, arrival_time=float(at), priority=priority)
        queue.add_request(requests[key])
    return queue, requests


def drained(queue: internals.PolicyQueue) -> list[str]:
    order = []
    while queue:
        first = queue.peek_request()
        assert queue.pop_request() is first
        order.append(first.request_id)
    return order


def test_waiting_offline_requests_come_after_online_ones_in_the_order_of_the_plan() -> None:
    queue, requests = queued(("a", 1), ("b", 1), ("c", 1), ("gone", 1), ("on", 0))
    queue.name_offline([requests["gone"], requests["c"], requests["b"]])
    queue.remove_requests([requests["gone"]])
    assert drained(queue) == ["on", "c", "b", "a"]


def test_waiting_requests_keep_vllms_order_if_no_order_is_planned() -> None:
    queue, _ = queued(("a", 1), ("b", 1), ("on", 0))
    assert drained(queue) == ["on", "a", "b"]
