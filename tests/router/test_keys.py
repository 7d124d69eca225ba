"""API keys have permissions and owners, and their file may change while the gateway runs."""

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import Result
from prometheus_client import generate_latest
from typer.testing import CliRunner

from deploy.cli.commands.key import app as key_commands
from router.auth.keyring import Keyring
from router.auth.keys import Key, Limits, Scope, hash_secret, inline_keys
from router.auth.keys_file import KeysFileError, load_keys, parse_keys
from router.errors import Unauthorized
from router.gateway.config import ServedModel
from tests.router.test_large_bodies import BOUND_S, Stalls
from tests.support.descriptors import no_descriptors
from tests.support.fake_fleet import MODEL, ask, fleet, get, user
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENTRY = "- {id: one, owner: search, hash: 'HASH'}\n".replace("HASH", hash_secret("first"))


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def entry(secret: str, owner: str, **more: Any) -> str:
    fields = {"id": f"of-{secret}", "owner": owner, "hash": hash_secret(secret), **more}
    return f"- {orjson.dumps(fields).decode()}\n"


def in_time(when: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))


def test_a_keys_file_sets_owner_scopes_models_and_expiry_of_a_key() -> None:
    text = (
        f"# for the search team\n- id: k\n  owner: search\n  hash: {hash_secret('s')}\n"
        "  scopes: [read]\n  models: [small]\n  expires: 2027-01-31\n"
    )
    wanted = Key("k", "search", hash_secret("s"), frozenset({Scope.READ}), ("small",), 1801353600.0)
    assert parse_keys(text, "f") == (wanted,)
    assert parse_keys(text.replace("2027-01-31", "2027-01-31T01:00+01:00"), "f") == (wanted,)
    assert parse_keys("[]\n", "f") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "f:1: the file is empty"),
        ("keys: []\n", "f:1: expected a list"),
        ("- {id: a\n", "f:2: not valid YAML"),
        (ENTRY + "- id: b\n  owner: o\n  hash: secret\n", "f:4: hash"),
        (ENTRY + "- id: b\n  owner: a:b\n  hash: ''\n", "f:3: owner"),
        (ENTRY + "- id: b\n  hash: ''\n", "f:2: 'owner' is missing"),
        (ENTRY + "\n" + ENTRY, "f:3: id: the key one has the same id"),
        (ENTRY + ENTRY.replace("one", "two"), "f:2: hash: the key one has the same hash"),
        ("- id: b\n  owner: o\n  hash: ''\n  scope: [x]\n", "f:4: unknown field 'scope'; it is one of"),
        ("- id: b\n  owner: o\n  hash: ''\n  limits:\n    turns: 0\n", "f:5: limits.turns"),
        ("- id: b\n  owner: o\n  hash: ''\n  limits:\n    turn: 1\n", "f:5: unknown field 'limits.turn'"),
        ("- id: b\n  owner: o\n  hash: ''\n  scopes: [root]\n", "f:4: scopes"),
        ("- id: b\n  owner: o\n  hash: ''\n  expires: 2027-02-31\n", "f:4: expires: a day as in"),
        (ENTRY + "- {[a]: b}\n", "f:2: not valid YAML: found unhashable key"),
        (ENTRY + "- {id: b,\n  id: c}\n", "f:3: not valid YAML: 'id' is repeated"),
        (ENTRY + "- *a\n", "f:2: not valid YAML: found undefined alias"),
        (ENTRY + "---\n" + ENTRY, "f:2: not valid YAML: but found another document"),
        ("- &a [*a]\n", "f:1: not valid YAML: found unconstructable recursive"),
        ("[" * 3000, "f:1: not valid YAML: more than 8 levels of lists"),
        ("- " * 50_000, "f:1: not valid YAML: more than 8 levels of lists"),
        ("[" * 100_000 + "]" * 100_000, "f:1: not valid YAML: more than 8 levels"),  # crashed libyaml
        *(
            (f"- id: b\n  owner: o\n  hash: ''\n  limits:\n    {limit}\n", "f:5: limits.")
            for limit in (
                *(f"stored_gib: {wrong}" for wrong in (".inf", "inf", "nan", "1e300", "-1")),
                *(f"{name}: {'9' * 400}" for name in ("requests_per_minute", "tokens_per_minute", "turns")),
                f"batches: {'9' * 400}",
                "waiting_share: nan",
            )
        ),
    ],
)
def test_an_error_in_a_keys_file_names_its_line(text: str, said: str) -> None:
    with pytest.raises(KeysFileError) as wrong:
        parse_keys(text, "f")
    assert said in str(wrong.value).splitlines()[0]


