"""The check of English: each rule finds what it is for, and leaves plain sentences alone."""

import re

import pytest
from prose import RULES, files, markdown_cells, problems, sentences

HARD = {
    "There is one beside it.": "beside",
    "Say it aloud.": "aloud",
    "It is refused in words.": "in words",
    "Then mend the rest.": "mend",
    "Start anew.": "anew",
    "Wait till then.": "till",
    "Each rank has a D-th.": "a D-th",
    "It lets go after that.": "lets go",
    "The block at work is large.": "at work",
    "It takes some 20 seconds.": "some 2",
    "See what there is.": "what there is",
    "All but for one.": "but for",
    "Weights and the like.": "and the like",
    "What it needs of the others it gets.": "needs of",
    "It is to be freed.": "is to be",
    "At the peak stand the states.": "stand",
    "It takes 16 bytes a parameter.": "bytes a parameter",
    "A kernel of which no name is known.": "of which no name is known.",
    "A bias is no matrix.": "is no matrix",
}
PLAIN = """In which phase is the peak? There is no gap. It is no longer there. FP stands for floating point.
"There is one beside it" is a quotation. `beside` is code. The GPU has 80 GB of which 3 MiB is free."""


def found(tmp_path, text, name="page.md"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return list(problems(path))


@pytest.mark.parametrize("text", HARD)
def test_a_hard_word_is_found_once_and_with_its_line(text, tmp_path):
    ((line, _, said),) = found(tmp_path, f"# A page\n\nFine.\n\n{text}\n")
    assert line == 5 and said.startswith(f"'{HARD[text][:40]}")


def test_each_rule_has_an_example():
    assert {pattern for pattern in RULES if any(re.search(pattern, text) for text in HARD)} == set(RULES)


def test_plain_sentences_code_and_quotations_pass(tmp_path):
    assert found(tmp_path, PLAIN.replace("3 MiB", "X")) == []
    assert found(tmp_path, "```\nbeside\n```\n\n$$\nbeside\n$$\n") == []


def test_a_long_sentence_is_found_in_text_lists_tables_and_cells(tmp_path):
    long = " ".join(["word"] * 36) + "."
    assert [rule for _, rule, _ in found(tmp_path, f"{long}\n\n- {long}\n\n| {long} | short |\n")] == [
        "long"
    ] * 3
    assert found(tmp_path, " ".join(["word"] * 35) + ".") == []
    (tmp_path / "src").mkdir()
    cells = f"# %% [markdown]\n# {long}\n\n# %%\n# {long}\nprint('{long}')\n"
    assert [line for line, _, _ in found(tmp_path, cells, "src/01_a.py")] == [2, 6]


def test_messages_and_docstrings_of_code_and_texts_of_toml_are_read(tmp_path):
    code = 'def f():\n    """What is there."""\n    raise ValueError(f"{f} is no number of bytes")\n'
    assert [(line, rule) for line, rule, _ in found(tmp_path, code, "a.py")][-1] == (2, "docstring")
    assert [line for line, _, _ in found(tmp_path, code, "a.py")] == [3, 2]
    assert found(tmp_path, 'def f():\n    """Bytes that persist."""\n', "a.py") == []
    assert len(found(tmp_path, '[a]\ntext = ["The bytes stand there."]\n', "a.toml")) == 1


def test_parts_of_a_source_are_told_apart():
    assert markdown_cells("# %% [markdown]\n# One\n\n# %%\n# two\n") == "\nOne\n\n\n"
    assert list(sentences("One. *Two* words? (Three.) Four")) == ["One.", "Two words?", "(Three.", "Four"]


def test_every_kind_of_text_is_checked():
    names = {path.name for path in files()}
    assert {
        "README.md",
        "glossary.md",
        "instructor.md",
        "01_where_did_the_memory_go.py",
        "errata.toml",
        "run.py",
    } <= names
