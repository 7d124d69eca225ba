"""Device of the engines in tests: the GPU if torch sees one, otherwise the CPUs."""

from benchmarks.harness.standalone_engine import on_cuda

# Options of several engines on one GPU. vLLM requires this share of the memory to be free at the
# start. Without a given KV size it also measures free memory, which fails while other engines start or end.
BESIDE_OTHERS = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 4 << 30}


def options() -> dict[str, object]:
    """Return the vLLM options of an engine on this machine."""
    return dict(BESIDE_OTHERS) if on_cuda() else {}


def environment() -> dict[str, str]:
    """Return the environment variables of an engine's processes on this machine."""
    cpu = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    both = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return both if on_cuda() else cpu | both
