"""An engine's processes show vLLM's titles, although torch changes the first environment variable."""

import os
import subprocess
import sys

SERVER = """
import os, sys, types
from setproctitle import setproctitle
import workers.serve

def serve():
    os.environ["FIRST"] = "changed, as torch changes a variable when it is imported"
    setproctitle("VLLM::EngineCore")
    print(open("/proc/self/cmdline").read().rstrip("\\0 "))

entry = types.SimpleNamespace(main=serve)
sys.modules["vllm.entrypoints.launchers.api_server.entry"] = entry
workers.serve.start_process = lambda address: None
workers.serve.main()
"""


def test_a_process_title_is_shown_although_the_first_environment_variable_changes() -> None:
    environment = {"FIRST": "as started", "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SERVER]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "VLLM::EngineCore"
