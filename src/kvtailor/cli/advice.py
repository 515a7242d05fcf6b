"""What to do when answers are worse than expected, steps take uneven times, or memory runs out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from kvtailor.plan import Plan

LADDER = ("full", "int8", "int4", "int3", "tailor", "tailor-offload")
"""Plans from the safest to the smallest in memory."""

SHARE = 0.8  # of the free memory that a cache may take


def recommended(config: PretrainedConfig, tokens: int, dtype: torch.dtype, free: int | None) -> tuple[str, int] | None:
    """The first plan of the ladder whose cache fits, and its bytes; None where none fits or the memory is not known.

    Parameters
    ----------
    config, tokens, dtype : as for an estimate.
    free : bytes of memory that is free, on the GPU where there is one.
    """
    from kvtailor.estimate import estimate
    from kvtailor.plan import Plan

    for name in LADDER if free is not None else ():
        held = estimate(config, Plan.preset(name), tokens, dtype).bytes_held
        if held <= SHARE * free:  # type: ignore[operator]
            return name, held
    return None


def advice(plan: Plan, measured: dict[str, Any], held: int, default: int, free: int | None) -> list[str]:
    """Lines on the three usual complaints, from the plan and from what was measured.

    Parameters
    ----------
    plan : as it is to be used.
    measured : bandwidths, see :func:`kvtailor.cli.bandwidth.measure`.
    held, default : bytes of the cache with the plan and without.
    free : bytes of free memory, or None.
    """
    return [
        f"Answers worse than expected: {_answers(plan)}",
        f"Steps of uneven length: {_steps(plan, measured)}",
        f"Out of memory: {_memory(held, default, free)}",
    ]


def _answers(plan: Plan) -> str:
    few = [entry for entry in plan.layers if entry.form.bits is not None and entry.form.bits <= 2]
    if any(entry.keep.policy != "all" for entry in plan.layers):
        return "this plan drops tokens; packing (int4, int3) loses less on most models, or raise the budget"
    if few:
        bits = min(entry.form.bits or 0 for entry in few)
        return f"layers packed to {bits} bits must look at everything evenly; kvtailor plan MODEL measures which do"
    if any(entry.find.index != "all" for entry in plan.layers):
        return "each step reads few tokens; raise top, or find by 3-bit rotated codes, and keep the first layer out"
    return "this plan loses next to nothing; the cause is elsewhere"


def _steps(plan: Plan, measured: dict[str, Any]) -> str:
    rows, disk = measured["disk_rows_ms"], measured["disk_read_gb_per_s"]
    if any(entry.tier == "disk" for entry in plan.layers):
        if rows is None:
            return "files cannot be written here, and this plan keeps tokens in them: name another folder"
        return (
            f"tokens are read from disk, where 256 scattered rows take {rows:.1f} ms and long runs {disk:.2f} GB/s "
            "when they are not in memory; find tokens ahead (ahead: true), or keep them in host memory"
        )
    if any(entry.form.kind != "dense" for entry in plan.layers):
        return "one step in 64 packs a block; nothing else here depends on the step"
    links = [f"{rate:.1f}" for rate in measured["link_gb_per_s"]]
    return f"nothing in this plan; links to GPUs: {', '.join(links) or 'none'} GB/s" + (
        ", which under 4 is a link at rest or a narrow one" if links else ""
    )


def _memory(held: int, default: int, free: int | None) -> str:
    from kvtailor.report import human_bytes

    if free is None:
        return f"the cache takes {human_bytes(held)}; how much is free is not known here"
    fits = "fits" if held <= SHARE * free else "does not fit"
    return (
        f"the cache takes {human_bytes(held)} ({human_bytes(default)} by default) of {human_bytes(free)} that are "
        f"free, and {fits} beside what else comes; prompts in chunks (prefill_chunk) bound what they take meanwhile"
    )
