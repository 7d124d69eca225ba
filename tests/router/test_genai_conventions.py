"""Requests are counted in OpenTelemetry's histograms for generative AI, by operation and model."""

from pathlib import Path

from prometheus_client import REGISTRY

from tests.support.fake_fleet import MODEL, ask, fleet, user

NAMES = ("time_to_first_token", "time_per_output_token", "request_duration")


def counts(operation: str) -> dict[str, float]:
    labels = {"gen_ai_operation_name": operation, "gen_ai_request_model": MODEL}
    found = {}
    for name in NAMES:
        more = {"error_type": ""} if name == "request_duration" else {}
        found[name] = REGISTRY.get_sample_value(f"gen_ai_server_{name}_seconds_count", labels | more) or 0.0
    return found


async def test_streams_count_in_all_three_histograms_and_other_answers_in_the_duration(
    tmp_path: Path,
) -> None:
    async with fleet(tmp_path) as made:
        before = counts("chat"), counts("text_completion")
        assert (await ask(made.urls[0], [user("one")], stream=True, max_tokens=4)).status == 200
        whole = await ask(made.urls[0], "two", path="/v1/completions")
        assert whole.status == 200
        await made.settle()
        after = counts("chat"), counts("text_completion")
    grown = [{name: now[name] - was[name] for name in NAMES} for was, now in zip(before, after, strict=True)]
    chat, completion = grown
    assert chat == dict.fromkeys(NAMES, 1.0)
    assert completion == {**dict.fromkeys(NAMES, 0.0), "request_duration": 1.0}
