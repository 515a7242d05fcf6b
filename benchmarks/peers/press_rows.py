"""Other caches on the samples of a comparison: kvpress's presses and Transformers' quantized caches, as its rows.

    benchmarks/peers/setup.sh kvpress
    kvtailor compare smollm2 … --out out
    build/peers/kvpress/bin/python benchmarks/peers/press_rows.py build/peers/smollm2 out --out build/peers/presses
    kvtailor compare smollm2 … --out out --with build/peers/presses

Runs in an environment of its own (see README.md): kvpress 0.5.5 needs an older Transformers than kvtailor. A context is
read once; each press then compresses what it would have seen: its hook changes no layer's output, so this is the same
as reading the context once more with each press. As in the comparison the context's last token is fed with the
question. Bytes are those of the tensors in the cache: presses that only mask tokens hold everything.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
from kvtailor.evals.metrics import metric  # needs neither torch nor Transformers
from kvtailor.evals.rendering import context_ids
from kvtailor.evals.sample import Ask

FORMAT = 1
FOLLOWING = "following"
PRESSES: dict[str, Callable[[], Any]] = {
    "SnapKV": kvpress.SnapKVPress,
    "PyramidKV": kvpress.PyramidKVPress,
    "AdaKV(SnapKV)": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress()),
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
    "KVzip": kvpress.KVzipPress,
    "KeyDiff": kvpress.KeyDiffPress,
    "TOVA": kvpress.TOVAPress,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "Knorm": kvpress.KnormPress,
}
# Whose plans of the comparison hold tokens by the same method.
SAME = {
    "SnapKV": "snapkv",
    "KeyDiff": "keydiff",
    "PyramidKV": "pyramidkv",
    "AdaKV(SnapKV)": "adakv",
    "Knorm": "keynorm",
}
QUANTIZED = {"quanto 4-bit": 4, "quanto 2-bit": 2}
"""Bits by name. HQQ's form cannot hold contexts of some odd lengths, so it is not among them."""


def main() -> None:
    """Answer every question of the samples with every cache."""
    asked = arguments()
    torch.set_grad_enabled(False)
    runner = Runner(asked)
    done = known(asked.out)
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / "rows.jsonl").open("a", encoding="utf-8") as file:
        for sample in samples(asked.ours, asked.tasks):
            for rows in runner.rows(sample, done):
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder that export_model.py wrote")
    parser.add_argument("ours", type=Path, help="the folder of a comparison")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the rows; goes on where it was")
    parser.add_argument("--press", action="append", help=f"default: {', '.join(PRESSES)}")
    parser.add_argument("--quantized", action="append", default=[], help=f"of {', '.join(QUANTIZED)}; default: none")
    parser.add_argument("--budgets", default="0.5,0.25,0.1", help="shares of the tokens")
    parser.add_argument("--tasks", default="", help="with commas; default: all of the comparison")
    parser.add_argument("--dtype", default="bfloat16", help="of the cache and of decoding")
    parser.add_argument(
        "--equal", action="store_true", help="hold the bytes that the comparison's own plan of the same method held"
    )
    return parser.parse_args()


def samples(folder: Path, tasks: str) -> Iterator[dict[str, Any]]:
    """The samples of a comparison."""
    wanted = {name for name in tasks.split(",") if name}
    for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        if not wanted or sample["task"] in wanted:
            yield sample


def known(folder: Path) -> set[tuple[Any, ...]]:
    """What an earlier run measured."""
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(row["task"], row["tokens"], row["sample"], row["plan"], row["budget"]) for row in rows}


