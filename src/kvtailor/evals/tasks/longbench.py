"""LongBench (Bai et al. 2024): 21 data sets of long texts with questions, summaries, examples and code."""

# ruff: noqa: RUF001 - Chinese questions have Chinese punctuation

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtailor.evals.rendering import Asked, Renderer
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, check_size, single
from kvtailor.evals.tasks.published import Form, Place, Row, Source, middle_cut, texts

_FIELDS = ("input", "context", "answers", "all_classes")

_PASSAGES = Form(
    "Below are several passages. Use them to answer the question behind them with as few words as possible, and write "
    "nothing but the answer.\n\n{context}\n\n",
    "Question: {input}\nAnswer from the passages above, with as few words as possible.",
    "f1",
    32,
    "Answer:",
)

FORMS = {
    "narrativeqa": Form(
        "Below is a story: a book or the script of a film. Use it to answer the question behind it with as few words "
        "as possible, and explain nothing.\n\n{context}\n\n",
        "Question: {input}\nAnswer from the story above, with as few words as possible.",
        "f1",
        128,
        "Answer:",
    ),
    "qasper": Form(
        "Below is a scientific article. Use it to answer the question behind it briefly, with a phrase or a sentence. "
        'Write "unanswerable" if the article does not say it, and "yes" or "no" to a question that asks so.\n\n'
        "{context}\n\n",
        "Question: {input}\nAnswer briefly from the article above, and explain nothing.",
        "f1",
        128,
        "Answer:",
    ),
    "multifieldqa_en": Form(
        "Read this text, then answer a question about it briefly.\n\n{context}\n\n",
        "Question: {input}\nAnswer briefly from the text above, and write nothing else.",
        "f1",
        64,
        "Answer:",
    ),
    "multifieldqa_zh": Form(
        "请先阅读这段文字，随后简短回答一个问题。\n\n{context}\n\n",
        "问题：{input}\n请根据上文简短回答，不要写其他内容。",
        "f1",
        64,
        "回答：",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": Form(
        "下面是几篇文章，请根据它们回答后面的问题。\n\n{context}\n\n",
        "问题：{input}\n请根据上面的文章作答。",
        "rouge_l",
        128,
        "答案：",
    ),
    "gov_report": Form(
        "Below is a report of a government agency. Summarize it on one page.\n\n{context}\n\n",
        "Write a summary of the report above, one page long.",
        "rouge_l",
        512,
        "Summary:",
    ),
    "qmsum": Form(
        "Below is the transcript of a meeting, and behind it a request about it. Answer it in one or a few sentences."
        "\n\n{context}\n\n",
        "Request: {input}\nAnswer from the transcript above, in one or a few sentences.",
        "rouge_l",
        512,
        "Answer:",
    ),
    "multi_news": Form(
        "Below are several news articles. Summarize all of them together on one page.\n\n{context}\n\n",
        "Write one summary of all the articles above.",
        "rouge_l",
        512,
        "Summary:",
    ),
    "vcsum": Form(
        "下面是一次会议的记录，请为它写一段总结。\n\n{context}\n\n",
        "请总结上面的会议记录。",
        "rouge_l",
        512,
        "会议总结：",
    ),
    "trec": Form(
        "Name the type of each question. Here are examples.\n\n{context}\n", "{input}", "classification", 64, chat=False
    ),
    "triviaqa": Form(
        "Answer the question from the passage with nothing but the answer. Here are examples.\n\n{context}\n\n",
        "{input}",
        "first_line_f1",
        32,
        chat=False,
    ),
    "samsum": Form(
        "Summarize each dialogue in a few short sentences. Here are examples.\n\n{context}\n\n",
        "{input}",
        "first_line_rouge_l",
        128,
        chat=False,
    ),
    "lsht": Form("请给出每条新闻的类别，以下是一些例子。\n\n{context}\n", "{input}", "classification", 64, chat=False),
    "passage_count": Form(
        "Below are numbered paragraphs from an encyclopedia, some of them more than once. Find out how many different "
        "paragraphs there are.\n\n{context}\n\n",
        "How many paragraphs are left when each that is repeated counts once? Write only the number, such as 3 or 12.",
        "count",
        32,
        "The number of different paragraphs is",
    ),
    "passage_retrieval_en": Form(
        "Below are 30 paragraphs from an encyclopedia, and behind them a summary of one of them. Find out which one it "
        "is.\n\n{context}\n\n",
        'Summary: {input}\nWhich paragraph does it summarize? Write only its number, such as "Paragraph 3".',
        "retrieval",
        32,
        "Answer:",
    ),
    "passage_retrieval_zh": Form(
        "下面有若干个段落，后面是其中一段的摘要，请找出它出自哪一段。\n\n{context}\n\n",
        "摘要：{input}\n它出自哪一段？只写段落编号，例如“段落3”。",
        "retrieval",
        32,
        "答案：",
    ),
    "lcc": Form("Complete this code.\n{context}", "{input}", "edit_similarity", 64, "Next line of code:\n", chat=False),
    "repobench-p": Form(
        "Complete this code.\n{context}", "{input}", "edit_similarity", 64, "Next line of code:\n", chat=False
    ),
}
"""Our words around the rows of each data set; the few-shot and code ones have no chat markup, as published."""


@dataclass(frozen=True)
class LongBench:
    """One of LongBench's data sets; its rows are samples, whose contexts lose their middle where they are too long.

    Attributes
    ----------
    dataset : one of ``FORMS``.
    source : a folder that holds ``DATASET.jsonl`` or ``data/DATASET.jsonl`` as published, or a name on the hub, such as
        ``THUDM/LongBench``.
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
        form = FORMS[self.dataset]
        renderer = Renderer.of(tokenizer) if form.chat else Renderer.bare(tokenizer)
        hub = {"name": self.dataset, "split": "test"}
        rows = Place(self.name, self.source, self.dataset, hub, _FIELDS).rows(count, seed)
        return [self._sample(Draw(renderer, tokens, number, seed), form, row) for number, row in enumerate(rows)]

    def _sample(self, draw: Draw, form: Form, row: Row) -> Sample:
        context = str(row["context"])
        prompt = middle_cut(self.name, draw, context, lambda left: form.prompt(left, str(row["input"])))
        answers = texts(row["answers"])
        if form.metric == "classification":
            right = answers[0]
            answers = (right, *(one for one in texts(row["all_classes"] or ()) if one != right))
        return single(
            self.name, draw, prompt, self.asked, answers, None, tokens=form.tokens, row=row.get("_id", draw.number)
        )


LONGBENCH = tuple(LongBench(f"longbench/{name}", form.metric, name) for name, form in FORMS.items())
