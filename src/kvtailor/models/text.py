"""Long prompts of real text that every Python carries: its own language reference (PSF licence)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvtailor.errors import ModelError

# Read in this order; the topics that hold mostly grammar or tables stand behind those that hold prose.
TOPICS = (
    "execmodel",
    "objects",
    "types",
    "typesmapping",
    "try",
    "with",
    "import",
    "naming",
    "customization",
    "attribute-access",
    "specialattrs",
    "exceptions",
    "identifiers",
    "strings",
    "typesseq",
    "string-methods",
    "formatstrings",
    "debugger",
    "comparisons",
    "calls",
    "compound",
    "specialnames",
)

NEEDLE_INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards."
)


def paragraphs(first: str = TOPICS[0]) -> Iterator[str]:
    """Give the language reference paragraph by paragraph, each topic under its title, in the order of ``TOPICS``.

    Parameters
    ----------
    first
        The topic to start with.

    Raises
    ------
    ModelError
        The topic is none of ``TOPICS``.
    """
    from pydoc_data.topics import topics

    if first not in TOPICS:
        raise ModelError(f"{first!r} is no topic of the Python language reference; allowed: {', '.join(TOPICS)}")
    for topic in TOPICS[TOPICS.index(first) :]:
        # Other Python versions may lack a topic.
        yield from (part for part in topics.get(topic, "").strip().split("\n\n") if part.strip())


def python_reference(tokens: int, tokenizer: Any, *, topic: str = TOPICS[0], skip: int = 0) -> str:
    """Cut a passage of whole paragraphs out of the Python language reference of the running interpreter.

    Parameters
    ----------
    tokens
        The most tokens the passage may have; it ends with the last paragraph that fits.
    tokenizer
        Counts the tokens.
    topic
        The topic, one of ``TOPICS``, whose title the passage starts with; the next topics follow.
    skip
        Start instead with the paragraph that stands this many tokens later.

    Raises
    ------
    ModelError
        The topic is unknown, the reference is shorter than what is asked for, or not one paragraph fits.
    """
    chosen: list[str] = []
    skipped = used = 0
    for paragraph in paragraphs(topic):
        length = len(tokenizer(paragraph + "\n\n", add_special_tokens=False).input_ids)
        if skipped + length <= skip and not chosen:
            skipped += length
        elif used + length <= tokens:
            used += length
            chosen.append(paragraph)
        else:
            break
    else:
        raise ModelError(
            f"the Python language reference has {skipped + used} tokens from {topic!r} on, "
            f"{skip} + {tokens} were asked for"
        )
    if not chosen:
        raise ModelError(f"no paragraph of the Python language reference behind token {skip} fits {tokens} tokens")
    return "\n\n".join(chosen)


def needle_prompt(text: str, city: str, digits: str, depth: float) -> tuple[str, str]:
    """Hide a magic number in a text and ask for it.

    Parameters
    ----------
    text
        Paragraphs with blank lines between them.
    city
        Whose number is hidden.
    digits
        The number.
    depth
        Where it is hidden: 0 before the first paragraph, 1 behind the last.

    Returns
    -------
    tuple
        The user's message, and the words that the answer starts with; the digits are what should follow.

    Raises
    ------
    ModelError
        The depth is not in 0..1.
    """
    if not 0 <= depth <= 1:
        raise ModelError(f"depth is {depth}, allowed is 0 to 1")
    parts = text.split("\n\n")
    parts.insert(round(depth * len(parts)), f"One of the special magic numbers for {city} is: {digits}.")
    question = f"What is the special magic number for {city} mentioned in the provided text?"
    message = "\n\n".join([NEEDLE_INTRODUCTION, *parts, question])
    return message, f"The special magic number for {city} mentioned in the provided text is"
