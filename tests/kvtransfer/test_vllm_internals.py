"""Every use of vLLM's internals is verified at the start, and only the modules in `CONTACTS` use them."""

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from kvtransfer.compat.free_queue import FREE_QUEUE
from kvtransfer.compat.kv_connector import CONNECTOR, LMCACHE, WORKER
from kvtransfer.compat.relied_on import ReliedOn, UnsupportedVllmError, differences, verify
from kvtransfer.config import ConnectorConfigError
from kvtransfer.connector import ConServeConnector
from router.requests.fields import FIELDS, REFUSED
from workers.engine.exact_tokens import ExactTokensMiddleware


def module_at(path: str) -> ModuleType:
    return import_module(path.removesuffix(".py").replace("/", "."))


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvtransfer", "workers", "router", "placement", "traces", "deploy")
CONTACTS = {
    "kvtransfer/compat/block_cache.py",
    "kvtransfer/compat/free_queue.py",
    "kvtransfer/compat/kv_connector.py",
    "kvtransfer/compat/whole_graphs.py",
    "workers/engine/compat/block_pool.py",
    "workers/engine/compat/coserving_runner.py",
    "workers/engine/compat/coserving_scheduler.py",
    "workers/engine/compat/cpu_build.py",
    "workers/engine/compat/engine_core_patches.py",
    "workers/engine/compat/grammar_advance.py",
    "workers/engine/compat/grammar_checks.py",
    "workers/engine/compat/policy_queue.py",
    "workers/engine/compat/split_runner.py",
    "workers/engine/compat/stream_replay.py",
}
HANDED = ("workers/engine/",)  # modules that get vLLM's objects
TABLES = {
    f"{path}: {name}": table
    for path in sorted(CONTACTS)
    for name, table in vars(module_at(path)).items()
    if isinstance(table, ReliedOn)
}
# Names that are not private, but are no interface either.
INTERNAL = {
    "discard_request_mask",
    "execute_model_state",
    "free_block_queue",
    "is_prefill_chunk",
    "iter_blocks_after",
    "kv_connector_output",
    "kv_holding_waiting",
    "last_read",
    "num_cached_block",
    "req_to_blocks",
    "single_type_managers",
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_NAME = ("getattr", "setattr")


@pytest.mark.parametrize("name", TABLES)
def test_the_installed_vllm_is_the_supported_release(name: str) -> None:
    if TABLES[name] is not LMCACHE:  # an optional package
        verify(TABLES[name])


@pytest.mark.parametrize("release", ["0.31.4", "0.33.0", "1.0.0", "0.320.0"])
def test_a_vllm_of_another_release_is_refused(release: str) -> None:
    with pytest.raises(UnsupportedVllmError, match=rf"this is {release}: install vllm==0\.32\.0"):
        verify(CONNECTOR, release)


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda self, block_ids: None)
    with pytest.raises(UnsupportedVllmError, match=r"touch\(self, blocks\) is relied on.*block_ids"):
        verify(CONNECTOR)


def test_a_vllm_without_one_of_our_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    with pytest.raises(UnsupportedVllmError, match=r"get_transfer_results\(.*does not exist"):
        verify(CONNECTOR)


def test_a_vllm_whose_scheduler_calls_another_hook_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "reset_connector_cache", lambda self: self.connector.forget_all())
    relied_on = r"reset_connector_cache is relied on to use reset_cache, but does not"
    with pytest.raises(UnsupportedVllmError, match=relied_on):
        verify(CONNECTOR)


def test_a_changed_generate_method_is_refused_and_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    async def generate(self: Any, prompt: Any, params: Any, request_id: str) -> None:
        pass

    async def app(*_: Any) -> None:
        pass

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    relied_on = r"AsyncLLM\.generate\(self, prompt, sampling_params, .* is relied on, but has .* params,"
    with pytest.raises(UnsupportedVllmError, match=relied_on):
        ExactTokensMiddleware(app)
    assert AsyncLLM.generate is generate


def test_a_vllm_without_an_attribute_that_we_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "__init__", lambda self: None)
    with pytest.raises(UnsupportedVllmError, match=r"BlockPool\.\w+ is relied on, but does not exist"):
        verify(CONNECTOR)


class Mentions:
    def __init__(self, other: Any) -> None:
        self.sets = other.reads


def test_an_attribute_that_is_read_but_never_set_counts_as_missing() -> None:
    table = ReliedOn({}, {f"{__name__}:Mentions": ("sets", "reads")})
    assert list(differences(table)) == ["Mentions.reads is relied on, but does not exist"]


class HealthyAdapter:
    def __init__(self) -> None:
        self._health_event = threading.Event()


class AnotherAdapter:
    def __init__(self) -> None:
        self._healthy = True


