"""Measures copies of blocks to the disk and back, compared with `dd` in the same folder with direct I/O."""

import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.harness.kv_transfer import LIMIT_S
from benchmarks.kv.copies import GB, KvSize, seconds_of
from kvtransfer.checkpoint.copier import Copier
from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT, BlockCopy, BlockLoad, CheckpointOrder, DiskMove
from kvtransfer.checkpoint.cuda_mover import memory_for, mover_for
from kvtransfer.checkpoint.disk_slots import DiskSlots
from kvtransfer.checkpoint.host_slots import block_bytes
from kvtransfer.config import disk_row_bytes


def disk_copies(size: KvSize, folder: Path | None = None) -> dict[str, float]:
    """Measure moves from host memory to the disk, and loads from the disk. Differing bytes are an error."""
    layers = list(size.make(True).values())
    wanted = [layer.clone() for layer in layers]
    row, mover = block_bytes(layers), mover_for(layers)
    with tempfile.TemporaryDirectory(prefix="conserve-disk-", dir=folder) as made:
        disk = DiskSlots(Path(made), size.blocks, row)
        copier = Copier(memory_for(layers, size.blocks, disk, mover.at_once), mover)
        copier.submit(CheckpointOrder(stores=[BlockCopy(n, n, 1) for n in size.all_blocks]))
        _until(lambda: len(copier.take_report().stored), size.blocks)
        moves = [DiskMove(n, 1, FIRST_DISK_SLOT + n, 2) for n in size.all_blocks]
        loads = [BlockCopy(n, FIRST_DISK_SLOT + n, 2) for n in size.all_blocks]

        def move() -> None:
            copier.submit(CheckpointOrder(moves=moves))
            _until(lambda: len(copier.take_report().moved), size.blocks)

        def load() -> None:
            copier.submit(CheckpointOrder(loads=[BlockLoad("r", loads)]))
            _until(lambda: len(copier.take_ended().requests), 1)

        def dd(*arguments: str) -> Callable[[], object]:
            command = ["dd", f"bs={disk_row_bytes(row)}", f"count={size.blocks}", *arguments]
            return lambda: subprocess.run(command, check=True, capture_output=True)

        plain = f"{made}/plain"
        ways: dict[str, Callable[[], object]] = {
            "dd_write": dd("if=/dev/zero", f"of={plain}", "oflag=direct", "conv=notrunc"),
            "write": move,
            "dd_read": dd(f"if={plain}", "of=/dev/null", "iflag=direct"),
            "read": load,
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        try:
            for _ in range(size.rounds):
                for layer in layers:
                    layer.zero_()
                for way, work in ways.items():
                    taken[way].append(seconds_of(work))
                if not all(torch.equal(one, other) for one, other in zip(layers, wanted, strict=True)):
                    raise AssertionError("KV did not come back from the disk as it was")
        finally:
            copier.close()
    ratios = {
        way: statistics.median(dd / ours for dd, ours in zip(taken[f"dd_{way}"], taken[way], strict=True))
        for way in ("write", "read")
    }
    gbs = {f"disk_{way}_gbs": size.blocks * row / min(seconds) / GB for way, seconds in taken.items()}
    return {**gbs, "disk_copy_vs_dd": min(ratios.values())}


def _until(count: Callable[[], int], wanted: int) -> None:
    limit, got = time.monotonic() + LIMIT_S, 0
    while (got := got + count()) < wanted:
        if time.monotonic() > limit:
            raise TimeoutError(f"a copy of KV did not end in {LIMIT_S:g} s")
        time.sleep(0.0002)
