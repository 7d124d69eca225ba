"""The Ray actor of one engine: places a keeper, and restarts it. All else is in `workers`."""

import ray

from deploy.fleet import Fleet
from deploy.fleet.changes import Need
from deploy.fleet.rooms import EngineName, engine_spec, keeper_settings, power_settings, shared_tier
from deploy.home import FleetHome
from deploy.model.ensure import ensure_model
from deploy.observe.metrics_page import serve_metrics
from deploy.ray.background import Background
from deploy.ray.logs import log_to_stderr
from workers.board import Board, Status
from workers.command import FEED_SOCKET
from workers.control.server import ControlServer
from workers.feed import ConnectorFeed
from workers.keeper import Keeper
from workers.power.keeping import EnginePower, visible_gpus

CONTROL_FILE = "control"


class KeeperActor:
    def __init__(
        self, fleet: Fleet, engine: EngineName, home: FleetHome, secret: str, host: str | None
    ) -> None:
        """`host`: where this node is reached; None: by the address that Ray knows it by."""
        log_to_stderr()
        host = host or ray.util.get_node_ip_address()
        home.create()
        ensure_model(fleet, home)
        self._engine, self._home = engine, home
        self._spec = engine_spec(fleet, engine, home, host)
        self._spec.directory.mkdir(parents=True, exist_ok=True)
        self._board = Board(engine.name)
        self._settings, self._secret = keeper_settings(fleet), secret
        self._power = power_settings(fleet, engine, home, visible_gpus())
        self._shared_tier = shared_tier(fleet, engine, home)
        self._control = ""
        self._keeper: Keeper | None = None
        self._background = Background(self._work)

    def control_address(self) -> str:
        """host:port of the control service, once it listens."""
        return self._control

    def status(self) -> Status:
        return self._board.status

    def compare(self, fleet: Fleet, engine: EngineName) -> str:
        """What it would take to become what `fleet` says (deploy.fleet.changes.Need)."""
        spec = engine_spec(fleet, engine, self._home, self._spec.host)
        moved = engine.tier.resources != self._engine.tier.resources
        if moved or spec.fingerprint() != self._spec.fingerprint():
            return Need.ENGINE.value
        power = power_settings(fleet, engine, self._home, visible_gpus())
        store = shared_tier(fleet, engine, self._home)
        ours = (self._settings, self._power, self._shared_tier)
        same = (keeper_settings(fleet), power, store) == ours
        return (Need.NOTHING if same else Need.KEEPER).value

    def end(self) -> bool:
        """End the engine and its tree; the keeper then does nothing more."""
        self._background.call(self._withdraw(), 10.0)
        self._background.call(self._background.stop(), 10.0)
        (self._spec.directory / CONTROL_FILE).unlink(missing_ok=True)
        if self._keeper is not None:
            self._background.call(self._keeper.end(), 60.0)
        return True

    async def _withdraw(self) -> None:
        """While somebody hears it: or the directory would wait for the lease of an engine that is gone."""
        self._board.engine_down()

    async def _work(self) -> None:
        feed = ConnectorFeed(self._spec.engine, self._spec.directory / FEED_SOCKET)
        server = ControlServer(self._board, feed, self._secret)
        self._control = await server.start(self._spec.host, self._last_port())
        self._keep_address(self._control)
        self._board.tell(self._board.status.phase, metrics=serve_metrics(self._spec.host))
        self._keeper = Keeper(
            self._spec,
            self._settings,
            self._board,
            feed,
            secret=self._secret,
            control=self._control,
            shared_tier=self._shared_tier,
        )
        try:
            async with EnginePower(self._power):
                await self._keeper.run()
        finally:
            await server.stop()

    def _last_port(self) -> int:
        """A restarted keeper listens where it did before, if it can: who watched it finds it again."""
        file = self._spec.directory / CONTROL_FILE
        return int(file.read_text().rsplit(":", 1)[1]) if file.exists() else 0

    def _keep_address(self, address: str) -> None:
        (self._spec.directory / CONTROL_FILE).write_text(address)
