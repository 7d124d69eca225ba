"""Count the product files that one turn executes, observed on a fleet of real engines.

The fleet is configs/random.yaml: directory, gateway, one prefiller, two decoders. The first turn of a
conversation passes through the prefiller, the later turn does not. A file counts when one of its functions
runs between the turn's first byte and its last, in any process of the fleet, and does not run in an idle
window of `IDLE_S` as well. Each turn is taken `TRIPS` times after `WARM_UP` unmeasured conversations. Only
functions that run every time count, so that a timer is not taken for a part of the turn.

Every process of the fleet loads `SITECUSTOMIZE`. The profile function in it reads the number of the current
window from a shared byte and logs each product function once a window.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.structure import PRODUCT
from workers.processes import free_port

IDLE_S, SETTLE_S = 30.0, 3.0
TRIPS, WARM_UP = 3, 3
FIRST, LATER, IDLE = "first turn", "later turn", "idle"

SITECUSTOMIZE = """
import mmap, os, sys, threading, time
_root, _log = os.environ["TRIPS_ROOT"], os.open(os.environ["TRIPS_LOG"], os.O_WRONLY | os.O_APPEND)
with open(os.environ["TRIPS_WINDOW"], "rb") as _file:
    _window = mmap.mmap(_file.fileno(), 1, prot=mmap.PROT_READ)
_seen = {}

def _log_call(code, window):
    _seen[id(code)] = window
    if code.co_filename.startswith(_root):
        row = window, time.time_ns(), os.getpid(), code.co_filename, code.co_qualname
        os.write(_log, ("\\t".join(map(str, row)) + "\\n").encode())

def _profile(frame, event, argument):
    window = _window[0]
    if window:
        if _seen.get(id(frame.f_code)) != window:
            _log_call(frame.f_code, window)
        # The caller goes on when a function returns.
        if event == "return" and frame.f_back is not None and _seen.get(id(frame.f_back.f_code)) != window:
            _log_call(frame.f_back.f_code, window)

sys.setprofile(_profile)
threading.setprofile(_profile)
"""


@dataclass(frozen=True, order=True)
class Call:
    """First call of a product function in a window, by one process."""

    window: int
    at_ns: int
    pid: int
    file: str
    function: str


def measure(root: Path) -> dict[str, int]:
    """Bring a fleet up, run turns on it, print the files that each kind runs, and return their numbers."""
    with tempfile.TemporaryDirectory(prefix="trips-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        window, log = folder / "window", folder / "log"
        window.write_bytes(b"\0")
        log.touch()
        with fleet(root, folder, window, log) as (url, model):
            windows = take_trips(url, model, window)
        calls = sorted(
            Call(int(number), int(at), int(pid), os.path.relpath(file, root), function)
            for number, at, pid, file, function in (row.split("\t") for row in log.read_text().splitlines())
        )
    found = {}
    for kind in (FIRST, LATER):
        files = files_of(kind, windows, calls)
        print(f"\n{kind}: {len(files)} files")
        for file, functions in files.items():
            print(f"  {file}: {', '.join(functions)}")
        found[f"{kind.replace(' ', '_')}_files"] = len(files)
    return found


@contextmanager
def fleet(root: Path, folder: Path, window: Path, log: Path) -> Iterator[tuple[str, str]]:
    """Run the fleet `random` from the checkout `root`; yield the fleet's URL and its model's name."""
    content = yaml.safe_load((root / "configs" / "random.yaml").read_text())
    content["gateway"]["port"] = port = free_port("127.0.0.1")
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
        "CONSERVE_HOME": str(folder / "home"),
        "TRIPS_ROOT": f"{root}{os.sep}",
        "TRIPS_LOG": str(log),
        "TRIPS_WINDOW": str(window),
    }
    own = root / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable

    def conserve(*arguments: str) -> None:
        command = [python, "-m", "deploy.cli", *arguments]
        subprocess.run(command, env=environment, cwd=root, check=True, timeout=1500)

    try:
        conserve("up", str(file), "--detach")
        yield f"http://127.0.0.1:{port}", content["model"]["served_name"]
    finally:
        conserve("down", content["name"])


def take_trips(url: str, model: str, window: Path) -> list[str]:
    """Play conversations of two turns; return each window's kind. Window n has index n - 1."""
    windows: list[str] = []
    for number in range(WARM_UP + TRIPS):
        words = " ".join(str(n * 7919 % (number + 997)) for n in range(900))
        messages = [{"role": "user", "content": f"Agent {number}: {words}"}]
        for kind in (FIRST, LATER):
            if number >= WARM_UP:
                time.sleep(SETTLE_S)  # work that the previous turn left behind is not part of this turn
                windows.append(kind)
                write_window(window, len(windows))
            text = turn(url, model, messages)
            write_window(window, 0)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"And then? {number}"})
    time.sleep(SETTLE_S)
    windows.append(IDLE)
    write_window(window, len(windows))
    time.sleep(IDLE_S)
    write_window(window, 0)
    return windows


def write_window(file: Path, number: int) -> None:
    """Write the number of a window into the file, in place because every process has it mapped."""
    with file.open("r+b") as mapped:
        mapped.write(bytes([number]))


def turn(url: str, model: str, messages: list[dict[str, str]]) -> str:
    """Send one request, and return the text of its streamed answer."""
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer trips"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    text = ""
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += "".join(choice["delta"].get("content") or "" for choice in choices)
    return text


def files_of(kind: str, windows: list[str], calls: list[Call]) -> dict[str, list[str]]:
    """Return the product files of one kind of turn, with their functions, in order of their first calls."""
    idle = {(call.pid, call.file, call.function) for call in calls if windows[call.window - 1] == IDLE}
    ran: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for call in calls:
        product = call.file.split(os.sep)[0] in PRODUCT and not call.file.endswith(
            ("_pb2.py", "_pb2_grpc.py")
        )
        if product and (call.pid, call.file, call.function) not in idle:
            ran[call.window].add((call.file, call.function))
    numbers = [number for number, other in enumerate(windows, 1) if other == kind]
    every_time = set.intersection(*(ran[number] for number in numbers))
    files: dict[str, list[str]] = {}
    for call in calls:
        if call.window == numbers[0] and (call.file, call.function) in every_time:
            functions = files.setdefault(call.file, [])
            if call.function not in functions:
                functions.append(call.function)
    return files
