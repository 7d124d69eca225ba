"""The byte-level vocabulary: token id = byte value, then the special tokens.

The model must be able to read any text, but should only ever write text that reads back as the very
same tokens: a client sends an answer back as a string, and a turn whose past tokenises differently
loses its prefix. Hence SPEAKABLE: printable ASCII, one token a character, plus the end of turn. No white
space: JSON allows any amount of it, and a random model held to JSON would make use of that. CLOSING
characters are favoured, so that the strings and numbers of a forced tool call come to an end.
"""

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, START_OF_TURN, END_OF_TURN)
# Single tokens, as in Qwen's own vocabulary, but not special: the tool parser must see them.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
VOCABULARY_SIZE = 320  # a multiple of 64, as vLLM pads it otherwise


def token_id(text: str) -> int:
    return 256 + (*SPECIAL_TOKENS, *MARKERS).index(text)


SPEAKABLE: tuple[int, ...] = (*range(0x21, 0x7F), token_id(END_OF_TURN))
CLOSING: tuple[int, ...] = tuple(b'",]}')
