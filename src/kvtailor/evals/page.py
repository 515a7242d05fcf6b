"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from kvtailor.evals.result import Row
from kvtailor.evals.statistics import Cell, front, unsolved
from kvtailor.evals.table import Section, markdown, sections

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 1.2rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #666; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.front td:first-child::after { content: " \\25C6"; color: #0072B2; }
img { max-width: 100%; height: auto; } .warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; white-space: pre-wrap; font-size: 13px; }
.scroll { overflow-x: auto; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
"""

CAPTIONS = {
    "quality": "Quality over bytes. Vertical lines are 95 % intervals; the wide grey line joins the plans that no "
    "other beats in both.",
    "depth": "Score by depth of the answer and length of the context. Cells without a number had no sample.",
    "time": "Time over the length of the context.",
    "kept": "What each layer and KV head keeps of the first sample's context at the greatest length, of plans whose "
    "heads differ.",
}


def page(found: Sequence[Cell], rows: Sequence[Row], pictures: Sequence[Path], notes: Sequence[str]) -> str:
    """The whole page.

    Parameters
    ----------
    found, rows : cells, and what they were made of.
    pictures : PNG files; they are put into the page.
    notes : lines for the reader, such as plans that were left out.
    """
    run = rows[0].run
    name = f"{run.get('model')}: caches compared"
    parts = [f"<h1>{escape(name)}</h1>", _about(rows), _warnings(found, notes)]
    parts += [_picture(path) for path in pictures]
    parts += ["<h2>Tables</h2><p>A diamond marks plans that no other beats in both score and bytes held.</p>"]
    parts += [_table(section) for section in sections(found)]
    parts += ["<h2>The same, to paste</h2>", f"<pre>{escape(markdown(found))}</pre>"]
    parts += ["<h2>One sample of each task</h2>", *_examples(rows)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(name)}</title>'
    body = "".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'


def _about(rows: Sequence[Row]) -> str:
    run = rows[0].run
    versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
    said = {
        "Model": f"{run.get('model')}, {run.get('dtype')}, on {run.get('device')}",
        "Machine": f"{run.get('machine', 'not told')}; {run.get('threads')} threads, {run.get('kernels')} kernels",
        "Versions": versions,
        "Samples": f"seed {run.get('seed')}; {len({row.place for row in rows})} contexts, {len(rows)} answers",
        "Bytes": "of keys and values, with everything that goes with them, once the context is held; of the default "
        "cache in the same data type. Fast: without slow host memory.",
        "Intervals": "95 %, bootstrap over samples; differences are of the same samples.",
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in said.items()) + "</dl>"


def _warnings(found: Sequence[Cell], notes: Sequence[str]) -> str:
    said = [
        f"{one.task} at {one.tokens} tokens: the full cache scores {one.score.mean:.0%}, so this tells nothing about "
        "caches."
        for one in unsolved(found)
    ]
    said += list(notes)
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in said)


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = escape(CAPTIONS[path.stem.partition("-")[0]])
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(section: Section) -> str:
    best = {one.label for one in front(section.cells)}
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    lines = "".join(
        f"<tr{' class=front' if row[0] in best else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in section.rows
    )
    return f'<h3>{escape(section.title)}</h3><div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def _examples(rows: Sequence[Row]) -> list[str]:
    """The answers of all plans to the first sample of each task."""
    parts = []
    for place in dict.fromkeys((row.task, row.tokens) for row in rows if row.expected):
        own = [row for row in rows if (row.task, row.tokens) == place]
        first = min(row.sample for row in own)
        own = [row for row in own if row.sample == first and row.ask == 0]
        lines = "\n".join(f"{row.label}: {' '.join(row.answer.split())}  [{row.score:.2f}]" for row in own)
        wanted = ", ".join(own[0].expected)
        parts.append(
            f"<h3>{escape(place[0])}, {place[1]} tokens; expected: {escape(wanted)}</h3><pre>{escape(lines)}</pre>"
        )
    return parts