@pytest.mark.parametrize("adapter", [HealthyAdapter, AnotherAdapter])
def test_an_lmcache_without_the_event_that_we_clear_is_refused(
    adapter: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connector:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            self.worker_adapter = adapter()

    package = "lmcache.integration.vllm"
    stand_ins = {
        "lmcache": {},
        "lmcache.integration": {},
        package: {},
        f"{package}.lmcache_mp_connector": {"LMCacheMPConnector": Connector},
        f"{package}.vllm_multi_process_adapter": {"LMCacheMPWorkerAdapter": adapter},
    }
    for name, content in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "kvtransfer.lmcache", raising=False)
    guarded = import_module("kvtransfer.lmcache").GuardedLMCache
    monkeypatch.delitem(sys.modules, "kvtransfer.lmcache")  # of the stand-in
    if adapter is AnotherAdapter:
        with pytest.raises(ConnectorConfigError, match=r"_health_event is relied on.*lmcache\.txt"):
            guarded(None, None)
    else:
        assert isinstance(guarded(None, None).worker_adapter, HealthyAdapter)


def test_a_vllm_method_that_no_longer_uses_a_name_that_we_rely_on_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, ordered_blocks: self.free_blocks)
    with pytest.raises(UnsupportedVllmError, match=r"free_blocks is relied on to use append_n, but does not"):
        verify(FREE_QUEUE)


def test_a_class_that_moved_is_a_difference_and_not_an_import_error() -> None:
    table = ReliedOn({"vllm.v1.core.elsewhere:BlockPool": {"touch": ("self", "blocks")}}, {})
    assert list(differences(table)) == ["BlockPool.touch(self, blocks) is relied on, but does not exist"]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def contacts(source: str) -> Iterator[str]:
    """Yield the private names of vLLM that a module's source uses, and the names that it patches."""
    tree = ast.parse(source)
    imported = set(names_from_vllm(tree))
    own = own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "vllm":
                yield from (n for n in [*module.split("."), *(a.name for a in names)] if is_private(n))
            case ast.Attribute(attr="_exit", value=ast.Name(id="os")):
                pass  # the standard library's
            case ast.Attribute(attr=name) if name in INTERNAL:
                yield name
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls")) if is_private(name):
                if name not in own:
                    yield name
            case ast.Attribute(attr=name) if is_private(name):
                yield name
            case ast.Call(func=ast.Name(id=called), args=[_, ast.Constant(value=str(name)), *_]):
                if called in BY_NAME and (is_private(name) or name in INTERNAL):
                    yield name
        for target in assigned(node):
            if isinstance(target, ast.Attribute) and root_of(target) in imported:
                yield f"{ast.unparse(target)} patched"


def names_from_vllm(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.asname or "vllm" for a in node.names if a.name.split(".")[0] == "vllm")


