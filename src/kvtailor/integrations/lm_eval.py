"""The model ``kvtailor`` for lm-eval (EleutherAI's evaluation harness): a Transformers model with a plan."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import log_softmax

from kvtailor import _compat
from kvtailor.attachment import Attachment, attach
from kvtailor.errors import EvaluationError
from kvtailor.models.load import load
from kvtailor.plan import Plan

NAME = "kvtailor"


@torch.no_grad()
def likelihood(attachment: Attachment, ids: Sequence[int], count: int) -> tuple[float, bool]:
    """How likely the last tokens of a text are behind the others, and whether they are what the model would say.

    The tokens before them are read as a prompt, and they are fed one by one, so that the plan acts on what it holds.
    (lm-eval's own model reads both in one pass, in which no cache is ever used.)

    Parameters
    ----------
    attachment : the plan on its model.
    ids : the text.
    count : tokens at its end, at least one less than there are.
    """
    model, text = attachment.model, torch.tensor([list(ids)], device=attachment.model.device)
    argument = _compat.output_cache_argument(inspect.signature(model.forward).parameters)
    serve = partial(model, use_cache=True, **{argument: attachment.new_cache()})
    rows = [serve(input_ids=text[:, :-count]).logits[0, -1]]
    for place in range(text.shape[1] - count, text.shape[1] - 1):
        rows.append(serve(input_ids=text[:, place : place + 1]).logits[0, -1])
    logits, following = torch.stack(rows).float(), text[0, -count:]
    found = log_softmax(logits, dim=-1).gather(1, following[:, None])
    return float(found.sum()), bool((logits.argmax(-1) == following).all())


def register() -> None:
    """Make the model known to lm-eval by its name; a second call does nothing.

    Raises
    ------
    EvaluationError
        If lm-eval is not installed.
    """
    try:
        from lm_eval.api.registry import model_registry, register_model
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise EvaluationError(
            f"lm-eval cannot be used: {error}; install it with its models (pip install 'lm-eval[hf]')"
        ) from None
    if NAME in model_registry:
        return

    class TailoredLM(HFLM):
        """lm-eval's model of Transformers, with a plan and, for likelihoods, with its cache.

        Parameters
        ----------
        pretrained, plan, dtype, device : model, plan, data type and device, by name.
        given : what else lm-eval hands over.
        """

        def __init__(
            self,
            pretrained: str,
            plan: str = "full",
            dtype: str = "float32",
            device: str | None = None,
            **given: Any,
        ) -> None:
            loaded = load(pretrained, getattr(torch, dtype), device or "cpu")
            self._attachment = attach(loaded.model, Plan.of(plan))
            super().__init__(pretrained=loaded.model, tokenizer=loaded.tokenizer, **given)

        def _loglikelihood_tokens(
            self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            from tqdm import tqdm

            answers = []
            for key, context, continuation in tqdm(requests, disable=disable_tqdm, desc="likelihoods with the plan"):
                ids = (context + continuation)[-self.max_length - 1 :]
                answers.append(likelihood(self._attachment, ids, min(len(continuation), len(ids) - 1)))
                self.cache_hook.add_partial("loglikelihood", key, answers[-1])
            return answers

    register_model(NAME)(TailoredLM)


def run(model: str, plan: str, dtype: str, device: str, arguments: Sequence[str]) -> None:
    """Run lm-eval's own command line with a model and a plan.

    Parameters
    ----------
    model, plan, dtype, device : by name.
    arguments : lm-eval's, such as ``--tasks arc_easy --limit 100``.

    Raises
    ------
    EvaluationError
        If lm-eval is not installed.
    """
    register()
    from lm_eval.__main__ import cli_evaluate

    named = f"pretrained={model},plan={plan},dtype={dtype}"
    with _arguments(["lm-eval", "run", "--model", NAME, "--model_args", named, "--device", device, *arguments]):
        cli_evaluate()


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    """lm-eval reads its command line from the process."""
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before
