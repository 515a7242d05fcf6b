"""How an answer is scored: a number from 0 (wrong) to 1 (right)."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from kvtailor.errors import EvaluationError
from kvtailor.evals.sample import Ask

Metric = Callable[[str, Ask], float]

_ARTICLES = {"a", "an", "the"}
_CHINESE = r"\u3400-\u9fff"
_WORD = re.compile(rf"[{_CHINESE}]|[^\s{_CHINESE}]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_INTEGER = re.compile(r"(?<![\d.])-?\d+(?!\.?\d)")


def contains(answer: str, ask: Ask) -> float:
    """Share of the expected answers that the answer contains; letter case is ignored.

    Source: RULER (Hsieh et al. 2024), string match of all.
    """
    found = answer.lower()
    expected = _expected(ask, "contains")
    return sum(one.lower() in found for one in expected) / len(expected)


def contains_any(answer: str, ask: Ask) -> float:
    """1 if the answer contains any of the expected answers; letter case is ignored.

    Source: RULER (Hsieh et al. 2024), string match of a part.
    """
    found = answer.lower()
    return float(any(one.lower() in found for one in _expected(ask, "contains_any")))


def first_line_exact(answer: str, ask: Ask) -> float:
    """1 if the answer's first line is one of the expected answers; letter case counts, outer blanks do not.

    Here and below the first line is the first that is not blank.
    """
    return float(first_line(answer).strip() in {one.strip() for one in _expected(ask, "first_line_exact")})


def edit_similarity(answer: str, ask: Ask) -> float:
    """How similar the answer's first line is to the nearest expected answer; letter case counts, outer blanks do not.

    It is 1 - d / (n + m) for lines of n and m characters and d insertions and deletions between them: the similarity
    that code completion is scored with (CodeXGLUE, Lu et al. 2021; LongBench, Bai et al. 2024).
    """
    line = first_line(answer).strip()
    return max(_similarity(line, one.strip()) for one in _expected(ask, "edit_similarity"))


def f1(answer: str, ask: Ask) -> float:
    """F1 of words against the nearest expected answer, without articles, punctuation and letter case.

    Words count as often as they occur; each Chinese character is a word. Source: SQuAD (Rajpurkar et al. 2016), used by
    LongBench, which has Chinese text cut into words instead.
    """
    return max(_f1(answer, one) for one in _expected(ask, "f1"))


def rouge_l(answer: str, ask: Ask) -> float:
    """F1 of the longest common subsequence of words with the nearest expected answer; letter case is ignored.

    Each Chinese character is a word. Source: ROUGE-L (Lin 2004) at beta 1, over the whole text.
    """
    found = _WORD.findall(answer.lower())
    return max(_rouge(found, _WORD.findall(one.lower())) for one in _expected(ask, "rouge_l"))


def first_line_f1(answer: str, ask: Ask) -> float:
    """:func:`f1` of the answer's first line: LongBench's few-shot questions, behind which models write more of them."""
    return f1(first_line(answer), ask)


def first_line_rouge_l(answer: str, ask: Ask) -> float:
    """:func:`rouge_l` of the answer's first line: LongBench's few-shot summaries."""
    return rouge_l(first_line(answer), ask)


def classification(answer: str, ask: Ask) -> float:
    """Whether the answer's first line names the right class, shared among all that it names; letter case counts.

    The first expected answer is the right class, the others are the wrong ones. A class whose name is part of the right
    one's does not count as named. Source: LongBench (Bai et al. 2024).
    """
    right, *wrong = _expected(ask, "classification")
    line = first_line(answer)
    if right not in line:
        return 0.0
    return 1 / (1 + sum(one in line and one not in right for one in wrong))


def count(answer: str, ask: Ask) -> float:
    """Share of the whole numbers in the answer that are the expected one. Source: LongBench (Bai et al. 2024)."""
    return _share_of_numbers(answer, _expected(ask, "count")[0])


def retrieval(answer: str, ask: Ask) -> float:
    """Share of the whole numbers in the answer that are the number in the expected answer, such as "Paragraph 12".

    Source: LongBench (Bai et al. 2024).
    """
    expected = _expected(ask, "retrieval")[0]
    number = re.search(r"\d+", expected)
    if number is None:
        raise EvaluationError(f"metric 'retrieval' has the expected answer {expected!r}; allowed is one with a number")
    return _share_of_numbers(answer, number.group())


def choice(answer: str, ask: Ask) -> float:
    """1 if the answer chooses the right option, by letter or by words.

    The first expected answer is the right letter, a capital; others are the option's words. The first capital letter
    from A to D that stands alone is the choice; without one, words are looked for without letter case.
    """
    letter, *words = _expected(ask, "choice")
    chosen = re.search(r"(?<![A-Za-z'])[A-D](?![A-Za-z'])", answer)
    if chosen:
        return float(chosen.group() == letter)
    return float(any(one.lower() in answer.lower() for one in words if one))


def first_number(answer: str, ask: Ask) -> float:
    """1 if the first number in the answer equals the expected one. Source: InfiniteBench (Zhang et al. 2024)."""
    return _equals(_NUMBER.findall(answer)[:1], _expected(ask, "first_number")[0])


def last_number(answer: str, ask: Ask) -> float:
    """1 if the last number in the answer equals the expected one. Source: InfiniteBench (Zhang et al. 2024)."""
    return _equals(_NUMBER.findall(answer)[-1:], _expected(ask, "last_number")[0])


def numbers(answer: str, ask: Ask) -> float:
    """Share of the expected whole numbers, in order, that the answer gives before its first wrong one.

    Source: InfiniteBench (Zhang et al. 2024), for chains of calculations.
    """
    expected = _expected(ask, "numbers")
    right = 0
    for found, one in zip(_INTEGER.findall(answer), expected, strict=False):
        if found != one:
            break
        right += 1
    return right / len(expected)


METRICS: dict[str, Metric] = {
    one.__name__: one
    for one in (
        contains,
        contains_any,
        first_line_exact,
        edit_similarity,
        f1,
        rouge_l,
        first_line_f1,
        first_line_rouge_l,
        classification,
        count,
        retrieval,
        choice,
        first_number,
        last_number,
        numbers,
    )
}


def metric(name: str) -> Metric:
    """Give a metric by name.

    Raises
    ------
    EvaluationError
        If there is none; the loss of the text that follows a context, "following", is no metric of an answer.
    """
    if name not in METRICS:
        close = get_close_matches(name, METRICS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise EvaluationError(f"no metric {name!r} of answers{meant}; allowed are {', '.join(METRICS)}")
    return METRICS[name]


def first_line(answer: str) -> str:
    """The first line that is not blank, or ""."""
    return next((line for line in answer.splitlines() if line.strip()), "")


def common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    The row of the textbook's table is kept as the bits of one integer, so a step costs an addition. Source: Hyyrö 2004,
    "Bit-parallel LCS-length computation revisited".
    """
    places: dict[str, int] = {}
    for number, item in enumerate(first):
        places[item] = places.get(item, 0) | 1 << number
    every = (1 << len(first)) - 1
    row = every
    for item in second:
        matches = row & places.get(item, 0)
        row = (row + matches | row - matches) & every
    return len(first) - row.bit_count()


