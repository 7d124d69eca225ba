"""The keys of `--json` stay the same, because results are compared with those of earlier runs."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import availability, placement, prefixes, returns
from benchmarks.batch import Phase
from benchmarks.coserving import __main__ as coserving
from benchmarks.coserving.policy_runs import Experienced, LoadOutcome, OnlineLoad, PartLengths
from benchmarks.kv.conversations import Played, compared
from benchmarks.kv.copies import KvSize, measure_copies
from benchmarks.kv.disk import disk_copies
from benchmarks.overload import PolicyBursts
from benchmarks.paper import __main__ as paper
from benchmarks.paper import elastic, roles
from benchmarks.peers import figures as peers
from benchmarks.relay import report as relay
from benchmarks.tenants import __main__ as tenants
from placement.scheduling.interface import TurnTargets
from traces.simulator.policies import System


def keys(text: str) -> set[str]:
    return set(text.split())


def row(cls: Any, *names: str) -> Any:
    """Return a row whose first fields are names and whose other fields have the same small value."""
    return cls(*names, *[0.01] * (len(cls.__dataclass_fields__) - len(names)))


def test_the_relay_benchmark_keeps_its_json_keys() -> None:
    assert set(relay.named_figures({}, {})) == keys("""
        cpu_ms_per_1k_tokens cpu_vs_haproxy cpu_vs_httpx_proxy cpu_vs_best_peer cpu_vs_best_peer_1000_streams
        cpu_vs_haproxy_1000_streams requests_per_s requests_per_core_s requests_per_core_vs_best_peer
        added_ttft_p50_ms late_streams tls_cpu_vs_plain tls_cpu_vs_plain_1000_streams tls_cpu_vs_haproxy
        tls_requests_per_core_vs_plain gateway_cpu_vs_haproxy gateway_cpu_vs_best_peer
        gateway_cpu_vs_best_peer_1000_streams gateway_first_turns_per_core_s gateway_requests_per_core_s
        gateway_late_streams""")


def test_the_peers_benchmark_keeps_its_json_keys() -> None:
    assert set(peers.named([])) == keys("""
        ttfet_p95_vs_best_peer ttfet_p50_vs_best_peer e2e_p95_vs_best_peer gap_p99_vs_best_peer
        later_ttft_p95_vs_best_peer cpu_vs_best_peer tokens_per_s_vs_best_peer
        prefiller_share_real prefiller_share_mix least_kv_share failed refused""")


def test_the_paper_benchmark_keeps_its_json_keys() -> None:
    saturated = [row(paper.PaperRow, system.value) for system in paper.SYSTEMS]
    assert set(paper.headlines([], saturated, saturated[0])) == keys("""
        p95_ttfet_vs_ampd10 slo_violations tokens_per_joule_gain_capped full_disagg_gmean_ttfet
        ours_gmean_ttfet""")
    systems = (*(system.value for system in System), elastic.CAPPED)
    rows = [row(elastic.ElasticRow, load, name) for load in ("saturation", "mix") for name in systems]
    assert set(elastic.headlines(rows)) == keys("""
        elastic_worst_ttfet elastic_worst_first_ttft elastic_worst_later_ttft elastic_worst_e2e
        elastic_late_share elastic_tokens_per_joule_vs_collocated
        elastic_capped_tokens_per_joule_vs_collocated elastic_kv_bound_ttfet_vs_collocated""")


def test_the_paper_roles_benchmark_keeps_its_json_keys() -> None:
    rows = [
        roles.RolesRow(8, load, kind, idle, *[1.0] * 7)
        for load, kind, idle in ((0.8, "fixed", 0.3), (1.5, "fixed", 0.1), (0.8, "elastic", 0.2))
    ]
    assert roles.figures(rows) == {"idle_while_waiting_fixed_8": 0.3, "idle_while_waiting_elastic_8": 0.2}


def test_the_prefixes_and_returns_benchmarks_keep_their_json_keys() -> None:
    table = {name: row(prefixes.PrefixFigures) for name in prefixes.VARIANTS}
    assert set(prefixes.ratios(table)) == keys("""
        prefill_tokens_vs_apart bytes_vs_apart ttft_p95_vs_apart prefill_tokens_vs_unknown bytes_vs_unknown
        ttft_p95_vs_unknown failed""")
    rounds = [returns.ReturnRound(name, [1.0], [1.0], [1]) for name in returns.VARIANTS]
    assert set(returns.figures_of(rounds)) == keys("""
        ttft_p50_vs_on_arrival early_ttft_p50_vs_on_arrival tbt_vs_on_arrival tbt_mean_vs_on_arrival
        early_tbt_vs_on_arrival""")


def test_prefetch_figures_without_token_gaps_have_no_gap_ratio() -> None:
    """Agents that have one turn per round never run in the same round, so no gaps are recorded."""
    rounds = [returns.ReturnRound(name, [2.0], [], [1]) for name in returns.VARIANTS]
    found = returns.figures_of(rounds)
    assert found["ttft_p50_vs_on_arrival"] == 1.0 and found["tbt_vs_on_arrival"] is None


def test_the_kv_and_overload_benchmarks_keep_their_json_keys() -> None:
    played = Played({"c": [[1]]}, [1.0, 1.0])
    assert set(compared(played, played)) == keys("""
        turns turns_with_other_output known_tokens recomputed_tokens recomputed_tokens_vllm recomputed_tails
        recomputed_vs_vllm recomputed_vs_vllm_with_tails later_ttft_p50_s later_ttft_p50_vllm_s
        later_ttft_p95_s later_ttft_p95_vllm_s later_ttft_p95_vs_vllm restored_blocks leaked_blocks
        offline_prompts seconds seconds_vllm""")
    assert set(PolicyBursts([1.0], [1.0], [1.0], [1.0], [1.0]).figures()) == keys("""
        ttft_p50_s ttft_p99_s tbt_p50_s tbt_p99_s tpot_p50_s tpot_p99_s e2e_p50_s burst_s burst_least_s
        burst_most_s tokens_per_s recomputed_tokens preemptions drops""")


def test_the_coserving_benchmark_keeps_its_json_keys() -> None:
    got = {name: Experienced([1.0], [1.0], 1, 1.0) for name in coserving.POLICIES}
    load = OnlineLoad(1.0, 1.0, 1.0, PartLengths.part_of_paper(16))
    outcome = LoadOutcome(load, TurnTargets(1.0, 1.0), got, {name: [] for name in got})
    profile: Any = SimpleNamespace(errors=[SimpleNamespace(median=0.1, p90=0.2)])
    assert set(coserving.figures([outcome], profile)) == keys("""
        ttft_p99_vs_online_only tbt_p99_vs_online_only throughput_vs_nonpreemptive attainment_at_1
        safepoint_cost abort_p99_layers profile_error_p50 profile_error_p90""")


def test_the_batch_and_placement_benchmarks_keep_their_json_keys() -> None:
    assert set(Phase().to_json()) == keys("""
        turns refused ttft_p50_s ttft_p90_s ttft_p99_s tbt_p50_s tbt_p90_s tbt_p99_s offline_done
        offline_failed offline_tokens_per_s""")
    assert set(placement.percentiles([1.0])) == keys("p50_us p90_us p99_us p99.9_us")


def test_the_tenants_benchmark_keeps_its_json_keys() -> None:
    seen = tenants.VictimSeen([1.0], [1.0])
    assert set(tenants.figures_of(seen, seen, Counter({"beam 500": 2}), 1.1)) == keys("""
        engine_memory_vs_idle internal_errors
        victim_ttft_p99_vs_alone victim_gap_p99_vs_alone victim_failed victim_failed_alone
        victim_ttft_p50_alone_s victim_ttft_p50_beside_s victim_ttft_p90_alone_s victim_ttft_p90_beside_s
        victim_ttft_p99_alone_s victim_ttft_p99_beside_s victim_turns_alone victim_turns_beside""")


def test_the_availability_benchmark_keeps_its_json_keys() -> None:
    killed = (process.name for process in availability.PROCESSES)
    rows = [availability.Unavailability(name, "new", 1.0, 0.5, 0.0, None, False) for name in killed]
    assert set(availability.figures_of(rows)) == keys("""
        only_gateway_new gateway_of_several_new directory_new keeper_new batch_new gcs_new raylet_new
        decoder_new prefiller_new over_budget""")


def test_measured_copies_to_the_disk_keep_their_json_keys() -> None:
    assert set(disk_copies(KvSize(layers=1, blocks=2, rounds=1))) == keys("""
        disk_dd_write_gbs disk_dd_read_gbs disk_write_gbs disk_read_gbs disk_copy_vs_dd
    """)


@pytest.mark.timeout(400)  # a process that imports torch takes a minute on busy cores
@pytest.mark.slow
def test_measured_copies_of_kv_keep_their_json_keys() -> None:
    assert set(measure_copies(KvSize(layers=1, blocks=2, rounds=1))) == keys("""
        host_plain_store_gbs host_plain_restore_gbs host_one_call_gbs host_store_gbs host_restore_gbs
        host_copy_vs_memcpy transfer_direct_gbs transfer_staged_gbs staged_transfer_vs_direct
        transfer_encrypted_gbs encrypted_transfer_vs_direct processes_transfer_gbs processes_encrypted_gbs
        processes_plain_socket_gbs processes_transfer_vs_plain_socket""")
