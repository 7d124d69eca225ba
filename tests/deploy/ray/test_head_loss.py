"""A killed head of our own Ray cluster restarts with its tables; its node and actors run on."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from tests.support.fleet import ROOT, conserve, environment

pytestmark = pytest.mark.slow

# Ray reads its environment when it is imported: a process of its own, as `conserve up` is one.
DRIVER = """
import contextlib, json, os, subprocess, sys, time
from pathlib import Path
import psutil
from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.ray.cluster import connect, start_own_cluster
from deploy.lifecycle.down import marked

COUNTER = '''
import os
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count
    def pid(self): return os.getpid()

def make(name):
    return ray.remote(Counter).options(
        name=name, lifetime="detached", max_restarts=-1, num_cpus=0, resources={"decode_tier": 1}).remote()
'''
AGAIN = COUNTER + '''
import json, time
from pathlib import Path
from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.ray.cluster import connect
fleet = load_fleet(Path("configs/random.yaml"))
home = FleetHome.of(fleet.name)
ray = connect(fleet, home, home.read_run())
deadline = time.monotonic() + 60
while True:
    try:
        first = ray.get(ray.get_actor("first").add.remote(), timeout=20)
        break
    except ray.exceptions.RayError:
        assert time.monotonic() < deadline
        time.sleep(0.5)
print(json.dumps([first, ray.get(make("second").add.remote(), timeout=60)]))
'''

fleet = load_fleet(Path("configs/random.yaml"))
home = FleetHome.of(fleet.name)
home.create()
home.fleet_file.write_text(Path("configs/random.yaml").read_text())  # as `conserve up` does
ray = connect(fleet, home, start_own_cluster(fleet, home, end_with_us=True))
exec(COUNTER)

def heads():
    found = []
    for process in marked(home):
        with contextlib.suppress(psutil.Error):  # it ends as we look
            if "gcs_server" in process.name():
                found.append(process.pid)
    return found

def ask(call, limit_s=60):
    return ray.get(call, timeout=limit_s)

first = make("first")
pid = ask(first.pid.remote())
assert ask(first.add.remote()) == 1
before = heads()
for one in before:
    psutil.Process(one).kill()
said = {"during": ask(first.add.remote(), 10)}
deadline = time.monotonic() + 60
while time.monotonic() < deadline and (not heads() or heads() == before):
    time.sleep(0.2)
said["restarted"] = bool(heads()) and heads() != before
said["after"] = ask(ray.get_actor("first").add.remote())
said["same_process"] = ask(first.pid.remote()) == pid
os.kill(pid, 9)
# This driver sat on the head's own node, which is gone, and its job ends with that: a new one asks for the
# restarted actor, and makes another.
again = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, timeout=120)
assert again.returncode == 0, again.stderr
said["restarted_actor"], said["new_actor"] = json.loads(again.stdout.splitlines()[-1])
print(json.dumps(said))
"""


@pytest.mark.timeout(400)
def test_a_killed_ray_head_restarts_and_nothing_else_stops() -> None:
    base = Path(tempfile.mkdtemp(prefix="conserve-"))
    try:
        driver = subprocess.run(
            [sys.executable, "-c", DRIVER],
            env={**environment(base), "RAY_AUTH_TOKEN": "of another cluster of this user"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert driver.returncode == 0, driver.stderr[-3000:]
        assert json.loads(driver.stdout.splitlines()[-1]) == {
            "during": 2,
            "restarted": True,
            "after": 3,
            "same_process": True,
            "new_actor": 1,
            "restarted_actor": 1,
        }
    finally:
        conserve(base, "down", "random", timeout_s=120)
        assert not marked(FleetHome.of("random", str(base)))
        shutil.rmtree(base, ignore_errors=True)
