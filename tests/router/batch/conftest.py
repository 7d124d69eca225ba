"""Fixtures for offline work: both kinds of store, a gateway and engines, all over real sockets."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.router.batch import postgres
from tests.router.batch.fake_engine import OfflineEngine
from tests.router.batch.gateway import GatewayWithBatch, StaticFleet


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str | postgres.Absent]:
    try:
        with postgres.private_server() as folder:
            yield folder
    except postgres.Absent as why:
        yield why


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty store, for tests that run on SQLite and on PostgreSQL."""
    return _store_url(request, tmp_path)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def either_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty store for end-to-end tests; the slow run repeats them on PostgreSQL."""
    return _store_url(request, tmp_path)


def _store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/batch.db"
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install -e .[postgres]")
    server: str | postgres.Absent = request.getfixturevalue("postgres_server")
    if isinstance(server, postgres.Absent):
        pytest.skip(str(server))
    return new_database(server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/batch.db"


def new_database(server: str) -> str:
    import psycopg

    name = f"t{secrets.token_hex(6)}"
    with psycopg.connect(f"host={server} user=conserve dbname=postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
    return f"postgresql+psycopg://conserve@/{name}?host={server}"


@pytest.fixture
async def engine() -> AsyncIterator[OfflineEngine]:
    fake = OfflineEngine()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway(engine: OfflineEngine, either_url: str, tmp_path: Path) -> AsyncIterator[GatewayWithBatch]:
    running = GatewayWithBatch(either_url, str(tmp_path / "files"), StaticFleet(engine.address))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def sqlite_gateway(
    engine: OfflineEngine, sqlite_url: str, tmp_path: Path
) -> AsyncIterator[GatewayWithBatch]:
    running = GatewayWithBatch(sqlite_url, str(tmp_path / "files"), StaticFleet(engine.address))
    await running.start()
    yield running
    await running.stop()
