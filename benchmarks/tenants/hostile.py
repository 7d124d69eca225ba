"""Plays a tenant that does all it can to slow down another tenant, in a process of its own."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.harness.chats import batch_file
from traces.replay.client import text

CHAT = "/v1/chat/completions"
# Number of clients of each kind. Requests of the kinds after `slow` cost much more than their tokens count.
CLIENTS = {"flood": 32, "giant": 6, "cancel": 12, "batch": 4, "slow": 20}
CLIENTS |= dict.fromkeys(("cut", "tokenize", "count", "named", "noted", "urgent", "beam", "dear_batch"), 2)
CLIENTS |= dict.fromkeys(("regex", "schema", "tools"), 2)  # make an engine compile
CLIENTS |= dict.fromkeys(("listed", "scored", "avoided"), 2)  # slow down an engine's steps or front end
FLOOD_TOKENS, GIANT_CHARACTERS, LONGEST_SCORED = 128, 80_000, 3_000
LONG_CHARACTERS, LONG_ID = 10 << 20, "R" * 60_000
REPEATED_CHARACTERS = 100_000  # longer text repeats this many, which takes little processor time
EXPRESSION = "((a{1,999}b){1,999}c){1,999}|" + "|".join(f"([a-z]{{1,{2000 + n}}}[0-9])" for n in range(900))
PROPERTIES, TOOLS, TOOL_PROPERTIES = 1500, 150, 20
ANSWERS = (2, 128)  # answers of one request: as many as the key may have at once, and too many
LISTED, AVOIDED = 20, 64  # log-probabilities, bad words
LINES = 50  # of a batch
PAUSE_S = 0.1  # after a refusal: `retry-after` is ignored
SLOW_BYTE_S = 1.0
GIVES_UP_S = 60.0
TELL_EVERY_S = 1.0


class HostileTenant:
    """Clients of the hostile tenant; counts the answers to each kind of attack."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        key: str,
        model: str,
        seed: int,
        kinds: Sequence[str] = tuple(CLIENTS),
    ) -> None:
        self._kinds = kinds
        self._session, self._url, self._model, self._random = session, url, model, Random(seed)
        self._headers, self._numbers = {"authorization": f"Bearer {key}"}, count()
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for kind in self._kinds:
                for _ in range(CLIENTS[kind]):
                    group.create_task(self._forever(kind))

    async def _forever(self, kind: str) -> None:
        while True:
            try:
                outcome = await self._attack(kind)
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                outcome = type(wrong).__name__
            self.answers[f"{kind} {outcome}"] += 1
            if outcome != "200":
                await asyncio.sleep(PAUSE_S)

    async def _attack(self, kind: str) -> str:
        """Send one request of a kind, and return the status of its answer."""
        match kind:
            case "flood":
                return await self._ask(self._body(400, FLOOD_TOKENS, stream=True))
            case "giant":
                return await self._ask(self._body(GIANT_CHARACTERS, 1))
            case "cancel":  # leaves after the first bytes of the answer
                return await self._ask(self._body(4000, FLOOD_TOKENS, stream=True), read=16)
            case "cut":  # has long text that an engine would tokenise in order to truncate it
                return await self._ask(self._body(LONG_CHARACTERS, 1, truncate_prompt_tokens=10))
            case "tokenize":
                body = {"model": self._model, "prompt": long_text("long", LONG_CHARACTERS)}
                return await self._ask(body, path="/tokenize")
            case "count":
                messages = [{"role": "user", "content": long_text("long", LONG_CHARACTERS)}]
                return await self._ask(
                    {"model": self._model, "messages": messages}, path="/v1/messages/count_tokens"
                )
            case "noted":  # has long text outside the prompt
                return await self._ask(self._body(400, 1, metadata={"note": "n" * LONG_CHARACTERS}))
            case "regex":
                expression = f"{EXPRESSION}|{next(self._numbers)}"
                return await self._ask(self._body(400, 2, structured_outputs={"regex": expression}))
            case "schema":
                schema = self._schema(PROPERTIES)
                asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
                return await self._ask(self._body(400, 2, response_format=asked))
            case "tools":
                tools = [
                    {
                        "type": "function",
                        "function": {"name": f"f{n}", "parameters": self._schema(TOOL_PROPERTIES)},
                    }
                    for n in range(TOOLS)
                ]
                return await self._ask(self._body(400, 2, tools=tools, tool_choice="required"))
            case "named":  # has a long id, which every event of its stream would repeat
                body = self._body(400, FLOOD_TOKENS, stream=True)
                return await self._ask(body, headers={"x-request-id": LONG_ID})
            case "urgent":
                return await self._ask(self._body(10_000, 1), headers={"x-conversation-priority": "10"})
            case "beam":
                return await self._ask(self._body(400, FLOOD_TOKENS, use_beam_search=True, n=8))
            case "listed":
                listed: dict[str, Any] = {"logprobs": True, "top_logprobs": LISTED, "stream": True}
                return await self._ask(self._body(400, FLOOD_TOKENS, n=self._answers(), **listed))
            case "scored":
                characters = self._random.choice((LONGEST_SCORED, GIANT_CHARACTERS))
                return await self._ask(self._body(characters, 1, prompt_logprobs=LISTED))
            case "avoided":
                words = [f"word {next(self._numbers)}" for _ in range(AVOIDED)]
                return await self._ask(self._body(400, FLOOD_TOKENS, n=self._answers(), bad_words=words))
            case "batch":
                return await self._submit(LINES, 2000)
            case "dear_batch":
                return await self._submit(1, LONG_CHARACTERS)
            case _:
                return await self._send_slowly()

    def _body(self, characters: int, tokens: int, **more: Any) -> dict[str, Any]:
        content = long_text(f"hostile-{self._random.random()}-{next(self._numbers)}", characters)
        sizes = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return {"model": self._model, "messages": [{"role": "user", "content": content}], **sizes, **more}

    def _answers(self) -> int:
        return self._random.choice(ANSWERS)

    def _schema(self, properties: int) -> dict[str, Any]:
        """Return a JSON schema with `properties` optional properties, which no engine has compiled before."""
        names = (f"p{next(self._numbers)}" for _ in range(properties))
        return {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
            "additionalProperties": False,
        }

    async def _ask(
        self,
        body: dict[str, Any],
        read: int = -1,
        path: str = CHAT,
        headers: dict[str, str] | None = None,
    ) -> str:
        async with self._session.post(f"{self._url}{path}", json=body, headers=headers) as answer:
            await answer.content.read(read)
            return str(answer.status)

    async def _submit(self, count: int, characters: int) -> str:
        form = aiohttp.FormData({"purpose": "batch"})
        lines = batch_file(CHAT, (self._body(characters, 64) for _ in range(count)))
        form.add_field("file", lines, filename="in.jsonl")
        async with self._session.post(f"{self._url}/v1/files", data=form) as answer:
            if answer.status != 200:
                return str(answer.status)
            file = (await answer.json())["id"]
        wanted = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        return await self._ask(wanted, path="/v1/batches")

    async def _send_slowly(self) -> str:
        """Send a request whose body comes byte by byte; return the status of the answer."""
        where = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            fields = {"host": where.netloc, "content-type": "application/json", "content-length": "100000"}
            head = "".join(f"{name}: {value}\r\n" for name, value in {**self._headers, **fields}.items())
            writer.write(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n".encode())
            answer = asyncio.create_task(reader.readline())
            while not answer.done():
                writer.write(b" ")
                await writer.drain()
                await asyncio.wait([answer], timeout=SLOW_BYTE_S)
            line = answer.result().split()
            return line[1].decode() if len(line) > 1 else "cut"
        finally:
            writer.close()


def long_text(stream: str, characters: int) -> str:
    """Return text of this length, different for each `stream`. Long text repeats its beginning."""
    part = text(stream, min(characters, REPEATED_CHARACTERS))
    return (part * -(-characters // REPEATED_CHARACTERS))[:characters]


def attack(
    pipe: Connection, url: str, key: str, model: str, seed: int, seconds: float, kinds: Sequence[str]
) -> None:
    """Attack for `seconds`, and send the counts of new answers through the pipe every second.

    The process has a low priority, because a real attack would come from another machine. On a busy machine
    it may therefore end late.
    """
    os.nice(19)

    async def for_a_while() -> None:
        async with aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(GIVES_UP_S),
            connector=aiohttp.TCPConnector(limit=0),
        ) as session:
            tenant = HostileTenant(session, url, key, model, seed, kinds)

            async def tell() -> None:
                while True:
                    await asyncio.sleep(TELL_EVERY_S)
                    pipe.send(tenant.answers)
                    tenant.answers = Counter()

            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(tenant.run(), tell())

    with suppress(BrokenPipeError):  # nobody listens any more
        asyncio.run(for_a_while())
