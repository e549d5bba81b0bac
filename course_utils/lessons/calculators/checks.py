"""Checks of the exercises of lesson 13, "Who is right?": each names the misconception, never the answer."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from course_utils.interactive.feedback import alike, by_name, call, entries, exercise, expect, fail, of_kind, unit_slip

from .errata import ERRATA
from .labs import (
    JUDGED,
    JUDGMENTS,
    POSTS,
    SUSPECTS,
    TERM_NAMES,
    TOKEN_CASES,
    TOKEN_MISTAKES,
    UNIT_CASES,
    UNIT_MISTAKES,
    judged_right,
    share_of_peak,
    token_right,
    unit_right,
    worst_term,
)

__all__ = ["SUSPECTS", "bytes_a_token", "erratum", "judge", "missing_term", "posts", "share_of_peak", "unit_meant"]

# ---------------------------------------------------------------------------------------------------- 13.1: unit_meant


@exercise("13.1", "One percent is nearer than a letter: GB and GiB are 7 % apart.")
def unit_meant(answer: Any) -> None:
    """`answer(number, size)` is "GB", "GiB" or "neither"."""
    got = [call(answer, number=number, size=size, returns=str) for number, size in UNIT_CASES]
    if got == [unit_right(*case) for case in UNIT_CASES]:
        return
    unknown = [word for word in got if word not in ("GB", "GiB", "neither")]
    expect(not unknown, f'{", ".join(map(repr, unknown))}: the answers are "GB", "GiB" and "neither".')
    expect(set(got) != {"neither"}, "Reports round their numbers: give each a tolerance, and say neither beyond it.")
    expect(len(set(got)) > 1, "The same unit for every report: do you compare at all, or is GB as good as GiB to you?")
    for message, mistaken in UNIT_MISTAKES.items():
        expect(got != [mistaken(*case) for case in UNIT_CASES], message)
    fail("Some units are off. Turn the number into bytes both ways, and compare each with the size as a ratio.")


# -------------------------------------------------------------------------------------------------- 13.2: missing_term


@exercise("13.2", "Five calculators, and what each was not made for.")
def missing_term(answer: Any) -> None:
    """`answer(calculator)` is the term in which its answer is furthest off."""
    got = {name: call(answer, calculator=name, returns=str) for name in SUSPECTS}
    for name, term in got.items():
        expect(term in TERM_NAMES, f"{term!r} is not on the list: {', '.join(TERM_NAMES)}.")
        if term != worst_term(name):
            off = f"{abs(share_of_peak(name, term)):.1f} % of the peak"
            fail(f"{name}: in “{term}” it is off by {off}. In another term it is further off.")


# --------------------------------------------------------------------------------------------------------- 13.3: judge


def posts() -> tuple[str, ...]:
    """Some answers of a forum that does not exist."""
    return POSTS


@exercise("13.3", "Every wrong number is the right answer to another question.")
def judge(answer: Any) -> None:
    """`answer(said, run)` names what a number is."""
    got = [call(answer, said=said, run=run, returns=str) for said, run in JUDGED]
    right = [judged_right(said, run) for said, run in JUDGED]
    if got == right:
        return
    unknown = [word for word in got if word not in JUDGMENTS]
    expect(not unknown, f"{', '.join(map(repr, unknown))}: not one of {', '.join(JUDGMENTS)}.")
    expect(set(got) != {"unknown"}, "Nothing is near enough: are your candidates in GB as well, do you allow for 1 %?")
    expect(len(set(got)) > 1, "You give the same answer to every post. They were written by different people.")
    for said, run, mine, wanted in ((*case, one, two) for case, one, two in zip(JUDGED, got, right, strict=True)):
        if mine == wanted:
            continue
        expect(wanted != "right", f"{said:g} GB for {run} is what the run takes, and you call it {mine!r}.")
        expect(mine != "unknown", f"{said:g} GB for {run} is one of the five: within 1 %, above it or below it.")
        off = f"{said:g} GB for {run}: you call it {mine!r}, but it is more than 1 % off that."
        fail(f"{off} Do you allow for more, or compute that candidate otherwise, or in another unit?")


# ------------------------------------------------------------------------------------------------- 13.4: bytes_a_token


@exercise("13.4", "Every tensor has its bytes, and autocast has more of them than it is said to.")
def bytes_a_token(answer: Any) -> None:
    """`answer(h, kv, ffn, a)` is what a Llama's block keeps for one token under autocast."""
    got = [call(answer, **by_name(("h", "kv", "ffn", "a"), case)) for case in TOKEN_CASES]
    if alike(got, (token_right(*case) for case in TOKEN_CASES), 1e-9):
        return
    for message, mistaken in TOKEN_MISTAKES.items():
        expect(not alike(got, (mistaken(*case) for case in TOKEN_CASES), 1e-9), message)
    slip = unit_slip(got[0], token_right(*TOKEN_CASES[0]))
    expect(slip is None, f"Your bytes are {slip}")
    fail("The bytes are off. Call your function with kv, ffn and a of 0: what is left has h in it, and should be even.")


# ------------------------------------------------------------------------------------------------------- 13.5: erratum

KEYS = ("claim", "source", "said", "evidence", "lesson")


@exercise("13.5", "A claim, its source, and evidence that anybody can run: that is all an erratum needs.")
def erratum(answer: Any) -> None:
    """`answer()` is a dictionary: claim, source, said, evidence, lesson."""
    got = entries(call(answer, returns=Mapping), KEYS, object)
    claim = of_kind(got["claim"], str, "The claim is")
    source = of_kind(got["source"], str, "The source is")
    said, lesson = of_kind(got["said"], Real, "said is"), of_kind(got["lesson"], int, "lesson is")
    expect(any(letter.isdigit() for letter in claim), "The claim has no number in it: what exactly was claimed?")
    expect(len(source.split()) >= 2, "Say a little more of the source: where does the claim stand, and when was that?")
    expect(claim not in [one.claim for one in ERRATA], "That one is on the course's list already. Find your own.")
    expect(1 <= lesson <= 14, "There are lessons 1 to 14.")
    _weigh(said, call(got["evidence"]), call(got["evidence"]))


def _weigh(said: float, first: float, second: float) -> None:
    expect(first == second, "Your evidence gives another number each time. Fix what is random in it.")
    expect(first != 0, "Your evidence comes to 0: is that really the number in question?")
    expect(
        abs(said / first - 1) > 0.005,
        "Your evidence gives what was said, to half a percent. Then the claim holds, and there is nothing to correct.",
    )
