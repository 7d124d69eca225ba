"""What can be wrong with a line, in the codes and words of OpenAI where it has them."""

from router.batch.records import BatchError


class BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def at(self, line: int) -> BatchError:
        return BatchError(self.code, self.message, self.param, line)


def missing(param: str) -> BadLine:
    return BadLine("missing_required_parameter", f"Missing required parameter: '{param}'.", param)


def wrong_type(param: str, expected: str, value: object) -> BadLine:
    names = {
        "str": "a string",
        "int": "an integer",
        "float": "a number",
        "bool": "a boolean",
        "list": "an array",
    }
    got = {"dict": "an object", "NoneType": "null"} | names
    kind = type(value).__name__
    return BadLine(
        "invalid_type",
        f"Invalid type for '{param}': expected {expected}, but got {got.get(kind, kind)} instead.",
        param,
    )
