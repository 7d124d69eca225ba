"""The cause of a failure is found at the end of the engine's log, in logs of real failures."""

from pathlib import Path

import pytest

from workers.keeper.engine_log import diagnose

LOGS = Path(__file__).parent / "engine_logs"


@pytest.mark.parametrize(
    ("log", "cause", "evidence"),
    [
        ("wrong_argument", "wrong argument", "unrecognized arguments: --max-numseqs"),
        ("port_taken", "port taken", "Address already in use"),
        ("model_not_a_directory", "model not found", "/nonexistent/model"),
        ("model_not_cached", "model not found", "Cannot find an appropriate cached snapshot"),
        ("context_too_long", "context too long for the model", "max_model_len (99999)"),
        ("not_enough_memory", "not enough memory for KV", "less than desired CPU memory utilization"),
    ],
)
def test_the_cause_of_a_real_failure_is_found_in_its_log(log: str, cause: str, evidence: str) -> None:
    found = diagnose((LOGS / f"{log}.txt").read_text().splitlines())
    assert found.cause == cause
    assert evidence in found.evidence
    assert any(evidence in line for line in found.excerpt)
    assert found.advice


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of GPU memory"),
        ("RuntimeError: No CUDA GPUs are available", "missing GPU"),
        ("RuntimeError: Failed to infer device type, please set the environment variable", "missing GPU"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
            "out of memory",
        ),
        (
            "kvtransfer.config.ConnectorConfigError: CONSERVE_TRANSFER_SECRET must hold the fleet's secret",
            "wrong transfer settings",
        ),
        ("kvtransfer.config.ConnectorConfigError: lease_s must be above 0, not 0", "wrong transfer settings"),
        ("RuntimeError: operator torchvision::nms does not exist", "torchvision of another build than torch"),
    ],
)
def test_the_causes_of_errors_of_torch_and_vllm_on_other_machines_are_found(line: str, cause: str) -> None:
    assert diagnose(["INFO starting", f"(EngineCore pid=12) {line}", "INFO ending"]).cause == cause


def test_an_unknown_failure_shows_its_first_error() -> None:
    lines = [
        "INFO one",
        "ValueError: seven is not a number",
        "RuntimeError: Engine core failed. See root cause above.",
    ]
    found = diagnose(lines)
    assert found.cause == "unknown cause"
    assert found.evidence == "ValueError: seven is not a number"


def test_an_empty_log_gives_an_unknown_cause() -> None:
    assert diagnose([]).cause == "unknown cause"
