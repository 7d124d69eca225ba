"""Regular expression for the log lines of our processes, and a parser of their fields."""

import re

LINE = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?P<logger>[A-Za-z_][\w.]*) (?P<event>.+)$"
)
FIELD = re.compile(r"(\w+)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S+)")


def fields(event: str) -> dict[str, str]:
    return dict(FIELD.findall(event))
