from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Node(_message.Message):
    __slots__ = ("link", "tail_bytes", "tail_digest")
    LINK_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    link: bytes
    tail_bytes: int
    tail_digest: bytes
    def __init__(self, link: _Optional[bytes] = ..., tail_bytes: _Optional[int] = ..., tail_digest: _Optional[bytes] = ...) -> None: ...

class Epoch(_message.Message):
    __slots__ = ("engine", "epoch")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine: str
    epoch: int
    def __init__(self, engine: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("key", "gateway", "parent", "prompt_tokens", "wait_s", "uncached_tokens", "lost", "end", "again", "turn", "alone")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    key: str
    gateway: str
    parent: str
    prompt_tokens: int
    wait_s: float
    uncached_tokens: int
    lost: Epoch
    end: Node
    again: bool
    turn: int
    alone: bool
    def __init__(self, key: _Optional[str] = ..., gateway: _Optional[str] = ..., parent: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., uncached_tokens: _Optional[int] = ..., lost: _Optional[_Union[Epoch, _Mapping]] = ..., end: _Optional[_Union[Node, _Mapping]] = ..., again: _Optional[bool] = ..., turn: _Optional[int] = ..., alone: _Optional[bool] = ...) -> None: ...

class Placed(_message.Message):
    __slots__ = ("decoder", "prefiller", "known", "cause", "note", "context_tokens")
    DECODER_FIELD_NUMBER: _ClassVar[int]
    PREFILLER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    decoder: Epoch
    prefiller: str
    known: bool
    cause: str
    note: bytes
    context_tokens: int
    def __init__(self, decoder: _Optional[_Union[Epoch, _Mapping]] = ..., prefiller: _Optional[str] = ..., known: _Optional[bool] = ..., cause: _Optional[str] = ..., note: _Optional[bytes] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after_s: float
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("index", "placed", "refused")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    index: int
    placed: Placed
    refused: Refused
    def __init__(self, index: _Optional[int] = ..., placed: _Optional[_Union[Placed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class PlacesRequest(_message.Message):
    __slots__ = ("asks",)
    ASKS_FIELD_NUMBER: _ClassVar[int]
    asks: _containers.RepeatedCompositeFieldContainer[PlaceRequest]
    def __init__(self, asks: _Optional[_Iterable[_Union[PlaceRequest, _Mapping]]] = ...) -> None: ...

class PlacesReply(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[PlaceReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[PlaceReply, _Mapping]]] = ...) -> None: ...

class IdentifyRequest(_message.Message):
    __slots__ = ("links", "digests")
    LINKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedScalarFieldContainer[bytes]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, links: _Optional[_Iterable[bytes]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("conversation", "tip", "running")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    TIP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    conversation: str
    tip: bool
    running: bool
    def __init__(self, conversation: _Optional[str] = ..., tip: _Optional[bool] = ..., running: _Optional[bool] = ...) -> None: ...

class IdentifyReply(_message.Message):
    __slots__ = ("index", "holders", "tails")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    index: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    tails: _containers.RepeatedCompositeFieldContainer[Tails]
    def __init__(self, index: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., tails: _Optional[_Iterable[_Union[Tails, _Mapping]]] = ...) -> None: ...

class Tails(_message.Message):
    __slots__ = ("index", "lengths")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    index: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("key", "turn", "turn_began", "prefill_done", "turn_ended", "first_token")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    TURN_BEGAN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_FIELD_NUMBER: _ClassVar[int]
    TURN_ENDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    key: str
    turn: int
    turn_began: Node
    prefill_done: PrefillDone
    turn_ended: TurnEnded
    first_token: FirstToken
    def __init__(self, key: _Optional[str] = ..., turn: _Optional[int] = ..., turn_began: _Optional[_Union[Node, _Mapping]] = ..., prefill_done: _Optional[_Union[PrefillDone, _Mapping]] = ..., turn_ended: _Optional[_Union[TurnEnded, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("prompt_tokens", "lost")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    lost: Epoch
    def __init__(self, prompt_tokens: _Optional[int] = ..., lost: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TurnEnded(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "tool_call", "answer", "met", "missed")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    tool_call: bool
    answer: Node
    met: _containers.RepeatedScalarFieldContainer[str]
    missed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., tool_call: _Optional[bool] = ..., answer: _Optional[_Union[Node, _Mapping]] = ..., met: _Optional[_Iterable[str]] = ..., missed: _Optional[_Iterable[str]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("gateway", "activities")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    activities: _containers.RepeatedCompositeFieldContainer[Activity]
    def __init__(self, gateway: _Optional[str] = ..., activities: _Optional[_Iterable[_Union[Activity, _Mapping]]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class LanesRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class LanesReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("key", "cause")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    key: str
    cause: str
    def __init__(self, key: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class EndReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("gateway", "metrics")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    metrics: str
    def __init__(self, gateway: _Optional[str] = ..., metrics: _Optional[str] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("engine", "tier", "role", "epoch", "http", "transfer", "control", "kv_tokens", "block_tokens", "max_context", "suspect", "live_tokens", "parked_tokens", "offline_tokens", "free_tokens", "running", "waiting", "draining", "conversations", "kv_in_use", "seq", "offline_running", "offline_waiting", "host_used_tokens", "host_free_tokens", "host_offline_tokens", "idle_tokens")
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
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    LIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    KV_IN_USE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_RUNNING_FIELD_NUMBER: _ClassVar[int]
    OFFLINE_WAITING_FIELD_NUMBER: _ClassVar[int]
    HOST_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_OFFLINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IDLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
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
    suspect: bool
    live_tokens: int
    parked_tokens: int
    offline_tokens: int
    free_tokens: int
    running: int
    waiting: int
    draining: bool
    conversations: int
    kv_in_use: int
    seq: int
    offline_running: int
    offline_waiting: int
    host_used_tokens: int
    host_free_tokens: int
    host_offline_tokens: int
    idle_tokens: int
    def __init__(self, engine: _Optional[str] = ..., tier: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[int] = ..., http: _Optional[str] = ..., transfer: _Optional[str] = ..., control: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_context: _Optional[int] = ..., suspect: _Optional[bool] = ..., live_tokens: _Optional[int] = ..., parked_tokens: _Optional[int] = ..., offline_tokens: _Optional[int] = ..., free_tokens: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., draining: _Optional[bool] = ..., conversations: _Optional[int] = ..., kv_in_use: _Optional[int] = ..., seq: _Optional[int] = ..., offline_running: _Optional[int] = ..., offline_waiting: _Optional[int] = ..., host_used_tokens: _Optional[int] = ..., host_free_tokens: _Optional[int] = ..., host_offline_tokens: _Optional[int] = ..., idle_tokens: _Optional[int] = ...) -> None: ...

class Engines(_message.Message):
    __slots__ = ("engines", "settled")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    settled: bool
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., settled: _Optional[bool] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("key", "cause")
    KEY_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    key: str
    cause: str
    def __init__(self, key: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("engines", "ended", "foreign")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    engines: Engines
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    foreign: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engines: _Optional[_Union[Engines, _Mapping]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., foreign: _Optional[_Iterable[str]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("prefix", "after", "limit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    limit: int
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class EnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnginesReply(_message.Message):
    __slots__ = ("engines", "live_conversations", "waiting", "metrics", "gateways")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    LIVE_CONVERSATIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    engines: Engines
    live_conversations: int
    waiting: int
    metrics: str
    gateways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, engines: _Optional[_Union[Engines, _Mapping]] = ..., live_conversations: _Optional[int] = ..., waiting: _Optional[int] = ..., metrics: _Optional[str] = ..., gateways: _Optional[_Iterable[str]] = ...) -> None: ...

class CapacityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CapacityReply(_message.Message):
    __slots__ = ("prefillers", "prefill_load", "prefill_wait_s", "decoders", "decoder_pressure", "running_share", "observed_s", "advice")
    PREFILLERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    DECODERS_FIELD_NUMBER: _ClassVar[int]
    DECODER_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SHARE_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_S_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    prefillers: int
    prefill_load: float
    prefill_wait_s: float
    decoders: int
    decoder_pressure: float
    running_share: float
    observed_s: float
    advice: _containers.RepeatedCompositeFieldContainer[Recommendation]
    def __init__(self, prefillers: _Optional[int] = ..., prefill_load: _Optional[float] = ..., prefill_wait_s: _Optional[float] = ..., decoders: _Optional[int] = ..., decoder_pressure: _Optional[float] = ..., running_share: _Optional[float] = ..., observed_s: _Optional[float] = ..., advice: _Optional[_Iterable[_Union[Recommendation, _Mapping]]] = ...) -> None: ...

class Recommendation(_message.Message):
    __slots__ = ("action", "count", "reason")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    action: str
    count: int
    reason: str
    def __init__(self, action: _Optional[str] = ..., count: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
