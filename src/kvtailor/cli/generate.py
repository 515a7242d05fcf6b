"""``kvtailor generate``: text from a model whose cache follows a plan."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtailor.cli.settings import active_kernels, check_reads_text, console, count, dtype_of, heard, quiet, warn
from kvtailor.errors import KVTailorError

if TYPE_CHECKING:
    from kvtailor.models.load import Loaded
    from kvtailor.plan import Plan


def generate(
    model: Annotated[str, typer.Argument(help="A folder, a .gguf file, a hub name or an embedded model.")] = "smollm2",
    prompt: Annotated[str | None, typer.Option(help="The prompt; default: --file, else standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file that holds the prompt.")] = None,
    plan: Annotated[str, typer.Option(help="A preset such as int4 or snapkv:25%, or a plan file.")] = "full",
    max_new_tokens: Annotated[int, typer.Option(parser=count, metavar="N", help="The most tokens to generate.")] = 128,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: where there is one.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
    report: Annotated[bool, typer.Option("--report", help="Print what the cache held, layer by layer.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Generate text, greedily, with a tailored KV cache."""
    text = read_prompt(prompt, file)
    active_kernels()
    from kvtailor.plan import Plan

    chosen, numbers = Plan.of(plan), dtype_of(dtype)
    with quiet():
        from kvtailor.models.load import load

        loaded = load(model, numbers, device, progress=not as_json)
        check_reads_text(loaded)
        inputs = encode(loaded, text, chat)
        check_length(loaded, chosen, inputs["input_ids"].shape[1])
        streams = sys.stdout.isatty() and not as_json
        answer = answer_to(loaded, inputs, chosen, max_new_tokens, streams)
    warn(answer["warnings"])
    if as_json:
        typer.echo(json.dumps({**answer, "model": model, "report": answer["report"].as_dict()}))
        return
    if not streams:
        typer.echo(answer["text"])
    if report:
        console().print(answer["report"])


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the option, the file or standard input.

    Raises
    ------
    KVTailorError
        If both or none are given, the file cannot be read, or the prompt is empty.
    """
    if prompt is not None and file is not None:
        raise KVTailorError(f"--prompt and --file {str(file)!r} were both given: allowed is one of them")
    if file is not None:
        text, source = _read(file), f"--file {str(file)!r}"
    elif prompt is not None:
        text, source = prompt, f"--prompt {prompt!r}"
    elif sys.stdin.isatty():
        raise KVTailorError("there is no prompt: allowed are --prompt TEXT, --file PATH, or text on standard input")
    else:
        text, source = sys.stdin.read(), "standard input"
    if not text.strip():
        raise KVTailorError(f"the prompt is empty ({source}): allowed is text of one token or more")
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise KVTailorError(f"--file {str(file)!r} cannot be read: {error.strerror}; allowed is a text file") from None
    except UnicodeDecodeError as error:
        raise KVTailorError(f"--file {str(file)!r} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def encode(loaded: Loaded, text: str, chat: bool | None) -> dict[str, Any]:
    """The prompt as ``input_ids`` and ``attention_mask``, (1, n), on the model's device.

    Raises
    ------
    KVTailorError
        If a chat template is asked for and the tokenizer has none, or the text makes no token.
    """
    tokenizer = loaded.tokenizer
    templated = bool(getattr(tokenizer, "chat_template", None))
    if chat and not templated:
        raise KVTailorError(
            f"--chat: the tokenizer of model {loaded.name!r} has no chat template; allowed is --no-chat"
        )
    if templated and chat is not False:
        messages = [{"role": "user", "content": text.strip("\n")}]  # a line end from a file or pipe is no question
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    else:
        inputs = tokenizer(text, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise KVTailorError(f"the prompt makes no token with the tokenizer of model {loaded.name!r}")
    return {name: inputs[name].to(loaded.model.device) for name in ("input_ids", "attention_mask")}


def check_length(loaded: Loaded, plan: Plan, tokens: int) -> None:
    """Raise KVTailorError for a prompt beyond the model's positions, unless the plan renumbers what it keeps."""
    from kvtailor.estimate import length_limit

    limit = length_limit(loaded.model.config)
    if limit is None or tokens <= limit or renumbers(plan, loaded.model.config):
        return
    raise KVTailorError(
        f"the prompt has {tokens} tokens, and model {loaded.name!r} has positions for {limit}: allowed are prompts of "
        f"{limit} tokens or fewer, or plan streaming, which renumbers what it keeps"
    )


def renumbers(plan: Plan, config: Any) -> bool:
    """Whether every tailored layer gives the tokens it keeps positions of its own."""
    from kvtailor import _compat

    decoder = _compat.decoder_config(config)
    stock = _compat.stock_layers(decoder)
    keeps = [
        entry.keep
        for number, (layer_type, layer) in enumerate(stock)
        if _compat.is_plain_attention(layer_type, layer)
        for _, entry in plan.parts(number, len(stock), "self", _compat.kv_heads(decoder))
    ]
    return bool(keeps) and all(
        keep.policy == "streaming" and keep.options.get("positions", "renumbered") == "renumbered" for keep in keeps
    )


def answer_to(loaded: Loaded, inputs: dict[str, Any], plan: Plan, max_new_tokens: int, streams: bool) -> dict[str, Any]:
    """Generate, and give the text with its numbers and the cache's report.

    Parameters
    ----------
    loaded, inputs, plan : the model, the prompt (1, n) and the plan.
    max_new_tokens : the most tokens to generate.
    streams : whether to print the text as it comes.
    """
    from transformers import TextStreamer

    from kvtailor import _compat, attach

    model, tokenizer = loaded.model, loaded.tokenizer
    prompt_tokens = inputs["input_ids"].shape[1]
    skipped = 1 if model.config.is_encoder_decoder else prompt_tokens
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    if streams:
        skips = not model.config.is_encoder_decoder
        options["streamer"] = TextStreamer(tokenizer, skip_prompt=skips, skip_special_tokens=True)
    messages: list[str] = []
    with heard(messages):
        attachment = attach(model, plan)
    with attachment:
        cache = attachment.new_cache()
        begin = time.perf_counter()
        output = model.generate(**inputs, **options, **{_compat.GENERATE_CACHE_NAME: cache})
        seconds = time.perf_counter() - begin
    new = output[0, skipped:]
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "prompt_tokens": prompt_tokens,
        "plan": plan.name,
        "seconds": seconds,
        "warnings": messages,
        "report": cache.report(),
    }