async def test_a_key_may_do_only_what_its_scopes_allow(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        entry("work", "search")
        + entry("look", "search", scopes=["read"])
        + entry("boss", "ops", scopes=["read", "admin"])
        + entry("late", "search", expires=in_time(time.time() - 60))
        + entry("other", "mail", models=["none-of-ours"])
    )
    models = (ServedModel(MODEL, aliases=("alias",)),)
    async with fleet(tmp_path, keys_file=str(file), models=models) as made:
        url = made.urls[0]
        said = {"x-session-id": "c"}
        assert (await ask(url, [user("hi")], headers={**bearer("work"), **said})).status == 200
        conversation = f"{url}/v1/conversations/c"
        assert (await get(conversation, headers=bearer("look")))[0] == 200
        refused = await ask(url, [user("hi")], headers=bearer("look"))
        assert (refused.status, refused.error["code"]) == (403, "scope_missing")
        assert (await get(conversation, "DELETE", headers=bearer("look")))[0] == 403
        for secret, code in (("late", "api_key_expired"), ("unknown", "invalid_api_key")):
            refused = await ask(url, [user("hi")], headers=bearer(secret))
            assert (refused.status, refused.error["code"]) == (401, code)
        refused = await ask(url, [user("hi")], headers=bearer("other"))
        assert (refused.status, refused.error["code"]) == (404, "model_not_found")
        assert (await get(f"{url}/v1/models", headers=bearer("other")))[1]["data"] == []
        _, listed = await get(f"{url}/v1/conversations", headers=bearer("boss"))
        assert [one["id"] for one in listed["data"]] == ["search:c"]
        assert (await get(f"{url}/dashboard", headers=bearer("boss")))[0] == 200
        assert (await get(f"{url}/dashboard", headers=bearer("work")))[0] == 401
        for secret, status in (("look", 200), ("boss", 200), ("work", 403), ("none", 401)):
            assert (await get(f"{url}/metrics", headers=bearer(secret)))[0] == status
        assert made.decoder_requests()[0].conversation == "search:c"


async def test_an_owners_new_key_sees_the_data_of_its_old_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.05)
    file = tmp_path / "keys"
    file.write_text(entry("old", "search"))
    async with fleet(tmp_path, keys_file=str(file)) as made:
        url = made.urls[0]
        said = {"x-session-id": "c"}
        await ask(url, [user("hi")], headers={**bearer("old"), **said})

        async def taken(secret: str, status: int) -> bool:
            return (await get(f"{url}/v1/conversations/c", headers=bearer(secret)))[0] == status

        file.write_text(entry("old", "search") + entry("new", "search"))
        await until_async(lambda: taken("new", 200))
        assert await taken("old", 200)
        link = tmp_path / "next"  # Kubernetes changes a mounted secret in this way
        link.write_text(entry("new", "search"))
        link.replace(file)
        await until_async(lambda: taken("old", 401))
        with caplog.at_level(logging.ERROR, logger="conserve.router.keys"):
            file.write_text(entry("other", "search") + "- {id: broken}\n")
            await until(lambda: f"{file}:2: 'owner' is missing" in caplog.text)
        assert await taken("new", 200) and await taken("other", 401)
        assert "conserve_keys_stale 1.0" in generate_latest().decode()
        file.write_text(entry("other", "search"))
        await until_async(lambda: taken("other", 200))
        assert "conserve_keys_stale 0.0" in generate_latest().decode()


async def until_async(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


WRONG = ("- {[a]: b}\n", "[" * 60_000 + "]" * 60_000, "- {id: one}\n", "\0", "#" * (9 << 20))


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
async def test_a_keys_file_is_read_again_once_its_error_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.02)
    file = tmp_path / "keys"
    file.write_text(entry("good", "search"))
    known = Keyring((), str(file))
    watching = asyncio.create_task(known.watch())
    file.write_text(text)
    await until(lambda: "conserve_keys_stale 1.0" in generate_latest().decode())
    assert known.find("good").owner == "search"
    file.write_text("[]\n")
    await until(lambda: "conserve_keys_stale 0.0" in generate_latest().decode())
    with pytest.raises(Unauthorized):
        known.find("good")
    watching.cancel()


