"""Messages as the text that a tokenizer's model expects: chat markup and all, or plain text where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvtailor.errors import EvaluationError

Asked = Literal["known", "after"]
ASKED: tuple[Asked, ...] = ("known", "after")

PLAIN_CUE = "\nAnswer:"
PLAIN_TURN = "\n\n"

# Templates may trim a message or look into it, so the markup is taken from one of these and not from the text itself.
_FIRST, _ANSWER, _SECOND = "first0message", "one0answer", "second0message"
# Without a date of its own the text of some templates changes from day to day; thinking would take the answer's tokens.
_TEMPLATE_OPTIONS = {"enable_thinking": False, "date_string": "1 Jan 2025"}
_SPARE_TOKENS = 8  # of an answer, for the words and marks around what is asked for


@dataclass(frozen=True)
class Prompt:
    """One user message with the first words of its answer.

    Attributes
    ----------
    before : the message up to its question, with the blank lines between the two.
    question : the rest of the message.
    start : what the answer starts with; the model continues it. May be "".
    """

    before: str
    question: str
    start: str = ""


@dataclass(frozen=True)
class Renderer:
    """Puts the markup of a tokenizer's chat template around messages, or plain words where it has none.

    Attributes
    ----------
    tokenizer : counts tokens.
    head : stands before a message.
    tail : stands between a message and the answer.
    turn : stands between an answer and the message of the next turn.
    joint : stands between ``tail`` and the first words of an answer.
    """

    tokenizer: Any
    head: str
    tail: str
    turn: str
    joint: str = ""

    @classmethod
    def of(cls, tokenizer: Any) -> Renderer:
        """Give the renderer of a tokenizer: with its chat template if it has one.

        Raises
        ------
        EvaluationError
            If the template cannot hold a message, or not a second one behind an answer.
        """
        if not getattr(tokenizer, "chat_template", None):
            return cls(tokenizer, "", PLAIN_CUE, PLAIN_TURN, " ")
        once, twice = (_templated(tokenizer, messages) for messages in ((_FIRST,), (_FIRST, _ANSWER, _SECOND)))
        head, _, tail = once.partition(_FIRST)
        turn = twice.partition(_ANSWER)[2].partition(_SECOND)[0]
        return cls(tokenizer, head, tail or "\n", turn or PLAIN_TURN)

    @classmethod
    def bare(cls, tokenizer: Any) -> Renderer:
        """Give a renderer that adds nothing: what ``start`` holds directly follows the question."""
        return cls(tokenizer, "", "", "")

    def whole_context(self, prompt: Prompt) -> str:
        """The context that ends with the question."""
        return self.head + prompt.before + prompt.question

    def split(self, prompt: Prompt, asked: Asked) -> tuple[str, str]:
        """Give the context and what is fed behind it; both forms make the same text when joined.

        Parameters
        ----------
        prompt : the message and the first words of its answer.
        asked : "known" puts the question into the context, "after" behind it.

        Raises
        ------
        EvaluationError
            If ``asked`` is neither.
        """
        if asked == "known":
            return self.whole_context(prompt), self.opening(prompt.start)
        if asked == "after":
            return self.head + prompt.before, self.asking(prompt)
        raise EvaluationError(f"asked is {asked!r}; allowed are {', '.join(ASKED)}")

    def asking(self, prompt: Prompt) -> str:
        """The question, with all that stands between it and the model's own words."""
        return prompt.question + self.opening(prompt.start)

    def asking_again(self, prompt: Prompt) -> str:
        """The question of a further turn: it first closes the answer before it, whose end token must not be fed."""
        return self.turn + self.asking(prompt)

    def opening(self, start: str) -> str:
        """What stands between a question and the model's own words."""
        return self.tail + self.joint + start if start else self.tail

    def length(self, text: str) -> int:
        """Tokens of a text as a context."""
        return len(context_ids(self.tokenizer, text))

    def room(self, answers: Sequence[str]) -> int:
        """Tokens that a model needs to give all of these answers in one list."""
        return sum(len(self.ids(" " + answer)) + 2 for answer in answers) + _SPARE_TOKENS

    def ids(self, text: str) -> list[int]:
        """Encode a text that stands behind another."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


def context_ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a context: without special tokens but the one that the tokenizer puts before every text, once.

    Parameters
    ----------
    tokenizer : of the model that reads the context.
    text : chat markup and all; a template may have put the first token into it already.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    first = getattr(tokenizer, "bos_token_id", None)
    if first is None or tokenizer("").input_ids[:1] != [first] or ids[:1] == [first]:
        return ids
    return [first, *ids]


def _templated(tokenizer: Any, messages: Sequence[str]) -> str:
    roles = ("user", "assistant")
    chat = [{"role": roles[number % 2], "content": message} for number, message in enumerate(messages)]
    try:
        options = {"add_generation_prompt": True, "tokenize": False, **_TEMPLATE_OPTIONS}
        text: str = tokenizer.apply_chat_template(chat, **options)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EvaluationError(f"the tokenizer's chat template fails with {len(chat)} messages: {first_line}") from error
    missing = [message for message in messages if text.count(message) != 1]
    if missing:
        raise EvaluationError(
            f"the tokenizer's chat template holds {len(missing)} of {len(chat)} messages not once and unchanged; "
            "allowed are templates that show each message as it is"
        )
    return text