class Runner:
    """The model in float32 to read contexts, and in the cache's data type to answer.

    Parameters
    ----------
    asked : the arguments.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.tokenizer = AutoTokenizer.from_pretrained(asked.model)
        self.reader = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).eval()
        self.dtype = getattr(torch, asked.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=self.dtype).eval()
        self.ends = self.model.generation_config.eos_token_id
        self.ends = {self.ends} if isinstance(self.ends, int) else set(self.ends or ())
        self.presses = {name: PRESSES[name] for name in asked.press or PRESSES}
        self.budgets = [float(budget) for budget in asked.budgets.split(",")]
        self.metrics = {}
        self.shares: dict[tuple[Any, ...], float] = {}
        for line in (asked.ours / "rows.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            self.metrics[row["task"]] = row["metric"]
            place = row["task"], row["tokens"], row["sample"], row["plan"], row["budget"]
            self.shares[place] = row["bytes_held"] / row["bytes_default"]
        self.run = {
            "model": asked.model.name,
            "dtype": asked.dtype,
            "read_dtype": "float32",
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "versions": {
                "kvpress": __import__("importlib.metadata").metadata.version("kvpress"),
                "torch": str(torch.__version__),
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }

    def rows(self, sample: dict[str, Any], done: set[tuple[Any, ...]]) -> Iterator[list[dict[str, Any]]]:
        """The rows of one sample, cache by cache."""
        place = sample["task"], sample["tokens"], sample["number"]
        missing = [
            (name, budget) for name in self.presses for budget in self.budgets if (*place, name, budget) not in done
        ]
        quantized = [name for name in self.asked.quantized if (*place, name, None) not in done]
        if not missing and not quantized:
            return
        context = Context(self, sample)
        for name, budget in missing:
            share = budget
            if self.asked.equal and name in SAME:
                share = self.shares.get((*place, SAME[name], budget), budget)
            begin = time.perf_counter()
            cache = context.compressed(name, share)
            yield self.answered(sample, context, "kvpress", name, budget, cache, time.perf_counter() - begin, share)
        for name in quantized:
            begin = time.perf_counter()
            cache = context.quantized(QUANTIZED[name])
            yield self.answered(sample, context, "transformers", name, None, cache, time.perf_counter() - begin, 1.0)

    def answered(
        self,
        sample: dict[str, Any],
        context: Context,
        engine: str,
        name: str,
        budget: float | None,
        cache: Any,
        seconds: float,
        share: float,
    ) -> list[dict[str, Any]]:
        """A row for each question."""
        held, rows = held_bytes(cache), []
        kind = self.metrics[sample["task"]]
        last, position, turns = context.ids[:, -1:], context.length - 1, sample["ordering"] == "turns"
        for number, ask in enumerate(sample["asks"]):
            own = cache if turns or number + 1 == len(sample["asks"]) else copy.deepcopy(cache)
            if kind == FOLLOWING:
                told = self.followed(own, context)
            else:
                fed = torch.cat([last, self.encoded(ask["text"])], dim=1)
                told = self.say(own, fed, position, ask["tokens"])
                if turns:
                    position += fed.shape[1] + max(0, len(told["ids"]) - 1)
                    last = torch.tensor([told["unfed"]], dtype=torch.long)
            scored = told["loss"] if kind == FOLLOWING else metric(kind)(told["text"], Ask(**as_ask(ask)))
            rows.append(
                {
                    "format": FORMAT,
                    "engine": engine,
                    "plan": name,
                    "budget": budget,
                    "settings": {"tokens kept": share, "masked": context.masks},
                    "task": sample["task"],
                    "metric": kind,
                    "tokens": sample["tokens"],
                    "sample": sample["number"],
                    "ask": number,
                    "depth": ask["depth"],
                    "context_tokens": context.length,
                    "score": scored,
                    "answer": told["text"],
                    "expected": [] if kind == FOLLOWING else ask["answers"],
                    "kl": told.get("kl"),
                    "agreement": told.get("agreement"),
                    "bytes_held": held,
                    "bytes_fast": held,
                    "bytes_on_disk": 0,
                    "bytes_peak": held,
                    "bytes_default": context.default_bytes,
                    "read_seconds": context.seconds,
                    "compress_seconds": seconds,
                    "token_ms": told["ms"],
                    "tokens_answered": told["count"],
                    "kept": [],
                    "run": self.run,
                }
            )
        return rows

    def encoded(self, text: str) -> torch.Tensor:
        """Ids (1, n) of a text behind another."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if text else []
        return torch.tensor([ids], dtype=torch.long)

    def step(self, cache: Any, ids: torch.Tensor, position: int) -> torch.Tensor:
        """Logits (n, vocabulary) behind tokens that stand at a position of the whole text."""
        places = torch.arange(position, position + ids.shape[1])[None]
        return self.model(input_ids=ids, past_key_values=cache, position_ids=places, use_cache=True).logits[0].float()

    def say(self, cache: Any, ids: torch.Tensor, position: int, count: int) -> dict[str, Any]:
        """Greedy decoding, as in the comparison."""
        said, unfed, times = [], [], []
        for token in ids.split(1, dim=1):  # one by one: a mask for several is wrong where layers differ in length
            logits = self.step(cache, token, position)[-1]
            position += 1
        while len(said) < count:
            token = int(logits.argmax())
            unfed = [token]
            if token in self.ends:
                unfed = []
                break
            said.append(token)
            if len(said) == count:
                break
            begin = time.perf_counter()
            logits = self.step(cache, torch.tensor([[token]]), position)[-1]
            times.append(time.perf_counter() - begin)
            position += 1
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return {
            "text": text,
            "ids": said,
            "unfed": unfed,
            "count": len(said),
            "ms": 1000 * median(times) if times else 0.0,
        }

    def followed(self, cache: Any, context: Context) -> dict[str, Any]:
        """Loss of the tokens that follow the context, fed one by one."""
        fed, rows, times = torch.cat([context.ids[:, -1:], context.following], dim=1), [], []
        for place in range(fed.shape[1] - 1):
            begin = time.perf_counter()
            rows.append(self.step(cache, fed[:, place : place + 1], context.length - 1 + place)[-1])
            times.append(time.perf_counter() - begin)
        logits = torch.stack(rows).double().log_softmax(-1)
        exact = context.exact.double().log_softmax(-1)
        return {
            "text": "",
            "loss": float(torch.nn.functional.nll_loss(logits, context.following[0])),
            "kl": max(0.0, float((exact.exp() * (exact - logits)).sum(-1).mean())),
            "agreement": float((logits.argmax(-1) == exact.argmax(-1)).double().mean()),
            "count": context.following.shape[1],
            "ms": 1000 * median(times),
        }


