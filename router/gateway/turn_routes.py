"""Routes of the generating APIs: each request becomes a turn, or a flex request to the batch process."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from router.auth.keys import Key
from router.auth.rate_limits import Meters
from router.batch.forwarding import BatchForwarding
from router.gateway.responses.stored_answers import Answers
from router.gateway.turn.handler import TurnHandler
from router.gateway.turn.turn import Models, TurnReader
from router.http import Request, Responder
from router.requests.body_parser import Api
from router.requests.ignored_fields import HEADER, IgnoredFields


@dataclass(frozen=True, slots=True)
class TurnRoutes:
    """Reads turns under the limits of their keys, and passes them to the turn handler."""

    reader: TurnReader
    turns: TurnHandler
    answers: Answers
    batch: BatchForwarding | None
    meters: Meters
    models_of: Callable[[tuple[str, ...]], Models]  # returns the models that a key's `models` allow
    address: Callable[[Request], str]
    ignored: IgnoredFields
    clock: Callable[[], float] = time.monotonic

    async def generate(self, api: Api, key: Key, request: Request, responder: Responder) -> None:
        """Serve one request of a generating API."""
        arrived_at, address = self.clock(), self.address(request)
        models = self.models_of(key.models)
        pieces = await request.body.read_pieces()
        with self.meters.turn(key, responder, address) as charge:
            turn = await self.reader.read(api, request, pieces, key, models, charge, arrived_at)
            charge.count_answers(turn.prompt.answers)
            if turn.ignored:
                responder.add_header(HEADER, self.ignored.record(key.id, request.path, turn.ignored))
            if turn.grammar is not None:
                self.meters.grammar(key, turn.grammar, address)
            if self.batch is not None and turn.flex:
                charge.reserve(self.turns.binder.prompt_tokens(turn))  # the gateway does not see flex usage
                await self.batch.flex(turn, responder, self.answers.observer(turn.space, turn.history))
                if responder.status not in (None, 200):
                    charge.refund()
            else:
                await self.turns.serve(turn, responder)
