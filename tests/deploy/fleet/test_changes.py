"""A changed fleet file replaces the affected parts of a running fleet and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.fleet import FleetSpec, parse_fleet
from deploy.fleet.changes import FleetChanges, Need, differences, not_while_running, plan
from deploy.generated import SCHEMA_FILE
from deploy.home import FleetHome

HOME = FleetHome(Path("/state"))
LAPTOP = SCHEMA_FILE.parent / "laptop.yaml"
NOTHING = dict.fromkeys(("prefill-0", "decode-0", "decode-1"), Need.NOTHING)
Edit = Callable[[Any], object]


def laptop(edit: Edit = lambda content: None) -> FleetSpec:
    content = yaml.safe_load(LAPTOP.read_text())
    edit(content)
    return parse_fleet(yaml.safe_dump(content), "laptop.yaml")


def planned(edit: Edit, running: dict[str, Need] | None = None, old: FleetSpec | None = None) -> FleetChanges:
    return plan(old or laptop(), laptop(edit), HOME, NOTHING if running is None else running)


def decode(**values: Any) -> Edit:
    return lambda content: content["tiers"][1].update(values)


def test_an_upgrade_to_the_same_fleet_file_changes_nothing() -> None:
    same = planned(lambda content: None)
    assert same.steps() == []
    assert differences(laptop(), laptop()) == []


@pytest.mark.parametrize(
    ("block", "values", "directory", "gateways"),
    [
        ("gateway", {"processes": 2}, False, True),
        ("gateway", {"limits": {"body_mib": 1}}, False, True),
        ("conversation", {"decoder_wait": "40s"}, False, True),
        ("conversation", {"headroom_tokens": 10}, True, False),
        ("capacity", {"high": 0.9}, True, False),
        ("slos", {"default": {"ttfet": "5s"}}, False, True),
        ("batch", {"keep_free": 0.2}, False, True),
    ],
)
def test_changed_keys_that_engines_do_not_receive_restart_no_engine(
    block: str, values: dict[str, Any], directory: bool, gateways: bool
) -> None:
    found = planned(lambda content: content.setdefault(block, {}).update(values))
    assert (found.directory, found.gateways) == (directory, gateways)
    assert not (found.added or found.removed or found.engines or found.keepers or found.autoscaler)


def test_changed_arguments_of_decoders_restart_only_decoders() -> None:
    running = {"prefill-0": Need.NOTHING, "decode-0": Need.ENGINE, "decode-1": Need.ENGINE}
    found = planned(decode(args={"max-num-seqs": 31}), running)
    assert not (found.directory or found.gateways or found.keepers)
    assert found.steps() == ["drain decode-0 and start it again", "drain decode-1 and start it again"]


def test_changed_replicas_add_or_remove_the_last_engines_of_the_tier() -> None:
    more = planned(decode(replicas=4))
    assert [engine.name for engine in more.added] == ["decode-2", "decode-3"]
    fewer = planned(decode(replicas=1))
    assert fewer.removed == ("decode-1",)
    assert fewer.steps() == ["drain decode-1 and end it"]


def test_an_upgrade_replaces_only_the_keeper_where_that_suffices_and_otherwise_the_engine() -> None:
    needs = {"prefill-0": Need.KEEPER, "decode-0": Need.ENGINE, "decode-1": Need.PLACE}
    found = planned(decode(args={"max-num-seqs": 8}), needs)
    assert [engine.name for engine in found.keepers] == ["prefill-0"]
    assert [engine.name for engine in found.engines] == ["decode-0", "decode-1"]


@pytest.mark.parametrize(("present", "expected"), [(1, 2), (3, 3), (9, 4)])
def test_an_upgrade_keeps_the_size_of_an_autoscaled_tier_within_its_limits(
    present: int, expected: int
) -> None:
    running = {f"decode-{index}": Need.NOTHING for index in range(present)} | {"prefill-0": Need.NOTHING}
    found = planned(decode(autoscale={"min": 2, "max": 4}), running)
    assert present + len(found.added) - len(found.removed) == expected
    assert found.autoscaler


def test_a_tier_that_is_no_longer_autoscaled_gets_the_replicas_of_the_file() -> None:
    old = laptop(decode(autoscale={"min": 1, "max": 4}))
    running = {**NOTHING, "decode-2": Need.NOTHING}
    found = planned(lambda content: None, running, old)
    assert (found.removed, found.autoscaler) == (("decode-2",), True)


@pytest.mark.parametrize(
    ("edit", "path"),
    [
        (lambda content: content["model"].update(max_context=1024), "model.max_context"),
        (lambda content: content["engine"]["args"].update({"block-size": 16}), "engine.args.block-size"),
        (lambda content: content.update(ray={"dashboard": True}), "ray.dashboard"),
        (lambda content: content.update(transfer={"backend": "nixl"}), "transfer.backend"),
    ],
)
def test_an_upgrade_refuses_changes_of_settings_that_all_engines_share(
    edit: Edit, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.fleet.checks.find_spec", lambda name: name)
    assert [one.path for one in not_while_running(differences(laptop(), laptop(edit)))] == [path]


def test_printed_differences_name_the_tier_and_hide_secrets() -> None:
    def edit(content: Any) -> None:
        content["tiers"][1]["args"] = {"max-num-seqs": 8}
        content["gateway"]["api_keys"] = ["hidden"]
        content["conversation"]["ttl"] = "10m"

    found = [str(one) for one in differences(laptop(), laptop(edit))]
    assert found == [
        "tiers.decode.args.max-num-seqs: (not set) -> 8",
        "gateway.api_keys: changed",
        "conversation.ttl: 1800.0 -> 600.0",
    ]
