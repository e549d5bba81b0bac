"""What a GPU counted, as tables: python tests/gpu/tables.py --write puts them into docs/evidence.md.

They are between `<!-- gpu:NAME -->` and `<!-- /gpu:NAME -->`; tests/rest/test_evidence.py compares them.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from histories import NAMES, events_of, most_reserved, snapshot_of  # noqa: E402

from course_utils.allocator.replay import replay  # noqa: E402
from course_utils.allocator.snapshots import compare_with_gpu  # noqa: E402

PAGE = ROOT / "docs" / "evidence.md"
GB = 10**9

RESERVE = 1.05  # the rule of thumb that the table of limits judges

WHY = {
    "ctc.py": "its LSTM is predicted cell by cell, which keeps more than cuDNN's",
    "lstm.py": "cuDNN's workspace for an LSTM is not predicted",
    "hugging_face.py whisper": "convolutions; the reserved bytes are not explained yet",
}
WITH_AN_LSTM = ("ctc.py", "lstm.py")

WATCH, BLIND = "`watch`", "blind"
STATES_ALONE = ("16 bytes per parameter", "DeepSpeed's ZeRO-2 estimate", "accelerate estimate-memory")

Row = Mapping[str, Any]


def rows_of(name: str) -> list[Row]:
    """The lines of a recording."""
    return [json.loads(line) for line in (FOLDER / "recorded" / f"{name}.jsonl").read_text().splitlines()]


def origin(row: Row) -> str:
    torch = row.get("torch") or row["versions"]["torch"]
    return f"recorded on {row['device']}, torch {torch.partition('+')[0]}, {row['date']}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table: texts in the first and last column to the left, all others to the right."""
    marks = ["---", *("---:" for _ in headings[1:-1]), "---:" if headings[-1] != "why" else "---"]
    return ["| " + " | ".join(cells) + " |" for cells in (headings, marks, *rows)]


def paragraph(text: str) -> list[str]:
    """A text as lines of the page."""
    return textwrap.wrap(" ".join(text.split()), 118)


def gigabytes(size: int, digits: int = 3) -> str:
    return f"{size / GB:.{digits}f}"


def percent(predicted: float, counted: float) -> float:
    return 100 * (predicted / counted - 1)


# Scripts


def second_step(row: Row) -> Row:
    return next(step for step in row["steps"] if step["step"] == 2)


def predictions() -> dict[str, Row]:
    """What is predicted today, by script; None for one that cannot be followed."""
    return {row["script"]: row["predicted"] for row in rows_of("predictions")}


def error(predicted: Row, row: Row, of: str) -> float:
    """The error of a prediction, in percent of what was counted to the end of step 2."""
    return percent(predicted[of], second_step(row)[f"peak_{of}"])


def why(script: str, predicted: Row) -> str:
    seen = [most for most in predicted["not_predicted"].values() if most is not None]
    if script in WHY:
        return WHY[script]
    if predicted["not_predicted"]:
        return f"convolutions: cuDNN up to {gigabytes(max(seen))} GB" if seen else "convolutions"
    return ""


def median_and_most(found: Iterable[float]) -> tuple[float, float]:
    sizes = [abs(one) for one in found]
    return median(sizes), max(sizes)


def blind_errors() -> list[float]:
    """Sizes of the errors of first predictions, but for the compiled script."""
    rows = [row for row in rows_of("scripts") if row["predicted"] and row["script"] != "nanogpt.py"]
    return [abs(error(row["predicted"], row, "allocated")) for row in rows]


def signed(error: float) -> str:
    return f"{error:+.2f}"


