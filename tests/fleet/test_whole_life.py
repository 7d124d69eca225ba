"""A fleet of one engine answers, traces its requests, caps its GPU's power and leaves nothing behind."""

import pytest

from tests.support.whole_life import CAP_W, CLIENTS_SPAN, CLIENTS_TRACE, WholeLife

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]


def test_the_curl_command_that_up_prints_gets_an_answer(life: WholeLife) -> None:
    assert life.answer["choices"][0]["message"]["content"]
    assert life.models["data"][0]["id"] == "small"
    assert [(name, one["phase"]) for name, one in life.engines.items()] == [("decode-0", "serving")]
    assert "fleet 'one' is up as the file says; to end it: conserve down one" in life.up_again


def test_a_clients_trace_contains_the_spans_of_gateway_and_engine(life: WholeLife) -> None:
    """The trace has the gateway's spans, and vLLM's own span below the decode leg."""
    found = {span.name: span for span in life.spans}
    assert set(found) == {"turn", "identify", "bind", "decode leg", "llm_request"}
    assert {span.trace for span in life.spans} == {CLIENTS_TRACE} and found["turn"].parent == CLIENTS_SPAN
    assert found["llm_request"].parent == found["decode leg"].span
    assert found["llm_request"].service == "conserve-decode-0"


def test_conserve_down_ends_every_process_of_a_fleet(life: WholeLife) -> None:
    assert "processes ended" in life.down
    assert life.left == []
    assert not life.answers_still


def test_a_keeper_caps_the_power_of_its_gpu_while_the_fleet_is_up(life: WholeLife) -> None:
    """Only the keeper sees the GPUs: the engine of this test is vLLM for CPUs."""
    assert life.saw_gpus == {"keeper": True, "engine": False}
    assert life.limits_w == [CAP_W, 300.0]
    assert life.limits_after_w == [300.0, 300.0]
