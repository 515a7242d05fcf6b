"""SCBench (Li et al. 2024): several questions about one long context, in turns or apart."""

# ruff: noqa: RUF001 - Chinese questions have Chinese punctuation

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Prompt, Renderer
from kvtailor.evals.sample import Ask, Ordering, Sample
from kvtailor.evals.tasks.base import Draw, check_size
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

_CHOICE = "{input}\nWrite only the letter of the right option."

FORMS = {
    "scbench_kv": Form(
        "Below is a JSON object. I will ask you for values of its keys.\n\n{context}\n\n",
        "{input}",
        "contains",
        64,
        "The value is",
    ),
    "scbench_prefix_suffix": Form(
        "Below are strings. I will ask you for the one that begins and ends in a certain way.\n\n{context}\n\n",
        "{input}",
        "contains",
        128,
        "The string is",
    ),
    "scbench_vt": Form(
        "Variables are set within the following text. Keep track of what each of them holds.\n\n{context}\n\n",
        "{input}",
        "contains",
        64,
    ),
    "scbench_repoqa": Form(
        "Below is the code of a project. I will describe functions of it, which you are to find.\n\n{context}\n\n",
        "{input}\nWrite the function exactly as it stands in the code.",
        "rouge_l",
        1024,
    ),
    "scbench_qa_eng": Form(
        "Below is a book. I will ask you about it; answer briefly.\n\n{context}\n\n",
        "Question: {input}\nAnswer with as few words as possible.",
        "f1",
        40,
        "Answer:",
    ),
    "scbench_qa_chn": Form(
        "下面是一本书，我会就它提问，请简短回答。\n\n{context}\n\n",
        "问题：{input}\n请尽量简短地回答。",
        "f1",
        40,
        "回答：",
    ),
    "scbench_choice_eng": Form(
        "Below is a book. I will ask you questions with options, one of which is right.\n\n{context}\n\n",
        "Question: " + _CHOICE,
        "choice",
        16,
        "The letter of the right option is",
    ),
    "scbench_many_shot": Form(
        "Below are examples of questions with their right options. I will ask you more of them.\n\n{context}\n\n",
        _CHOICE,
        "choice",
        16,
        "The letter of the right option is",
    ),
    "scbench_summary": Form(
        "Below are documents. I will ask you to summarize some of them.\n\n{context}\n\n",
        "{input}",
        "rouge_l",
        512,
        "Summary:",
    ),
    "scbench_mf": Form(
        "Below is a list of numbers. I will ask you to find some of them.\n\n{context}\n\n",
        "{input}\nWrite only the number.",
        "first_number",
        16,
        "The number is",
    ),
}
"""Our words around the rows of each data set; the two that score their turns in different ways are left out."""


@dataclass(frozen=True)
class SCBench:
    """One of SCBench's data sets; its rows are samples, whose contexts lose their middle where they are too long.

    Functions of ``scbench_repoqa`` are scored by ROUGE-L, where SCBench counts those that are similar enough.

    Attributes
    ----------
    dataset : one of ``FORMS``.
    source : a folder that holds ``DATASET.jsonl`` or ``data/DATASET.jsonl`` as published, or a name on the hub, such as
        ``microsoft/SCBench``.
    ordering : "turns": each question stands behind those before it and their answers; "apart": each alone.
    """

    name: str
    metric: str
    dataset: str
    source: Source = None
    ordering: Ordering = "turns"

    def samples(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> Sequence[Sample]:
        """Read samples, see :meth:`kvtailor.evals.sample.Task.samples`."""
        check_size(self.name, tokens, count)
        renderer = Renderer.of(tokenizer)
        hub = {"name": self.dataset, "split": "test"}
        rows = Place(self.name, self.source, self.dataset, hub, ("context", "multi_turns")).rows(count, seed)
        return [self._sample(Draw(renderer, tokens, number, seed), row) for number, row in enumerate(rows)]

    def _sample(self, draw: Draw, row: Row) -> Sample:
        form, renderer = FORMS[self.dataset], draw.renderer
        turns = self._turns(row)
        before = middle_cut(
            self.name, draw, str(row["context"]), lambda left: Prompt(form.prompt(left, "").before, "")
        ).before
        asks = []
        for number, turn in enumerate(turns):
            prompt, answers = self._asked(form, row, turn)
            again = number > 0 and self.ordering == "turns"
            text = renderer.asking_again(prompt) if again else renderer.asking(prompt)
            asks.append(Ask(text, answers, form.tokens))
        context = renderer.head + before
        settings = draw.settings(context, depth=None, row=row.get("id", draw.number), turns=len(turns))
        return Sample(self.name, draw.number, context, tuple(asks), self.ordering, settings)

    def _asked(self, form: Form, row: Row, turn: Mapping[str, Any]) -> tuple[Prompt, tuple[str, ...]]:
        asked, answers, options = str(turn["input"]), texts(turn["answer"]), turn.get("options")
        if form.metric == "choice" and options:
            answers = option_answers(self.name, row, turn["answer"], options)
            asked = f"{asked}\n{options_text(options)}"
        return form.prompt("", asked), answers

    def _turns(self, row: Row) -> Sequence[Mapping[str, Any]]:
        turns: Any = row["multi_turns"]
        is_list = isinstance(turns, Sequence) and not isinstance(turns, str) and len(turns) > 0
        if not is_list or not all(isinstance(turn, Mapping) and {"input", "answer"} <= set(turn) for turn in turns):
            raise EvaluationError(
                f"task {self.name!r}: {row['where']} has a broken 'multi_turns'; allowed is a list of turns with "
                "'input' and 'answer'"
            )
        return list(turns)


SCBENCH = tuple(SCBench(f"scbench/{name.removeprefix('scbench_')}", form.metric, name) for name, form in FORMS.items())
