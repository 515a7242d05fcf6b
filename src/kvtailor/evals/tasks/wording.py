"""What is hidden and asked for: keys, values and words, drawn at random, and the sentences around them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal
from uuid import UUID

from kvtailor.evals.tasks.filling import reference

Kind = Literal["numbers", "uuids"]
KINDS: tuple[Kind, ...] = ("numbers", "uuids")

_CITY_NAMES = (
    "Amsterdam Ankara Athens Bangkok Barcelona Belgrade Berlin Bogota Brussels Bucharest Budapest Cairo Chicago "
    "Copenhagen Dakar Delhi Dublin Edinburgh Geneva Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima "
    "Lisbon London Madrid Manila Marseille Melbourne Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo "
    "Paris Prague Quito Reykjavik Riga Rome Rotterdam Santiago Seattle Seoul Shanghai Singapore Sofia Stockholm Sydney "
    "Tallinn Tokyo Toronto Tunis Turin Valencia Vancouver Vienna Vilnius Warsaw Zagreb Zurich"
)

_KIND_NAMES = (
    "amber ancient bitter blue bold brave brisk bronze calm careful clever cold copper crimson curious dark dusty "
    "eager early empty faint fancy gentle giant golden grand green happy hidden hollow humble icy jolly keen kind late "
    "lazy little lively lonely loud lucky mellow mild narrow noble odd pale patient plain polite proud purple quick "
    "quiet rapid rare red round rusty sharp shy silent silver simple slow smooth soft solid steady stone strong sunny "
    "swift tall tame tidy tiny vivid warm white wide wild wise wooden young"
)
_THING_NAMES = (
    "acorn anchor apple apron arrow badge banner barrel basket beacon bell blanket bottle bridge broom bucket button "
    "cabin camera candle canoe carpet castle chair chimney clock cloud coat comet compass cradle curtain dagger desk "
    "door drum eagle engine feather fence fiddle flag flute forest fountain garden gate glove hammer harbor harp hat "
    "helmet hill island jacket jar kettle kite ladder lamp lantern letter lighthouse meadow mirror mountain needle oar "
    "orchard oven paddle parcel pearl pencil piano pillow planet plate pond puzzle rabbit ribbon river rocket saddle "
    "sail shovel spoon table tower tunnel umbrella valley violin wagon window"
)

CITIES = tuple(_CITY_NAMES.split())

# Not parts of names, of contractions, of words that are split at a line's end, or of commands such as "c(ont(inue))".
_WORD = re.compile(r"(?<![\w.'\u2019()-])[a-z]{4,9}(?![\w.'\u2019()-])")


def key_names(rng: random.Random, count: int | None = None) -> list[str]:
    """Draw names of things, each once and in random order; all that there are if no count is given."""
    every = [f"{kind}-{thing}" for kind in _KIND_NAMES.split() for thing in _THING_NAMES.split()]
    return rng.sample(every, len(every) if count is None else count)


def digits(rng: random.Random, count: int = 5) -> str:
    """A number of so many digits, the first of which is not 0."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def uuid(rng: random.Random) -> str:
    """A random UUID of version 4."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def distinct_values(rng: random.Random, kind: Kind, count: int, length: int) -> list[str]:
    """Draw values that differ from each other: numbers of ``length`` digits, or UUIDs."""
    if kind == "uuids":
        return [uuid(rng) for _ in range(count)]
    return [str(number) for number in rng.sample(range(10 ** (length - 1), 10**length), count)]


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """English words of 4 to 9 small letters that the language reference uses, by letters."""
    return tuple(sorted({word for text in reference() for word in _WORD.findall(text)}))


def needle(key: str, value: str, kind: Kind = "numbers") -> str:
    """The sentence that says the value of a key."""
    return f"One of the special magic {kind} for {key} is: {value}."


def needle_question(keys: Sequence[str], values: int, kind: Kind = "numbers") -> tuple[str, str]:
    """Ask for the values of keys.

    Parameters
    ----------
    keys : at least one.
    values : of each.
    kind : of values.

    Returns
    -------
    tuple
        The question, and the words that its answer starts with.
    """
    names = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    if len(keys) == values == 1:
        what = f"special magic {kind.removesuffix('s')} for {names} mentioned in the provided text"
        return f"What is the {what}?", f"The {what} is"
    what = f"special magic {kind} for {names} mentioned in the provided text"
    return f"What are all the {what}?", f"The {what} are"
