from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConversationRequest(_message.Message):
    __slots__ = ("conversation",)
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    conversation: str
    def __init__(self, conversation: _Optional[str] = ...) -> None: ...

class HeldReply(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Change(_message.Message):
    __slots__ = ("status", "up", "down", "state")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    status: Status
    up: Engine
    down: Engine
    state: State
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., up: _Optional[_Union[Engine, _Mapping]] = ..., down: _Optional[_Union[Engine, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("engine", "phase", "detail", "epoch", "pid", "restarts", "failure", "log_lines", "metrics")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOG_LINES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    phase: str
    detail: str
    epoch: int
    pid: int
    restarts: int
    failure: str
    log_lines: _containers.RepeatedScalarFieldContainer[str]
    metrics: str
    def __init__(self, engine: _Optional[str] = ..., phase: _Optional[str] = ..., detail: _Optional[str] = ..., epoch: _Optional[int] = ..., pid: _Optional[int] = ..., restarts: _Optional[int] = ..., failure: _Optional[str] = ..., log_lines: _Optional[_Iterable[str]] = ..., metrics: _Optional[str] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "tier", "role", "epoch", "http", "transfer", "control", "kv_tokens", "block_tokens", "max_context")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    engine: str
    tier: str
    role: str
    epoch: int
    http: str
    transfer: str
    control: str
    kv_tokens: int
    block_tokens: int
    max_context: int
    def __init__(self, engine: _Optional[str] = ..., tier: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., http: _Optional[str] = ..., transfer: _Optional[str] = ..., control: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("engine", "epoch", "seq", "live_tokens", "parked_tokens", "offline_tokens", "free_tokens", "running", "waiting", "offline_running", "offline_waiting", "confirmed", "draining", "host_used_tokens", "host_free_tokens", "host_offline_tokens", "parked", "idle_tokens")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_RUNNING_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_WAITING_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_OFFLINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    IDLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine: str
    epoch: int
    seq: int
    live_tokens: int
    parked_tokens: int
    offline_tokens: int
    free_tokens: int
    running: int
    waiting: int
    offline_running: int
    offline_waiting: int
    confirmed: _containers.RepeatedScalarFieldContainer[str]
    draining: bool
    host_used_tokens: int
    host_free_tokens: int
    host_offline_tokens: int
    parked: _containers.RepeatedScalarFieldContainer[str]
    idle_tokens: int
    def __init__(self, engine: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., live_tokens: _Optional[int] = ..., parked_tokens: _Optional[int] = ..., offline_tokens: _Optional[int] = ..., free_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., offline_running: _Optional[int] = ..., offline_waiting: _Optional[int] = ..., confirmed: _Optional[_Iterable[str]] = ..., draining: _Optional[bool] = ..., host_used_tokens: _Optional[int] = ..., host_free_tokens: _Optional[int] = ..., host_offline_tokens: _Optional[int] = ..., parked: _Optional[_Iterable[str]] = ..., idle_tokens: _Optional[int] = ...) -> None: ...
