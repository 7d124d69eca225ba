"""Client of a keeper's own engine: checks its health, reads its size, and sends warm-up prompts over HTTP."""

import asyncio
import re
from dataclasses import dataclass

import aiohttp

from workers.engine.engine_key import KEY_HEADER
from workers.processes import WorkerError

WARM_TOKENS = 2048  # length of the longest warm-up prompt, if so many tokens fit
WARM_SHARES = (0.25, 1.0, 0.5)  # lengths of the warm-up prompts, as shares of the longest
FIRST_ID, IDS = 64, 180  # first id and number of the token ids in warm-up prompts, which any vocabulary has


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Sizes of a running engine, in tokens."""

    kv_tokens: int
    block_tokens: int
    max_context: int

    @property
    def warm_tokens(self) -> int:
        return min(WARM_TOKENS, self.max_context // 2, self.kv_tokens // 4)


class EngineHttpError(WorkerError):
    """Error: the engine did not answer a request of its keeper as expected."""


_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class EngineHttp:
    def __init__(self, address: str, served_name: str, key: str = "", *, embeds: bool = False) -> None:
        """Create a client of the engine. `embeds` means that the engine makes embeddings instead of text."""
        self.address, self._name, self._key, self._embeds = address, served_name, key, embeds
        self._session: aiohttp.ClientSession | None = None

    async def healthy(self, timeout_s: float) -> bool:
        try:
            async with self._open().get(f"http://{self.address}/health", timeout=_limit(timeout_s)) as answer:
                return answer.status == 200
        except _FAILURES:
            return False

    async def facts(self, timeout_s: float) -> EngineFacts:
        try:
            url, limit = f"http://{self.address}", _limit(timeout_s)
            async with self._open().get(f"{url}/v1/models", timeout=limit) as answer:
                models = (await answer.json())["data"]
            async with self._open().get(f"{url}/metrics", timeout=limit) as answer:
                cache = cache_config(await answer.text())
        except (*_FAILURES, KeyError, ValueError) as error:
            raise EngineHttpError(f"the engine did not report its size: {error!r}") from error
        context = next((int(model["max_model_len"]) for model in models if model["id"] == self._name), 0)
        blocks, tokens = int(cache["num_gpu_blocks"]), int(cache["block_size"])
        return EngineFacts(kv_tokens=blocks * tokens, block_tokens=tokens, max_context=context)

    async def first(self, timeout_s: float) -> None:
        """Send the engine's first request, which is short and has no KV transfer.

        A KV transfer in the first request can crash an engine.
        """
        if self._embeds:
            await self._ask("embeddings", {"input": "warm up"}, timeout_s)
        else:
            body = {"prompt": "warm up", "max_tokens": 4, "temperature": 0}
            await self._ask("completions", body, timeout_s)

    async def warm(self, timeout_s: float, prompt_tokens: int) -> None:
        """Send prompts of up to `prompt_tokens` tokens, within the time limit.

        These prompts touch the memory, compile kernels and give the latency model samples before the first
        user comes.
        """
        if self._embeds:
            return
        try:
            async with asyncio.timeout(timeout_s):
                for start, share in enumerate(WARM_SHARES):
                    if ids := [FIRST_ID + (start + at) % IDS for at in range(int(share * prompt_tokens))]:
                        body = {"prompt": ids, "max_tokens": 2, "temperature": 0}
                        await self._ask("completions", body, timeout_s)
        except TimeoutError as error:
            raise EngineHttpError(
                f"prompts of {prompt_tokens} tokens took more than {timeout_s:.0f} s"
            ) from error

    async def _ask(self, kind: str, body: dict[str, object], timeout_s: float) -> None:
        url, body = f"http://{self.address}/v1/{kind}", {"model": self._name, **body}
        try:
            async with self._open().post(url, json=body, timeout=_limit(timeout_s)) as answer:
                if answer.status != 200:
                    raise EngineHttpError(
                        f"a first request failed: {answer.status} {(await answer.text())[:300]}"
                    )
        except _FAILURES as error:
            raise EngineHttpError(f"a first request failed: {error!r}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {KEY_HEADER.decode(): self._key} if self._key else None
            self._session = aiohttp.ClientSession(headers=headers)
        return self._session


def cache_config(metrics: str) -> dict[str, str]:
    """Return the labels of the metric `vllm:cache_config_info` in the text of vLLM's metrics page."""
    match = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    if match is None:
        raise ValueError("/metrics lacks vllm:cache_config_info")
    return dict(re.findall(r'(\w+)="([^"]*)"', match[1]))


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)
