"""The producer's end: one listening socket a rank, one thread a connection."""

import logging
import socket
import threading
from dataclasses import dataclass

from kvtransfer.errors import Reason, TransferRefused
from kvtransfer.transfer import wire
from kvtransfer.transfer.exports import Exports, Reader
from kvtransfer.transfer.memory import BlockMemory

logger = logging.getLogger("conserve.kvtransfer.transfer")

HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 256
BLOCKS_A_FRAME = 256


@dataclass(frozen=True, slots=True)
class Producer:
    """Who serves: compared with what a consumer expects."""

    epoch: int
    rank: int
    ranks: int
    timeout_s: float


class TransferServer:
    def __init__(
        self,
        listener: socket.socket,
        producer: Producer,
        exports: Exports,
        memory: BlockMemory,
        secret: bytes,
    ) -> None:
        self._listener = listener
        self._producer = producer
        self._exports = exports
        self._memory = memory
        self._secret = secret
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        threading.Thread(target=self._accept, name="kv-transfer-accept", daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                peer, address = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(peer, address), name="kv-transfer", daemon=True
            ).start()

    def _serve(self, peer: socket.socket, address: object) -> None:
        try:
            with peer:
                peer.settimeout(HANDSHAKE_S)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(peer)
        except TransferRefused as refused:
            logger.warning("transfer refused to %s: %s", address, refused)
        except OSError as error:
            logger.warning("transfer to %s broke: %s", address, error)
        finally:
            self._slots.release()

    def _answer(self, peer: socket.socket) -> None:
        try:
            wanted = self._authenticate(peer)
            self._check(wanted)
            peer.settimeout(self._producer.timeout_s)
            if wanted.dismiss:
                self._exports.dismiss(wanted.transfer_id)
                wire.send_control(peer, wire.Kind.END)
                return
            reader = self._exports.attach(
                wanted.transfer_id, wanted.prompt, wanted.skip, self._producer.timeout_s
            )
            try:
                self._stream(peer, reader)
            finally:
                self._exports.leave(reader)
        except TransferRefused as refused:
            wire.send_refusal(peer, refused)
            raise

    def _authenticate(self, peer: socket.socket) -> wire.Wanted:
        challenge = wire.nonce()
        wire.send_control(peer, wire.Kind.CHALLENGE, challenge)
        answer, given, text = wire.split_open(wire.receive_control(peer, wire.Kind.OPEN))
        if not wire.proves(given, self._secret, wire.Signer.CONSUMER, challenge, answer, text):
            raise TransferRefused(Reason.UNAUTHORISED, "the consumer does not know this fleet's secret")
        wire.send_control(
            peer, wire.Kind.ACCEPT, wire.proof(self._secret, wire.Signer.PRODUCER, answer, challenge)
        )
        return wire.Wanted.decode(text)

    def _check(self, wanted: wire.Wanted) -> None:
        mine = self._producer
        if wanted.epoch is not None and wanted.epoch != mine.epoch:
            raise TransferRefused(Reason.OLD_EPOCH, f"wanted epoch {wanted.epoch}, this is {mine.epoch}")
        if (wanted.rank, wanted.ranks) != (mine.rank, mine.ranks):
            raise TransferRefused(
                Reason.MAPPING,
                f"rank {wanted.rank} of {wanted.ranks} asked rank {mine.rank} of {mine.ranks}: "
                "prefiller and decoder need the same tensor-parallel size",
            )
        if wanted.layout != self._memory.layout:
            raise TransferRefused(
                Reason.LAYOUT, "the engines differ in model, KV data type or block size; start them alike"
            )

    def _stream(self, peer: socket.socket, reader: Reader) -> None:
        while True:
            ready = self._exports.wait_ready(reader, self._producer.timeout_s)
            for layer, first, blocks in ready.runs:
                for at in range(0, len(blocks), BLOCKS_A_FRAME):
                    views = [self._memory.view(layer, block) for block in blocks[at : at + BLOCKS_A_FRAME]]
                    wire.send_blocks(peer, layer, first + at, views, ready.generation)
            if ready.complete and self._exports.confirm(reader, ready.generation):
                wire.send_control(peer, wire.Kind.END, generation=ready.generation)
                wire.receive_control(peer, wire.Kind.RECEIVED)
                return
