"""Counter of the product files that one turn passes through, observed on a fleet of real engines.

A *trip* is what runs while one turn is under way, from the request's first byte to the answer's last, on the
laptop fleet (directory, gateway, one prefiller, two decoders). A file of a product package counts when one
of its functions runs in that window in any process of the fleet and does not run there in an idle window of
`IDLE_S`. Functions are compared, not files: a file that also serves a heartbeat stays in the count. What
protoc wrote, and constructors that `dataclass` wrote, do not count: nobody reads those. The *first turn*
opens a conversation (prefiller, hand-over, decoder), the *later turn* is its second. Other conversations
went before, so that nothing is imported or connected for the first time; the trip is taken `TRIPS` times,
and a function counts that ran each time, so that a timer that happens to fire is not taken for a part of the
turn.

Every process of the fleet finds `sitecustomize` (below) on its path. It sets a profile function that looks at
one shared byte, the number of the window, and notes each product function once a window. Product code knows
nothing of it, so that any checkout can be observed with `--tree`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.structure import PRODUCT
from workers.processes import free_port

IDLE_S, TRIPS = 30.0, 3
WARM_UP = 3

SITECUSTOMIZE = """
import mmap, os, sys, threading, time
_root, _log = os.environ["TRIPS_ROOT"], os.open(os.environ["TRIPS_LOG"], os.O_WRONLY | os.O_APPEND)
with open(os.environ["TRIPS_WINDOW"], "rb") as _file:
    _window = mmap.mmap(_file.fileno(), 1, prot=mmap.PROT_READ)
_seen = {}

def _note(code, window):
    _seen[id(code)] = window
    if code.co_filename.startswith(_root):
        row = window, time.time_ns(), os.getpid(), code.co_filename, code.co_qualname
        os.write(_log, ("\\t".join(map(str, row)) + "\\n").encode())

def _profile(frame, event, argument):
    window = _window[0]
    if window:
        if _seen.get(id(frame.f_code)) != window:
            _note(frame.f_code, window)
        # A function that waited inside the one that ends here goes on.
        if event == "return" and frame.f_back is not None and _seen.get(id(frame.f_back.f_code)) != window:
            _note(frame.f_back.f_code, window)

sys.setprofile(_profile)
threading.setprofile(_profile)
"""


@dataclass(frozen=True)
class FunctionRun:
    """One function that ran in a window, and when it first did."""

    window: int
    at_ns: int
    pid: int
    file: str
    function: str


def report(root: Path) -> None:
    for trip, by_process in observe(root).items():
        files = {file for seen in by_process.values() for file in seen}
        print(f"\n{trip}: {len(files)} files")
        for process, seen in by_process.items():
            print(f"  {process}: {len(seen)} files")
            for file, functions in seen.items():
                print(f"    {file}: {', '.join(functions)}")


def observe(root: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Trip -> process -> file -> functions, each in the order in which they first ran."""
    with tempfile.TemporaryDirectory(prefix="trips-") as directory:
        folder = Path(directory)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        window, log, file = folder / "window", folder / "log", folder / "fleet.yaml"
        window.write_bytes(b"\0")
        log.touch()
        content = yaml.safe_load((root / "configs" / "laptop.yaml").read_text())
        content["gateway"]["port"] = port = free_port("127.0.0.1")
        file.write_text(yaml.safe_dump(content))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([directory, str(root)]),
            "CONSERVE_HOME": str(folder / "home"),
            "TRIPS_ROOT": f"{root}{os.sep}",
            "TRIPS_LOG": str(log),
            "TRIPS_WINDOW": str(window),
        }
        # The command line of that checkout, with its own libraries where it has them.
        python = root / ".venv" / "bin" / "python"
        conserve = [str(python) if python.exists() else sys.executable, "-m", "deploy.cli"]

        def run(*arguments: str) -> None:
            subprocess.run([*conserve, *arguments], env=environment, cwd=root, check=True, timeout=1500)

        try:
            run("up", str(file), "--detach")
            windows = take_trips(f"http://127.0.0.1:{port}", content["model"]["served_name"], window)
            names = process_names(log)
        finally:
            run("down", content["name"])
        return counted(root, log, windows, names)


def take_trips(url: str, model: str, window: Path) -> dict[int, str]:
    """Windows' kinds by number."""
    windows: dict[int, str] = {}

    def in_window(kind: str) -> "TakingNotes":
        windows[len(windows) + 1] = kind
        return TakingNotes(window, len(windows))

    for seed in range(WARM_UP + TRIPS):
        counted = seed >= WARM_UP
        notes_of_agent = " ".join(str(n * 7919 % (seed + 997)) for n in range(900))
        messages = [{"role": "user", "content": f"Agent {seed}: {notes_of_agent}"}]
        for kind in ("first turn", "later turn"):
            if counted:
                time.sleep(3)  # what the turn before leaves behind it is not this one's
                with in_window(kind):
                    text = turn(url, model, messages)
            else:
                text = turn(url, model, messages)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"And then? {seed}"})
    time.sleep(3)
    with in_window("idle"):
        time.sleep(IDLE_S)
    return windows


class TakingNotes:
    """The time in which the processes take notes."""

    def __init__(self, file: Path, number: int) -> None:
        self.file, self.number = file, number

    def __enter__(self) -> None:
        self._set(self.number)

    def __exit__(self, *_: object) -> None:
        self._set(0)

    def _set(self, number: int) -> None:
        with self.file.open("r+b") as file:  # in place: the processes have it mapped
            file.write(bytes([number]))


def turn(url: str, model: str, messages: list[dict[str, str]]) -> str:
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer trips"},
    )
    text = ""
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text


def notes(log: Path) -> list[FunctionRun]:
    rows = (line.split("\t") for line in log.read_text().splitlines())
    return [FunctionRun(int(window), int(at), int(pid), *where) for window, at, pid, *where in rows]


def process_names(log: Path) -> dict[int, str]:
    names = {}
    for pid in {seen.pid for seen in notes(log)}:
        line = Path(f"/proc/{pid}/cmdline")
        words = line.read_text().replace("\0", " ").split() if line.exists() else []
        names[pid] = f"{' '.join(word for word in words if '/' not in word)[:60]} ({pid})"
    return names


def counted(
    root: Path, log: Path, windows: dict[int, str], names: dict[int, str]
) -> dict[str, dict[str, dict[str, list[str]]]]:
    seen = sorted((one for one in notes(log) if is_product(one.file, root)), key=lambda one: one.at_ns)
    idle = {(one.pid, one.file, one.function) for one in seen if windows[one.window] == "idle"}
    seen = [one for one in seen if (one.pid, one.file, one.function) not in idle]
    trips = {}
    for kind in ("first turn", "later turn"):
        numbers = [number for number, other in windows.items() if other == kind]
        ran = ({(one.file, one.function) for one in seen if one.window == number} for number in numbers)
        always = set.intersection(*ran)
        by_process: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for one in seen:
            if one.window == numbers[0] and (one.file, one.function) in always:
                functions = by_process[names[one.pid]][os.path.relpath(one.file, root)]
                functions += [one.function] if one.function not in functions else []
        trips[kind] = by_process
    return trips


def is_product(file: str, root: Path) -> bool:
    package = os.path.relpath(file, root).split(os.sep)[0]
    return package in PRODUCT and not file.endswith(("_pb2.py", "_pb2_grpc.py"))