def own_names(tree: ast.AST) -> set[str]:
    """Return the names that a module's own classes and functions define or assign."""
    methods = {node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    fields = {t.id for node in ast.walk(tree) for t in assigned(node) if isinstance(t, ast.Name)}
    attributes = {t.attr for node in ast.walk(tree) for t in assigned(node) if isinstance(t, ast.Attribute)}
    return methods | fields | attributes


def assigned(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            flat = [t.elts if isinstance(t, ast.Tuple) else [t] for t in targets]
            return [one for targets in flat for one in targets]
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return [target]
        case ast.Call(func=ast.Name(id="setattr"), args=[target, ast.Constant(value=str(name)), *_]):
            return [ast.Attribute(target, name, ast.Store())]
    return []


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def near_vllm() -> list[Path]:
    """Return the modules that import vLLM or receive its objects."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            handed = package == "kvtransfer" or name.startswith(HANDED)
            if name not in CONTACTS and (handed or set(names_from_vllm(ast.parse(path.read_text())))):
                found.append(path)
    return found


def test_only_the_modules_in_contacts_use_private_names_of_vllm_or_patch_it() -> None:
    wrong = {
        path.relative_to(ROOT).as_posix(): found
        for path in near_vllm()
        if (found := sorted(set(contacts(path.read_text()))))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from vllm.v1.core.block_pool import _Pool", ["_Pool"]),
        ("from vllm._custom_ops import swap", ["_custom_ops"]),
        ("def f(scheduler):\n    return scheduler._inflight", ["_inflight"]),
        ("def f(pool):\n    return pool.free_block_queue.iter_blocks_after(None)", None),
        ("def f(runner):\n    runner._model_forward = None", ["_model_forward"]),
        ("def f(core):\n    return getattr(core, '_step')", ["_step"]),
        ("from vllm.v1.engine.core import EngineCore\nEngineCore.step = None", ["EngineCore.step patched"]),
        ("import vllm.v1.engine.core\nvllm.v1.engine.core.x = 1", ["vllm.v1.engine.core.x patched"]),
        ("from vllm import LLM\nsetattr(LLM, 'chat', None)", ["LLM.chat patched"]),
        ("class A(Scheduler):\n    def f(self):\n        return self._inflight", ["_inflight"]),
        ("class A(Scheduler):\n    def _f(self):\n        super()._f()", ["_f"]),
        ("class A:\n    def f(self):\n        self._a = 1\n        return self._a", []),
    ],
)
def test_the_check_finds_private_uses_and_patches_of_vllm(source: str, found: list[str] | None) -> None:
    wanted = sorted(["free_block_queue", "iter_blocks_after"]) if found is None else found
    assert sorted(set(contacts(source))) == wanted


def private_names(cls: type) -> set[str]:
    """Return the private names that a class defines or that its `__init__` sets or reads."""
    code = getattr(inspect.unwrap(vars(cls).get("__init__", lambda: None)), "__code__", None)
    return {name for name in (*vars(cls), *getattr(code, "co_names", ())) if is_private(name)} - {"_abc_impl"}


def test_only_the_modules_in_contacts_override_private_members_of_vllm() -> None:
    wrong = []
    for path in near_vllm():
        if path.name == "lmcache.py":  # an optional package; the syntax tree has shown that it is clean
            continue
        for cls in classes_in(path.relative_to(ROOT).as_posix()):
            above = [one for one in cls.__mro__[1:] if is_vllms(one)]
            taken = {private for one in above for private in private_names(one)}
            wrong += [f"{path.name}: {cls.__name__}.{private}" for private in private_names(cls) & taken]
    assert wrong == []


def is_vllms(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "vllm"


def classes_in(path: str) -> Iterator[type]:
    module = module_at(path)
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ == module.__name__:
            yield cls


def overridden(cls: type) -> Iterator[tuple[type, str]]:
    """Yield each method of vLLM that `cls` or its mixins override, after the vLLM class that defines it."""
    for place, ours in enumerate(cls.__mro__):
        for name in vars(ours) if ours.__module__.split(".")[0] in PACKAGES else ():
            behind = (one for one in cls.__mro__[place:] if is_vllms(one) and name in vars(one))
            theirs = next(behind, None)
            if theirs is not None and name != "_abc_impl" and not name.startswith("__"):
                yield theirs, name


def test_every_override_of_a_vllm_method_is_in_a_table() -> None:
    """If vLLM renamed the method, an engine would start and never call ours."""
    known = {
        (path, name)
        for table in TABLES.values()
        for names in (table.signatures, table.attributes)
        for path, methods in names.items()
        for name in methods
    }
    near = {path.relative_to(ROOT).as_posix() for path in near_vllm() if path.name != "lmcache.py"}
    found = {
        (f"{theirs.__module__}:{theirs.__name__}", name)
        for path in near | CONTACTS
        for cls in classes_in(path)
        for theirs, name in overridden(cls)
    }
    assert len(found) > 40
    assert sorted(found - known) == []


def test_the_call_site_in_vllm_of_every_connector_hook_is_known() -> None:
    used = {
        name
        for table in (CONNECTOR, WORKER)
        for methods in table.uses.values()
        for names in methods.values()
        for name in names
    }
    assert {name for _, name in overridden(ConServeConnector)} - used == set()


# Request fields of vLLM that the gateway drops: a fleet lacks what they need, or does not bound their values.
NOT_SERVED = {
    "mm_payload",
    "return_mm_kwargs",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "watermarking",
    "previous_input_messages",
    "repetition_detection",
    "stream_interval",
}
REQUESTS = {
    "/v1/chat/completions": ("openai.chat_completion", "ChatCompletionRequest"),
    "/v1/completions": ("openai.completion", "CompletionRequest"),
    "/v1/responses": ("openai.responses", "ResponsesRequest"),
    "/v1/messages": ("anthropic", "AnthropicMessagesRequest"),
    "/v1/embeddings": ("pooling.embed", "EmbeddingCompletionRequest", "EmbeddingChatRequest"),
    "/tokenize": ("serve.tokenize", "TokenizeCompletionRequest", "TokenizeChatRequest"),
    "/detokenize": ("serve.tokenize", "DetokenizeRequest"),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_every_request_field_of_vllm_is_served_or_refused_or_ignored_on_purpose(path: str) -> None:
    module, *names = REQUESTS[path]
    protocol = import_module(f"vllm.entrypoints.{module}.protocol")
    of_vllm = {field for name in names for field in getattr(protocol, name).model_fields}
    assert of_vllm - FIELDS[path].keys() - REFUSED.keys() <= NOT_SERVED
    assert not NOT_SERVED & FIELDS[path].keys()
