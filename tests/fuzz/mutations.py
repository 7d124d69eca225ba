"""Makes malformed requests from valid ones by changes of their JSON or of their bytes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

WORDS = "the agent reads a file and calls a tool"
USER = {"role": "user", "content": WORDS}
MESSAGES = [{"role": "system", "content": "You help."}, USER]
# A valid request for each endpoint with a body. Answers are short, so that most time is spent on refusals.
SEEDS: dict[str, dict[str, Any]] = json.loads("""{
  "/v1/chat/completions": {"messages": 0, "max_tokens": 2, "stream": true,
    "stream_options": {"include_usage": true},
    "tools": [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
    "tool_choice": "auto", "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 1, "stop": ["x"],
    "logit_bias": {"5": 1}, "response_format": {"type": "text"}, "logprobs": true, "top_logprobs": 2,
    "prompt_cache_key": "k", "metadata": {"session_id": "s"}, "service_tier": "auto",
    "vllm_xargs": {"slo_tbt_ms": 200}},
  "/v1/completions": {"prompt": [1, 2, 3, 4], "max_tokens": 2, "stream": false, "echo": false, "logprobs": 1,
    "suffix": null, "presence_penalty": 0.1, "repetition_penalty": 1.1, "min_tokens": 0,
    "structured_outputs": {"choice": ["a", "b"]}, "truncate_prompt_tokens": 3, "bad_words": ["x"]},
  "/v1/responses": {"input": 0, "max_output_tokens": 2, "store": false, "stream": false,
    "previous_response_id": null, "reasoning": null, "conversation": {"id": "c"}},
  "/v1/messages": {"messages": 0, "system": "You help.", "max_tokens": 2, "stream": false,
    "metadata": {"user_id": "u"}},
  "/v1/messages/count_tokens": {"messages": 0},
  "/v1/embeddings": {"input": 0, "encoding_format": "float"},
  "/tokenize": {"messages": 0, "add_generation_prompt": true},
  "/detokenize": {"tokens": [1, 2, 3]},
  "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
}""")
SEEDS["/v1/chat/completions"]["messages"] = SEEDS["/tokenize"]["messages"] = MESSAGES
SEEDS["/v1/messages"]["messages"] = SEEDS["/v1/messages/count_tokens"]["messages"] = [USER]
SEEDS["/v1/responses"]["input"], SEEDS["/v1/embeddings"]["input"] = [USER], [WORDS]
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
FILES = "/v1/files"
READS = ("/v1/models", "/v1/models/x", "/v1/conversations", "/v1/conversations/x", FILES, "/v1/batches")
FORM = "multipart/form-data; boundary=b"
UPLOAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n--b--\r\n'
)
QUERIES = ("?limit=-1", "?limit=²", "?after=%00&order=up", "?a=1&a=2", "?%zz", "?" + "q" * 20_000, "?")
METHODS = (*["POST"] * 4, "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW")
OUR_FIELDS = (
    "kv_transfer_params",
    "request_id",
    "priority",
    "session_id",
    "cache_salt",
    "vllm_xargs",
    "nvext",
)
HEADERS = (
    *("x-conversation-id", "x-session-id", "x-parent-conversation-id", "x-correlation-id", "accept"),
    *("x-conversation-final", "content-type", "content-encoding", "expect", "traceparent", "authorization"),
    *("connection", "x-request-id"),
)
HEADER_VALUES = ("x", "", "é", "a" * 600, "gzip", "100-continue", "00-0-0-0", "true", "\t")
DEEP = "@deep@"  # placeholder for a value nested more deeply than JSON encoders write
STRINGS = ("", "\0", "\ud800", "é" * 50, "inf", "../../etc/passwd", "{{7*7}}", "%s%n")
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63), 10**30, -(10**30))
FLOATS = (float("inf"), float("-inf"), float("nan"), 1e308, 5e-324, -0.0)
HOSTILE: tuple[Callable[[Random], Any], ...] = (
    lambda random: None,
    lambda random: random.choice((True, False)),
    lambda random: random.choice(NUMBERS),
    lambda random: random.choice(FLOATS),
    lambda random: random.choice(STRINGS),
    lambda random: "x" * random.choice((100, 10_000, 300_000)),
    lambda random: [],
    lambda random: {},
    lambda random: [{}] * random.choice((1, 100, 20_000)),
    lambda random: [None, [], {}, "x", 1.5],
    lambda random: {str(number): number for number in range(random.choice((1, 100, 3000)))},
    lambda random: [2**31] * random.choice((1, 50_000)),
    lambda random: [USER] * random.choice((1, 500)),
    lambda random: [{"role": random.choice(("tool", "x", "", None)), "content": [{"type": "image_url"}]}],
    lambda random: DEEP,
)
CONTENT_LENGTHS = (b"-1", b"1e3", b"99999999999999999999", b"0x10", b"", b"5, 6", b"+7")
CHUNK_SIZES = (b"zz", b"-5", b"ffffffffffffffff", b"5;" + b"e" * 5000, b"5\n")
VERSIONS = (b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"", b"ICY/1")
TARGETS = (b"/\0", b"/v1/%00", b"http://other/v1/models", b"*", b"/" + b"a" * 20_000, b"//", b"")


@dataclass(frozen=True, slots=True)
class Attack:
    """Bytes that are sent to the gateway. If they are one whole request (`whole`), it must be answered."""

    data: bytes
    whole: bool
    about: str


def attack(random: Random, model: str) -> Attack:
    return _tampered_bytes(random, model) if random.random() < 0.3 else _mutated_fields(random, model)


def _mutated_fields(random: Random, model: str) -> Attack:
    path = random.choice((*SEEDS, *SEEDS, *READS))
    body: Any = {"model": model, **json.loads(json.dumps(SEEDS.get(path, {})))}
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        body = _mutated(random, body)
    method = random.choice(METHODS) if random.random() < 0.1 or path in READS else "POST"
    # An answer without a length limit may go on until the context is full, so its client hangs up.
    generates = any(name in SEEDS.get(path, ()) for name in LENGTHS) and isinstance(body, dict)
    limited = not generates or any(body.get(name) is not None for name in LENGTHS)
    depth = random.choice((10, 500, 1000, 20_000))
    nested = random.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
    raw = json.dumps(body).replace(f'"{DEEP}"', nested).encode()
    if random.random() < 0.05:
        raw = _flipped(random, raw)
    head = [("Content-Type", "application/json")]
    if random.random() < 0.2:
        head.append((random.choice(HEADERS), random.choice(HEADER_VALUES)))
    whole = limited and method not in ("HEAD", "BREW")
    query = random.choice(QUERIES) if random.random() < 0.05 else ""
    return Attack(_request(method, path + query, head, raw), whole, f"{method} {path}{query[:20]}")


def _mutated(random: Random, value: Any) -> Any:
    """Return a JSON value in which one field or item, at any depth, is replaced, removed or added."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice([*value])
        step = random.random()
        if step < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if step < 0.25:
            return {**value, random.choice((*OUR_FIELDS, "é", "x" * 300)): random.choice(HOSTILE)(random)}
        return {**value, key: _mutated(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.7:
        place = random.randrange(len(value))
        return [*value[:place], _mutated(random, value[place]), *value[place + 1 :]]
    return random.choice(HOSTILE)(random)


def _request(method: str, path: str, head: list[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *(f"{name}: {value}" for name, value in head)]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def _tampered_bytes(random: Random, model: str) -> Attack:
    """Return a valid request of which some bytes are changed, so that it may be invalid."""
    path = random.choice([*SEEDS, FILES])
    valid = UPLOAD if path == FILES else json.dumps({"model": model, **SEEDS[path]}).encode()
    media_type = FORM if path == FILES else "application/json"
    good = _request("POST", path, [("Content-Type", media_type)], valid)
    head, _, body = good.partition(b"\r\n\r\n")
    without_length = b"\r\n".join(head.split(b"\r\n")[:-1]) + b"\r\n"
    end, kind = b"\r\n\r\n", random.randrange(12)
    match kind:
        case 0:
            data = _flipped(random, good)
        case 1:
            data = good[: random.randrange(len(good))]
        case 2:
            data = random.randbytes(random.choice((1, 100, 5000)))
        case 3:
            data = without_length + b"Content-Length: " + random.choice(CONTENT_LENGTHS) + end + body
        case 4:
            data = head + b"\r\nTransfer-Encoding: chunked" + end + body
        case 5:
            chunk = random.choice(CHUNK_SIZES) + b"\r\nhello\r\n0" + end
            data = without_length + b"Transfer-Encoding: chunked" + end + chunk
        case 6:
            data = head + b"\r\nX-Pad: " + b"p" * random.choice((1000, 70_000)) + end + body
        case 7:
            many = range(random.choice((50, 3000)))
            data = head + b"".join(b"\r\nX-%d: y" % number for number in many) + end + body
        case 8:
            data = good * random.choice((2, 10))  # pipelined
        case 9:
            data = good.replace(b"HTTP/1.1", random.choice(VERSIONS))
        case 10:
            data = good.replace(b"\r\n", random.choice((b"\n", b"\r", b"\r\n ")), random.choice((1, -1)))
        case _:
            data = good.replace(path.encode(), random.choice(TARGETS), 1)
    return Attack(data, False, f"bytes {kind} {path}")


def _flipped(random: Random, data: bytes) -> bytes:
    """Return `data` with some of its bytes replaced, removed or inserted."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 3, 20))):
        place = random.randrange(len(changed))
        step = random.random()
        if step < 0.5:
            changed[place] = random.randrange(256)
        elif step < 0.75:
            del changed[place]
            changed = changed or bytearray(b"\0")
        else:
            changed[place:place] = random.randbytes(random.choice((1, 4)))
    return bytes(changed)
