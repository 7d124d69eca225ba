"""Each kind of invalid input gets its own error, which names the line if there is one."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from sqlalchemy.exc import DataError

from router.auth.keys import StructuredOutputs
from router.batch.config import BatchLimits
from router.batch.dispatch.validation import BadLine, check_line
from router.batch.store.records import estimated_tokens
from router.batch.store.request_table import RequestTable
from router.gateway.config import ServedModel
from router.requests.fields import MAX_TOKENS, UnknownFields
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, submit

GOOD = [line("good-1"), line("good-2")]
LIMITS = BatchLimits(
    line_bytes=2_000,
    requests_per_batch=50,
    reported_errors=5,
    file_bytes=200_000,
    structured_outputs=StructuredOutputs.REFUSE,
)


def changed(**changes: Any) -> bytes:
    return jsonl([line("bad") | changes])


def without(name: str) -> bytes:
    entry = line("bad")
    del entry[name]
    return jsonl([entry])


def body(**changes: Any) -> bytes:
    entry = line("bad")
    entry["body"] = {k: v for k, v in (entry["body"] | changes).items() if v is not ...}
    return jsonl([entry])


def text(**changes: Any) -> bytes:
    """Return a batch line with one message, whose fields are `changes`."""
    return body(messages=[changes])


# name -> (bad line, error code, parameter); each bad line comes after two good ones
BAD_LINES: dict[str, tuple[bytes, str, str | None]] = {
    "not json": (b"{not json}\n", "invalid_json_line", None),
    "cut off json": (b'{"custom_id": "bad", "method"\n', "invalid_json_line", None),
    "not an object": (b"[1, 2]\n", "invalid_json_line", None),
    "a bare string": (b'"hello"\n', "invalid_json_line", None),
    "an empty line": (b"\n", "invalid_json_line", None),
    "only spaces": (b"   \t\n", "invalid_json_line", None),
    "not utf-8": (b'{"custom_id": "\xff\xfe"}\n', "invalid_encoding", None),
    "utf-16": ('{"custom_id": "bad"}\n'.encode("utf-16"), "invalid_encoding", None),
    "nan": (b'{"custom_id": "bad", "x": NaN}\n', "invalid_json_line", None),
    "too long": (body(pad="x" * 3_000), "line_too_large", None),
    "no custom_id": (without("custom_id"), "missing_required_parameter", "custom_id"),
    "custom_id a number": (changed(custom_id=7), "invalid_type", "custom_id"),
    "custom_id empty": (changed(custom_id=""), "invalid_value", "custom_id"),
    "custom_id with nul": (changed(custom_id="a\0b"), "invalid_value", "custom_id"),
    "nested too deeply": (
        jsonl([line("bad")]).replace(b'"max_tokens": 8', b'"x": ' + b"[" * 400 + b"]" * 400),
        "invalid_request",
        "body",
    ),
    "custom_id too long": (changed(custom_id="x" * 513), "string_above_max_length", "custom_id"),
    "custom_id twice": (changed(custom_id="good-1"), "duplicate_custom_id", "custom_id"),
    "no method": (without("method"), "missing_required_parameter", "method"),
    "wrong method": (changed(method="GET"), "invalid_method", "method"),
    "method in small letters": (changed(method="post"), "invalid_method", "method"),
    "no url": (without("url"), "missing_required_parameter", "url"),
    "another url": (changed(url="/v1/completions"), "url_mismatch", "url"),
    "an absolute url": (changed(url="http://x/v1/chat/completions"), "url_mismatch", "url"),
    "no body": (without("body"), "missing_required_parameter", "body"),
    "body null": (changed(body=None), "invalid_type", "body"),
    "body a string": (changed(body="{}"), "invalid_type", "body"),
    "no model": (body(model=...), "missing_required_parameter", "body.model"),
    "model a number": (body(model=4), "invalid_type", "body.model"),
    "unknown model": (body(model="gpt-9"), "model_not_found", "body.model"),
    "streaming": (body(stream=True), "invalid_request", "body.stream"),
    "transfer parameters": (body(kv_transfer_params={}), "invalid_request", "body.kv_transfer_params"),
    "a priority": (body(priority=-1), "invalid_request", "body.priority"),
    "no messages": (body(messages=...), "missing_required_parameter", "body.messages"),
    "messages a string": (body(messages="hi"), "invalid_type", "body.messages"),
    "messages empty": (body(messages=[]), "empty_array", "body.messages"),
    "message a string": (body(messages=["hi"]), "invalid_type", "body.messages[0]"),
    "message without role": (text(content="x"), "missing_required_parameter", "body.messages[0].role"),
    "content a number": (text(role="user", content=4), "invalid_type", "body.messages[0].content"),
    "a long method": (changed(method="GET" * 200), "invalid_method", "method"),
    "max_tokens zero": (body(max_tokens=0), "integer_below_min_value", "body.max_tokens"),
    "max_tokens a string": (body(max_tokens="8"), "invalid_type", "body.max_tokens"),
    "max_tokens of 10^30": (body(max_tokens=10**30), "integer_above_max_value", "body.max_tokens"),
    "max_tokens negative": (body(max_tokens=-(10**30)), "integer_below_min_value", "body.max_tokens"),
    "n zero": (body(n=0), "integer_below_min_value", "body.n"),
    "n of a million": (body(n=10**6), "integer_above_max_value", "body.n"),
    "n of more than a step": (body(n=128, bad_words=["a", "b"]), "invalid_request", "body.bad_words"),
    "log-probabilities of a prompt": (
        body(prompt_logprobs=20_000),
        "invalid_request",
        "body.prompt_logprobs",
    ),
    "a uuid of media": (
        text(role="user", content=[{"type": "image_url", "image_url": None, "uuid": "u"}]),
        "invalid_request",
        "body.messages.content.uuid",
    ),
    "an endless target": (
        body(vllm_xargs={"slo_tbt_ms": "inf"}),
        "invalid_type",
        "body.vllm_xargs.slo_tbt_ms",
    ),
    "a negative target": (
        body(vllm_xargs={"slo_tbt_ms": -1}),
        "invalid_value",
        "body.vllm_xargs.slo_tbt_ms",
    ),
    "a beam search": (body(use_beam_search=True), "invalid_request", "body.use_beam_search"),
    "a request id": (body(request_id="other"), "invalid_request", "body.request_id"),
    "a grammar, of a fleet that refuses them": (
        body(response_format={"type": "json_object"}),
        "structured_outputs_refused",
        "body.response_format",
    ),
    "a conversation": (body(conversation="c"), "invalid_request", "body.conversation"),
    "a conversation as an object": (body(conversation={"id": "c"}), "invalid_request", "body.conversation"),
    "a class": (body(slo_class="gold"), "invalid_request", "body.slo_class"),
    "hints": (body(kv_hints={"actions": []}), "invalid_request", "body.kv_hints"),
    "hints of Dynamo": (body(nvext={"agent_hints": {}}), "invalid_request", "body.nvext"),
    "an answer of another": (
        body(previous_response_id="r"),
        "invalid_request",
        "body.previous_response_id",
    ),
}


@pytest.fixture
async def small(engine: OfflineEngine, sqlite_url: str, tmp_path: Any) -> Any:
    running = GatewayWithBatch(
        sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address), limits=LIMITS
    )
    await running.start()
    yield running
    await running.stop()


def ignored_fields() -> float:
    return REGISTRY.get_sample_value("conserve_ignored_fields_total", {"path": "/v1/chat/completions"}) or 0.0


async def test_unknown_fields_of_a_line_are_dropped_unless_the_fleet_refuses_them(
    engine: OfflineEngine, sqlite_url: str, tmp_path: Any
) -> None:
    for policy, status in ((UnknownFields.DROP, "completed"), (UnknownFields.REFUSE, "failed")):
        limits = replace(LIMITS, unknown_fields=policy)
        running = GatewayWithBatch(
            sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address), limits=limits
        )
        await running.start()
        before = ignored_fields()
        async with running.client() as client:
            batch = await ended(client, await submit(client, body(frobnicate=1)))
        await running.stop()
        assert batch.status == status
        assert ignored_fields() - before == (1 if policy is UnknownFields.DROP else 0)
    assert batch.errors is not None and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].param) == ("unknown_parameter", "body.frobnicate")
    (seen,) = engine.bodies
    assert "frobnicate" not in seen and seen["messages"]


async def test_a_failed_batch_lists_each_bad_line_with_its_error(
    small: GatewayWithBatch, engine: OfflineEngine
) -> None:
    assert len(BAD_LINES) >= 30
    async with small.client() as client:
        for name, (bad, code, param) in BAD_LINES.items():
            batch = await ended(client, await submit(client, jsonl(GOOD) + bad + jsonl([line("good-3")])))
            assert batch.status == "failed", name
            assert batch.errors is not None and batch.errors.data, name
            error = batch.errors.data[0]
            assert (error.line, error.code, error.param) == (3, code, param), name
            assert error.message and len(error.message) < 500, name
            assert batch.output_file_id is None and batch.error_file_id is None, name
            assert batch.failed_at is not None and batch.in_progress_at is None, name
    assert engine.served == []  # no line of a failed batch runs


@pytest.mark.parametrize(
    ("data", "code", "line_number"),
    [
        (b"", "empty_file", None),
        (jsonl([line(f"r{i}") for i in range(51)]), "too_many_tasks", 51),
        (jsonl([line("a"), line("b"), line("c", method="PUT")]), "invalid_method", 3),
    ],
)
async def test_a_batch_with_an_invalid_file_fails_as_a_whole(
    small: GatewayWithBatch, data: bytes, code: str, line_number: int | None
) -> None:
    async with small.client() as client:
        batch = await ended(client, await submit(client, data))
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, line_number)


async def test_lines_for_another_model_or_an_unsupported_endpoint_are_refused(
    engine: OfflineEngine, sqlite_url: str, tmp_path: Any
) -> None:
    models = (ServedModel("tiny"), ServedModel("other"))
    running = GatewayWithBatch(
        sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address), models=models
    )
    await running.start()
    async with running.client() as client:
        two = await ended(client, await submit(client, jsonl(GOOD) + body(model="other")))
        asked = line("a", url="/v1/embeddings", body={"model": "tiny", "input": "x"})
        no_embeddings = await ended(client, await submit(client, jsonl([asked]), "/v1/embeddings"))
    await running.stop()
    for batch, expected in (
        (two, ("model_mismatch", 3, "body.model")),
        (no_embeddings, ("unsupported", 1, "url")),
    ):
        assert batch.errors is not None and batch.errors.data
        error = batch.errors.data[0]
        assert (error.code, error.line, error.param) == expected


async def test_a_failed_batch_lists_its_bad_lines_only_up_to_the_limit(small: GatewayWithBatch) -> None:
    async with small.client() as client:
        batch = await ended(client, await submit(client, b"x\n" * 40))
        assert batch.errors is not None and batch.errors.data
        assert [error.line for error in batch.errors.data] == [1, 2, 3, 4, 5]


async def test_a_file_with_crlf_or_without_a_last_newline_is_accepted(small: GatewayWithBatch) -> None:
    async with small.client() as client:
        data = jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n").rstrip()
        batch = await ended(client, await submit(client, data))
        assert batch.status == "completed" and batch.request_counts and batch.request_counts.total == 2


RESPONSES = {"model": "tiny", "input": "x", "max_output_tokens": 5}
UNCHECKED: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown n": ("/v1/responses", RESPONSES | {"n": "x"}),
    "an unknown limit": ("/v1/chat/completions", line("a")["body"] | {"max_output_tokens": 1e30}),
}


@pytest.mark.parametrize("name", list(UNCHECKED))
async def test_validation_goes_on_whatever_value_an_unknown_field_has(
    small: GatewayWithBatch, name: str
) -> None:
    url, asked = UNCHECKED[name]
    async with small.client("sk-one") as client, small.client("sk-two") as other:
        batch = await submit(client, jsonl([line("a", url=url, body=asked)]), url)
        behind = await ended(other, await submit(other, jsonl(GOOD)), within_s=20)
        assert behind.status == "completed"
        assert (await ended(client, batch)).status == "completed"


def test_the_token_estimate_of_a_line_is_limited_to_the_largest_number_that_the_store_holds() -> None:
    assert estimated_tokens(4_000, {"max_tokens": 1e30, "n": 128}) == 1_000 + MAX_TOKENS
    with_unknown = line("a")["body"] | {"max_completion_tokens": None, "max_output_tokens": 1000}
    data = jsonl([line("a", body=with_unknown)])
    checked = check_line(data, "/v1/chat/completions", BatchLimits(), {"tiny": ServedModel("tiny")})
    assert checked.est_tokens == len(data) // 4 + 8


async def test_a_batch_whose_validation_crashes_fails_and_later_ones_go_on(
    small: GatewayWithBatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = RequestTable.load
    for fault in (ZeroDivisionError("a fault"), DataError("INSERT", {}, ValueError("out of range"))):

        def load(table: RequestTable, batch: int, lines: Any, fault: Exception = fault) -> bool:
            if lines[0].custom_id == "bad":
                raise fault
            return real(table, batch, lines)

        with monkeypatch.context() as patched:
            patched.setattr(RequestTable, "load", load)
            async with small.client("sk-one") as client, small.client("sk-two") as other:
                batch = await submit(client, jsonl([line("bad")]))
                behind = await ended(other, await submit(other, jsonl(GOOD)), within_s=20)
                assert behind.status == "completed"
                batch = await ended(client, batch)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data
        assert batch.errors.data[0].code == "server_error" and batch.errors.data[0].message
        assert type(fault).__name__ in caplog.text and batch.id in caplog.text
        caplog.clear()


async def test_validation_errors_quote_only_a_little_of_a_line(
    engine: OfflineEngine, sqlite_url: str, tmp_path: Any
) -> None:
    running = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address))
    await running.start()
    many = [line("\U0001f600" * 512) for _ in range(101)]  # the same id in each line
    long = [line("a", method="M" * 10**6), line("b", url="U" * 10**6), text_model("m" * 10**6)]
    async with running.client() as client:
        for lines, most in ((long, 2_000), (many, 70_000)):
            batch = await ended(client, await submit(client, jsonl(lines)))
            assert batch.status == "failed" and batch.errors is not None and batch.errors.data
            assert len(batch.errors.data) >= 3
            assert len(batch.errors.model_dump_json().encode()) < most
    await running.stop()


def text_model(model: str) -> dict[str, Any]:
    entry = line("c")
    return entry | {"body": entry["body"] | {"model": model}}


CREATE = {"input_file_id": "?", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
BAD_CREATES: dict[str, tuple[Any, str, str | None]] = {
    "not json": (b"{", "invalid_json", None),
    "not an object": (b"[]", "invalid_json", None),
    "no file": (CREATE | {"input_file_id": None}, "missing_required_parameter", "input_file_id"),
    "file a number": (CREATE | {"input_file_id": 4}, "invalid_type", "input_file_id"),
    "unknown file": (CREATE | {"input_file_id": "file-no"}, "file_not_found", "input_file_id"),
    "unknown endpoint": (CREATE | {"endpoint": "/v1/images/generations"}, "invalid_value", "endpoint"),
    "no endpoint": (CREATE | {"endpoint": None}, "missing_required_parameter", "endpoint"),
    "window too short": (CREATE | {"completion_window": "30m"}, "invalid_value", "completion_window"),
    "window too long": (CREATE | {"completion_window": "8d"}, "invalid_value", "completion_window"),
    "window nonsense": (CREATE | {"completion_window": "soon"}, "invalid_value", "completion_window"),
    "metadata too many": (
        CREATE | {"metadata": {str(i): "" for i in range(17)}},
        "invalid_value",
        "metadata",
    ),
    "metadata not text": (CREATE | {"metadata": {"a": 1}}, "invalid_value", "metadata"),
    "metadata key long": (CREATE | {"metadata": {"k" * 65: ""}}, "invalid_value", "metadata"),
    "output ttl of 4400 digits": (
        CREATE | {"output_expires_after": {"anchor": "created_at", "seconds": "9" * 4400}},
        "invalid_value",
        "output_expires_after.seconds",
    ),
    "output ttl from a deep anchor": (
        json.dumps(CREATE | {"output_expires_after": {"anchor": 1}})
        .replace("1}", "[" * 1000 + "]" * 1000 + "}")
        .encode(),
        "invalid_value",
        "output_expires_after.anchor",
    ),
    "a long window": (CREATE | {"completion_window": "9" * 9999}, "invalid_value", "completion_window"),
    "a long endpoint": (CREATE | {"endpoint": "/" * 9999}, "invalid_value", "endpoint"),
    "output ttl": (
        CREATE | {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
        "invalid_value",
        "output_expires_after.seconds",
    ),
}


async def test_invalid_batches_are_refused(small: GatewayWithBatch) -> None:
    async with small.client() as client, httpx.AsyncClient(base_url=small.url) as http:
        file = await client.files.create(file=("a.jsonl", jsonl(GOOD)), purpose="batch")
        headers = {"authorization": "Bearer sk-one", "content-type": "application/json"}
        for name, (given, code, param) in BAD_CREATES.items():
            if isinstance(given, dict) and given["input_file_id"] == "?":
                given = given | {"input_file_id": file.id}
            content = given if isinstance(given, bytes) else json.dumps(given).encode()
            answer = await http.post("/v1/batches", content=content, headers=headers)
            assert answer.status_code == 400, name
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == (code, param), name
            assert error["type"] == "invalid_request_error" and len(error["message"]) < 500, name
        for window in ("1h", "7d", "168h"):
            answer = await http.post(
                "/v1/batches",
                json=CREATE | {"input_file_id": file.id, "completion_window": window},
                headers=headers,
            )
            assert answer.status_code == 200, window
            assert answer.json()["expires_at"] - answer.json()["created_at"] in (3600, 7 * 86400)


async def test_invalid_uploads_are_refused(small: GatewayWithBatch, tmp_path: Any) -> None:
    async with httpx.AsyncClient(base_url=small.url) as http:

        async def post(status: int, param: str | None, **form: Any) -> None:
            answer = await http.post("/v1/files", **form)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text

        file = ("a.jsonl", b"{}")
        await post(400, "purpose", files={"file": file})
        await post(400, "file", files={"purpose": (None, "batch")})
        await post(400, "purpose", files={"file": file}, data={"purpose": "fine-tune"})
        ttl = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 4400}
        await post(400, "expires_after.seconds", files={"file": file}, data={"purpose": "batch", **ttl})
        await post(400, None, content=b"hello", headers={"content-type": "text/plain"})
        cut = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        await post(400, None, content=cut, headers={"content-type": "multipart/form-data; boundary=b"})
        await post(413, None, files={"file": ("a", b"x" * 300_000)}, data={"purpose": "batch"})
        for path, status in (
            ("/v1/files/file-none", 404),
            ("/v1/batches/batch_none", 404),
            ("/v1/nothing", 404),
        ):
            answer = await http.get(path)
            assert answer.status_code == status and answer.json()["error"]["message"]
        assert (await http.put("/v1/files")).status_code == 405
        assert (await http.get("/v1/files/file%00x")).status_code == 400
        for bad in ("limit=0", "limit=x", "order=up", "limit=10001"):
            assert (await http.get(f"/v1/files?{bad}")).status_code == 400, bad
    left = [path.name for path in (tmp_path / "files").iterdir()]
    assert left == []  # no refused upload leaves bytes behind


def test_a_line_with_more_messages_than_a_turn_may_have_is_refused() -> None:
    entry = line("bad")
    entry["body"] |= {"messages": [{"role": "user", "content": "x"}] * 10_001}
    data = jsonl([entry])
    models = {entry["body"]["model"]: ServedModel(entry["body"]["model"])}
    with pytest.raises(BadLine, match="10001 items"):
        check_line(data, entry["url"], BatchLimits(line_bytes=len(data)), models)


def test_a_batch_line_may_ask_for_128_answers() -> None:
    for answers, refused in ((128, None), (2 * 65, "it may ask for 128")):
        entry = line("a", url="/v1/completions")
        entry["body"] = {"model": "tiny", "prompt": ["x"] * (answers // 2), "n": 2, "max_tokens": 3}
        data = jsonl([entry])
        asked = data, entry["url"], BatchLimits(), {"tiny": ServedModel("tiny")}
        with pytest.raises(BadLine, match=refused) if refused else nullcontext():
            assert check_line(*asked).est_tokens == len(data) // 4 + 3 * answers
