"""Has no lesson a word of a skeleton, and are lessons what the folders say? tests/rest builds a new one."""

from new_lesson import marks

from course_utils.interactive.course_files import EXERCISES_WITH, LESSONS, ROOT, numbered


def test_no_lesson_has_words_of_a_skeleton() -> None:
    left = marks()
    assert not left, f"{len(left)} places of a new lesson are yours to fill:\n" + "\n".join(left)


def test_lessons_are_what_the_folders_say() -> None:
    folders = {path.parent.name for path in (ROOT / "course_utils" / "lessons").glob("*/__init__.py")}
    assert set(LESSONS.values()) == folders - {"shared"}
    numbers = sorted({int(path.name[:2]) for path in numbered(ROOT / "notebooks")} - {0})
    assert sorted({*LESSONS, *map(int, EXERCISES_WITH)}) == numbers
    for number, folder in LESSONS.items():
        [solution] = (ROOT / "solutions" / "src").glob(f"{number:02d}_*.py")
        assert f"course_utils.lessons.{folder} import checks" in solution.read_text(encoding="utf-8")
