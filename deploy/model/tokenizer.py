"""The byte-level tokenizer and its chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deploy.model.vocabulary import END_OF_TURN, MARKERS, PADDING, SPECIAL_TOKENS

TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def write_tokenizer(directory: Path, max_context: int) -> None:
    tokenizer = Tokenizer(BPE(vocab=_bytes_to_ids(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_context,
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())


def _bytes_to_ids() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: chr(byte) for byte in printable}
    stand_in |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {stand_in[byte]: byte for byte in range(256)}