async def test_a_keys_file_is_read_as_soon_as_it_is_readable_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's content has not changed, so that without a retry a revoked key would stay valid."""
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.02)
    file, next_file = tmp_path / "keys", tmp_path / "next"
    file.write_text(entry("good", "search"))
    next_file.write_text("[]\n")
    known = Keyring((), str(file))
    watching = asyncio.create_task(known.watch())
    try:
        with no_descriptors():
            next_file.replace(file)
            await until(lambda: "conserve_keys_stale 1.0" in generate_latest().decode())
            assert known.find("good").owner == "search"
        await until(lambda: "conserve_keys_stale 0.0" in generate_latest().decode())
        with pytest.raises(Unauthorized):
            known.find("good")
    finally:
        watching.cancel()


async def test_thousands_of_keys_are_reloaded_without_blocking_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.02)
    file, many = tmp_path / "keys", "".join(entry(f"k{number}", f"o{number}") for number in range(20_000))
    file.write_text(entry("good", "search"))
    known, longest = Keyring((), str(file)), list[float]()
    watching = asyncio.create_task(known.watch())
    try:
        for more in range(3):  # other processes may slow this one down
            stalls = Stalls()
            measuring = asyncio.create_task(stalls.watch())
            await asyncio.sleep(0.1)
            file.write_text(many + entry("one", "more") * bool(more % 2))
            await until(lambda: len(known) == 20_000 + more % 2, 60.0)  # noqa: B023
            measuring.cancel()
            longest.append(stalls.longest_s)
            if longest[-1] < BOUND_S:
                break
        assert known.find("k19999").owner == "o19999"
        assert min(longest) < BOUND_S
    finally:
        watching.cancel()


@pytest.mark.parametrize("text", [None, "[]\n", *WRONG], ids=["none", "empty", *map(str, range(len(WRONG)))])
def test_without_a_valid_keys_file_every_request_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    known = Keyring((), str(file))
    for secret in ("", "any"):
        with pytest.raises(Unauthorized):
            known.find(secret)


def test_a_pipe_as_keys_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(KeysFileError, match="the file is empty"):
        load_keys(tmp_path / "keys")


def test_a_keys_file_cannot_use_an_id_of_the_fleet_file_for_another_key(tmp_path: Path) -> None:
    """Two keys with one id would share their limits."""
    given = inline_keys(("first",), ())
    text = ENTRY.replace("one", given[0].id)
    assert parse_keys(text, "f", given)[0].hash == given[0].hash
    with pytest.raises(KeysFileError, match="f:1: id: the fleet file has another key with this id"):
        parse_keys(text.replace(hash_secret("first"), hash_secret("other")), "f", given)


async def test_a_gateway_whose_keys_file_is_missing_answers_401(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys_file=str(tmp_path / "none")) as made:
        assert (await ask(made.urls[0], [user("hi")], headers=bearer("any"))).status == 401


async def test_keys_in_the_fleet_file_stay_valid_beside_a_keys_file(tmp_path: Path) -> None:
    """Each inline key keeps its own owner. An entry of the keys file with the same hash replaces it."""
    file = tmp_path / "keys"
    given = inline_keys(("first", "second"), ())
    file.write_text(entry("second", given[1].owner, scopes=["read"]))
    async with fleet(tmp_path, keys=given, keys_file=str(file)) as made:
        assert (await ask(made.urls[0], [user("hi")], headers=bearer("first"))).status == 200
        assert (await ask(made.urls[0], [user("hi")], headers=bearer("second"))).status == 403


async def test_if_only_admin_keys_are_configured_requests_need_no_key(tmp_path: Path) -> None:
    async with fleet(tmp_path, keys=inline_keys((), ("boss",))) as made:
        assert (await ask(made.urls[0], [user("hi")], headers=bearer("any"))).status == 200
        assert (await get(f"{made.urls[0]}/dashboard", headers=bearer("any")))[0] == 401
        assert (await get(f"{made.urls[0]}/dashboard", headers=bearer("boss")))[0] == 200


