"""`python -m benchmarks.gpu` runs without CUDA, and its mechanisms without vLLM; the page says what ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_VLLM = """
import runpy, sys
sys.modules["vllm"] = None
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_mechanisms_doubles_run_and_their_bytes_are_equal(tmp_path: Path) -> None:
    options = ["--mechanisms", "--page", str(tmp_path / "gpu.md"), "--json", str(tmp_path / "gpu.json")]
    run = [sys.executable, "-c", WITHOUT_VLLM, *options]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run(run, check=True, timeout=170, env=environment, cwd=Path(__file__).parents[2])
    page, found = (tmp_path / "gpu.md").read_text(), json.loads((tmp_path / "gpu.json").read_text())
    assert "without CUDA" in page and "| host_copies | equal | True |" in page
    assert {name for name, figures in found.items() if "equal" in figures} > {"pages", "aborted_steps"}


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_its_engines_run_and_stand_beside_plain_vllm(tmp_path: Path) -> None:
    options = ["--engines", "--json", str(tmp_path / "gpu.json")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    run = [sys.executable, "-m", "benchmarks.gpu", *options]
    subprocess.run(run, check=True, timeout=290, env=environment, cwd=Path(__file__).parents[2])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["kept"]["restored_blocks_of_512"] > 10 and found["kept"]["tbt_of_4_vs_plain"] > 0
    assert found["kept"]["handed_over_512_vs_plain"] > 0 and found["kept"]["transfers_refused"] == 0
    for kind in ("coserving", "coserving-piecewise"):
        assert found[kind]["iterations"] > 10 and found[kind]["offline_tokens_per_s"] > 0
        assert found[kind]["tbt_of_4_vs_plain"] > 0
