"""Offline work in a simulated run: the batch process, and an owner of a batch who checks its results."""

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

from router.batch.config import BatchConfig, DispatchSettings
from router.batch.service import serve
from router.gateway.config import BatchAddress, ServedModel
from tests.simulated.clients import request
from tests.simulated.disk import Disk
from tests.simulated.engines import MODEL
from tests.simulated.invariants import Monitor
from tests.simulated.processes import DIRECTORY_PORT, FREE, SECRET, Main

BATCH_HOST, BATCH_PORT, BATCH_KEY = "10.0.3.1", 8100, "batch"
ADDRESS = BatchAddress(f"{BATCH_HOST}:{BATCH_PORT}", BATCH_KEY)
LONGEST_BATCH_S = 90.0
BROKEN, TRY_AGAIN = 0, (502, 503, 504)
ENDED = "completed", "failed", "expired", "cancelled"


def batch_main(disk: Disk, directory: str) -> Main:
    async def main() -> None:
        config = BatchConfig(
            store_url=f"sqlite:///{disk.path}/batch.db",
            files_url=f"{disk.path}/files",
            models=(ServedModel(MODEL),),
            directory=f"{directory}:{DIRECTORY_PORT}",
            secret=SECRET,
            key=BATCH_KEY,
            host=BATCH_HOST,
            port=BATCH_PORT,
            dispatch=DispatchSettings(request_timeout_s=20.0, backoff_max_s=4.0),
        )
        await serve(config)

    return main


class BatchOwner:
    """Submits a batch through the gateways, waits for its end, and reads its results."""

    def __init__(self, gateways: list[str], draw: Random, monitor: Monitor) -> None:
        self._gateways, self._draw, self._monitor = gateways, draw, monitor

    async def run(self) -> None:
        names = [f"line {number}" for number in range(self._draw.randrange(20, 80))]
        try:
            async with asyncio.timeout(LONGEST_BATCH_S):
                results = await self._results(names)
        except TimeoutError:
            self._monitor.violated("a batch ends", f"one has not ended after {LONGEST_BATCH_S:.0f} s")
            return
        self._monitor.count("batches")
        if results != Counter(names):
            wrong = (results - Counter(names)) | (Counter(names) - results)
            self._monitor.violated("a batch line has one result", f"too many or none: {dict(wrong)}")

    async def _results(self, names: list[str]) -> Counter[str]:
        """Run a new batch with the lines `names`, and return how many results each line has."""
        file = json.loads(await self._ask("POST", "/v1/files", *self._form(names)))
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = json.loads(await self._ask("POST", "/v1/batches", json.dumps(wanted).encode()))
        while batch["status"] not in ENDED:
            await asyncio.sleep(1.0)
            batch = json.loads(await self._ask("GET", f"/v1/batches/{batch['id']}"))
        results: Counter[str] = Counter()
        for file in (batch["output_file_id"], batch["error_file_id"]):
            if file is not None:
                lines = await self._ask("GET", f"/v1/files/{file}/content")
                results.update(json.loads(line)["custom_id"] for line in lines.splitlines())
        return results

    def _form(self, names: list[str]) -> tuple[bytes, str]:
        """Return the upload of a file with the lines `names`, and the upload's content type."""
        lines = b"".join(json.dumps(self._line(name)).encode() + b"\n" for name in names)
        part = b'--cut\r\ncontent-disposition: form-data; name="%b\r\n\r\n%b\r\n'
        parts = part % (b'purpose"', b"batch") + part % (b'file"; filename="lines"', lines) + b"--cut--\r\n"
        return parts, "multipart/form-data; boundary=cut"

    def _line(self, name: str) -> dict[str, Any]:
        tokens = self._draw.randrange(20, 120)
        body = {"model": MODEL, "messages": [{"role": "user", "content": name}], "max_tokens": tokens}
        return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}

    async def _ask(
        self, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
    ) -> bytes:
        """Send a request until it succeeds. An error that does not ask for a retry is a violation."""
        while True:
            gateway = self._draw.choice(self._gateways)
            answer = await request(gateway, method, path, FREE, {"content-type": content_type}, body)
            if answer.status == 200 and answer.whole:
                return answer.body
            if answer.status not in (200, BROKEN, *TRY_AGAIN):
                said = f"{method} {path}: {answer.status} {answer.body.decode()}"
                self._monitor.violated("what a batch's owner was told holds", said)
            await asyncio.sleep(self._draw.uniform(0.5, 1.5))
