"""Questions about the Python language reference, whose paragraph is hidden among others."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Asked, Prompt
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, place, single
from kvtailor.evals.tasks.filling import Passage, hide, reference

_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Pair:
    """A question with what answers it.

    Attributes
    ----------
    question : about one paragraph.
    answer : words of that paragraph.
    mark : other words of it, by which it is found; blanks and line ends are the same.
    """

    question: str
    answer: str
    mark: str


PAIRS = (
    Pair("What is a code block executed in?", "execution frame", "A code block is executed in an"),
    Pair(
        "What is a variable called that is used in a code block but not defined there?",
        "free variable",
        "If a variable is used in a code block but not defined there",
    ),
    Pair(
        "Which exception is raised when a local variable is used that has not yet been bound to a value?",
        "UnboundLocalError",
        "has not yet been bound to a value at the point",
    ),
    Pair(
        "Which exception is raised at compile time if a name in a nonlocal statement exists in no enclosing function?",
        "SyntaxError",
        "is raised at compile time if the given name does not exist in any enclosing function scope",
    ),
    Pair(
        "Which model of error handling does Python use?",
        "termination",
        "an exception handler can find out what happened and continue execution at an outer level",
    ),
    Pair(
        "For which exception does the interpreter print no stack traceback when it is not handled?",
        "SystemExit",
        "In either case, it prints a stack traceback, except when the exception is",
    ),
    Pair(
        "Through which read-only attribute can the real part of a complex number be retrieved?",
        "z.real",
        "can be retrieved through the read-only attributes",
    ),
    Pair(
        "Of which type is the Boolean type a subtype?",
        "integer",
        "The Boolean type is a subtype of the",
    ),
    Pair("Which order do dictionaries preserve?", "insertion", "Dictionaries preserve"),
    Pair(
        "Which built-in constructor creates an immutable set?",
        "frozenset",
        "it can be used again as an element of another set, or as a dictionary key",
    ),
    Pair(
        "What kind of method is __new__(), although it need not be declared as such?",
        "static method",
        "special-cased so you need not declare it as such",
    ),
    Pair(
        "Apart from a destructor, what is the method __del__() also called?",
        "finalizer",
        "Called when the instance is about to be destroyed",
    ),
    Pair(
        "What is it called when __del__() postpones the destruction of an instance by creating a new reference to it?",
        "resurrection",
        "method to postpone destruction of the instance by creating a new reference to it",
    ),
    Pair(
        "What later detects and deletes reference cycles in CPython?",
        "garbage collector",
        "It is possible for a reference cycle to prevent the reference count of an object from going to zero",
    ),
    Pair(
        "Where is a warning printed when an exception occurs during the execution of __del__()?",
        "sys.stderr",
        "Due to the precarious circumstances under which",
    ),
    Pair(
        "With which standard does the behavior of not-a-number values in comparisons comply?",
        "IEEE 754",
        "Any ordered comparison of a number to a not-a-number value is false",
    ),
    Pair(
        "In which way do sequences compare, using comparison of corresponding elements?",
        "lexicographically",
        "The built-in containers typically assume identical objects are equal to themselves",
    ),
    Pair(
        "Which function do C implementations of built-in functions use to parse arguments that have no keyword?",
        "PyArg_ParseTuple",
        "An implementation may provide built-in functions whose positional parameters do not have names",
    ),
    Pair(
        "What is the number of the PEP that proposed any number of * and ** unpackings in function calls?",
        "448",
        "Function calls accept any number of",
    ),
    Pair(
        "What is the source character set if no encoding declaration is given in the source file?",
        "UTF-8",
        "The source character set is defined by the encoding declaration",
    ),
    Pair(
        "Octal escapes with a value larger than which one produce a DeprecationWarning?",
        "0o377",
        "Octal escapes with value larger than",
    ),
    Pair(
        "What is the number of the PEP about bringing back the unicode legacy literal u'value'?",
        "414",
        "Support for the unicode legacy literal",
    ),
    Pair(
        'For the use of the name "_" in internationalization, the documentation of which module is referred to?',
        "gettext",
        "is often used in conjunction with internationalization",
    ),
    Pair(
        "What are the names defined by the interpreter informally known as?",
        "dunder",
        "These names are defined by the interpreter and its implementation",
    ),
    Pair(
        "Into which form are class-private names re-written?",
        "mangled",
        "when used within the context of a class definition, are re-written",
    ),
    Pair(
        "Which module includes the Unicode Character Database that classifies characters of identifiers?",
        "unicodedata",
        "introduces additional characters from outside the ASCII range",
    ),
    Pair(
        "What are identifiers called that are only reserved under specific contexts?",
        "soft keyword",
        "Some identifiers are only reserved under specific contexts",
    ),
    Pair(
        "In which module is the variable stored that holds the interactive interpreter's last result?",
        "builtins",
        "the interactive interpreter makes the result of the last evaluation available",
    ),
    Pair(
        "Which runtime cost does building up a sequence by repeated concatenation have in the total length?",
        "quadratic",
        "Concatenating immutable sequences always results in a new object",
    ),
    Pair(
        "What is similar to lowercasing but more aggressive?",
        "casefolding",
        "is similar to lowercasing but more aggressive",
    ),
    Pair(
        "Which locale category does formatting a number with the type n temporarily set?",
        "LC_CTYPE",
        "the function temporarily sets the",
    ),
    Pair(
        "Which code point is an example of a decimal character that is not one of the ASCII digits?",
        "U+0660",
        "Decimal characters are those that can be used to form numbers in base 10",
    ),
    Pair(
        "Which numbers are an example of digits that cannot be used to form numbers in base 10?",
        "Kharosthi",
        "This covers digits which cannot be used to form numbers in base 10",
    ),
    Pair(
        "Which code point is the vulgar fraction one fifth?",
        "U+2155",
        "Numeric characters include digit characters",
    ),
    Pair(
        "The __class__ attribute of a module can be set to a subclass of what?",
        "types.ModuleType",
        "For a more fine grained customization of the module behavior",
    ),
    Pair(
        "Which module is used by the extension interface of the debugger, besides cmd?",
        "bdb",
        "This is currently undocumented but easily understood by reading the source",
    ),
    Pair(
        "Through which module is tab-completion available for the debugger's commands?",
        "readline",
        "is available for commands and command arguments, e.g. the current global and local names are offered",
    ),
    Pair(
        "For which signal does the debugger set a handler when it is given the continue command?",
        "SIGINT",
        "By default, Pdb sets a handler for the",
    ),
    Pair(
        "How many lines around the current line does the debugger list without arguments?",
        "11",
        "List source code for the current file. Without arguments, list",
    ),
)
"""Questions about paragraphs of the reference of Python 3.11; other versions lack some of them."""


@dataclass(frozen=True)
class ReferenceQuestions(Drawn):
    """A question that one paragraph of the Python language reference answers in a few words.

    The paragraph stands among others of the reference in which the answer's words do not occur. Each question comes
    once before any comes again, in an order that depends on the seed. Large models know some answers without the text.
    Ours.

    Attributes
    ----------
    asked : whether the context holds the question.
    """

    name: str = "qa"
    metric: str = "contains"
    asked: Asked = "known"

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        pairs = answerable()
        order = random.Random(f"{self.name}/{draw.seed}").sample(range(len(pairs)), len(pairs))
        pair, paragraph = pairs[order[draw.number % len(pairs)]]
        others = [text for text in reference() if pair.answer.lower() not in text.lower()]
        passage = Passage(others, draw.random(self.name).randrange(len(others)))

        def build(units: int) -> Prompt:
            text = hide(passage.parts(units), [(draw.depth(), paragraph)], "\n\n")
            return Prompt(
                f"Read the following parts of the Python language reference. I will ask about them.\n\n{text}\n\n",
                f"Answer this question with a few words of the text: {pair.question}",
            )

        prompt = filled(self.name, draw, build)
        depth = round(place(prompt.before, paragraph), 4)
        answers, tokens = (pair.answer,), _ANSWER_TOKENS
        return single(self.name, draw, prompt, self.asked, answers, depth, tokens=tokens, question=pair.question)


@lru_cache(maxsize=1)
def answerable() -> tuple[tuple[Pair, str], ...]:
    """The pairs whose paragraph the reference of the running Python has, with that paragraph.

    Raises
    ------
    EvaluationError
        If there are none.
    """
    flat = [(" ".join(text.split()), text) for text in reference()]
    found = []
    for pair in PAIRS:
        texts = [text for words, text in flat if pair.mark in words and pair.answer.lower() in words.lower()]
        if texts:
            found.append((pair, texts[0]))
    if not found:
        raise EvaluationError("task 'qa': the language reference of this Python has none of the paragraphs asked about")
    return tuple(found)


QA = (ReferenceQuestions(),)