def _expected(ask: Ask, name: str) -> tuple[str, ...]:
    if not ask.answers:
        raise EvaluationError(f"metric {name!r} has no expected answer; allowed is one or more")
    return ask.answers


def _equals(found: Sequence[str], expected: str) -> float:
    if _NUMBER.fullmatch(expected) is None:
        raise EvaluationError(f"a metric of numbers has the expected answer {expected!r}; allowed is a number")
    return float(any(float(one) == float(expected) for one in found))


def _similarity(first: str, second: str) -> float:
    total = len(first) + len(second)
    return 2 * common_subsequence(first, second) / total if total else 1.0


def _f1(answer: str, expected: str) -> float:
    found, wanted = (Counter(_plain_words(text)) for text in (answer, expected))
    return _mean(sum((found & wanted).values()), found.total(), wanted.total())


def _rouge(found: Sequence[str], wanted: Sequence[str]) -> float:
    return _mean(common_subsequence(found, wanted), len(found), len(wanted))


def _mean(common: int, found: int, wanted: int) -> float:
    """Harmonic mean of precision and recall; two empty texts are the same."""
    return 2 * common / (found + wanted) if found + wanted else 1.0


def _plain_words(text: str) -> list[str]:
    bare = "".join(sign for sign in text.lower() if not _is_punctuation(sign))
    return [word for word in _WORD.findall(bare) if word not in _ARTICLES]


def _is_punctuation(sign: str) -> bool:
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")


def _share_of_numbers(answer: str, expected: str) -> float:
    found = re.findall(r"\d+", answer)
    return found.count(expected) / len(found) if found else 0.0