def scripts() -> list[str]:
    rows = sorted(rows_of("scripts"), key=lambda row: row["script"])
    today = predictions()
    followed = [row for row in rows if today[row["script"]]]
    plain = [row for row in followed if not why(row["script"], today[row["script"]])]
    convolved = [
        row for row in followed if today[row["script"]]["not_predicted"] and row["script"] not in WITH_AN_LSTM
    ]
    recurrent = [row for row in followed if row["script"] in WITH_AN_LSTM]
    allocated = median_and_most(error(today[row["script"]], row, "allocated") for row in plain)
    reserved = median_and_most(error(today[row["script"]], row, "reserved") for row in plain)
    with_cudnn = median_and_most(error(today[row["script"]], row, "allocated") for row in convolved)
    with_lstm = median_and_most(error(today[row["script"]], row, "allocated") for row in recurrent)
    first = blind_errors()
    headings = (
        "script",
        "allocated, predicted",
        "counted",
        "error, %",
        "blind, %",
        "reserved, predicted",
        "counted",
        "error, %",
        "why",
    )
    cells = []
    for row in followed:
        said, counted = today[row["script"]], second_step(row)
        cells.append(
            (
                f"`{row['script']}`",
                gigabytes(said["allocated"]),
                gigabytes(counted["peak_allocated"]),
                signed(error(said, row, "allocated")),
                signed(error(row["predicted"], row, "allocated")) if row["predicted"] else "none",
                gigabytes(said["reserved"]),
                gigabytes(counted["peak_reserved"]),
                signed(error(said, row, "reserved")),
                why(row["script"], said),
            )
        )
    refused = [f"`{row['script']}`" for row in rows if not today[row["script"]]]
    libraries = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    again = rows_of("predictions")[0]
    return [
        *paragraph(f"""
            `watch --gpu {again["card"]}` predicts {len(plain)} scripts that have neither convolutions nor an
            LSTM; `nanogpt.py` is compiled. The median error of bytes allocated is {allocated[0]:.2f} %,
            {allocated[1]:.2f} % at most. Of bytes reserved it is {reserved[0]:.2f} %, {reserved[1]:.2f} % at
            most. In {len(convolved)} scripts with convolutions, the error of bytes allocated is
            {with_cudnn[0]:.2f} % at the median and {with_cudnn[1]:.2f} % at most: cuDNN's workspaces are not
            predicted. In {len(recurrent)} with an LSTM it is up to {with_lstm[1]:.0f} %. A script is counted
            from its beginning to the end of its second step. Peaks in GB.
        """),
        "",
        *paragraph(f"""
            These predictions were made on {again["date"]}, after the card had counted. The course had learned
            from these recordings which attention kernel a card takes, what sums take, and where the driver
            places memory. The column *blind* has the error of the first prediction, of {rows[0]["date"]}. It
            was in the file before the card executed the script, and was made for an A100, whose workspaces
            are smaller: {median(first):.1f} % at the median.
        """),
        "",
        *table(headings, cells),
        "",
        *([f"`watch` cannot follow {', '.join(refused)}. The card executed them too."] if refused else []),
        f"({origin(rows[0])}; {libraries}; predicted with torch {again['versions']['torch']};"
        " `tests/gpu/scripts_as_they_are.py`)",
    ]


def reserved() -> list[str]:
    """Reserved bytes, from what the card did to what is predicted, term by term."""
    counted = {name_of_history(row["script"]): row for row in rows_of("scripts")}
    today = {name_of_history(script): found for script, found in predictions().items()}
    headings = ("script", "counted", "as placed", "descending", "in order", "predicted", "error, %")
    cells = []
    for name in NAMES:
        events = events_of(name)
        most = most_reserved(name)
        placed = max(compare_with_gpu(snapshot_of(name)).replayed)
        replayed = [replay(events, descending=descending).peak_reserved for descending in (True, False)]
        said = today[name]["reserved"]
        sizes = (most, placed, *replayed, said)
        script = counted[name]["script"]
        cells.append((f"`{script}`", *map(gigabytes, sizes), signed(percent(said, most))))
    return [
        *paragraph("""
            Why does a script reserve more or less than predicted? For ten scripts, the allocator's events
            were recorded. *As placed* replays them with each segment at the address that the driver gave it.
            *Descending* replays them with each segment below the one before, *in order* with each above it.
            What differs is the driver's part: torch 2.11 tells equal free blocks apart by their addresses.
            torch 2.13 takes one of the oldest segment, so addresses no longer matter. On torch before 2.13,
            `watch` lets segments descend. *Predicted* has simulated events in place of the recorded ones.
        """),
        "",
        *table(headings, cells),
        "",
        *paragraph("""
            *Descending* against *predicted* is what the events lack: cuDNN's workspaces (`unet.py`,
            `gradient_penalty.py`, `torchvision_reference.py`), and what is not explained yet of a compiled
            step (`nanogpt.py`). `gradient_penalty.py` is right by chance: there the driver placed segments
            upward.
        """),
        f"({origin(rows_of('scripts')[0])}; `tests/gpu/count_script.py`)",
    ]


# Other tools


