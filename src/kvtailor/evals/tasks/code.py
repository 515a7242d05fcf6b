"""Real source code that is to be continued: the standard library of the running Python."""

from __future__ import annotations

import ast
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvtailor.errors import EvaluationError
from kvtailor.evals.rendering import Prompt, Renderer
from kvtailor.evals.sample import Sample
from kvtailor.evals.tasks.base import Draw, Drawn, filled, single

FILES = (
    "argparse.py",
    "bdb.py",
    "calendar.py",
    "cmd.py",
    "codeop.py",
    "configparser.py",
    "copy.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "doctest.py",
    "fileinput.py",
    "fnmatch.py",
    "fractions.py",
    "ftplib.py",
    "functools.py",
    "gettext.py",
    "getopt.py",
    "glob.py",
    "gzip.py",
    "hmac.py",
    "http/client.py",
    "http/cookies.py",
    "imaplib.py",
    "inspect.py",
    "ipaddress.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/handlers.py",
    "mailbox.py",
    "netrc.py",
    "optparse.py",
    "pdb.py",
    "pickle.py",
    "plistlib.py",
    "poplib.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "sched.py",
    "shelve.py",
    "shlex.py",
    "shutil.py",
    "smtplib.py",
    "socketserver.py",
    "statistics.py",
    "string.py",
    "subprocess.py",
    "tarfile.py",
    "tempfile.py",
    "textwrap.py",
    "threading.py",
    "trace.py",
    "traceback.py",
    "unittest/case.py",
    "unittest/mock.py",
    "uuid.py",
    "weakref.py",
    "xml/etree/ElementTree.py",
    "zipfile.py",
)
"""Modules of the standard library; those that the running Python lacks are passed over."""

_SHORTEST, _LONGEST = 12, 100  # characters of a line that is asked for
_LINES_BEFORE = 3  # of its function, so that there is something to go on


@dataclass(frozen=True)
class Code(Drawn):
    """A source file up to a line inside a function; the answer is that line.

    No chat markup is put around the code. Files that stand before it, each under its name, fill up what the file itself
    does not. The last line before the answer is fed behind the context. Ours, after LongBench's code completion (Bai et
    al. 2024).
    """

    name: str = "code"
    metric: str = "edit_similarity"

    def renderer(self, tokenizer: Any) -> Renderer:
        """Code stands by itself."""
        return Renderer.bare(tokenizer)

    def draw(self, draw: Draw) -> Sample:
        """Draw one sample."""
        rng = draw.random(self.name)
        files = rng.sample(source_files(), len(source_files()))
        lines = _file_lines(files[0])
        at = rng.choice(answer_lines(files[0]))
        last = next(number for number in range(at - 1, -1, -1) if lines[number].strip())
        before = _file_head(files[0]) + list(lines[:last])
        others = iter(files[1:])

        def build(units: int) -> Prompt:
            while len(before) < units and (other := next(others, None)) is not None:
                before[:0] = _file_head(other) + list(_file_lines(other))
            return Prompt("".join(before[-units:] if units else ()), "", "".join(lines[last:at]))

        prompt = filled(self.name, draw, build)
        answer = lines[at].rstrip("\n")
        tokens = draw.renderer.room((answer,))
        return single(self.name, draw, prompt, "known", (answer,), None, tokens=tokens, file=files[0], line=at + 1)


def source_files() -> tuple[str, ...]:
    """Those of ``FILES`` that the running Python has as source text.

    Raises
    ------
    EvaluationError
        If there are none.
    """
    found = tuple(name for name in FILES if (_library() / name).is_file())
    if not found:
        raise EvaluationError(f"task 'code': {str(_library())!r} holds no source files of the standard library")
    return found


@lru_cache(maxsize=64)
def answer_lines(name: str) -> tuple[int, ...]:
    """Lines of a file, counted from 0, that are statements inside functions and of a fit length."""
    lines = _file_lines(name)
    found: set[int] = set()
    for function in ast.walk(ast.parse("".join(lines))):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            starts = {node.lineno - 1 for node in ast.walk(function) if isinstance(node, ast.stmt)}
            found |= {start for start in starts if start >= function.lineno - 1 + _LINES_BEFORE}
    return tuple(sorted(number for number in found if _is_fit(lines[number].strip())))


def _is_fit(line: str) -> bool:
    return _SHORTEST <= len(line) <= _LONGEST and not line.startswith(("'", '"', "@", "r'", 'r"'))


def _file_head(name: str) -> list[str]:
    return [f"# {name}\n"]


@lru_cache(maxsize=64)
def _file_lines(name: str) -> tuple[str, ...]:
    return tuple((_library() / name).read_text(encoding="utf-8").splitlines(keepends=True))


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))
