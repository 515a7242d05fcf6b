"""InfiniteBench (Zhang et al. 2024): texts of 100 thousand tokens and more, real and made."""

# ruff: noqa: RUF001 - Chinese questions have Chinese punctuation

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.evals.rendering import Asked, Renderer
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, check_size, single
from kvtailor.evals.tasks.published import (
    Form,
    Place,
    Row,
    Source,
    middle_cut,
    option_answers,
    options_text,
    texts,
)

_FIELDS = ("context", "input", "answer")

FORMS = {
    "passkey": Form(
        "Something important is hidden in a lot of irrelevant text. Find it and memorize it. I will ask you about it."
        "\n\n{context}\n\n",
        "{input}",
        "contains",
        16,
        "The pass key is",
    ),
    "number_string": Form(
        "A sequence of digits is hidden in a lot of irrelevant text. Find it and memorize it. I will ask you about it."
        "\n\n{context}\n\n",
        "{input}",
        "contains",
        24,
        "The sequence of digits is",
    ),
    "kv_retrieval": Form(
        "Find the value of a key in this JSON object.\n\n{context}\n\n", "{input}", "contains", 56, "The value is"
    ),
    "longbook_sum_eng": Form(
        "Below is a book. Summarize it.\n\n{context}\n\n",
        "Write a summary of the book above.",
        "rouge_l",
        1200,
        "Summary:",
    ),
    "longbook_qa_eng": Form(
        "Below is a book, and behind it a question. Answer it briefly.\n\n{context}\n\n",
        "Question: {input}\nAnswer with as few words as possible.",
        "f1",
        40,
        "Answer:",
    ),
    "longbook_qa_chn": Form(
        "下面是一本书，请在读完之后回答问题。\n\n{context}\n\n", "问题：{input}\n请尽量简短地回答。", "f1", 40, "回答："
    ),
    "longbook_choice_eng": Form(
        "Below is a book, and behind it a question with options, one of which is right.\n\n{context}\n\n",
        "Question: {input}\nWrite only the letter of the right option.",
        "choice",
        16,
        "The letter of the right option is",
    ),
    "longdialogue_qa_eng": Form(
        'Below is the script of a film in which one name is replaced by "$$MASK$$". Find out which.\n\n{context}\n\n',
        'Which name stands for "$$MASK$$"? Write only the name.',
        "contains_any",
        24,
        'The name that stands for "$$MASK$$" is',
    ),
    "math_find": Form("Find a number in a list.\n\n{context}\n\n", "{input}", "first_number", 16),
    "math_calc": Form(
        "Below is a long calculation. Work through it from left to right, and write the result of each step, with "
        "commas between the results.\n\n{context}\n\n",
        "Write the results of all steps, in order.",
        "numbers",
        4096,
        "The results are:",
    ),
    "code_run": Form(
        "Below are functions, some of which call others.\n\n{context}\n\n",
        "{input}\nWrite only the number that is returned.",
        "last_number",
        24,
        "The number that is returned is",
    ),
    "code_debug": Form(
        "Below is the code of a project, in one function of which a bug was put on purpose.\n\n{context}\n\n",
        "{input}\nWhich function has the bug? Write only the letter of the right option.",
        "choice",
        16,
        "The letter of the right option is",
    ),
}
"""Our words around the rows of each data set."""


@dataclass(frozen=True)
class InfiniteBench:
    """One of InfiniteBench's data sets; its rows are samples, whose contexts lose their middle where they are too long.

    Attributes
    ----------
    dataset : one of ``FORMS``.
    source : a folder that holds ``DATASET.jsonl`` or ``data/DATASET.jsonl`` as published, or a name on the hub, such as
        ``xinrongzhang2022/InfiniteBench``.
    asked : whether the context holds the question.
    """

    name: str
    metric: str
    dataset: str
    source: Source = None
    asked: Asked = "known"

    def samples(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> Sequence[Sample]:
        """Read samples, see :meth:`kvtailor.evals.sample.Task.samples`."""
        check_size(self.name, tokens, count)
        renderer = Renderer.of(tokenizer)
        fields = (*_FIELDS, "options") if self.metric == "choice" else _FIELDS
        rows = Place(self.name, self.source, self.dataset, {"split": self.dataset}, fields).rows(count, seed)
        return [self._sample(Draw(renderer, tokens, number, seed), row) for number, row in enumerate(rows)]

    def _sample(self, draw: Draw, row: Row) -> Sample:
        form = FORMS[self.dataset]
        asked, answers = str(row["input"]), texts(row["answer"])
        if form.metric == "choice":
            answers = option_answers(self.name, row, row["answer"], row["options"])
            asked = f"{asked}\n{options_text(row['options'])}".strip()
        prompt = middle_cut(self.name, draw, str(row["context"]), lambda left: form.prompt(left, asked))
        return single(
            self.name, draw, prompt, self.asked, answers, None, tokens=form.tokens, row=row.get("id", draw.number)
        )


INFINITEBENCH = tuple(InfiniteBench(f"infinitebench/{name}", form.metric, name) for name, form in FORMS.items())