def errors_of_tools() -> dict[str, dict[str, float]]:
    """Errors in percent of what a card counted, by tool and script; `watch` is first, blind last."""
    rows = rows_of("peers")
    scripts = dict.fromkeys(row["script"] for row in rows)
    counted = {row["script"]: row for row in rows_of("scripts")}
    today = predictions()
    found = {WATCH: {script: error(today[script], counted[script], "allocated") for script in scripts}}
    for row in rows:
        if row["predicted"]:
            found.setdefault(row["tool"], {})[row["script"]] = percent(row["predicted"], row["counted"])
    first = {script: counted[script]["predicted"] for script in scripts}
    found[BLIND] = {
        script: error(said, counted[script], "allocated") for script, said in first.items() if said
    }
    return found


def medians_of_tools() -> dict[str, float]:
    """The median error of each tool, whatever its sign, over the scripts for which it predicts anything."""
    return {tool: median(map(abs, errors.values())) for tool, errors in errors_of_tools().items()}


def peers() -> list[str]:
    rows = rows_of("peers")
    errors, middle = errors_of_tools(), medians_of_tools()
    scripts = {row["script"]: row["counted"] for row in rows}
    cells = [
        (
            f"`{script}`",
            gigabytes(counted),
            *(signed(each[script]) if script in each else "none" for each in errors.values()),
        )
        for script, counted in scripts.items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in rows[0]["versions"].items())
    others = [tool for tool in errors if tool not in (WATCH, BLIND)]
    alone = [middle[tool] for tool in STATES_ALONE]
    first = blind_errors()
    return [
        *paragraph(f"""
            What would people use instead of `watch`? These are the {len(scripts)} scripts that allocated
            most, of those without convolutions, an LSTM or `torch.compile`. The median error of bytes
            allocated is {middle[WATCH]:.3f} % for `watch` and {middle["MemTracker"]:.2f} % for torch's own
            MemTracker, which can follow {len(errors["MemTracker"])} of them. It is {middle["FitCheck"]:.0f} %
            for FitCheck, which accepts {len(errors["FitCheck"])}, and {min(alone):.0f} to {max(alone):.0f} %
            for three estimates of model states alone. The table has signed errors in percent.
        """),
        "",
        *paragraph(f"""
            As above, `watch` predicted after the card had counted, and the course had learned from these
            recordings; the other tools had not. Its first predictions of these scripts, which were blind,
            were {middle[BLIND]:.1f} % off at the median, and those of all scripts {median(first):.1f} %. The
            one with Falcon's attention was half of what the card counted. There MemTracker is
            {abs(errors["MemTracker"]["multi_query.py"]):.1f} % off.
        """),
        "",
        *table(("script", "counted, GB", WATCH, *others, BLIND), cells),
        "",
        *paragraph("""
            The tools do not all predict the same. MemTracker followed each script as it is, on a GPU that
            does nothing (`tests/null_gpu.py`). Without a GPU, a script has to be rewritten for it, under
            FakeTensorMode. It counts tensors that operators return, no workspaces, and stops where weights
            are frozen.
            FitCheck estimates from a model's configuration; its overhead for the context and fragmentation is
            left out here, as these bytes are not allocated. It refuses models that it does not describe. The
            last three have no activations. accelerate has a row for 16 bits, DeepSpeed's estimate is for one
            GPU without offloading, and 16 bytes are for each parameter that is trained, with 2 for a frozen
            one. Both expect weights of 16 bits with a copy in 32 bits. Scripts that train in plain bf16 keep
            8 bytes per parameter.
        """),
        f"({versions}; {rows[0]['date']}; `tests/gpu/peers.py`)",
    ]


def lines_of_readme() -> str:
    """README's sentences on the same errors, in one line."""
    errors, middle = errors_of_tools(), medians_of_tools()
    alone = [middle[tool] for tool in STATES_ALONE]
    first = blind_errors()
    return " ".join(
        f"""
        For ten training scripts that an H200 counted, the median error of `watch` is {middle[WATCH]:.3f} %.
        Its first, blind predictions were {middle[BLIND]:.1f} % off, and {median(first):.1f} % for all
        {len(first)} scripts. torch's own MemTracker is {middle["MemTracker"]:.1f} % off for the
        {len(errors["MemTracker"])} that it follows, formulas for model states {min(alone):.0f} to
        {max(alone):.0f} %.
        """.split()
    )


def name_of_history(script: str) -> str:
    return script.replace(" ", "_").replace("=", "_")


