"""Text of a wanted length. The same stream always gives the same text, and a shorter one is its beginning."""

from random import Random

VOCABULARY = (
    "about after again air all along also an and another any are around as at away back be because been "
    "before below between both but by call can change come could day did do does down each end even every "
    "find first for from get give go good great had has have he help her here him his home house how if in "
    "into is it just keep kind know large last learn left life like line little live long look made make "
    "man many may me men might more most move much must my name need never new next no not now number of "
    "off old on one only or other our out over own page part people place plant point put read right said "
    "same saw say school see sentence set she should show small so some something sound still stop story "
    "study such take tell than that the their them then there these they thing think this those three "
    "through time to together too tree try turn two under until up us use very want was water way we well"
)
WORDS = tuple(VOCABULARY.split())
AVERAGE = sum(len(word) + 1 for word in WORDS) / len(WORDS)


def text(stream: str, characters: int) -> str:
    if characters <= 0:
        return ""
    random = Random(stream)
    parts: list[str] = []
    length = -1
    while length < characters:
        chosen = random.choices(WORDS, k=int((characters - length) / AVERAGE) + 8)
        parts.extend(chosen)
        length += sum(map(len, chosen)) + len(chosen)
    return " ".join(parts)[:characters]
