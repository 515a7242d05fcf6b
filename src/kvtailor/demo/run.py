"""Measuring plans on one long prompt: the answer, the agreement with the default cache, bytes and time."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from kvtailor import _compat
from kvtailor.attachment import attach
from kvtailor.errors import KVTailorError
from kvtailor.estimate import length_limit
from kvtailor.models.load import Loaded
from kvtailor.models.text import python_reference
from kvtailor.plan import Plan

INTRODUCTION = "Read this part of the Python language reference."
QUESTION = "Which exception is raised when a name refers to a local variable that has not been bound?"
RIGHT = "UnboundLocalError"
DEFAULT = "default"
TABLE_PLANS = ("full", "int4", "int3", "snapkv:25%", "h2o:25%", "streaming:25%")
EVICTING = ("snapkv", "h2o", "streaming")
SHARES = (10, 25, 50)
PACKED = ("int8", "int4", "int3", "int2", "int1")


@dataclass(frozen=True)
class Measured:
    """One plan on the prompt.

    Attributes
    ----------
    plan : its name; "default" for Transformers' DynamicCache without kvtailor.
    agreement : share of the default cache's next tokens that this cache puts first too, given the same text so far.
    bytes_held, bytes_peak : at the end of the continuation, and at most.
    prefill_seconds : time of the prompt.
    token_milliseconds : time of a decode step, the median.
    answer : what greedy decoding answers, its first paragraph; None where it was not asked.
    is_right : whether the answer names what the passage names.
    is_same : whether the answer is the default cache's, word for word.
    """

    plan: str
    agreement: float
    bytes_held: int
    bytes_peak: int
    prefill_seconds: float
    token_milliseconds: float
    answer: str | None = None
    is_right: bool | None = None
    is_same: bool | None = None


@dataclass(frozen=True)
class Demo:
    """All that was measured.

    Attributes
    ----------
    model, question : what was asked of whom.
    prompt_tokens, continuation_tokens : lengths of the prompt and of the compared continuation.
    rows : the plans of the table, the default cache first.
    curves : more plans for the plot, by family: "snapkv", "h2o", "streaming" over budgets, and "packed".
    """

    model: str
    question: str
    prompt_tokens: int
    continuation_tokens: int
    rows: list[Measured]
    curves: dict[str, list[Measured]] = field(default_factory=dict)

    @property
    def bytes_default(self) -> int:
        """Bytes of the default cache at the end of the continuation."""
        return self.rows[0].bytes_held

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)


Progress = Callable[[str], None]


def run(
    loaded: Loaded,
    tokens: int = 1536,
    new_tokens: int = 32,
    plans: Sequence[str] = TABLE_PLANS,
    curves: bool = True,
    progress: Progress = lambda plan: None,
) -> Demo:
    """Ask one question about a passage of the Python language reference, with the default cache and with each plan.

    Parameters
    ----------
    loaded : a model that reads text.
    tokens : the most tokens of the prompt.
    new_tokens : tokens of the continuation that is compared, and the most of an answer.
    plans : presets or plan files, for the table.
    curves : whether to measure the plans of :func:`curve_plans` too.
    progress : called with the name of each plan before it is measured.

    Raises
    ------
    KVTailorError
        If a plan is wrong, or the prompt is longer than the model's positions or shorter than the question.
    """
    chosen = {name: Plan.of(name) for name in plans}
    chosen |= {name: Plan.of(name) for family in curve_plans().values() for name in family} if curves else {}
    prompt = question_prompt(loaded, tokens)
    runner = Runner(loaded, prompt, new_tokens)
    progress(DEFAULT)
    reference, continuation = runner.default()
    measured: dict[str, Measured] = {}
    for name, plan in chosen.items():
        progress(name)
        measured[name] = runner.tailored(plan, reference, continuation, asks=name in plans)
    return Demo(
        model=loaded.name,
        question=QUESTION,
        prompt_tokens=prompt.shape[1],
        continuation_tokens=new_tokens,
        rows=[reference, *(measured[name] for name in dict.fromkeys(plans))],
        curves={family: [measured[name] for name in names] for family, names in curve_plans().items()}
        if curves
        else {},
    )


def curve_plans() -> dict[str, tuple[str, ...]]:
    """The plans of the plot by family, from the least bytes to the most."""
    evicting = {policy: tuple(f"{policy}:{share}%" for share in SHARES) for policy in EVICTING}
    return {**evicting, "packed": tuple(reversed(PACKED))}


def plan_count(plans: Sequence[str], curves: bool) -> int:
    """How many caches :func:`run` measures, the default one included."""
    more = [name for family in curve_plans().values() for name in family] if curves else []
    return 1 + len({*plans, *more})


def question_prompt(loaded: Loaded, tokens: int) -> torch.Tensor:
    """The passage and the question as ids, (1, n) with n at most ``tokens``, on the model's device.

    Raises
    ------
    KVTailorError
        If ``tokens`` is beyond the model's positions, or leaves no room for a passage.
    """
    limit = length_limit(loaded.model.config)
    if limit is not None and tokens > limit:
        raise KVTailorError(f"--tokens {tokens} is beyond the {limit} positions of model {loaded.name!r}")
    frame = _encode(loaded, f"{INTRODUCTION}\n\n\n\n{QUESTION}").shape[1]
    if tokens <= frame:
        raise KVTailorError(f"--tokens {tokens} leaves no room beside the question: allowed are more than {frame}")
    passage = python_reference(tokens - frame, loaded.tokenizer)
    return _encode(loaded, f"{INTRODUCTION}\n\n{passage}\n\n{QUESTION}")


def _encode(loaded: Loaded, text: str) -> torch.Tensor:
    tokenizer = loaded.tokenizer
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return ids.to(loaded.model.device)


class Runner:
    """Runs one prompt with one cache after the other.

    Parameters
    ----------
    loaded : the model.
    prompt : (1, n) ids.
    new_tokens : tokens of the continuation.
    """

    def __init__(self, loaded: Loaded, prompt: torch.Tensor, new_tokens: int) -> None:
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.prompt, self.new_tokens = prompt, new_tokens
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = _compat.output_cache_argument(parameters)
        self.options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        end = self.model.generation_config.eos_token_id
        self.ends = {end} if isinstance(end, int) else set(end or ())

    def default(self) -> tuple[Measured, list[int]]:
        """Measure Transformers' own cache; gives its greedy continuation too, open-ended."""
        cache = DynamicCache(config=_compat.decoder_config(self.model.config))
        self._warm_up()
        with timed() as prefill:
            logits = self._forward(self.prompt, cache)
        answer = self._answer(copy.deepcopy(cache), logits)
        continuation, times = [], []
        for _ in range(self.new_tokens):
            continuation.append(self._open_ended(logits))
            with timed() as step:
                logits = self._forward(self._one(continuation[-1]), cache)
            times.append(step.seconds)
        held = stock_bytes(cache)
        milliseconds = 1000 * median(times)
        return Measured(
            DEFAULT, 1.0, held, held, prefill.seconds, milliseconds, answer, RIGHT in answer, True
        ), continuation

    def tailored(self, plan: Plan, reference: Measured, continuation: list[int], asks: bool) -> Measured:
        """Measure a plan against the default cache.

        Parameters
        ----------
        plan : the plan.
        reference, continuation : what :meth:`default` gave.
        asks : whether to generate the answer too.
        """
        with attach(self.model, plan) as attachment:
            cache = attachment.new_cache()
            with timed() as prefill:
                logits = self._forward(self.prompt, cache)
            answer = self._answer(copy.deepcopy(cache), logits) if asks else None
            agreed, times = 0, []
            for token in continuation:
                agreed += self._open_ended(logits) == token
                with timed() as step:
                    logits = self._forward(self._one(token), cache)
                times.append(step.seconds)
            report = cache.report()
        return Measured(
            plan=plan.name,
            agreement=agreed / len(continuation),
            bytes_held=report.bytes_held,
            bytes_peak=report.bytes_peak,
            prefill_seconds=prefill.seconds,
            token_milliseconds=1000 * median(times),
            answer=answer,
            is_right=None if answer is None else RIGHT in answer,
            is_same=None if answer is None else answer == reference.answer,
        )

    def _warm_up(self) -> None:
        self._forward(self.prompt[:, :8], DynamicCache(config=_compat.decoder_config(self.model.config)))

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self.model(input_ids=ids, use_cache=True, **{self.cache_argument: cache}, **self.options)
        logits: torch.Tensor = output.logits[0, -1]
        return logits  # (vocabulary,)

    def _one(self, token: int) -> torch.Tensor:
        return torch.tensor([[token]], device=self.prompt.device)

    def _open_ended(self, logits: torch.Tensor) -> int:
        """The most likely token that ends nothing."""
        if not self.ends:
            return int(logits.argmax())
        return int(logits.index_fill(0, torch.tensor(sorted(self.ends), device=logits.device), -torch.inf).argmax())

    def _answer(self, cache: Any, logits: torch.Tensor) -> str:
        """Greedy decoding up to the end of the first paragraph."""
        tokens: list[int] = []
        for _ in range(self.new_tokens):
            token = int(logits.argmax())
            if token in self.ends:
                break
            tokens.append(token)
            text = self.tokenizer.decode(tokens).strip()
            if "\n\n" in text:
                break
            logits = self._forward(self._one(token), cache)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return " ".join(text.split("\n\n")[0].split())


@dataclass
class Stopwatch:
    """Seconds that a block took."""

    seconds: float = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Time a block."""
    watch, begin = Stopwatch(), time.perf_counter()
    try:
        yield watch
    finally:
        watch.seconds = time.perf_counter() - begin


def stock_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values in Transformers' own cache."""
    held = (
        tensor for layer in cache.layers for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in held if isinstance(tensor, torch.Tensor))