async def test_a_gateway_answers_requests_for_its_own_host_names_only(tmp_path: Path) -> None:
    """A web page can point its own host name to this machine; the `Host` header shows which name was used."""
    async with fleet(tmp_path, hosts=("localhost", "127.0.0.1", "::1")) as made:
        url = made.urls[0]
        port = url.rpartition(":")[2]
        for name in (f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}", f"[::1]:{port}"):
            assert (await get(f"{url}/v1/models", headers={"host": name}))[0] == 200
        for path in ("/v1/models", "/dashboard", "/metrics"):
            status, said = await get(url + path, headers={"host": f"evil.example:{port}"})
            assert (status, said["error"]["code"]) == (421, "host_not_allowed")


async def test_the_audit_log_says_who_requested_what_but_quotes_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(entry("work", "search"))
    with caplog.at_level(logging.INFO, logger="conserve.audit"):
        async with fleet(tmp_path, keys_file=str(file), audit=True) as made:
            said = {**bearer("work"), "x-session-id": "c"}
            await ask(made.urls[0], [user("a word of mine")], headers=said)
            await ask(made.urls[0], [user("a word of mine")], headers=bearer("stranger"))
    lines = [record.getMessage() for record in caplog.records if record.name == "conserve.audit"]
    path = "action='POST' path='/v1/chat/completions'"
    assert lines == [
        f"key=of-work owner=search address=127.0.0.1 {path} conversation=c status=200",
        f"key=- owner=- address=127.0.0.1 {path} conversation=- status=401",
    ]
    assert "a word of mine" not in caplog.text and "stranger" not in "".join(lines)


async def test_the_audit_log_says_who_looked_at_the_dashboard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(entry("work", "search") + entry("chief", "operators", scopes=["admin"]))
    with caplog.at_level(logging.INFO, logger="conserve.audit"):
        async with fleet(tmp_path, keys_file=str(file), audit=True) as made:
            for secret, status in (("chief", 200), ("work", 401)):
                seen = await get(f"{made.urls[0]}/dashboard/state", headers=bearer(secret))
                assert seen[0] == status
    lines = [record.getMessage() for record in caplog.records if record.name == "conserve.audit"]
    path = "action='GET' path='/dashboard/state' conversation=-"
    assert lines == [
        f"key=of-chief owner=operators address=127.0.0.1 {path} status=200",
        f"key=- owner=- address=127.0.0.1 {path} status=401",
    ]


def conserve_key(*arguments: str) -> Result:
    return CliRunner().invoke(key_commands, list(arguments))


def test_conserve_key_prints_a_key_once_and_writes_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    more = ("--scope", "read", "--model", MODEL, "--expires", "90d", "--id", "k1", "--turns", "7")
    made = conserve_key("new", "--owner", "search", "--file", str(file), *more)
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    (key,) = load_keys(file)
    assert (key.id, key.owner, key.hash) == ("k1", "search", hash_secret(secret))
    assert key.scopes == {Scope.READ} and key.models == (MODEL,) and key.limits == Limits(turns=7)
    assert key.expires == pytest.approx(time.time() + 90 * 86_400, abs=120)
    assert secret not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    file.write_text(f"# ours\n{file.read_text()}# the end\n")
    assert conserve_key("new", "--owner", "mail", "--file", str(file), "--id", "k2").exit_code == 0
    again = conserve_key("new", "--owner", "mail", "--file", str(file), "--id", "k2")
    assert "the key k2 has the same" in str(again.exception)
    assert [one.id for one in load_keys(file)] == ["k1", "k2"]
    file.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(file, 1234, 2345)
    before = file.stat()
    assert conserve_key("new", "--owner", "mail", "--file", str(file), "--id", "k3").exit_code == 0
    assert conserve_key("revoke", "k3", "--file", str(file)).exit_code == 0
    after = file.stat()  # otherwise gateways of that group could not read it
    assert [after.st_mode, after.st_uid, after.st_gid] == [before.st_mode, before.st_uid, before.st_gid]
    assert "k2" in conserve_key("list", "--file", str(file)).stdout
    assert conserve_key("revoke", "k1", "--file", str(file)).exit_code == 0
    assert [one.id for one in load_keys(file)] == ["k2"] and file.read_text().startswith("# ours\n")
    assert conserve_key("revoke", "k2", "--file", str(file)).exit_code == 0
    assert load_keys(file) == ()
    assert "there is no key k2" in str(conserve_key("revoke", "k2", "--file", str(file)).exception)
