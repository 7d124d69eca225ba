"""The conversation paper's set-up: 4 x A40, Qwen3-0.6B in bf16. Every constant names where it comes from.

"Paper" is "Observation, Not Prediction", section 5.1 unless another is given. Nothing here was chosen by
looking at a result of the simulation. What the paper leaves open is derived from what it states:

* Prefill. The arithmetic of the model gives the ratio of linear to attention work; the paper's 25k tokens/s
  at a mean prompt gives the speed.
* Decode. Two unknowns, the fixed cost of an iteration and the cost of a token of context, and two statements:
  1k tokens/s with the KV full (B conversations of mean length), and "2,944 tokens in one iteration stay
  within 5 x the baseline", the baseline being one conversation decoding alone.

The A40's data sheet contradicts the decode statement: 696 GB/s cannot read 114,688 bytes x 15k tokens of
context for each of 1,000 tokens a second. With that bandwidth three decoders could not carry 1.634
conversations/s at all. The paper's number is used, and the sensitivity table shows the other.
"""

from dataclasses import dataclass

from placement.engines import Role
from placement.scheduling.latency_model import LatencyModel
from placement.sizing.power_curve import PowerCurve
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

PREFILL_TOKENS_PER_S = 25_000.0  # paper
DECODE_TOKENS_PER_S = 1_000.0  # paper
KV_TOKENS = 300_000  # paper
PREFILL_CHUNK = 8_192  # paper
COLLOCATED_CHUNK = 2_944  # paper
SLO_FACTOR = 5.0  # paper
SATURATED_RATE = 1.634  # paper: conversations a second that fill the prefiller
OUTPUT_TOKENS = 1_000.0  # paper: of a conversation
INPUT_TOKENS = PREFILL_TOKENS_PER_S / SATURATED_RATE  # 15.3k of a first turn; the paper rounds it to 15k

LIMIT_W, CAP_W = 300.0, 200.0  # paper
IDLE_W = 75.0  # assumed: a quarter of the limit, clocks up and weights loaded; see the sensitivity table
# Memory-bound decoding on a GDDR card draws 96 % of its limit (172.7 of 180 W, RTX 5060 Ti, power-limit sweep
# on inventivehq.com). On HBM cards it draws far less (137-300 of 700 W, H200, arXiv:2605.11999), and a cap at
# two thirds would save nothing.
DECODE_SHARE_OF_LIMIT = 0.96
SPEED_EXPONENT = 1 / 3  # dynamic power ~ clock³ (CMOS: voltage² x clock)

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 28, 16, 8, 128, 1_024  # Qwen3-0.6B's configuration
NON_EMBEDDING_PARAMETERS = 0.44e9  # Qwen3-0.6B's model card
KV_BYTES_PER_TOKEN = 2.0 * LAYERS * KV_HEADS * HEAD_DIM * 2  # K and V, bf16: 114,688
FLOPS_PER_TOKEN = 2 * NON_EMBEDDING_PARAMETERS
FLOPS_PER_ATTENDED = 4.0 * LAYERS * HEADS * HEAD_DIM  # per token and token it attends to

DATASHEET_BYTES_PER_S = 696e9  # A40 data sheet: GDDR6 bandwidth
PCIE_BYTES_PER_S = 25e9  # A40 data sheet: PCIe 4.0 x16 is 31.5 GB/s each way; 80 % of it


@dataclass(frozen=True, slots=True)
class A40:
    """The knobs that the sensitivity table turns, at what is stated above."""

    constant_s: float | None = None  # of an iteration; None: derived
    per_context_s: float | None = None  # of a token of context; None: derived
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    idle_w: float = IDLE_W
    decode_share_of_limit: float = DECODE_SHARE_OF_LIMIT
    speed_exponent: float = SPEED_EXPONENT
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S

    def latency(self) -> LatencyModel:
        linear, attention = FLOPS_PER_TOKEN, FLOPS_PER_ATTENDED
        tokens = INPUT_TOKENS
        second = tokens - PREFILL_CHUNK
        work = linear * tokens + attention * (PREFILL_CHUNK**2 + second * tokens)
        constant, per_context = 0.0, 0.0
        for _ in range(50):  # prefill and decode share constants; this settles in a few rounds
            fixed = 2 * constant + per_context * (PREFILL_CHUNK + tokens)
            speed = work / (tokens / self.prefill_tokens_per_s - fixed)
            constant, per_context = self._decode(linear / speed, attention / speed)
        return LatencyModel(linear / speed, attention / speed, per_context - attention / speed, constant)

    def _decode(self, per_token: float, per_attended: float) -> tuple[float, float]:
        """Fixed cost of an iteration, and cost of a token of context."""
        peak = INPUT_TOKENS + OUTPUT_TOKENS
        full = KV_TOKENS / peak / DECODE_TOKENS_PER_S  # an iteration with the KV full
        chunk = COLLOCATED_CHUNK * (per_token + per_attended * COLLOCATED_CHUNK)
        alone = INPUT_TOKENS + OUTPUT_TOKENS / 2
        # constant + KV_TOKENS x context = full;  SLO x (constant + alone x context) = constant + chunk
        share = alone / KV_TOKENS
        constant = (chunk - SLO_FACTOR * share * full) / (SLO_FACTOR * (1 - share) - 1)
        constant = self.constant_s if self.constant_s is not None else constant
        derived = (full - constant) / KV_TOKENS
        return constant, self.per_context_s if self.per_context_s is not None else derived

    def power(self) -> PowerCurve:
        return PowerCurve(
            limit_w=LIMIT_W,
            idle_w=self.idle_w,
            decode_w=self.decode_share_of_limit * LIMIT_W,
            prefill_w=LIMIT_W,
            speed_exponent=self.speed_exponent,
        )

    def engine(self, chunk: int) -> EngineProfile:
        return EngineProfile(
            latency=self.latency(),
            power=self.power(),
            chunk_tokens=chunk,
            kv_tokens=KV_TOKENS,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            network_bytes_per_s=self.pcie_bytes_per_s,
            host_bytes_per_s=self.pcie_bytes_per_s,
            layers=LAYERS,
            layer_bytes=2 * NON_EMBEDDING_PARAMETERS / LAYERS,
            activation_bytes=2.0 * HIDDEN,
        )


def disaggregated(calibration: A40, cap_w: float = LIMIT_W) -> SimulatedFleet:
    """1 prefiller and 3 decoders, the decoders under `cap_w`."""
    engine = calibration.engine(PREFILL_CHUNK)
    decoder = engine.capped(cap_w) if cap_w < LIMIT_W else engine
    return SimulatedFleet(
        (SimulatedTier("prefill", Role.PREFILL, 1, engine), SimulatedTier("decode", Role.DECODE, 3, decoder))
    )


def collocated(calibration: A40, cap_w: float = LIMIT_W) -> SimulatedFleet:
    """The same four cards, each serving whole conversations; three of them under `cap_w`."""
    engine = calibration.engine(COLLOCATED_CHUNK)
    capped = engine.capped(cap_w) if cap_w < LIMIT_W else engine
    return SimulatedFleet(
        (SimulatedTier("mixed", Role.MIXED, 1, engine), SimulatedTier("mixed-capped", Role.MIXED, 3, capped))
    )
