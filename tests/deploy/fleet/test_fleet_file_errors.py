"""Every mistake in a fleet file names its line, what was expected, and the nearest valid key."""

from pathlib import Path

import pytest

from deploy.fleet import FleetFileError, load_fleet, parse_fleet
from kvtransfer.config import ConnectorConfigError

GOOD = """\
name: test
tiers:
  - name: prefill
    role: prefill
  - name: decode
    role: decode
    replicas: 2
conversation:
  ttl: 10m
  park_after: 30s
"""


def mistakes(text: str) -> list[str]:
    with pytest.raises(FleetFileError) as caught:
        parse_fleet(text, "fleet.yaml")
    return list(caught.value.problems)


def only_mistake(text: str) -> str:
    found = mistakes(text)
    assert len(found) == 1, found
    return found[0]


def test_a_correct_fleet_file_has_no_errors() -> None:
    fleet = parse_fleet(GOOD, "fleet.yaml")
    assert [tier.replicas for tier in fleet.tiers] == [1, 2]
    assert fleet.conversation.ttl == 600


@pytest.mark.parametrize(
    ("wrong", "right", "expected"),
    [
        (
            "    replicas: 2",
            "    replcas: 2",
            "fleet.yaml:7: tiers[1].replcas: unknown key 'replcas'; did you mean",
        ),
        (
            "  ttl: 10m",
            "  ttl: 10m\nslos:\n  default: {ttft: 1s}",
            "fleet.yaml:11: slos.default.ttft: unknown key 'ttft'; did you mean 'ttfet'?",
        ),
        (
            "  park_after: 30s",
            "  park_after: 30s\ngateway:\n  limits:\n    bodies_mib: 48",
            "fleet.yaml:13: gateway.limits.bodies_mib: bodies_mib must be at least twice body_mib",
        ),
        (
            "    replicas: 2",
            "    autoscale: {mn: 1, max: 2}",
            "fleet.yaml:7: tiers[1].autoscale.mn: unknown key 'mn'; did you mean 'min'?",
        ),
        (
            "    replicas: 2",
            "    replicas: two",
            "fleet.yaml:7: tiers[1].replicas: expected a valid integer, not 'two'",
        ),
        (
            "    replicas: 2",
            "    replicas: -1",
            "fleet.yaml:7: tiers[1].replicas: expected greater than or equal to 0",
        ),
        (
            "  ttl: 10m",
            "  ttl: -3",
            "fleet.yaml:9: conversation.ttl: expected greater than or equal to 0, not -3",
        ),
        ("  ttl: 10m", "  ttl: -3s", "fleet.yaml:9: conversation.ttl: a time is seconds, or a number with"),
        ("  ttl: 10m", "  ttl: soon", "fleet.yaml:9: conversation.ttl: a time is seconds"),
        (
            "conversation:",
            "conversations:",
            "fleet.yaml:8: conversations: unknown key 'conversations'; did you mean",
        ),
        (
            "    role: decode",
            "    role: decoder",
            "fleet.yaml:6: tiers[1].role: expected 'prefill', 'decode' or 'mixed'",
        ),
        ("  - name: decode", "  - nam: decode", "fleet.yaml:5: tiers[1]: 'name' is missing"),
        (
            "  - name: decode",
            "  - name: prefill",
            "fleet.yaml:5: tiers[1].name: a tier named 'prefill' is already above",
        ),
        (
            "    role: prefill",
            "    role: decode",
            "fleet.yaml:3: tiers: the policy 'conserve' needs a tier with role 'pre",
        ),
        (
            "  park_after: 30s",
            "  park_after: 1h",
            "fleet.yaml:10: conversation.park_after: expected at most conversation",
        ),
        (
            "  park_after: 30s",
            "  ttl: 5s",
            "fleet.yaml:10: conversation.ttl: the key 'ttl' is already on line 9",
        ),
        ("name: test", "name: Not A Name", "fleet.yaml:1: name: String should match pattern"),
    ],
)
def test_a_mistake_in_a_fleet_file_is_located_and_explained(wrong: str, right: str, expected: str) -> None:
    assert any(found.startswith(expected) for found in mistakes(GOOD.replace(wrong, right, 1)))


NO_RECEIVER = "observe:\n  tracing:\n    sample: 0.5\n    endpoint: http://here:99999\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("30s", "0"), "fleet.yaml:10: conversation.park_after: expected greater than 0, not 0"),
        (GOOD + "transfer: {lease: 0}\n", "fleet.yaml:11: transfer.lease: expected greater than 0, not 0"),
        (GOOD + "transfer: {timeout: 0s}\n", "fleet.yaml:11: transfer.timeout: expected greater than 0"),
        (
            GOOD + "kv: {disk_gib: 9}\n",
            "fleet.yaml:11: kv.disk_gib: set kv.disk_path, too: a folder on a fast",
        ),
        (
            GOOD + "kv: {disk_path: /nvme}\n",
            "fleet.yaml:11: kv.disk_path: it has no effect without kv.disk_gib",
        ),
        (
            GOOD + "kv: {disk_gib: 9, disk_path: ~/kv}\n",
            "fleet.yaml:11: kv.disk_path: expected an absolute path",
        ),
        (
            GOOD + "kv: {disk_gib: 9, disk_path: /nvme, host_kv_gib: 0}\n",
            "fleet.yaml:11: kv.disk_gib: KV goes to the disk from host memory: set kv.host_kv_gib above 0",
        ),
        (
            GOOD.replace("  park_after: 30s\n", "")
            + "kv: {disk_gib: 9, disk_path: /nvme}\noverload: {policy: preempt}\n",
            "fleet.yaml:10: kv.disk_gib: nothing is parked with overload.policy 'preempt'",
        ),
        (GOOD + NO_RECEIVER, "fleet.yaml:14: observe.tracing.endpoint: expected http://host:port of an OTLP"),
    ],
)
def test_a_value_that_a_component_would_refuse_is_a_mistake_in_the_fleet_file(
    text: str, expected: str
) -> None:
    assert only_mistake(text).startswith(expected)


