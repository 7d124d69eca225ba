"""Reports of several tensor-parallel ranks become one: work is done when every rank has done it."""

from collections import Counter

from kvtransfer.checkpoint.copy_orders import CheckpointReport
from kvtransfer.transfer.scheduler import TransferReport


def test_a_merged_report_counts_the_ranks_that_released_a_transfer() -> None:
    merged = TransferReport(Counter({"t": 1, "u": 1})).merge(TransferReport(Counter({"t": 1})))
    assert merged.released == {"t": 2, "u": 1}


def test_a_slot_that_is_corrupt_on_one_rank_counts_as_corrupt() -> None:
    merged = CheckpointReport(Counter({1: 1}), {5}).merge(CheckpointReport(Counter({1: 1, 2: 1}), set(), {6}))
    assert merged.stored == {1: 2, 2: 1}
    assert merged.corrupt == {5} and merged.failed == {6}