# Limits


def limits() -> list[str]:
    rows = rows_of("limits")
    wrong = sum(RESERVE * row["closed_form"] <= row["too_small"] for row in rows)
    off = sorted(abs(percent(row["replayed"]["works"], row["works"])) for row in rows)
    headings = (
        "run",
        "closed form",
        "times 1.05",
        "too small",
        "works",
        "works / closed form",
        "replay",
        "its error, %",
    )
    cells = [
        (
            f"`{row['run'].removeprefix('TrainingRun(').removesuffix(')')}`",
            gigabytes(row["closed_form"]),
            gigabytes(round(RESERVE * row["closed_form"])),
            gigabytes(row["too_small"]),
            gigabytes(row["works"]),
            f"{row['works'] / row['closed_form']:.3f}",
            gigabytes(row["replayed"]["works"]),
            f"{percent(row['replayed']['works'], row['works']):+.2f}",
        )
        for row in sorted(rows, key=lambda row: row["works"] / row["closed_form"])
    ]
    return [
        *paragraph(f"""
            How small may a card be? A memory fraction made the GPU smaller and smaller, until three steps ran
            out of memory. The rule "it fits if 1.05 times the closed form fits" is
            wrong for {wrong} of {len(rows)} runs: it accepts a card that is too small.
            The allocator's replay of the simulated steps is off by {median(off):.2f} % at the median and
            {off[-1]:.1f} % at most. Sizes in GB, without what the driver and the context take.
        """),
        "",
        *table(headings, cells),
        "",
        (
            f"({origin(rows[0])}; replayed with torch {rows[0]['replayed']['torch']};"
            " `tests/gpu/near_the_limit.py`)"
        ),
    ]


# Times


def found(rows: Iterable[Row], **choice: Any) -> Row | None:
    """The row with exactly these differences from the usual choice."""
    usual = {
        "model": "gpt2",
        "micro_batch": 16,
        "seq_len": 1024,
        "micro_batches": 1,
        "precision": "bf16",
        "attention": "flash",
        "recompute": "none",
        "compiled": "",
        "budget": 1.0,
        "optimizer": "fused",
        "loss_chunks": 1,
    }
    return next((row for row in rows if row["choice"] == {**usual, **choice}), None)


def peak_and_time(row: Row | None) -> tuple[str, str]:
    if row is None:
        return "not recorded", ""
    spread = row["step_ms"]
    return (
        gigabytes(row["peak_allocated"], 2),
        f"{spread['median']:.1f} ({spread['q1']:.1f}–{spread['q3']:.1f})",
    )


def front() -> list[str]:
    rows = rows_of("turns")
    policies = (
        "none",
        "full",
        "every-2",
        "every-3",
        "every-4",
        "every-6",
        "selective",
        "offload",
        "offload-all",
    )
    headings = (
        "recomputation",
        "eager",
        "ms",
        "loss in 8 chunks",
        "ms",
        "blocks compiled",
        "ms",
        "model compiled",
        "ms",
    )
    ways: tuple[dict[str, Any], ...] = ({}, {"loss_chunks": 8}, {"compiled": "blocks"}, {"compiled": "model"})
    cells = []
    for policy in policies:
        pairs = [peak_and_time(found(rows, recompute=policy, **way)) for way in ways]
        cells.append((policy, *(text for pair in pairs for text in pair)))
    budgets = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
    by_budget = [(f"{b:g}", *peak_and_time(found(rows, compiled="model", budget=b))) for b in budgets]
    plain, compiled = (found(rows, recompute="selective", **way) for way in (ways[0], ways[3]))
    base, fast = found(rows), found(rows, compiled="model")
    assert plain and compiled and base and fast
    slower = [
        percent(a["step_ms"]["median"], b["step_ms"]["median"]) for a, b in ((plain, base), (compiled, fast))
    ]
    return [
        *paragraph(f"""
            GPT-2 with 16 sequences of 1,024 tokens, bf16 by autocast, flash attention, fused AdamW.
            Peaks in GB.
            Milliseconds per step as median and quartiles, while the processor did nothing else.
            *selective* keeps matrix products and attention.
            It makes an eager step {slower[0]:.0f} % longer and a compiled one {slower[1]:.0f} %.
            The arithmetic is the same, so most of the difference is not arithmetic.
            *offload* sends the inputs of blocks to the host, *offload-all* all that blocks keep.
        """),
        "",
        *table(headings, cells),
        "",
        "The compiler's own knob, `activation_memory_budget`, with the model compiled:",
        "",
        *table(("budget", "peak", "ms"), by_budget),
        "",
        f"({origin(rows[0])}; `tests/gpu/in_turn.py`)",
    ]