def test_an_error_of_a_component_is_reported_at_the_key_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*given: object) -> None:
        raise ConnectorConfigError("timeout_s must be below 5, not 30.0")

    monkeypatch.setattr("deploy.fleet.components.connector", refuses)
    text = GOOD + "transfer:\n  lease: 20s\n  timeout: 30s\n"
    expected = "fleet.yaml:13: transfer.timeout: timeout_s must be below 5, not 30.0"
    assert only_mistake(text) == expected


def test_an_unknown_key_that_resembles_none_lists_the_valid_keys() -> None:
    found = only_mistake(GOOD + "gateway:\n  xyzzy: 1\n")
    assert found.startswith("fleet.yaml:12: gateway.xyzzy: unknown key 'xyzzy'; expected one of admin_keys, ")


def test_all_errors_are_reported_together_in_the_order_of_lines() -> None:
    found = mistakes(GOOD.replace("replicas: 2", "replicas: x").replace("ttl: 10m", "ttI: 10m"))
    assert [line.split(":")[1] for line in found] == ["7", "9"]


def test_vllm_options_that_conserve_sets_itself_are_refused() -> None:
    found = mistakes(GOOD + "engine:\n  args:\n    max-model-len: 10\n    --seed: 1\n")
    assert found[0].startswith(
        "fleet.yaml:13: engine.args.max-model-len: 'max-model-len' is not set here: set model.max"
    )
    assert "'seed'" in found[1]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("api-key: secret", "set gateway.keys_file instead"),
        ("ssl-keyfile: a.pem", "set gateway.tls instead"),
        ("uds: /run/vllm", "ConServe sets up each engine's server"),
    ],
)
def test_options_of_vllms_http_server_are_refused(option: str, said: str) -> None:
    name = option.partition(":")[0]
    found = only_mistake(GOOD + f"engine:\n  args:\n    {option}\n")
    assert found == f"fleet.yaml:13: engine.args.{name}: '{name}' is not set here: {said}"


def test_a_wrong_value_of_a_vllm_option_is_reported_once() -> None:
    assert only_mistake(GOOD + "engine:\n  args:\n    seed:\n").startswith(
        "fleet.yaml:13: engine.args.seed: "
    )


def test_broken_yaml_and_missing_files_are_reported(tmp_path: Path) -> None:
    assert only_mistake("tiers: [1, 2\nname: x\n").startswith("fleet.yaml:2: not valid YAML: ")
    assert only_mistake("- 1\n").startswith("fleet.yaml:1: expected a mapping")
    assert only_mistake("").startswith("fleet.yaml:1: expected a mapping")
    with pytest.raises(FleetFileError, match=r"none\.yaml:1: cannot be read: No such file"):
        load_fleet(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            "slos:\n  default: {}\n  gold: {keys: [a]}\n  silver:\n    keys: [a]\n",
            "fleet.yaml:15: slos.silver.keys: a key of this class is of class 'gold' too",
        ),
        (
            "slos:\n  default: {}\n  gold: {ahead: 20s}\n",
            "fleet.yaml:13: slos.gold.ahead: expected less than conversation.decoder_wait (30 s) less 10 s",
        ),
        (
            "gateway:\n  host: 0.0.0.0\n",
            "fleet.yaml:12: gateway.host: everybody who reaches 0.0.0.0 may call without a key",
        ),
        (
            "gateway:\n  api_keys: [replace-me]\n",
            "fleet.yaml:12: gateway.api_keys: 'replace-me' is known to everybody",
        ),
        (
            "gateway:\n  api_keys: [cl\u00e9]\n",
            "fleet.yaml:12: gateway.api_keys[0]",
        ),
        (
            "gateway: {key_limits: {stored_gib: 1e300}}\n",
            "fleet.yaml:11: gateway.key_limits.stored_gib",
        ),
        (
            "gateway: {api_keys: [a]}\nslos:\n  default: {}\n  gold: {keys: [b]}\n",
            "fleet.yaml:14: slos.gold.keys: a key of this class is none of gateway.api_keys",
        ),
        (
            "placement:\n  roles: elastic\n  first_turns: prefiller\n",
            "fleet.yaml:12: placement.roles: 'elastic' has an effect with policy 'conserve' and",
        ),
        (
            "placement:\n  relieve_hot: true\npolicy: collocated\n",
            "fleet.yaml:12: placement.relieve_hot: engines of the policy 'collocated' cannot send KV",
        ),
        (
            "coserving:\n  policy: bros\n  offline_share: 0.1\n",
            "fleet.yaml:13: coserving.offline_share: 'offline_share' has an effect with policy 'conserve'",
        ),
        (
            "coserving:\n  policy: sarathi\n  safepoints: false\n",
            "fleet.yaml:13: coserving.safepoints: 'safepoints' has an effect with policy 'conserve' only",
        ),
        (
            "model:\n  embeddings: true\n",
            "fleet.yaml:12: model.embeddings: a model that makes embeddings has no turns: policy",
        ),
        (
            "transfer:\n  secret: x\n",
            "fleet.yaml:12: transfer.secret: unknown key 'secret'; did you mean 'encrypt'?",
        ),
    ],
)
def test_a_key_without_effect_is_refused(block: str, expected: str) -> None:
    assert only_mistake(GOOD + block).startswith(expected)
