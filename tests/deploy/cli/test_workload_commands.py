"""`conserve trace` and `report` write readable files, and report mistakes in sentences."""

from pathlib import Path

from typer.testing import CliRunner, Result

from deploy.cli.application import app as APP
from deploy.cli.commands.replay import pages_of
from tests.support.fleet import ROOT
from traces import TraceError
from traces.format import load

SAMPLES = ROOT / "traces" / "samples"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_a_generated_trace_can_be_scaled_and_described(tmp_path: Path) -> None:
    made, scaled, picture = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl", tmp_path / "b.svg"
    assert run("trace", "generate", "swe-bench", "--count", 50, "--out", made).exit_code == 0
    options = ("--lengths", 0.1, "--max-turns", 2, "--arrivals", "steps:5*2,1*10", "--count", 20)
    assert run("trace", "scale", made, "--out", scaled, *options).exit_code == 0
    found = load(scaled).conversations
    assert len(found) == 20
    assert max(len(conversation.turns) for conversation in found) == 2
    described = run("trace", "describe", scaled, "--picture", picture, "--json", tmp_path / "b.json")
    assert described.exit_code == 0
    assert "generated: swe-bench" in described.output
    assert picture.exists()
    assert (tmp_path / "b.json").exists()


def test_every_generator_writes_a_trace(tmp_path: Path) -> None:
    for name, *options in (
        ("saturating",),
        ("bursts", "--cv", 3),
        ("steps", "--step", "2*5", "--step", "0*5"),
    ):
        out = tmp_path / f"{name}.jsonl"
        assert run("trace", "generate", name, "--count", 10, "--out", out, *options).exit_code == 0
        assert len(load(out).conversations) == 10


def test_trace_import_detects_the_format_and_trace_describe_reads_foreign_files(tmp_path: Path) -> None:
    out = tmp_path / "all.jsonl.gz"
    assert run("trace", "import", SAMPLES / "sources", "--out", out).exit_code == 0
    assert "CC-BY-4.0" in load(out).header.licence
    assert "Mooncake" in run("trace", "describe", SAMPLES / "sources" / "mooncake.jsonl.gz").output


def test_a_replay_reads_each_page_of_a_target_file_once(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    file.write_text('[{"targets": ["a:1"], "labels": {}}, {"targets": ["b:2", "c:3"], "labels": {}}]')
    assert pages_of(file, "http://a:1/") == ["http://b:2/metrics", "http://c:3/metrics"]
    assert pages_of(None, "http://a:1") == []


def test_trace_and_report_commands_report_mistakes_in_a_sentence(tmp_path: Path) -> None:
    for arguments in (
        ("trace", "describe", tmp_path / "none"),
        ("trace", "scale", SAMPLES / "agents.jsonl.gz", "--rate", 0, "--out", tmp_path / "x"),
        ("trace", "generate", "steps", "--step", "2", "--out", tmp_path / "x"),
        ("report", SAMPLES / "agents.jsonl.gz"),
    ):
        assert isinstance(run(*arguments).exception, TraceError), arguments
