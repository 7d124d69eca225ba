"""Unusable certificates are refused before a start, with the line of the fleet file."""

from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.application import app
from deploy.fleet import FleetFileError, load_fleet
from tests.support.certificates import Authority

FLEET = """\
name: sealed
tiers:
  - {name: prefill, role: prefill}
  - {name: decode, role: decode}
gateway:
  tls:
    cert: CERT
    key: KEY
"""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def fleet_of(tmp_path: Path, cert: Path, key: Path, more: str = "") -> Path:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET.replace("CERT", str(cert)).replace("KEY", str(key)) + more)
    return file


def said(file: Path) -> str:
    with pytest.raises(FleetFileError) as caught:
        load_fleet(file, to_start=True)
    checked = CliRunner().invoke(app, ["check", str(file)])
    assert checked.exit_code != 0
    assert isinstance(caught.value.problems, tuple) and len(caught.value.problems) == 1
    return caught.value.problems[0].removeprefix(f"{file}:")


def test_conserve_check_accepts_a_valid_certificate_and_key(tmp_path: Path, authority: Authority) -> None:
    load_fleet(fleet_of(tmp_path, *authority.pair()), to_start=True)


def test_missing_certificate_files_are_refused(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.pair()
    none = tmp_path / "none.pem"
    wrong = f"7: gateway.tls.cert: {none} cannot be read: No such file or directory"
    assert said(fleet_of(tmp_path, none, key)) == wrong
    assert said(fleet_of(tmp_path, cert, none)).startswith(f"8: gateway.tls.key: {none} cannot be read")


def test_expired_and_not_yet_valid_certificates_are_refused(tmp_path: Path, authority: Authority) -> None:
    old = authority.pair("old", begins=timedelta(days=-2), lasts=timedelta(days=1))
    assert said(fleet_of(tmp_path, *old)).startswith(f"7: gateway.tls.cert: {old[0]} expired on ")
    coming = authority.pair("coming", begins=timedelta(days=1))
    assert "is not valid before" in said(fleet_of(tmp_path, *coming))


def test_keys_of_another_certificate_and_files_without_a_certificate_are_refused(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.pair()
    _, other = authority.pair("other")
    assert said(fleet_of(tmp_path, cert, other)).startswith(f"8: gateway.tls.key: {other} is not the key of")
    assert "does not begin with a certificate in PEM" in said(fleet_of(tmp_path, key, key))
    assert "holds no private key in PEM" in said(fleet_of(tmp_path, cert, cert))
    locked = authority.pair("locked", password=b"word")
    assert "is encrypted" in said(fleet_of(tmp_path, *locked))


def test_a_running_fleet_can_be_ended_without_its_tls_files(tmp_path: Path) -> None:
    load_fleet(fleet_of(tmp_path, tmp_path / "gone.pem", tmp_path / "gone.key"))


def test_tls_files_of_a_fleet_on_a_cluster_may_be_on_other_machines(tmp_path: Path) -> None:
    pair = Path("/etc/none/a.pem"), Path("/etc/none/a.key")
    file = fleet_of(tmp_path, *pair, "ray: {address: '10.0.0.1:6379'}\n")
    load_fleet(file, to_start=True)


def test_relative_paths_of_tls_files_are_refused(tmp_path: Path) -> None:
    assert "7: gateway.tls.cert: " in said(fleet_of(tmp_path, Path("a.pem"), Path("/a.key")))
