"""Does each command and snippet of the page of questions run, and does it print the sizes of its answer?"""

import gc
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.utils.checkpoint import checkpoint

from course_utils import on_gpu
from course_utils.cli.main import parse
from course_utils.interactive.course_files import ROOT
from course_utils.lessons.shared.search import QUESTION

PAGE = ROOT / "docs" / "questions.md"
_, *PARTS = QUESTION.split(PAGE.read_text(encoding="utf-8"))
ANSWERS = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
COMMAND = re.compile(r"`python3 -m course_utils ([^`]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIZE = re.compile(r"([\d,]*\d(?:\.\d+)?) GB\b")
YOURS = {"train.py", "train.log"}
"""Files of the reader's own. Commands that name one are parsed, and not run."""


def words_of(command: str) -> list[str]:
    """A command's words, as a shell reads them. Fails if a character in it means more to a shell."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = shlex.split(command)
    assert list(lexer) == words
    return words


def printed(words: list[str]) -> str:
    """Run a command in a Python without packages, and return what it prints."""
    command = [sys.executable, "-S", "-E", "-m", "course_utils", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_its_questions_and_each_has_a_lesson_and_something_to_try():
    assert len(PARTS[::2]) == len(ANSWERS) == 49
    for asked, answer in ANSWERS.items():
        assert answer.count("\n- ") == 1, asked
        assert re.search(r"\[Lesson \d\d\]\(../notebooks/", answer), asked
        assert COMMAND.search(answer) or SNIPPET.search(answer), asked
        assert re.search(r"[Aa]sked\s+in\s+\S", answer), asked


LINKS = sorted(set(LINK.findall(PAGE.read_text(encoding="utf-8"))))
"""Where the page's relative links lead."""


@pytest.mark.parametrize("link", LINKS)
def test_each_link_leads_to_a_file(link):
    assert (PAGE.parent / link).is_file()


@pytest.mark.parametrize("asked", ANSWERS)
def test_an_answers_commands_run_and_print_its_sizes(asked):
    text, _, last = ANSWERS[asked].partition("\n- ")
    commands = [words_of(found) for found in COMMAND.findall(last)]
    if commands:
        commands += [[*commands[0], *found.split()] for found in re.findall(r"`(--[^`]+)`", text)]
    for words in commands:
        parse(words)
    out = "".join(printed(words) for words in commands if not YOURS & set(words))
    sizes = [float(size.replace(",", "")) for size in SIZE.findall(out)]
    for sentence in re.split(r"(?<=[.?!:]) ", " ".join(text.split())):
        for size in SIZE.findall(sentence) if "H200" not in sentence else ():
            decimals = len(size.partition(".")[2])
            assert any(f"{each:.{decimals}f}" == size for each in sizes), f"{size} GB, in: {sentence}"


class Model(nn.Module):
    """A model with what the snippets name: a head, and a config as that of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 16)
        self.config = SimpleNamespace(use_cache=True)

    def forward(self, x):
        return self.head(self.body(x))


def loss_of(model, batch):
    return model(batch).sum()


@pytest.mark.parametrize("code", [code for answer in ANSWERS.values() for code in SNIPPET.findall(answer)])
def test_each_snippet_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COURSE_SOURCE", "simulated")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    model, batch = Model(), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
    names = vars(state_dict) | {"torch": torch, "checkpoint": checkpoint, "sys": sys, "gc": gc, "os": os}
    names |= {"model": model, "optimizer": optimizer, "batch": batch, "batches": [batch], "step": model}
    names |= {"outputs": SimpleNamespace(loss=loss_of(model, batch)), "loss_of": loss_of, "kept": []}
    names |= {"logits": torch.randn(6, 16), "tokens": torch.arange(6)}
    with on_gpu():
        exec(code, names)