def batches() -> list[str]:
    rows = rows_of("turns")
    cells = []
    for b in (1, 2, 4, 8, 16, 32, 64):
        pair = [found(rows, micro_batch=b, **way) for way in ({}, {"compiled": "model"})]
        texts = [
            (gigabytes(r["peak_allocated"], 2), f"{r['tokens_per_second']:,}") if r else ("not recorded", "")
            for r in pair
        ]
        split = found(rows, micro_batch=b, micro_batches=64 // b)
        cells.append(
            (str(b), *texts[0], *texts[1], f"{split['step_ms']['median']:.0f}" if split else "not recorded")
        )
    few, many = found(rows, micro_batch=8), found(rows, micro_batch=64)
    assert few and many
    gain = percent(many["tokens_per_second"], few["tokens_per_second"])
    larger = many["peak_allocated"] / few["peak_allocated"]
    headings = ("micro-batch", "eager, GB", "tokens/s", "compiled, GB", "tokens/s", "64 sequences, eager, ms")
    return [
        *paragraph(f"""
            The same GPT-2 by the size of its micro-batch.
            A step of 4 sequences takes about as long as a step of 1:
            probably the card waits for its kernels to be launched. From 8 to 64 sequences, tokens per second
            grow by {gain:.0f} %, and the peak is {larger:.1f} times as high.
        """),
        "",
        *table(headings, cells),
        "",
        f"({origin(rows[0])}; `tests/gpu/in_turn.py`)",
    ]


def stages() -> list[str]:
    rows = [row for row in rows_of("turns") if row["group"] == "stages"]
    cells = [(row["label"], *peak_and_time(row), f"{row['tokens_per_second']:,}") for row in rows]
    compiled = found(rows_of("turns"), micro_batch=8, compiled="model")
    if compiled:
        cells.append((compiled["label"], *peak_and_time(compiled), f"{compiled['tokens_per_second']:,}"))
    return [
        "One script that changes one choice at a time. What is not named is as in the tables above.",
        "",
        *table(("stage", "peak, GB", "ms", "tokens/s"), cells),
        "",
        f"({origin(rows[0])}; `tests/gpu/in_turn.py`)",
    ]


def outside() -> list[str]:
    first, *rows = rows_of("outside_the_step")
    cells = [(row["moment"], *(gigabytes(row[name]) for name in ("before", "after", "peak"))) for row in rows]
    return [
        *paragraph(f"""
            A step is not all that a run does. A GPT with {first["parameters"]:,} parameters, 8 sequences of
            1,024 tokens, bf16 by autocast and AdamW also resumes, evaluates, saves, copies and generates.
            With torch 2.11, the simulated GPU gives each of these {3 * len(rows)} counts of allocated
            bytes to the byte. From torch 2.12 on each is 1 MiB lower after the first step: cuBLASLt has
            no workspace of its own any more. `watch --whole` finds the same peaks as parts of a script. Sizes
            in GB.
        """),
        "",
        *table(("moment", "before", "after", "peak"), cells),
        "",
        f"(recorded on {first['device']}, torch {first['torch'].partition('+')[0]}, 2026-11-27;"
        " `tests/gpu/outside_the_step.py`, `tests/rest/test_outside_the_step.py`)",
    ]


SECTIONS = {
    "scripts": scripts,
    "outside": outside,
    "reserved": reserved,
    "peers": peers,
    "limits": limits,
    "front": front,
    "batches": batches,
    "stages": stages,
}


def filled(page: str) -> str:
    """The page with each section between its marks made anew. Raises ValueError where marks are missing."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- gpu:{name} -->", f"<!-- /gpu:{name} -->"
        text = "\n".join(section())
        page, count = re.subn(
            f"{begin}.*?{end}",
            lambda _, text=text, b=begin, e=end: f"{b}\n{text}\n{e}",
            page,
            flags=re.DOTALL,
        )
        if count != 1:
            raise ValueError(f"{begin} … {end} stands {count} times in the page, not once")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    made = filled(PAGE.read_text(encoding="utf-8"))
    if options.write:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