class Context:
    """A context as the model read it, once.

    Parameters
    ----------
    runner : the models.
    sample : holds the context.
    """

    def __init__(self, runner: Runner, sample: dict[str, Any]) -> None:
        self.runner, self.masks = runner, False
        self.ids = torch.tensor([context_ids(runner.tokenizer, sample["context"])])
        self.length = self.ids.shape[1]
        self.layers = runner.reader.model.layers
        begin = time.perf_counter()
        self.seen, self.cache = self._read(self.ids[:, :-1])
        self.seconds = time.perf_counter() - begin
        self.default_bytes = sum(2 * keys.numel() * runner.dtype.itemsize for _, _, keys, *_ in self.seen)
        self.scores: torch.Tensor | None = None
        if runner.metrics[sample["task"]] == FOLLOWING:
            self.following = runner.encoded(sample["asks"][0]["answers"][0])
            whole = torch.cat([self.ids, self.following], dim=1)
            self.exact = runner.reader(whole, use_cache=False).logits[0, self.length - 1 : -1].float()

    def _read(self, ids: torch.Tensor) -> tuple[list[Any], DynamicCache]:
        """What a press's hook would be given, layer by layer."""
        seen: list[Any] = []
        cache = DynamicCache()

        def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            layer = cache.layers[module.layer_idx]
            seen.append((module, kwargs["hidden_states"], layer.keys, layer.values, kwargs))

        for layer in self.layers:
            layer.self_attn.rotary_emb = self.runner.reader.model.rotary_emb
        hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in self.layers]
        try:
            self.runner.reader.model(input_ids=ids, past_key_values=cache)
        finally:
            for hook in hooks:
                hook.remove()
        return seen, cache

    def compressed(self, name: str, share: float) -> DynamicCache:
        """The cache that a press leaves, in the data type of answers."""
        press = self.runner.presses[name]()
        self._mask(None)
        press.compression_ratio = 1 - share
        if name == "KVzip":
            self._zip(press)
            parts = [(keys, values) for _, _, keys, values, _ in self.seen]
        else:
            press.post_init_from_model(self.runner.reader)
            parts = [
                press.compress(module, hidden, keys, values, None, kwargs)
                for module, hidden, keys, values, kwargs in self.seen
            ]
        self.masks = any(getattr(layer.self_attn, "masked_key_indices", None) is not None for layer in self.layers)
        for layer, answering in zip(self.layers, self.runner.model.model.layers, strict=True):
            answering.self_attn.masked_key_indices = getattr(layer.self_attn, "masked_key_indices", None)
        cache = DynamicCache()
        for number, (keys, values) in enumerate(parts):
            cache.update(keys.to(self.runner.dtype).clone(), values.to(self.runner.dtype).clone(), number)
        return cache

    def _zip(self, press: Any) -> None:
        """KVzip scores tokens by reading the context again; the scores serve every budget."""
        if self.scores is None:
            scoring = Scoring(compression_ratio=0.5)
            with scoring(self.runner.reader):
                self.runner.reader.model(input_ids=self.ids[:, :-1], past_key_values=DynamicCache())
            self.scores = scoring.scores
        press.score_val = self.scores.clone()
        press.compress_post(self.runner.reader)

    def quantized(self, bits: int) -> QuantizedCache:
        """Transformers' quantized cache of the same keys and values, with its own settings."""
        self._mask(None)
        self.masks = False
        for answering in self.runner.model.model.layers:
            answering.self_attn.masked_key_indices = None
        cache = QuantizedCache("quanto", self.runner.model.config, nbits=bits)
        for number, (_, _, keys, values, _) in enumerate(self.seen):
            cache.update(keys.to(self.runner.dtype), values.to(self.runner.dtype), number)
        return cache

    def _mask(self, indices: None) -> None:
        for layer in self.layers:
            layer.self_attn.masked_key_indices = indices


class Scoring(kvpress.KVzipPress):
    """KVzip up to its scores."""

    scores: torch.Tensor

    def compress_post(self, model: Any) -> None:
        """Keep the scores instead of masking by them."""
        self.scores = self.score_val.clone()


def as_ask(ask: dict[str, Any]) -> dict[str, Any]:
    """A question as the metrics take it."""
    return {**ask, "answers": tuple(ask["answers"])}


def held_bytes(cache: Any) -> int:
    """Bytes of every tensor that a cache's layers lead to, each storage once."""
    storages: dict[int, int] = {}
    pending: list[Any] = [vars(layer) for layer in cache.layers]
    while pending:
        value = pending.pop()
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            if value.numel():
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, torch.Tensor):  # quanto's: tensors made of tensors
            pending.append(vars(value))
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return sum(storages.values())


if __name__ == "__main__":
    main()
