"""Stands in for the Hugging Face Hub: describes the model `a/b` and serves its files."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0" * 40


@dataclass
class StandInHub:
    files: Mapping[str, bytes]
    url: str = ""
    sent: set[str] = field(default_factory=set)  # names of files that clients have fetched
    refuses: dict[str, int] = field(default_factory=dict)  # status to answer with, by a part of the path
    why: dict[str, str] = field(default_factory=dict)  # headers of these answers
    drops: str = ""  # a part of a path, for which the connection is dropped

    def run(self, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run Python with this stand-in as Hugging Face Hub, and with the hub's cache in `home`."""
        given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        ours = {"HF_HOME": str(home / "hf"), "HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**given, **ours, "CONSERVE_HOME": str(home / "state")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def answer(self, path: str) -> bytes:
        path = path.partition("?")[0]
        if path.startswith("/api/"):
            entries = [{"type": "file", "path": name, "size": len(self.files[name])} for name in self.files]
            if "/tree/" in path:
                return json.dumps(
                    [{"oid": name, **one} for name, one in zip(self.files, entries, strict=True)]
                ).encode()
            siblings = [{"rfilename": one["path"], "size": one["size"]} for one in entries]
            return json.dumps({"id": "a/b", "sha": COMMIT, "siblings": siblings}).encode()
        return self.files[path.partition("/resolve/")[2].partition("/")[2]]


@contextmanager
def standing_in(files: Mapping[str, bytes]) -> Iterator[StandInHub]:
    hub = StandInHub(files)

    class HubHandler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if hub.drops and hub.drops in self.path:
                self.close_connection = True
                return
            refused = next((status for part, status in hub.refuses.items() if part in self.path), None)
            body = b"" if refused else hub.answer(self.path)
            name = self.path.rpartition("/resolve/")[2].partition("/")[2]
            self.send_response(refused or 200)
            for header in hub.why.items() if refused else ():
                self.send_header(*header)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{name.replace("/", "-")}"')
            self.end_headers()
            if self.command == "GET" and not refused:
                hub.sent.add(name)
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
