"""What the small model looks like, and its Hugging Face configuration."""

from dataclasses import dataclass

from deploy.model.vocabulary import END_OF_TURN, PADDING, VOCABULARY_SIZE, token_id


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64  # vLLM's CPU attention supports 32, 64, 80, 96, 112, 128, 192, 256
    intermediate: int = 768
    max_context: int = 32_768
    seed: int = 0
    std: float = 0.15  # smaller falls into loops of two tokens, which hides wrong KV

    def hugging_face_config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": token_id(END_OF_TURN),
            "pad_token_id": token_id(PADDING),
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": self.std,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": VOCABULARY_SIZE,
        }
